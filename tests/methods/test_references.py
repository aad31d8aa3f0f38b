"""The twelve newest methods beside tests/methods/references.py, in rounds of drawn clients.

They are AdaBest, APPLE, FedPAC, FedProto, FedRoD, HeteroFL, Per-FedAvg, pFedSim, pFedHN, pFedLA, FedMA and FAVOR. Each has
60 cases, drawn from a seed, of two or three rounds around a real server half. A case's kind follows from its number: one client
alone, one sample or one class for each client, a class of nobody, clients with equal data or models, absent clients, and large
numbers. The first case of each kind runs daily, the others by night. Clients' training is compared step by step where the
method changes it, on the batches that the trainer draws; methods that train as FedAvg does get drawn models in its place.

Corolla computes in float32, the references in float64: results agree to 2e-5 of the largest number of an array, and of 1 at
least. Where a difference of two gradients stands for a Hessian (Per-FedAvg), it is 1e-4.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from client_app.trainer import LocalTrainer
from corolla import testing
from fl_app import rng
from fl_app.data import ClientData, DatasetInfo
from fl_app.keys import Scalar
from strategies.baselines.fedpac import head_weights
from tests.conftest import flat
from tests.methods import references as ref

INPUTS, CLASSES, TOLERANCE = 3, 3, 2e-5
KINDS = ("any", "alone", "one sample each", "one class each", "a class of nobody", "alike", "absent", "large")
CASES = [pytest.param(case, marks=() if case < len(KINDS) else pytest.mark.nightly) for case in range(60)]
pytestmark = pytest.mark.parametrize("case", CASES)


def kind(case: int) -> str:
    return KINDS[case % len(KINDS)]


def drawing(method: str, case: int) -> np.random.Generator:
    return np.random.default_rng([zlib.crc32(method.encode()), case])


def close(found: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    a, b = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert a.shape == b.shape
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1.0, np.abs(b).max(initial=0)))


class Declaring(testing.Federation):
    """Clients that declare their numbers of samples, as real ones do."""

    @property
    def declared(self) -> dict[int, dict[str, Scalar]]:
        sizes = {i: {"train-samples": len(y)} for i, (_, y) in enumerate(self.data)}
        return {i: {**told, **sizes[i]} for i, told in super().declared.items()}


@dataclass
class Trial:
    """A case: clients around a server, and how they train."""

    fed: Any
    case: int
    random: np.random.Generator
    sizes: list[int]
    setting: dict[str, float]

    @property
    def clients(self) -> int:
        return len(self.fed.data)

    @property
    def initial(self) -> ref.Array:
        start: ref.Array = self.fed.initial.params.astype(np.float64)
        return start

    @property
    def samples(self) -> ref.Array:
        return np.array([len(y) for _, y in self.fed.data], np.float64)

    def data(self, i: int) -> tuple[ref.Array, ref.Indices]:
        x, y = self.fed.data[i]
        return x.astype(np.float64), y

    def slope(self, i: int) -> Callable[[ref.Array, ref.Indices], ref.Array]:
        x, y = self.data(i)
        return lambda w, at: ref.plain(w, self.sizes, x[at], y[at])

    def pulled(
        self, i: int, pull: Callable[..., ref.Array], weight: float, goals: ref.Array, known: NDArray[np.bool_]
    ) -> Callable[[ref.Array, ref.Indices], ref.Array]:
        """Return the slope of a client's loss with a pull of its features to the known goals."""
        x, y = self.data(i)

        def slope(w: ref.Array, at: ref.Indices) -> ref.Array:
            z, g = ref.outputs(w, self.sizes, x[at])[-2:]
            by_features = weight * pull(z, y[at], goals, known)
            return ref.gradient(w, self.sizes, x[at], ref.by_logits(g, y[at]), by_features)

        return slope

    def batches(self, i: int, round: int, epochs: int | None = None, purpose: str = "train") -> list[ref.Indices]:
        """Return the samples of each batch as the trainer draws them."""
        x, y = self.fed.data[i]
        trainer = LocalTrainer(self.fed.module(), self.fed.config, ClientData(x, y, x, y, self.fed.info), round, i)
        return [trainer.indices.numpy().copy() for _ in trainer.batches(epochs, purpose)]

    def who(self, round: int) -> list[int]:
        """Draw a round's clients. Of `absent` cases client 0 first comes in round 3."""
        everyone = list(range(self.clients))
        if kind(self.case) == "absent":
            return everyone[1:] if round == 1 else everyone[-1:] if round == 2 else everyone
        if self.random.random() < 0.6:
            return everyone
        return sorted(self.random.choice(everyone, self.random.integers(1, self.clients + 1), replace=False).tolist())

    def models(self, count: int, near: float = 1) -> np.ndarray:
        """Draw models as if clients had trained them, float32 [count, d]: the nearer the larger `near`, equal in `alike` cases."""
        size = 100 if kind(self.case) == "large" else 1
        common = near * (self.initial + 0.3 * size * self.random.normal(size=self.initial.size))
        rows = common + 0.3 * size * self.random.normal(size=(count, self.initial.size))
        if kind(self.case) == "alike":
            rows[:] = rows[0]
        return rows.astype(np.float32)

    def buffers(self, count: int) -> np.ndarray:
        return self.random.uniform(0.1, 2, (count, self.fed.layout.b)).astype(np.float32)

    def received(self, i: int, round: int) -> ref.Array:
        model: ref.Array = self.fed.context(i, round)[1].params.astype(np.float64)
        return model

    def slots(self) -> list[slice]:
        return [slice(slot.start, slot.stop) for slot in self.fed.layout.params]


def trial(
    method: str,
    case: int,
    random: np.random.Generator,
    folder: Path,
    *,
    hidden: Sequence[int] = (4,),
    norm: bool = False,
    most: int = 4,
    rates: Sequence[float] = (0.05, 0.2),
    own: dict[str, Any],
    **keys: Any,
) -> Trial:
    """Draw clients' data and settings.

    norm: with BatchNorm. most: clients. rates: learning rates to draw from. own: the method's keys.
    """
    this = kind(case)
    count = 1 if this == "alone" else int(random.integers(2, most + 1))
    data = []
    for i in range(count):
        n = 1 if this == "one sample each" else int(random.integers(1, 10))
        x = random.normal(size=(n, INPUTS)).astype(np.float32) * (10 if this == "large" else 1)
        y = random.integers(0, CLASSES - 1 if this == "a class of nobody" else CLASSES, n)
        data.append((x, np.full(n, i % CLASSES) if this == "one class each" else y))
    if this == "alike":
        data = [data[0]] * count
    sizes = [INPUTS, *hidden, CLASSES]

    def network() -> nn.Module:
        parts: list[nn.Module] = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(case)
            for into, out in zip(sizes[:-2], sizes[1:-1], strict=True):
                parts += [nn.Linear(into, out), *([nn.BatchNorm1d(out)] if norm else []), nn.Tanh()]
            return nn.Sequential(*parts, nn.Linear(sizes[-2], sizes[-1]))

    info = DatasetInfo(1, 0, ("a", "b", "c"), 9, 9, (0.0,) * INPUTS, (1.0,) * INPUTS, (INPUTS,))
    setting = {
        "learning_rate": float(random.choice(rates)) / (10 if this == "large" else 1),
        "momentum": float(random.choice([0.0, 0.5])),
        "weight_decay": float(random.choice([0.0, 0.01])),
    }
    drawn = {
        "device": "cpu",
        "batch_size": int(random.choice([2, 4, 16])),
        "local_epochs": int(random.integers(1, 3)),
        "num_server_rounds": 4,
    }
    fed = Declaring(method, data, info, network, flat({**drawn, **setting, **keys, method: own}), folder)
    names = {"learning_rate": "rate", "momentum": "momentum", "weight_decay": "decay"}
    return Trial(fed, case, random, sizes, {names[name]: value for name, value in setting.items()})


def test_adabest(tmp_path: Path, case: int) -> None:
    """Training against the bias estimates, the estimates themselves, and the server's step."""
    random = drawing("adabest", case)
    mu, beta = float(random.choice([0, 0.02, 0.5])), float(random.choice([0, 0.5, 0.8, 1.2]))
    t = trial("adabest", case, random, tmp_path, own={"mu": mu, "beta": beta})
    theta, mean = t.initial, t.initial
    h: dict[int, ref.Array] = {}
    last: dict[int, int] = {}
    for round in (1, 2, 3):
        ids, models = t.who(round), []
        for i in ids:
            bias, plain = h.get(i, np.zeros_like(theta)), t.slope(i)
            models.append(
                ref.sgd(
                    theta,
                    t.batches(i, round),
                    lambda w, at, plain=plain, bias=bias: plain(w, at) - bias,  # type: ignore[misc]
                    **t.setting,
                )
            )
            h[i] = ref.adabest_bias(bias, theta, models[-1], round - last.get(i, 0), mu)
            last[i] = round
        close(t.fed.round(ids=ids).W, models)
        previous, mean = mean, ref.average(np.array(models), np.ones(len(ids)))
        theta = ref.adabest_model(mean, previous, beta)
        close(t.fed.server.global_model.params, theta)
        for i in h if mu else ():
            close(t.fed.states[i].arrays["adabest.bias"], h[i])


def test_apple(tmp_path: Path, case: int) -> None:
    """Core models, relationship vectors, mixtures, and which core models a client is sent."""
    random = drawing("apple", case)
    own = {
        "relation_rate": float(random.choice([0, 0.01, 0.1])),
        "core_rate": float(random.choice([0, 1, 2])),
        "mu": float(random.choice([0, 0.1, 1])),
        "loosen_rounds": int(random.choice([0, 2, 4])),
        "models": int(random.choice([0, 1, 2])),
    }
    t = trial("apple", case, random, tmp_path, own=own)
    n = t.clients
    prior = t.samples / t.samples.sum()
    cores: dict[int, ref.Array] = {}
    p = {i: prior for i in range(n)}
    seen = {i: np.zeros(n, bool) for i in range(n)}

    def offered(i: int) -> list[int]:
        others = sorted(set(cores) - {i})
        known = np.abs(p[i]) if i in cores else np.zeros(n)
        if own["models"]:
            others = sorted(others, key=lambda j: (seen[i][j], -known[j], j))[: own["models"]]
        return others

    def stack(i: int) -> ref.Array:
        known = {i, *offered(i)}
        return np.array([cores.get(j, t.initial) if j in known else t.initial for j in range(n)])

    for round in (1, 2, 3):
        ids, pull = t.who(round), ref.apple_lambda(round, own["loosen_rounds"]) * own["mu"]
        setting = {**t.setting, "rate": t.setting["rate"] * (own["core_rate"] or n)}
        found = {}
        for i in ids:
            found[i] = ref.apple_train(
                stack(i),
                p[i],
                i,
                t.batches(i, round),
                t.slope(i),
                prior=prior,
                pull=pull,
                relation_rate=own["relation_rate"],
                **setting,
            )
        for i in ids:
            seen[i][offered(i)] = True
        for i, (core, relations) in found.items():
            cores[i], p[i] = core, relations
        uploads = t.fed.round(ids=ids)
        close(uploads.W, [cores[i] for i in ids])
        close(uploads.extras["relations"], [p[i] for i in ids])
        close(t.fed.models, [ref.apple_mixture(stack(i), p[i]) for i in range(n)])


def test_fedpac(tmp_path: Path, case: int) -> None:
    """Statistics, both phases of training, centroids, and the quadratic program of the heads."""
    random = drawing("fedpac", case)
    own = {
        "weight": float(random.choice([0, 0.5, 1])),
        "head_epochs": int(random.integers(1, 3)),
        "head_rate": float(random.choice([1, 3])),
        "combine": bool(random.random() < 0.8),
    }
    t = trial("fedpac", case, random, tmp_path, own=own)
    at_head = np.zeros(t.initial.size, bool)
    at_head[ref.head(t.sizes)] = True
    model, heads = t.initial, dict[int, ref.Array]()
    goals, known = np.zeros((CLASSES, t.sizes[-2])), np.zeros(CLASSES, np.int64)
    for round in (1, 2, 3):
        ids, expected, sent = t.who(round), [], []
        for i in ids:
            # heads may be one of several optima, so that clients go on from what they receive
            start = t.received(i, round)
            close(start[~at_head], model[~at_head])
            close(start[at_head], heads.get(i, model[at_head]))
            x, y = t.data(i)
            features = ref.outputs(start, t.sizes, x)[-2]
            statistics = ref.fedpac_statistics(features, y, CLASSES)

            pulled = t.pulled(i, ref.pull_by_samples, own["weight"], goals, known > 0)
            faster = {**t.setting, "rate": own["head_rate"] * t.setting["rate"]}
            epochs = t.batches(i, round, int(own["head_epochs"]), "train-head")
            after = ref.sgd(start, epochs, t.slope(i), moving=at_head, **faster)
            after = ref.sgd(after, t.batches(i, round, purpose="train-body"), pulled, moving=~at_head, **t.setting)
            expected.append(after)
            sent.append((*statistics, *ref.prototypes_of(ref.outputs(after, t.sizes, x)[-2], y, CLASSES)))
        uploads = t.fed.round(ids=ids)
        close(uploads.W, expected)
        for name, values in zip(("shares", "variance", "prototypes", "counts"), zip(*sent, strict=True), strict=True):
            close(uploads.extras[name], np.reshape(values, uploads.extras[name].shape))
        model = ref.average(uploads.W.astype(np.float64), t.samples[ids])
        for row, i in enumerate(ids):
            theirs = uploads.W[:, at_head].astype(np.float64)
            heads[i] = theirs[row]
            if own["combine"]:
                h, v = uploads.extras["shares"].astype(np.float64), uploads.extras["variance"][:, 0]
                Q, a = ref.fedpac_program(h, v, row), head_weights(h, v)[row]
                best = ref.on_simplex(Q)
                assert (a >= 0).all() and a.sum() == pytest.approx(1, abs=1e-9)
                assert a @ Q @ a <= best @ Q @ best + 1e-9 * np.abs(Q).max()
                # one sample or equal features: several weights may cost as little
                if np.linalg.eigvalsh(Q)[0] > 1e-7 * np.abs(Q).max():
                    close(a, best)
                heads[i] = a @ theirs
            close(t.received(i, round)[at_head], heads[i])
        counts = uploads.extras["counts"]
        goals = ref.mean_prototypes(uploads.extras["prototypes"].astype(np.float64), counts, goals)
        known = np.where(counts.sum(axis=0) > 0, counts.sum(axis=0), known)
        close(t.fed.server.state.memory["prototypes"], goals)
        close(t.fed.server.state.memory["counts"], known)


def test_fedproto(tmp_path: Path, case: int) -> None:
    """Both pulls, prototypes of clients and of the server, and the nearest prototype as the prediction."""
    random = drawing("fedproto", case)
    pull = str(random.choice(["samples", "classes"]))
    own = {
        "weight": float(random.choice([0, 0.5, 2])) * (0.1 if pull == "classes" else 1),
        "pull": pull,
        "mean": str(random.choice(["samples", "clients"])),
        "candidates": str(random.choice(["all", "own"])),
    }
    t = trial("fedproto", case, random, tmp_path, own=own)
    pulling = ref.pull_by_samples if pull == "samples" else ref.pull_by_classes
    models = {i: t.initial for i in range(t.clients)}
    goals, known = np.zeros((CLASSES, t.sizes[-2])), np.zeros(CLASSES, np.int64)
    for round in (1, 2, 3):
        ids, sent = t.who(round), []
        for i in ids:
            x, y = t.data(i)

            pulled = t.pulled(i, pulling, own["weight"], goals, known > 0)
            models[i] = ref.sgd(models[i], t.batches(i, round), pulled, **t.setting)
            sent.append(ref.prototypes_of(ref.outputs(models[i], t.sizes, x)[-2], y, CLASSES))
        uploads, memory = t.fed.round(ids=ids), t.fed.server.state.memory
        P, counts = (np.array(each) for each in zip(*sent, strict=True))
        close(uploads.extras["prototypes"], P)
        assert (uploads.extras["counts"] == counts).all()
        for i in ids:
            close(t.fed.states[i].arrays["local.params"], models[i])
        goals = ref.mean_prototypes(P, counts, goals, samples=own["mean"] == "samples")
        known = np.where(counts.sum(axis=0) > 0, counts.sum(axis=0), known)
        close(memory["prototypes"], goals)
        assert (memory["counts"] == known).all()
        for i in range(t.clients):
            x, y = random.normal(size=(9, INPUTS)), t.data(i)[1]
            allowed = (known > 0) & (np.isin(range(CLASSES), y) | (own["candidates"] == "all"))
            if not allowed.any():
                continue
            apart = ref.distances(ref.outputs(models[i], t.sizes, x)[-2], goals, allowed)
            chosen = ref.outputs(t.fed.evaluated(i).params.astype(np.float64), t.sizes, x)[-1].argmax(axis=1)
            rows = np.arange(len(x))
            assert (apart[rows, chosen] <= apart.min(axis=1) + 1e-3).all()
        if pull == "classes":
            # a distance has no slope at 0, where a client's own features would be
            goals = (goals + random.normal(size=goals.shape)).astype(np.float32).astype(np.float64)
            memory["prototypes"] = goals.astype(np.float32)


def test_fedrod(tmp_path: Path, case: int) -> None:
    """Both heads' training, the mean, and the model with both heads."""
    random = drawing("fedrod", case)
    balanced = bool(random.random() < 0.8)
    t = trial("fedrod", case, random, tmp_path, own={"balanced": balanced})
    at = ref.head(t.sizes)
    theta = t.initial
    heads = {i: np.zeros(at.stop - at.start) for i in range(t.clients)}
    for round in (1, 2, 3):
        ids, models = t.who(round), []
        for i in ids:
            batches = t.batches(i, round)
            after, heads[i] = ref.fedrod_train(
                theta, heads[i], t.sizes, *t.data(i), batches, balanced=balanced, **t.setting
            )
            models.append(after)
        close(t.fed.round(ids=ids).W, models)
        theta = ref.average(np.array(models), t.samples[ids])
        close(t.fed.server.global_model.params, theta)
        for i in range(t.clients):
            both = theta.copy()
            both[at] += heads[i]
            close(t.fed.evaluated(i).params, both)


def test_heterofl(tmp_path: Path, case: int) -> None:
    """Narrow networks trained by themselves, means over who holds an element, and narrow networks in tests."""
    random = drawing("heterofl", case)
    own = {
        "rates": str(random.choice(["1, 0.5, 0.25", "0.6", "0.3, 0.7", "1"])),
        "mask_classes": bool(random.random() < 0.5),
        "scale": bool(random.random() < 0.7),
    }
    # a narrow network's slopes are many times as steep, and so would be the growth of rounding
    t = trial("heterofl", case, random, tmp_path, hidden=(5, 3), rates=(0.02,), own=own)
    theta, rates = t.initial, t.fed.server.rates
    each = [rates.count(float(rate)) for rate in str(own["rates"]).split(",")]
    assert sum(each) == t.clients and max(each) - min(each) <= 1
    narrow = [ref.narrow_sizes(t.sizes, rate) for rate in rates]
    divisors = [rate if own["scale"] else 1.0 for rate in rates]
    has = np.array([np.isin(range(CLASSES), y) | (not own["mask_classes"]) for _, y in t.fed.data])
    for round in (1, 2, 3):
        ids, parts = t.who(round), []
        for i in ids:
            x, y = t.data(i)

            def slope(w: ref.Array, at: ref.Indices, i: int = i, x: ref.Array = x, y: ref.Indices = y) -> ref.Array:
                logits = ref.outputs(w, narrow[i], x[at], divisors[i])[-1] * has[i]
                return ref.gradient(w, narrow[i], x[at], ref.by_logits(logits, y[at]) * has[i], 0, divisors[i])

            start = ref.corner(theta, t.sizes, narrow[i])
            parts.append((ref.sgd(start, t.batches(i, round), slope, **t.setting), narrow[i]))
        uploads = t.fed.round(ids=ids)
        for w, (part, widths) in zip(uploads.W.astype(np.float64), parts, strict=True):
            close(ref.corner(w, t.sizes, widths), part)
        theta = ref.heterofl_mean(theta, t.sizes, parts, has[ids])
        close(t.fed.server.global_model.params, theta)
        for i in range(t.clients):
            x = random.normal(size=(4, INPUTS))
            logits = ref.outputs(ref.corner(theta, t.sizes, narrow[i]), narrow[i], x, divisors[i])[-1] * has[i]
            close(ref.outputs(t.fed.evaluated(i).params.astype(np.float64), t.sizes, x)[-1], logits)


def test_perfedavg(tmp_path: Path, case: int) -> None:
    """Both variants' steps, the mean, and the step before a test."""
    random = drawing("perfedavg", case)
    alpha, delta = float(random.choice([0, 0.05, 0.3])), float(random.choice([0, 0.01, 0.05]))
    own = {"alpha": alpha, "variant": "hessian-free" if delta else "first-order", "delta": delta or 1e-3}
    t = trial("perfedavg", case, random, tmp_path, own=own)
    theta = t.initial
    for round in (1, 2, 3):
        ids, models = t.who(round), []
        for i in ids:
            plain = t.slope(i)

            def outer(w: ref.Array, at: ref.Indices, plain: Any = plain) -> ref.Array:
                half = len(at) // 2
                if not alpha:
                    found: ref.Array = plain(w, at)
                    return found
                return ref.perfedavg_slope(w, plain, at[: max(half, 1)], at[half:], alpha, delta)

            models.append(ref.sgd(theta, t.batches(i, round), outer, **t.setting))
        close(t.fed.round(ids=ids).W, models, 1e-4 if delta else TOLERANCE)
        theta = ref.average(t.fed.latest.uploads.W.astype(np.float64), np.ones(len(ids)))
        close(t.fed.server.global_model.params, theta)
        for i in range(t.clients):
            everything = np.arange(len(t.data(i)[1]))
            close(t.fed.evaluated(i).params, theta - alpha * t.slope(i)(theta, everything))


def test_pfedsim(tmp_path: Path, case: int) -> None:
    """The warm-up's means, weights from classifiers, and mixtures of bodies and statistics."""
    random = drawing("pfedsim", case)
    warmup, by_rows = float(random.choice([0, 0.25, 0.5, 1])), bool(random.random() < 0.5)
    own = {"warmup": warmup, "similarity": "rows" if by_rows else "classifier"}
    t = trial("pfedsim", case, random, tmp_path, norm=True, own=own)
    at = slice(t.initial.size - (t.sizes[-2] + 1) * CLASSES, t.initial.size)
    last: dict[int, ref.Array] = {}
    model, statistics = t.initial, t.fed.initial.buffers.astype(np.float64)
    for round in (1, 2, 3):
        ids = t.who(round)
        W, B = t.models(len(ids)), t.buffers(len(ids))
        if kind(case) == "one sample each":
            W[0, at] = 0
        t.fed.round(W, B, ids=ids)
        every = np.concatenate([W, B], axis=1).astype(np.float64)
        if round <= 4 * warmup:
            mean = ref.average(every, t.samples[ids])
            model, statistics = mean[: model.size], mean[model.size :]
        else:
            last |= dict(zip(ids, every, strict=True))
        known = sorted(last)
        rows = np.array([last[i] for i in known]).reshape(len(known), every.shape[1])
        weight = rows[:, at][:, : CLASSES * t.sizes[-2]].reshape(len(known), CLASSES, t.sizes[-2])
        bias = rows[:, at][:, CLASSES * t.sizes[-2] :, None]
        phi = ref.pfedsim_weights(np.concatenate([weight, bias], axis=2), by_rows)
        for i in range(t.clients):
            expected = np.concatenate([model, statistics])
            if i in last:
                expected = ref.average(rows, phi[known.index(i)])
                expected[at] = last[i][at]
            sent = t.fed.context(i, round + 1)[1]
            close(sent.params, expected[: model.size])
            close(sent.buffers, expected[model.size :])


def test_pfedhn(tmp_path: Path, case: int) -> None:
    """The hypernetwork's outputs, and its steps with momentum and weight decay, beside numerical derivatives."""
    random = drawing("pfedhn", case)
    own = {
        "learning_rate": float(random.choice([0.01, 0.05])),
        "momentum": float(random.choice([0, 0.9])),
        "weight_decay": float(random.choice([0, 1e-3, 0.1])),
        "hidden": 4,
        "layers": int(random.integers(0, 3)),
        "embedding": int(random.choice([0, 3])),
        "local_head": bool(random.random() < 0.3),
    }
    t = trial("pfedhn", case, random, tmp_path, norm=True, own=own)
    network = {name: layer.astype(np.float64) for name, layer in t.fed.server.network.items()}
    embeddings = t.fed.server.state.memory["embeddings"].astype(np.float64)
    assert embeddings.shape == (t.clients, own["embedding"] or 1 + t.clients // 4)
    assert len(network) == 2 * (own["layers"] + 2) and (network["b"] == t.initial[: len(network["b"])]).all()
    speeds = {name: np.zeros_like(layer) for name, layer in network.items()}
    speeds |= {f"v{i}": np.zeros_like(v) for i, v in enumerate(embeddings)}
    statistics = t.fed.initial.buffers.astype(np.float64)
    for round in (1, 2):
        ids = t.who(round)
        uploads = t.fed.round(t.models(len(ids)), t.buffers(len(ids)), ids=ids)
        for row, i in enumerate(ids):
            slopes = ref.pfedhn_slopes(network, embeddings[i], uploads.W[row].astype(np.float64))
            for name, slope in slopes.items():
                value = embeddings[i] if name == "v" else network[name]
                speed = speeds[f"v{i}" if name == "v" else name]
                speed[:] = own["momentum"] * speed + slope + own["weight_decay"] * value
                value -= own["learning_rate"] * speed
        statistics = ref.average(uploads.B.astype(np.float64), t.samples[ids])
        for name, layer in network.items():
            close(t.fed.server.network[name], layer)
        close(t.fed.server.state.memory["embeddings"], embeddings)
        for i in range(t.clients):
            sent = t.fed.context(i, round + 1)[1]
            close(sent.params, ref.hypernetwork(network, embeddings[i], False))
            close(sent.buffers, statistics)


def test_pfedla(tmp_path: Path, case: int) -> None:
    """Mixtures of layers, and the hypernetworks' steps beside numerical derivatives of what they lower."""
    random = drawing("pfedla", case)
    rate, keep = float(random.choice([5e-3, 0.05])), int(random.choice([0, 0, 1, 2]))
    if kind(case) == "large":
        rate /= 1e4
    own = {"learning_rate": rate, "keep_layers": keep, "hidden": 3, "embedding": 2}
    t = trial("pfedla", case, random, tmp_path, norm=True, own=own)
    slots, n = t.slots(), t.clients
    networks = [
        {name: layer.astype(np.float64) for name, layer in t.fed.server.network_of(i).items()} for i in range(n)
    ]
    models, statistics = np.tile(t.initial, (n, 1)), np.tile(t.fed.initial.buffers.astype(np.float64), (n, 1))
    for round in (1, 2):
        ids = t.who(round)
        uploads = t.fed.round(t.models(len(ids)), t.buffers(len(ids)), ids=ids)
        before = models.copy()
        for row, i in enumerate(ids):
            trained = uploads.W[row].astype(np.float64)
            slopes = ref.pfedla_slopes(networks[i], before, slots, i, keep, trained)
            for name, slope in slopes.items():
                networks[i][name] -= rate * slope
                close(t.fed.server.network_of(i)[name], networks[i][name])
            models[i], statistics[i] = trained, uploads.B[row]
        for i in range(n):
            rest = {name: layer for name, layer in networks[i].items() if name != "v"}
            units = ref.hypernetwork(rest, networks[i]["v"], True).reshape(len(slots), n)
            alpha = ref.pfedla_weights(units, i, keep)[0]
            sent = t.fed.context(i, round + 1)[1]
            close(sent.params, ref.pfedla_mixture(alpha, models, slots))
            close(sent.buffers, alpha.mean(axis=0) @ statistics)


def test_fedma(tmp_path: Path, case: int) -> None:
    """A pass, or single shots: matched units, means layer by layer, and training under fixed layers."""
    random = drawing("fedma", case)
    one_shot, mean = bool(random.random() < 0.4), str(random.choice(["classes", "samples"]))
    trains = bool(random.random() < 0.4)
    own = {"one_shot": one_shot, "mean": mean}
    t = trial("fedma", case, random, tmp_path, hidden=(5, 4), norm=not trains, most=6, own=own)
    layers: list[list[tuple[slice, tuple[int, ...]]]] = []
    for slot in t.fed.layout.params:
        if len(slot.shape) == 2:
            layers.append([])
        layers[-1].append((slice(slot.start, slot.stop), slot.shape))
    statistics = [slice(slot.start, slot.stop) for slot in t.fed.layout.buffers]
    belongs = np.concatenate([np.full(at.stop - at.start, k) for k, layer in enumerate(layers) for at, _ in layer])
    owner = np.repeat(range(len(statistics)), [at.stop - at.start for at in statistics]) // 2
    model, own_models = (t.initial, t.fed.initial.buffers.astype(np.float64)), dict[int, Any]()
    ids = t.who(1)
    for round in (1, 2, 3):
        at = 0 if one_shot else round - 1
        ids = t.who(round) if one_shot else ids
        start = {i: own_models.get(i, model) for i in ids}
        if trains:
            for i in ids:
                moving = (belongs >= at).astype(float)
                after = ref.sgd(start[i][0], t.batches(i, round), t.slope(i), moving=moving, **t.setting)
                start[i] = (after, start[i][1])
            uploads = t.fed.round(ids=ids)
            close(uploads.W, [start[i][0] for i in ids])
        else:
            W, B = t.models(len(ids), near=float(random.choice([0, 0, 1]))), t.buffers(len(ids))
            for row, i in enumerate(ids):
                W[row, belongs < at] = t.received(i, round)[belongs < at]
                B[row, owner < at] = t.fed.context(i, round)[1].buffers[owner < at]
            uploads = t.fed.round(W, B, ids=ids)
        sent = [(w.astype(np.float64), b.astype(np.float64)) for w, b in zip(uploads.W, uploads.B, strict=True)]
        for k in (0, 1) if one_shot else (at,) if at < 2 else ():
            units = [
                np.concatenate([w[where].reshape(shape[0], -1) for where, shape in layers[k]], axis=1) for w, _ in sent
            ]
            for (w, b), order in zip(sent, ref.fedma_orders(units), strict=True):
                new = list(order)
                for where, shape in layers[k]:
                    w[where] = w[where].reshape(shape[0], -1)[new].ravel()
                for where in () if trains else statistics[2 * k : 2 * k + 2]:
                    b[where] = b[where][new]
                where, shape = layers[k + 1][0]
                w[where] = w[where].reshape(shape)[:, new].ravel()
        weights = np.ones(len(ids)) if mean == "classes" else t.samples[ids]
        average = [ref.average(np.array(each), weights) for each in zip(*sent, strict=True)]
        if mean == "classes":
            counts = np.array([np.bincount(t.data(i)[1], minlength=CLASSES) for i in ids])
            for where, _ in layers[-1]:
                rows = np.array([w[where].reshape(CLASSES, -1) for w, _ in sent])
                average[0][where] = ref.fedma_class_mean(rows, counts).ravel()
        model, own_models = (average[0], average[1]), {}
        if not one_shot and at < 2:
            for i, (w, b) in zip(ids, sent, strict=True):
                w[belongs <= at], b[owner <= at] = model[0][belongs <= at], model[1][owner <= at]
                own_models[i] = (w, b)
        for i in range(t.clients):
            received = t.fed.context(i, round + 1)[1]
            expected = own_models.get(i, model)
            close(received.params, expected[0])
            close(received.buffers, expected[1])


def test_favor(tmp_path: Path, case: int) -> None:
    """Components, chosen clients, rewards, transitions, and the Q-network's steps beside numerical derivatives."""
    random = drawing("favor", case)
    own = {
        "components": int(random.choice([1, 2, 100])),
        "target": float(random.choice([0.5, 0.9])),
        "discount": float(random.choice([0, 0.9])),
        "epsilon": 0.0,
        "hidden": 3,
        "learning_rate": float(random.choice([1e-3, 0.05])) / (1e5 if kind(case) == "large" else 1),
        "steps": int(random.choice([0, 3])),
        "copy_every": int(random.choice([1, 2, 5])),
    }
    t = trial("favor", case, random, tmp_path, own=own, fraction_train=0.5)
    server, n = t.fed.server, t.clients
    update, accuracies = server.update, dict[int, float]()

    def told(state: Any, uploads: Any, turn: Any) -> Any:
        uploads.metrics[:] = [{"accuracy-before": accuracies[i]} for i in uploads.ids]
        return update(state, uploads, turn)

    server.update = told
    everyone = list(range(n))
    assert server.sample(everyone, 1) == everyone
    W = t.models(n)
    accuracies |= dict.fromkeys(everyone, 0.1)
    t.fed.round(W, ids=everyone)
    mean, axes = ref.favor_axes(W.astype(np.float64), own["components"])
    clients = (W - mean) @ axes.T
    close(server.state.memory["clients"], clients)
    Q, copy = ({name: layer.copy() for name, layer in values(server, which).items()} for which in ("q.", "copy."))
    assert Q["w0"].shape == (3, (n + 1) * len(axes)) and all((Q[name] == copy[name]).all() for name in Q)
    model = ref.average(W.astype(np.float64), t.samples)
    seen: list[tuple[ref.Array, int, float, ref.Array]] = []
    last: tuple[ref.Array, list[int]] | None = None
    for round in (2, 3, 4):
        state = np.concatenate([(model - mean) @ axes.T, clients.ravel()])
        valued = ref.favor_values(Q, state)
        ids = server.sample(everyone, round)
        assert len(ids) == max(1, int(n * 0.5 + 0.5))
        lowest, others = valued[ids].min(), [valued[j] for j in everyone if j not in ids]
        assert all(other <= lowest + TOLERANCE * max(1, np.abs(valued).max()) for other in others)
        accuracies |= {i: float(random.uniform()) for i in everyone}
        W = t.models(len(ids))
        t.fed.round(W, ids=ids)
        if last is not None:
            r = ref.favor_reward(float(np.mean([accuracies[i] for i in ids])), own["target"], 64.0)
            seen += [(last[0], a, r, state) for a in last[1]]
            stream = rng.generator(t.fed.config.seed, "favor-replay", round)
            for _ in range(own["steps"]):
                drawn = [seen[k] for k in stream.integers(len(seen), size=32)]
                Q = ref.favor_step(Q, copy, drawn, own["discount"], own["learning_rate"])
            copy = Q if round % own["copy_every"] == 0 else copy
            close(server.state.memory["seen.rewards"], [each[2] for each in seen])
        last = state, ids
        for name in Q:
            close(values(server, "q.")[name], Q[name])
            close(values(server, "copy.")[name], copy[name])
        clients[ids] = (W - mean) @ axes.T
        close(server.state.memory["clients"], clients)
        model = ref.average(W.astype(np.float64), t.samples[ids])
        close(server.global_model.params, model)


def values(server: Any, which: str) -> dict[str, ref.Array]:
    """Return a Q-network as the server has it."""
    memory = server.state.memory
    return {name.removeprefix(which): layer for name, layer in memory.items() if name.startswith(which)}
