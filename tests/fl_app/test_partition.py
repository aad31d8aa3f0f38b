"""Partitions: their pieces by hand, their properties, what is refused, and the user's own."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_app import known_names
from fl_app import partition as part
from fl_app.config import RunConfig, parse
from fl_app.data import index_files, named
from fl_app.errors import ConfigurationError, DataError, UserError
from fl_app.keys import NoParams, specs
from fl_app.rng import generator
from tests.facts import mentions, rejected

APP = Path(__file__).resolve().parents[2]
ARGUMENTS: dict[str, Any] = {
    "num_clients": 4,
    "seed": 0,
    "alpha": 0.3,
    "classes_per_client": 2,
    "train_samples": 20,
    "test_samples": 10,
    "min_samples": 5,
    "test_ratio": 0.25,
}
K = 5
Y_TRAIN = np.arange(200) % K
Y_TEST = np.arange(100) % K
Y_ALL = np.concatenate([Y_TRAIN, Y_TEST])


def split(name: str, y_train: Any = Y_TRAIN, y_test: Any = Y_TEST, classes: int = K, **changes: Any) -> Any:
    return part.split(name, y_train, y_test, classes, **(ARGUMENTS | changes))


def labels(counts: list[int]) -> np.ndarray:
    return np.random.default_rng(1).permutation(np.repeat(np.arange(len(counts)), counts))


# pure pieces, by hand


def test_allocate_by_hand() -> None:
    room = np.array([10, 10, 10])
    # 7 * q = 3.5, 2.1, 1.4: floors 3 + 2 + 1, the one left goes to the largest remainder, 0.5
    assert part.allocate(np.array([0.5, 0.3, 0.2]), 7, room).tolist() == [4, 2, 1]
    # class 0 wants all 8 but has 3; nothing else has weight: by room left, 5 * (4, 8)/12 = 1.67, 3.33 -> 2, 3
    assert part.allocate(np.array([1.0, 0, 0]), 8, np.array([3, 4, 8])).tolist() == [3, 2, 3]
    # its other class takes the excess as long as it can
    assert part.allocate(np.array([0.9, 0.1, 0]), 8, np.array([3, 9, 9])).tolist() == [3, 5, 0]
    assert part.allocate(np.array([0.5, 0.5, 0]), 8, np.array([3, 3, 9]), spill=False).tolist() == [3, 3, 0]


@given(
    q=st.lists(st.floats(0, 1), min_size=1, max_size=8),
    room=st.lists(st.integers(0, 30), min_size=8, max_size=8),
    total=st.integers(0, 300),
)
def test_allocate_is_exact_and_fits(q: list[float], room: list[int], total: int) -> None:
    cap = np.array(room[: len(q)])
    total = min(total, int(cap.sum()))
    counts = part.allocate(np.array(q), total, cap)
    assert counts.sum() == total and np.all(counts >= 0) and np.all(counts <= cap)


def test_mixes_have_the_stated_concentration() -> None:
    # Dir(a) with a_k = alpha * prior_k: E q_k = a_k / a_0, Var q_k = m (1 - m) / (a_0 + 1), a_0 = alpha * K
    prior = np.array([3, 1, 0, 2])
    mixes = part.client_mixes(prior, 0.5, 40_000, 3)
    mean = prior / 6
    assert np.allclose(mixes.mean(0), mean, atol=0.01) and np.allclose(mixes.sum(1), 1)
    assert np.allclose(mixes.var(0), mean * (1 - mean) / (0.5 * 3 + 1), atol=0.005)
    assert np.isfinite(part.client_mixes(prior, 1e-12, 100, 0)).all()


def test_deal_is_disjoint_until_the_pool_is_used_up() -> None:
    y = np.zeros(10, np.int64)
    hands = part.deal(np.array([[4], [4], [4], [10]]), y, np.random.default_rng(0))
    first = np.concatenate([hands[0], hands[1]])
    assert len(set(first)) == 8
    assert all(len(set(h)) == len(h) for h in hands)
    # what was left of the first round
    assert set(range(10)) - set(first) <= set(hands[2])
    assert set(hands[3]) == set(range(10))


@given(k=st.integers(1, 7), clients=st.integers(1, 30), classes=st.integers(7, 12), seed=st.integers(0, 99))
def test_classes_are_used_equally(k: int, clients: int, classes: int, seed: int) -> None:
    present = np.arange(classes)[1:]
    holds = part.assign_classes(present, classes, clients, min(k, len(present)), np.random.default_rng(seed))
    used = holds.sum(0)[present]
    assert np.all(holds.sum(1) == min(k, len(present))) and used.max() - used.min() <= 1 and not holds[:, 0].any()


@pytest.mark.parametrize("assignment", ["balanced", "random"])
def test_every_pair_of_classes_is_possible(assignment: str) -> None:
    pairs = set()
    for seed in range(60):
        holds = part.assign_classes(np.arange(4), 4, 5, 2, np.random.default_rng(seed), assignment)
        assert (holds.sum(1) == 2).all()
        pairs |= {tuple(np.flatnonzero(row)) for row in holds}
    assert len(pairs) == 6


def test_random_assignment_lets_clients_share_classes() -> None:
    # FedCAC's setting on CIFAR-100: 40 clients, 2 of 100 classes. A pair shares none with probability 98 * 97 / (100 * 99).
    rng = np.random.default_rng(0)
    sharing = {
        how: np.mean(
            [
                np.triu(holds @ holds.T, 1).sum()
                for holds in (part.assign_classes(np.arange(100), 100, 40, 2, rng, how).astype(int) for _ in range(50))
            ]
        )
        for how in ("balanced", "random")
    }
    # 80 of 100 classes, each once
    assert sharing["balanced"] == 0
    assert sharing["random"] == pytest.approx(40 * 39 / 2 * 2 * 2 / 100, rel=0.1)


@pytest.mark.parametrize(
    "clients, classes, per_client, expected",
    [
        # ceil(4 * 2 / 4) = 2 clients a class
        (4, 4, 2, ["01", "01", "23", "23"]),
        (20, 10, 2, [f"{2 * (i // 4)}{2 * (i // 4) + 1}" for i in range(20)]),  # FedPake's setting
        # ceil(1.5) = 2; the third is alone with what is left
        (3, 4, 2, ["01", "01", "23"]),
        (3, 3, 2, ["01", "01", "2"]),  # and here lacks a class
        (2, 5, 2, ["01", "23"]),  # ceil(0.8) = 1; nobody's: 4
    ],
)
def test_blocks_by_hand(clients: int, classes: int, per_client: int, expected: list[str]) -> None:
    holds = part.assign_classes(np.arange(classes), classes, clients, per_client, np.random.default_rng(0), "blocks")
    assert ["".join(map(str, np.flatnonzero(row))) for row in holds] == expected


# whole partitions


def test_every_partition_that_a_config_may_name_has_its_rule() -> None:
    assert set(part.PARTITIONS) == {*known_names.PARTITIONS, known_names.BY_COLUMN}


@settings(deadline=None, max_examples=40)
@given(
    counts=st.lists(st.integers(0, 60), min_size=2, max_size=8).filter(lambda c: sum(c) >= 20),
    test_counts=st.lists(st.integers(0, 60), min_size=8, max_size=8),
    clients=st.integers(1, 12),
    alpha=st.sampled_from([1e-6, 0.01, 0.1, 1.0, 100.0]),
    seed=st.integers(0, 99),
    shares=st.tuples(st.integers(0, 20), st.integers(0, 20)),
)
def test_dirichlet_client_properties(
    counts: list[int], test_counts: list[int], clients: int, alpha: float, seed: int, shares: tuple[int, int]
) -> None:
    y_train, y_test = labels(counts), labels(test_counts[: len(counts)])
    if shares[1] > len(y_test):
        return
    asked = shares[1] or len(y_test) // clients
    fewest = min(10, (asked + 1) // 2)
    try:
        result = split(
            "dirichlet-client",
            y_train,
            y_test,
            len(counts),
            num_clients=clients,
            alpha=alpha,
            seed=seed,
            train_samples=shares[0],
            test_samples=shares[1],
        )
    except UserError as error:
        assert mentions(str(error), f"cannot have {fewest} of {asked}", "training samples")
        return
    assert len(result) == clients
    n, k = len(y_train), len(counts)
    for train, test in result:
        assert len(train) == (shares[0] or n // clients) and fewest <= len(test) <= asked
        if len(train) and len(test):
            mixes = [
                np.bincount(np.concatenate([y_train, y_test])[part], minlength=k) / len(part) for part in (train, test)
            ]
            assert np.all(np.abs(mixes[0] - mixes[1]) < 1 / len(train) + 1 / len(test))
        assert len(set(train)) == len(train) and len(set(test)) == len(test)
        assert train.dtype == test.dtype == np.int64
        assert np.all(train < n) and np.all(test >= n) and np.all(test < n + len(y_test))


def test_dirichlet_client_has_the_same_mix_in_train_and_test() -> None:
    # 1,000 of each class: no class runs out, so both counts are q rounded
    y = labels([1000] * K)
    both = np.concatenate([y, y])
    mixes = part.client_mixes(np.full(K, 1000), 0.3, 4, 0)
    for (train, test), q in zip(
        split("dirichlet-client", y, y, train_samples=500, test_samples=100), mixes, strict=True
    ):
        assert np.all(np.abs(np.bincount(both[train], minlength=K) - 500 * q) < 1)
        assert np.all(np.abs(np.bincount(both[test], minlength=K) - 100 * q) < 1)


def mixes_of(name: str, test_counts: list[int], **changes: Any) -> list[tuple[list[int], list[int]]]:
    """Train and test samples per class of clients with 60 and 20 at most, of 200 training samples a class."""
    y, y_test = labels([200] * len(test_counts)), labels(test_counts)
    both = np.concatenate([y, y_test])
    few: dict[str, Any] = {"train_samples": 60, "test_samples": 20, "seed": 0, **changes}
    return [
        (np.bincount(both[train], minlength=3).tolist(), np.bincount(both[test], minlength=3).tolist())
        for train, test in split(name, y, y_test, len(test_counts), **few)
    ]


def test_a_mix_is_kept_with_fewer_test_samples_or_refused() -> None:
    # clients of one class each
    found = mixes_of("dirichlet-client", [50, 50, 13], alpha=0.001)
    assert found == [([0, 0, 60], [0, 0, 13])] * 3 + [([60, 0, 0], [20, 0, 0])]
    for lacking in ([50, 50, 0], [50, 50, 9]):
        with rejected(
            DataError,
            "test-samples",
            "client 0 cannot have 10",
            "20",
            "2",
            f"60 and {lacking[2]}",
            "lower test-samples",
        ):
            mixes_of("dirichlet-client", lacking, alpha=0.001)
    # of 6 that are asked, half are enough
    assert mixes_of("dirichlet-client", [50, 50, 3], alpha=0.001, test_samples=6)[0] == ([0, 0, 60], [0, 0, 3])


def test_test_samples_follow_training_samples_that_came_from_other_classes() -> None:
    # all 200 samples of class 2, and 100 of the class that was drawn next to it
    train, test = mixes_of("dirichlet-client", [90, 90, 90], alpha=0.001, train_samples=300, test_samples=60)[0]
    assert train == [0, 100, 200] and test == [0, 20, 40]


def test_pathological_clients_are_tested_on_what_they_train_on() -> None:
    found = mixes_of("pathological", [50, 50, 7])
    assert found == [
        ([30, 30, 0], [10, 10, 0]),
        ([30, 0, 30], [8, 0, 7]),
        ([0, 30, 30], [0, 8, 7]),
        ([30, 30, 0], [10, 10, 0]),
    ]
    with rejected(
        DataError, "test-samples", "client 1 cannot have 10", "20 test samples", "0", "30 and 50", "2", "30 and 0"
    ):
        mixes_of("pathological", [50, 50, 0])


def test_how_far_apart_two_mixes_are() -> None:
    assert part.apart(np.array([3, 1]), np.array([30, 10])) == 0
    assert part.apart(np.array([60, 0]), np.array([0, 20])) == 1
    # shares .75, .25 and .5, .5
    assert part.apart(np.array([3, 1]), np.array([1, 1])) == 0.25
    assert np.isnan(part.apart(np.array([3, 1]), np.array([0, 0])))


@settings(deadline=None, max_examples=15)
@given(
    clients=st.integers(1, 6),
    alpha=st.sampled_from([0.5, 5.0]),
    ratio=st.sampled_from([0.0, 0.25, 0.9]),
    seed=st.integers(0, 9),
)
def test_dirichlet_divides_everything(clients: int, alpha: float, ratio: float, seed: int) -> None:
    result = split("dirichlet", num_clients=clients, alpha=alpha, test_ratio=ratio, seed=seed, min_samples=3)
    assert sorted(np.concatenate([i for share in result for i in share])) == list(range(300))
    for train, test in result:
        total = len(train) + len(test)
        assert total >= 3 and len(train) >= 1 and len(test) == min(round(ratio * total), total - 1)
    if clients == 1 and ratio:
        assert result[0][1].min() < 200 <= result[0][0].max()  # both sets are mixed


@settings(deadline=None, max_examples=30)
@given(
    clients=st.integers(1, 30),
    k=st.integers(1, K),
    train=st.sampled_from([0, 10, 33]),
    test=st.sampled_from([0, 5, 20]),
    seed=st.integers(0, 99),
)
def test_pathological_properties(clients: int, k: int, train: int, test: int, seed: int) -> None:
    result = split(
        "pathological", num_clients=clients, classes_per_client=k, train_samples=train, test_samples=test, seed=seed
    )
    used = np.zeros(K, int)
    for mine, held_out in result:
        own = np.bincount(Y_ALL[mine], minlength=K)
        assert np.count_nonzero(own) == k
        assert set(Y_ALL[held_out]) <= set(Y_ALL[mine])
        assert len(set(mine)) == len(mine) and len(set(held_out)) == len(held_out)
        assert np.all(mine < 200) and np.all(held_out >= 200)
        if train:
            assert len(mine) == train and own[own > 0].max() - own[own > 0].min() <= 1
        if test:
            assert len(held_out) == test
        used += own > 0
    assert used.max() - used.min() <= 1
    if not train:
        everything = np.concatenate([mine for mine, _ in result])
        assert len(set(everything)) == len(everything) == 40 * np.count_nonzero(used)  # each class used in full


@settings(deadline=None, max_examples=15)
@given(clients=st.integers(1, 12), train=st.integers(0, 16), test=st.integers(0, 8), seed=st.integers(0, 99))
def test_iid_properties(clients: int, train: int, test: int, seed: int) -> None:
    result = split("iid", num_clients=clients, train_samples=train, test_samples=test, seed=seed)
    for side, size, n, offset in ((0, train, 200, 0), (1, test, 100, 200)):
        hands = [share[side] for share in result]
        everything = np.concatenate(hands)
        assert len(set(everything)) == len(everything) == (size * clients or n)
        assert everything.min() >= offset and everything.max() < offset + n
        sizes = [len(h) for h in hands]
        assert (set(sizes) == {size}) if size else (max(sizes) - min(sizes) <= 1)


def test_iid_is_flowers_partitioner_on_shuffled_data() -> None:
    from datasets import Dataset
    from flwr_datasets.partitioner import IidPartitioner

    for clients, samples in ((3, 0), (7, 0), (7, 20)):
        result = split("iid", num_clients=clients, train_samples=samples, test_samples=0, seed=3)
        order = generator(3, "partition-train").permutation(len(Y_TRAIN))[: samples * clients or None]
        theirs = IidPartitioner(clients)
        theirs.dataset = Dataset.from_dict({"index": order})
        for client, (train, _) in enumerate(result):
            assert train.tolist() == sorted(theirs.load_partition(client)["index"][:])


@pytest.mark.parametrize("assignment", ["random", "blocks"])
@pytest.mark.parametrize("train, test", [(0, 0), (20, 10)])
def test_clients_hold_the_classes_assigned_to_them(assignment: str, train: int, test: int) -> None:
    result = split("pathological", num_clients=6, assignment=assignment, train_samples=train, test_samples=test)
    rng = generator(0, "partition-classes")
    holds = part.assign_classes(np.arange(K), K, 6, 2, rng, assignment)
    for row, (mine, held_out) in zip(holds, result, strict=True):
        assert set(Y_ALL[mine]) == set(Y_ALL[held_out]) == set(np.flatnonzero(row))
        assert not train or (len(mine), len(held_out)) == (train, test)
    # the classes that someone holds are used in full
    if not train:
        everything = np.concatenate([mine for mine, _ in result])
        assert len(set(everything)) == len(everything) == 40 * np.count_nonzero(holds.any(0))


# accuracies of clients' own models in uglyghost/FedOBP_results f64b10a, alpha=0.1/local/fmnist, in per cent
FEDOBP_LOGGED = {
    0: (77.55, 81.63),
    2: (98.91, 99.56),
    14: (87.62, 90.24),
    20: (98.12, 98.39, 98.66),
    21: (81.99, 88.20, 89.44, 88.82, 90.06),
    25: (94.23, 92.31),
    31: (84.62, 86.15, 76.92, 89.23),
    34: (92.31, 80.77, 96.15),
    41: (87.90, 89.52),
    48: (98.73,),
    50: (98.86, 99.15),
    59: (86.13, 85.40, 89.05),
    67: (92.10, 93.13, 95.88),
    68: (87.27, 92.73, 93.64, 94.55),
    69: (93.21, 92.59, 95.68),
    76: (60.00, 80.00, 86.67),
    77: (96.37, 97.41, 97.93, 98.96),
    81: (90.74, 94.44, 98.15, 96.30),
    99: (97.89, 98.16),
}


@pytest.mark.parametrize(("seed", "fits"), [(42, True), (43, False)])
def test_fl_benchs_split_is_the_one_of_fedobps_logs(seed: int, fits: bool) -> None:
    folder = named.DEBIAN_FASHION_MNIST
    if not folder.is_dir():
        pytest.skip("needs Debian's package dataset-fashion-mnist")
    (_, y_train, _, y_test), _ = named._debian_fashion_mnist(folder)
    shares = split("dirichlet-fl-bench", y_train, y_test, 10, num_clients=100, seed=seed, alpha=0.1, min_samples=10)
    assert sum(len(a) + len(b) for a, b in shares) == 70_000
    tests = {k: len(shares[k][1]) for k in FEDOBP_LOGGED}
    possible = [
        min(abs(accuracy - 100 * right / tests[k]) for right in range(tests[k] + 1)) < 0.00501
        for k, accuracies in FEDOBP_LOGGED.items()
        for accuracy in accuracies
    ]
    assert all(possible) is fits


@given(clients=st.integers(1, 6), alpha=st.floats(0.001, 5), ratio=st.floats(0, 0.9), seed=st.integers(0, 2**32 - 1))
def test_fl_benchs_split_divides_everything(clients: int, alpha: float, ratio: float, seed: int) -> None:
    shares = part.fl_bench.split(Y_ALL, K, num_clients=clients, seed=seed, alpha=alpha, min_samples=0, test_ratio=ratio)
    assert sorted(np.concatenate([side for share in shares for side in share])) == list(range(len(Y_ALL)))
    assert all(len(test) == int((len(train) + len(test)) * ratio) for train, test in shares)


@settings(deadline=None, max_examples=15)
@given(clients=st.integers(2, 8), alpha=st.sampled_from([0.1, 1.0]), seed=st.integers(0, 99))
def test_balanced_dirichlet_stops_at_an_equal_share(clients: int, alpha: float, seed: int) -> None:
    result = split("dirichlet", num_clients=clients, alpha=alpha, seed=seed, min_samples=4, balance=True)
    assert sorted(np.concatenate([i for share in result for i in share])) == list(range(300))
    for client_id, share in enumerate(result):
        counts = np.bincount(Y_ALL[np.concatenate(share)], minlength=K)
        before = np.cumsum(counts) - counts
        # what rounding the others' shares down leaves of a class
        rest = 1 if client_id == clients - 1 else 0
        assert counts.sum() >= 4 and counts[before > 300 / clients].max(initial=0) <= rest


def test_balance_is_a_partition_of_its_own() -> None:
    spread = {
        b: np.std([len(a) for a, _ in split("dirichlet", alpha=0.3, balance=b, min_samples=1)]) for b in (False, True)
    }
    assert spread[True] < spread[False]


def test_seeds_differ_and_repeat() -> None:
    for name in ("dirichlet-client", "dirichlet", "pathological", "iid"):
        a, b, c = split(name), split(name), split(name, seed=1)
        assert all(np.array_equal(x, y) for s, t in zip(a, b, strict=True) for x, y in zip(s, t, strict=True))
        assert any(not np.array_equal(s[0], t[0]) for s, t in zip(a, c, strict=True))


@pytest.mark.parametrize("name", ["dirichlet-client", "pathological"])
def test_clients_that_share_samples_may_be_more_than_there_are(name: str) -> None:
    shares = split(name, num_clients=500)
    assert len(shares) == 500
    for train, test in shares:
        assert len(set(train)) == 20 and train.max() < 200
        assert 5 <= len(set(test)) == len(test) <= 10 and test.min() >= 200
    # every sample is dealt before one is dealt again
    assert len(set(np.concatenate([train for train, _ in shares]))) == 200


def test_an_empty_test_set_is_allowed_when_no_test_samples_are_asked_for() -> None:
    none = np.zeros(0, np.int64)
    for name in ("dirichlet-client", "pathological", "iid"):
        assert all(len(test) == 0 for _, test in split(name, y_test=none, test_samples=0))
        with rejected(UserError, "test-samples", "test set", "data set"):
            split(name, y_test=none)
    assert sum(len(test) for _, test in split("iid", y_test=Y_TEST[:2], test_samples=0)) == 2


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("pathological", {"classes_per_client": 6}, "classes-per-client: must be at most the data set's 5 .*got 6"),
        ("pathological", {"train_samples": 1}, r"train-samples: must be at least classes-per-client \(2\), got 1"),
        ("pathological", {"train_samples": 81}, r"train-samples: client 0 needs 81 samples but its classes .* have 80"),
        ("pathological", {"test_samples": 41}, r"test-samples: client 0 needs 41 samples but its classes .* have 40"),
        (
            "dirichlet-client",
            {"train_samples": 201},
            "train-samples: every client needs 201 .* has 200; .* can be 0, an equal",
        ),
        ("dirichlet-client", {"test_samples": 101}, "test-samples: every client needs 101 samples but .* has 100"),
        ("iid", {"train_samples": 51}, "train-samples: 4 clients with 51 each need 204 samples but .* has 200"),
        ("iid", {"test_samples": 26}, "test-samples: 4 clients with 26 each need 104 .* has 100; .* can be 0"),
        ("iid", {"num_clients": 0}, "num-clients: must be >= 1, got 0"),
        ("iid", {"num_clients": 201}, "num-clients: must be <= 200, the training samples of the data set, got 201"),
        ("dirichlet-client", {"num_clients": 201, "train_samples": 0}, "num-clients: must be <= 200, .*, got 201"),
        ("pathological", {"num_clients": 201, "train_samples": 0}, "num-clients: must be <= 200, .*, got 201"),
        ("dirichlet", {"min_samples": 76}, "min-samples: 4 clients with 76 each need 304 .* has 300"),
        ("dirichlet", {"min_samples": 75, "alpha": 0.05}, "min-samples: no draw .* at least 75 .*dirichlet-alpha 0.05"),
        ("dirichlet-fl-bench", {"min_samples": 76}, "min-samples: 4 clients with 76 each need 304 .* has 300"),
        (
            "dirichlet-fl-bench",
            {"min_samples": 75, "alpha": 0.05},
            "min-samples: no draw of 1000 .* at least 75 .*alpha 0.05",
        ),
        (
            "dirichlet-fl-bench",
            {"seed": 2**32},
            "partition-seed: must be <= 4294967295 with dirichlet-fl-bench, got 4294967296",
        ),
        (
            "pathological",
            {"assignment": "blocks", "num_clients": 3, "classes_per_client": 3},
            r"pathological-assignment: blocks leaves client 2 with 2 of .*\(3\) classes; .*\(3\) .*multiple of 2,",
        ),
        ("round-robin", {}, "partition: unknown 'round-robin'"),
    ],
)
def test_errors(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        split(name, **changes)


# a client's own test part


def test_uneven_shares_by_hand() -> None:
    # class 0: 100 samples, 4 clients: a share is 25, so three integers in [2, 25) and the rest; class 1: 9 samples, 2 clients: [1/3
    # rounded down = 0, 4); class 2: its only client has all
    holds = np.array([[1, 1, 0], [1, 1, 0], [1, 0, 0], [1, 0, 1]], bool)
    asked: list[tuple[int, int, int]] = []

    class Drawn:
        def integers(self, low: int, high: int, size: int) -> np.ndarray:
            asked.append((low, high, size))
            return np.array({3: [2, 24, 10], 1: [3], 0: []}[size], np.int64)

    counts = part.uneven_shares(holds, np.array([100, 9, 6]), Drawn())  # type: ignore[arg-type]
    assert asked == [(2, 25, 3), (0, 4, 1), (0, 6, 0)]
    assert counts.tolist() == [[2, 3, 0], [24, 6, 0], [10, 0, 0], [64, 0, 6]]


@pytest.mark.parametrize("assignment", ["balanced", "blocks", "blocks-unbalanced"])
def test_clients_split_their_own_samples(assignment: str) -> None:
    # 4 clients with 2 of 4 classes: each class has 60 + 20 samples and 2 clients
    y_train, y_test = np.arange(240) % 4, np.arange(80) % 4
    changes = {"assignment": assignment, "train_samples": 0, "test_samples": -1}
    result = split("pathological", y_train, y_test, 4, **changes)
    labels_of_all = np.concatenate([y_train, y_test])
    every = np.concatenate([np.concatenate(share) for share in result])
    assert np.array_equal(np.sort(every), np.arange(320))
    counts = np.stack([np.bincount(labels_of_all[np.concatenate(share)], minlength=4) for share in result])
    assert ((counts > 0).sum(1) == 2).all() and ((counts > 0).sum(0) == 2).all()
    for train, test in result:
        assert len(test) == round((len(train) + len(test)) * 0.25)
    # of both sets of the data
    assert {bool(i < 240) for _, test in result for i in test} == {True, False}
    if assignment == "blocks-unbalanced":
        # two clients of a class with 80 samples: an integer in [4, 40), and the rest
        first = counts.max(0) - counts.min(0)
        assert (first > 0).all() and ((counts[counts > 0] >= 4) & (counts[counts > 0] <= 76)).all()
    else:
        assert set(counts[counts > 0]) == {40}
    again = split("pathological", y_train, y_test, 4, **changes)
    assert all(
        np.array_equal(a, b)
        for ours, theirs in zip(result, again, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    )


def test_a_given_number_of_training_samples_and_their_test_part() -> None:
    # 15 training samples are three quarters of 20
    for train, test in split("pathological", train_samples=15, test_samples=-1):
        assert (len(train), len(test)) == (15, 5) and len(set(Y_ALL[np.concatenate([train, test])])) == 2


def test_a_client_without_samples_is_refused() -> None:
    with rejected(UserError, "train-samples", "client 0 needs 400 samples", "classes", "120"):
        split("pathological", train_samples=300, test_samples=-1)


@pytest.mark.parametrize(
    ("keys", "key", "rule"),
    [
        ({"partition": "iid", "test-samples": -1}, "test-samples", ">= 0"),
        ({"test-samples": -1}, "test-samples", ">= 0"),
        (
            {"partition": "pathological", "pathological-assignment": "blocks-unbalanced", "train-samples": 0},
            "pathological-assignment",
            "train-samples = 0, test-samples = 40",
        ),
    ],
)
def test_sizes_that_a_partition_cannot_give(keys: dict[str, Any], key: str, rule: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        parse(keys, {"fedcac": NoParams})
    assert refused.value.key == key and rule in refused.value.rule


CHANGED: dict[str, Any] = {
    "dirichlet_alpha": 0.5,
    "classes_per_client": 3,
    "pathological_assignment": "random",
    "train_samples": 16,
    "test_samples": 8,
    "min_samples": 60,
    "dirichlet_balance": True,
    "test_ratio": 0.5,
    "partition_seed": 1,
}


@pytest.mark.parametrize("own_test_part", [False, True])
@pytest.mark.parametrize("partition", known_names.PARTITIONS)
def test_a_key_is_said_to_have_no_effect_exactly_where_it_has_none(partition: str, own_test_part: bool) -> None:
    if own_test_part and partition != "pathological":
        pytest.skip("only pathological has it")
    keys = {spec.field: spec for spec in specs(RunConfig) if spec.about == "data" and spec.partitions}
    assert set(keys) == set(CHANGED)
    base = RunConfig(
        partition=partition, num_clients=4, train_samples=20, test_samples=-1 if own_test_part else 10, min_samples=5
    )

    def shares(config: RunConfig) -> Any:
        seed = max(config.partition_seed, 0)
        sizes = (config.train_samples, config.test_samples, config.min_samples, config.test_ratio)
        own = dict(zip(("train_samples", "test_samples", "min_samples", "test_ratio"), sizes, strict=True))
        own |= {"seed": seed, "alpha": config.dirichlet_alpha, "classes_per_client": config.classes_per_client}
        own |= {"assignment": config.pathological_assignment, "balance": config.dirichlet_balance}
        return [[side.tolist() for side in share] for share in split(config.partition, **own)]

    plain = shares(base)
    for name, value in CHANGED.items():
        changed = shares(dataclasses.replace(base, **{name: value})) != plain
        assert changed == keys[name].divides(base.divisions), name


# the index file


def test_written_once_and_keyed_by_what_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def key(**changes: Any) -> str:
        return index_files._key(RunConfig(**({"num_clients": 10} | changes)), "data")

    assert key(method="x", learning_rate=1.0, test_ratio=0.5, classes_per_client=3) == key()
    assert len({key(), key(seed=1), key(num_clients=3), key(dirichlet_alpha=1.0), key(train_samples=9)}) == 5
    assert key(partition="dirichlet", train_samples=9) == key(partition="dirichlet")
    assert key(partition="dirichlet", test_ratio=0.5) != key(partition="dirichlet")
    assert key(partition="dirichlet", dirichlet_balance=True) != key(partition="dirichlet")
    assert key(partition="pathological", pathological_assignment="blocks") != key(partition="pathological")
    assert key(pathological_assignment="blocks", dirichlet_balance=True) == key()
    own = {"partition": "pathological", "test_samples": -1}
    assert key(**own, test_ratio=0.5) != key(**own)
    assert key(partition_seed=3) == key(seed=3) == key(partition_seed=3, seed=4) != key()
    config = RunConfig(num_clients=3, train_samples=20, test_samples=5)
    written = index_files.open_partition(config, Y_TRAIN, Y_TEST, K, "data", tmp_path)
    monkeypatch.setattr(index_files, "split", None)  # not called again
    again = index_files.open_partition(config, Y_TRAIN, Y_TEST, K, "data", tmp_path)
    assert again.num_clients == 3
    for i in range(3):
        assert all(np.array_equal(a, b) for a, b in zip(written.client(i), again.client(i), strict=True))
        assert [len(a) for a in again.client(i)] == [20, 5]


def test_equal_in_every_process() -> None:
    code = """
import hashlib, numpy as np
from fl_app.partition import split
y, t = np.arange(200) % 5, np.arange(100) % 5
for name in ("dirichlet-client", "dirichlet", "dirichlet-fl-bench", "pathological", "iid"):
    shares = split(name, y, t, 5, num_clients=4, seed=7, alpha=0.3, classes_per_client=2, train_samples=20,
                   test_samples=10, min_samples=5, test_ratio=0.25)
    print(hashlib.sha256(b"".join(i.tobytes() for share in shares for i in share)).hexdigest())
"""
    there = subprocess.run([sys.executable, "-c", code], cwd=APP, capture_output=True, text=True, check=True).stdout
    here = io.StringIO()
    with contextlib.redirect_stdout(here):
        exec(code, {})
    assert there == here.getvalue() and len(there.split()) == 5


def test_what_clients_hold_of_other_classes_than_drawn() -> None:
    """Two classes of 6 and 4; with alpha next to nothing a client wants one class alone."""
    y_train, y_test = np.repeat([0, 1], [6, 4]), np.repeat([0, 1], [3, 3])
    fixed: dict[str, Any] = {"num_clients": 2, "seed": 0, "alpha": 1e-4}
    mixes = part.client_mixes(np.array([6, 4]), 1e-4, 2, 0)
    room = np.array([6, 4])[mixes.argmax(axis=1)]
    assert part.spilled(y_train, 2, **fixed, size=5).tolist() == np.maximum(5 - room, 0).tolist()
    training = part.spilled(y_train, 2, **fixed, size=10)
    assert training.tolist() == (10 - room).tolist()
    shares = part.split(
        "dirichlet-client",
        y_train,
        y_test,
        2,
        **fixed,
        classes_per_client=1,
        train_samples=10,
        test_samples=0,
        min_samples=1,
        test_ratio=0.5,
    )
    for (hand, _), mix, moved in zip(shares, mixes, training, strict=True):
        assert np.count_nonzero(y_train[hand] != mix.argmax()) == moved > 0


def test_by_column_gives_each_client_the_rows_of_its_value() -> None:
    rng = np.random.default_rng(5)
    train, test = rng.permutation(np.repeat(np.arange(40), 3)), rng.integers(-1, 40, 50)
    names = tuple(f"site {k}" for k in range(40))
    shares = split("by-column", num_clients=40, y_train=np.zeros(120), y_test=np.zeros(50), groups=(train, test, names))
    for k, (mine, tested) in enumerate(shares):
        assert mine.tolist() == np.flatnonzero(train == k).tolist()
        # a row of nobody's is nobody's
        assert tested.tolist() == (120 + np.flatnonzero(test == k)).tolist()


def test_dirichlet_partitions_are_read_as_flower_gives_them() -> None:
    from flwr_datasets.partitioner import DirichletPartitioner

    indices = np.arange(len(Y_ALL))[::-1].copy()

    def partitioner() -> DirichletPartitioner:
        return DirichletPartitioner(6, "label", 1.0, 3, self_balancing=False, shuffle=True, seed=4)

    theirs = partitioner()
    found = part._run_partitioner(theirs, indices, Y_ALL[::-1].copy())
    given = [theirs.load_partition(k)["index"][:] for k in range(6)]
    assert [share.tolist() for share in found] == given


# The user's own partition ---------------------------------------------------------------------------------------------


def write(tmp_path: Path, **arrays: Any) -> str:
    np.savez(tmp_path / "p.npz", **arrays)
    return f"file:{tmp_path / 'p.npz'}"


def test_file(tmp_path: Path) -> None:
    rows = split(write(tmp_path, train_idx=[[3, 1], [5, 7]], test_idx=[[0], [99]]), num_clients=2)
    assert [(a.tolist(), b.tolist()) for a, b in rows] == [([3, 1], [200]), ([5, 7], [299])]
    ragged = {"train_idx_0": np.array([4], np.uint8), "train_idx_1": [5, 6], "test_idx_0": [], "test_idx_1": [2]}
    rows = split(write(tmp_path, **ragged), num_clients=2)
    assert [(a.tolist(), b.tolist()) for a, b in rows] == [([4], []), ([5, 6], [202])]


@pytest.mark.parametrize(
    "arrays, message",
    [
        ({"train_idx": [[1], [2]]}, "p.npz has no test_idx, nor test_idx_0"),
        ({"train_idx_0": [1], "train_idx_2": [1], "test_idx": [[1], [2]]}, "p.npz has no train_idx_1"),
        ({"train_idx": [[1.5], [2]], "test_idx": [[1], [2]]}, "train_idx must hold integers, got float64"),
        ({"train_idx": [1, 2], "test_idx": [[1], [2]]}, r"train_idx must have 2 dimensions, got shape \(2,\)"),
        ({"train_idx": [[1], [200]], "test_idx": [[1], [2]]}, r"client 1: train index 200 is not in \[0, 200\)"),
        ({"train_idx": [[1], [2]], "test_idx": [[-1], [2]]}, r"client 0: test index -1 is not in \[0, 100\)"),
        ({"train_idx": [[1]] * 3, "test_idx": [[1]] * 3}, "num-clients: must be 3, .*p.npz's train_idx .*got 2"),
        ({"train_idx_0": [1], "train_idx_1": [], "test_idx": [[1], [2]]}, "client 1 has no training samples"),
        ({"train_idx": np.array([{}, {}]), "test_idx": [[1], [2]]}, "not a readable npz file"),
    ],
)
def test_file_errors(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        split(write(tmp_path, **arrays), num_clients=2)


def test_unreadable_files(tmp_path: Path) -> None:
    with rejected(DataError, "partition", "gone.npz", "no such file", "directory"):
        split(f"file:{tmp_path / 'gone.npz'}")
    np.save(tmp_path / "one.npy", np.zeros(3))
    (tmp_path / "text.npz").write_text("hello")
    for name, what in (("one.npy", "is a single array"), ("text.npz", "is not a readable npz file")):
        with pytest.raises(UserError, match=f"{name} {what}"):
            split(f"file:{tmp_path / name}")
