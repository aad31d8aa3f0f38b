"""Whole private runs in one process: the real ServerApp and ClientApp, joined by InProcessGrid."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from client_app import client_app
from client_app.client import CorollaClient
from fl_app import weights
from fl_app.debugging import Place
from fl_app.errors import MethodError, UserError
from fl_app.layout import Layout
from fl_app.reasons import Reason
from fl_app.server import matrices
from fl_app.server.run_folder import RunFolder, read_summary
from fl_app.transport import wire
from fl_app.transport.inprocess import InProcessGrid
from fl_app.transport.wire import Download
from strategies import METHODS, fedcac
from strategies.base import Turn
from strategies.engine.private import PrivateRounds
from strategies.kernels.linkage import ALONE
from tests.conftest import Run, config
from tests.facts import mentions, rejected
from tests.privacy.keys import make
from tests.privacy.runs import PRIVATE, rounds

SUMS = tuple(sorted(name for name in METHODS if METHODS[name].sums))


def global_model(folder: RunFolder) -> np.ndarray:
    from fl_app import models

    layout = Layout.of(models.build("mlp", in_channels=1, num_classes=10, image_size=8))
    return weights.load_safetensors(folder.path / "models" / "global.safetensors", layout).params


# what comes out


@pytest.mark.parametrize("method", ["fedavg", "pfedme", "fedobp"])
def test_sums_give_what_single_uploads_give(run: Run, method: str) -> None:
    sizes = {"partition": "dirichlet", "min_samples": 4}  # unequal clients
    plain = run(method=method, run_name="plain", num_server_rounds=1, num_clients=5, max_update_norm=0, **sizes)
    hidden = run(method=method, run_name="hidden", num_server_rounds=1, **PRIVATE, **sizes)
    np.testing.assert_allclose(global_model(hidden), global_model(plain), rtol=1e-6, atol=2.0**-23)  # s = 24 for N = 5
    assert rounds(hidden)[0]["accuracy-after"] == rounds(plain)[0]["accuracy-after"]


@pytest.mark.parametrize(
    "method", [pytest.param(m, marks=() if m in ("fedavg", "fedcac") else pytest.mark.long) for m in SUMS]
)
def test_every_method_that_needs_sums_alone_runs_private(
    run: Run, arriving: list[tuple[wire.Upload, wire.Expected]], method: str
) -> None:
    folder = run(method=method, **PRIVATE)
    assert read_summary(folder.path)["digest"]
    uploads = [(upload, expected) for upload, expected in arriving if wire.SUM in expected.extras]
    # and not one in which a model travels
    assert len(uploads) == 10
    for upload, _ in uploads:
        assert not {metric.name for metric in METHODS[method].recorded} & set(upload.metrics)
        assert (
            upload.model.nbytes == 0
            and list(upload.extras) == [wire.SUM]
            and upload.extras[wire.SUM].dtype == np.uint64
        )


def test_uploads_have_words_of_8_bytes_and_downloads_are_as_long_as_plain_ones(run: Run) -> None:
    settings = {"method": "fedcac", "num_clients": 5}
    size = {private: rounds(run(run_name=str(private), private=private, **settings))[0] for private in (False, True)}
    d, mask = 17226, 2154
    assert size[False]["upload-bytes"] == 5 * (4 * d + mask)
    # one more word has the weight
    assert size[True]["upload-bytes"] == 5 * (8 * (d + 1) + mask)
    assert size[True]["download-bytes"] == size[False]["download-bytes"]  # of the first round


def test_the_order_of_replies_does_not_matter(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run(method="fedcac", run_name="a", **PRIVATE)
    pull = InProcessGrid.pull_messages
    monkeypatch.setattr(InProcessGrid, "pull_messages", lambda self, ids: pull(self, list(ids)[::-1]))
    assert (
        read_summary(run(method="fedcac", run_name="b", **PRIVATE).path)["digest"]
        == read_summary(folder.path)["digest"]
    )


def overlap(folder: RunFolder) -> np.ndarray:
    """The overlaps of the first round."""
    found = matrices.matrix_of(folder.path, rounds(folder)[0], "overlap")
    assert found is not None
    return found.values


def test_fedcac_has_the_overlaps_of_the_masks_exactly(run: Run) -> None:
    plain = run(method="fedcac", run_name="plain", num_clients=7, num_server_rounds=1)
    hidden = run(method="fedcac", run_name="hidden", num_clients=7, num_server_rounds=1, private=True)
    assert (overlap(hidden) == overlap(plain)).all()
    some = run(method="fedcac", run_name="some", num_clients=7, num_server_rounds=1, private=True, private_sketch=8192)
    off = overlap(some) - overlap(plain)
    assert 0 < np.abs(off).max() < 0.04
    assert rounds(some)[0]["upload-bytes"] < rounds(hidden)[0]["upload-bytes"]


def test_fedcac_differs_by_its_groups_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain run that is given a private run's groups ends with the private run's losses."""
    groups: dict[int, dict[int, list[int]]] = {}
    note = Turn.note

    def noted(self: Turn, client_id: int, name: str, value: object) -> None:
        if self.config.private and name == "collaborators":
            groups.setdefault(self.round, {})[client_id] = list(value)  # type: ignore[call-overload]
        note(self, client_id, name, value)

    def chosen(self: fedcac.FedCAC, overlap: np.ndarray, round: int) -> np.ndarray:
        together = np.zeros(overlap.shape, bool)
        for client_id, others in groups[sorted(groups)[round - 1]].items():
            together[client_id, others] = True
        return together

    def losses(folder: RunFolder) -> np.ndarray:
        return np.array([row["loss"] for row in rounds(folder)[-1]["evaluation"]["clients"].values()])

    setting = {
        "method": "fedcac",
        "num_clients": 8,
        "num_server_rounds": 6,
        "fedcac": {"beta": 6},
        "private_regroup": 2,
        "max_update_norm": 0,
        "dirichlet_alpha": 0.1,
    }
    monkeypatch.setattr(Turn, "note", noted)
    hidden, plain = losses(run(run_name="hidden", private=True, **setting)), losses(run(run_name="plain", **setting))
    assert any(0 < len(others) < 7 for of_round in groups.values() for others in of_round.values())
    monkeypatch.setattr(fedcac.FedCAC, "choose", chosen)
    given = losses(run(run_name="given", **setting))
    assert np.abs(given - hidden).max() < 1e-3 < np.abs(plain - hidden).max()


def test_fedcac_after_beta_is_fedcac(run: Run) -> None:
    # nobody shares critical parameters after round beta: no groups, so plain and private differ by fixed point alone
    settings = {"method": "fedcac", "num_clients": 5, "fedcac": {"collaboration": "none"}, "num_server_rounds": 3}
    plain = run(run_name="plain", max_update_norm=0, **settings)
    hidden = run(run_name="hidden", private=True, **settings)
    np.testing.assert_allclose(global_model(hidden), global_model(plain), rtol=1e-5, atol=1e-5)
    for a, b in zip(rounds(hidden), rounds(plain), strict=True):
        assert a["accuracy-before"] == pytest.approx(b["accuracy-before"], abs=0.03)
        assert a["collaborators"] == b["collaborators"] == 0


def test_fedcac_groups_are_a_partition_kept_for_some_rounds_and_end_at_beta(run: Run) -> None:
    folder = run(
        method="fedcac",
        private=True,
        num_clients=9,
        num_server_rounds=7,
        private_regroup=2,
        fedcac={"beta": 6, "tau": 0.3},
        train_samples=16,
    )
    seen = []
    for record in rounds(folder):
        linked = matrices.read(folder.path, record["round"])["collaborators"]
        assert linked.rows.tolist() == [int(i) for i in record["clients"]]
        mates = {
            int(i): {int(i), *linked.columns[own].tolist()} for i, own in zip(linked.rows, linked.values, strict=True)
        }
        for own in mates.values():
            assert len(own) == 1 or len(own) >= 3
            assert all(mates[i] == own for i in own)
        seen.append({frozenset(own) for own in mates.values()})
    assert seen[0] == {frozenset(range(9))} and all(len(own) == 1 for own in seen[6])
    assert seen[1] == seen[2] and seen[3] == seen[4] and len({frozenset(s) for s in seen}) > 2


def test_fedcac_with_some_of_the_clients_a_round_still_collaborates(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is absent when groups are made anew keeps its group."""

    def without_a_collaborator(name: str) -> int:
        folder = run(
            run_name=name,
            method="fedcac",
            private=True,
            num_clients=12,
            num_server_rounds=10,
            fraction_train=0.5,
            private_regroup=2,
            fedcac={"beta": 20, "tau": 0.3},
            train_samples=16,
        )
        assert all(len(own) >= 3 for own in groups_of(folder))
        return sum(not row["collaborators"] for record in rounds(folder) for row in record["clients"].values())

    kept = without_a_collaborator("kept")

    def alone(labels: np.ndarray, ids: np.ndarray, parts: np.ndarray) -> np.ndarray:
        after = np.full_like(labels, ALONE)
        after[ids] = parts
        return after

    monkeypatch.setattr(fedcac, "regrouped", alone)
    assert kept < 0.75 * without_a_collaborator("dissolved")


def groups_of(folder: RunFolder) -> list[list[int]]:
    numbers = json.loads((folder.path / "aggregation-groups.json").read_text())["groups"]
    return [[i for i, number in enumerate(numbers) if number == own] for own in set(numbers)]


def test_a_resumed_run_ends_with_the_same_bits(run: Run) -> None:
    settings = {
        "method": "fedcac",
        "private": True,
        "num_clients": 6,
        "keep_state": True,
        "fedcac": {"tau": 0.3, "beta": 9},
    }
    whole = run(run_name="whole", num_server_rounds=5, **settings)
    half = run(run_name="half", num_server_rounds=3, **settings)
    resumed = run(run_name="half", num_server_rounds=5, resume=str(half.path), **settings)
    assert read_summary(resumed.path)["digest"] == read_summary(whole.path)["digest"]


def test_a_run_goes_on_from_another_ones_states(run: Run) -> None:
    first = run(method="fedper", run_name="first", keep_state=True, **PRIVATE)
    second = run(method="fedper", run_name="second", from_run=str(first.path), **PRIVATE)
    losses = [rounds(folder)[0]["loss"] for folder in (first, second)]
    assert losses[1] < losses[0] and not rounds(second)[0]["failures"]


def test_nothing_is_known_of_accuracies_and_class_counts(run: Run) -> None:
    folder = run(report_accuracy=False, **PRIVATE)
    for record in rounds(folder):
        assert record["accuracy-before"] is None and record["loss"] is None
        assert all(row["accuracy-after"] is None and row["loss-before"] is None for row in record["clients"].values())
    assert read_summary(folder.path)["final-accuracy"] is None and read_summary(folder.path)["digest"]
    assert "class-counts" not in (folder.path / "clients.json").read_text()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"method": "fedavg"}, False),
        ({"method": "fedcac"}, False),
        ({"method": "fedavg", "max_size_weight": 2.0}, True),
        ({"method": "pfedme", "max_size_weight": 2.0}, False),
    ],
)
def test_how_many_samples_a_client_has_is_told_only_where_the_server_must_bound_it(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], told: bool
) -> None:
    caplog.set_level("INFO", "corolla")
    handle = InProcessGrid._handle
    numbers: dict[int, list[tuple[str, object]]] = {}

    def heard(self: Any, message: Message) -> Message:
        reply = handle(self, message)
        said: list[Any] = [*reply.content.metric_records.items(), *reply.content.config_records.items()]
        numbers.setdefault(message.metadata.dst_node_id, []).extend(
            (f"{record}.{name}", value)
            for record, values in said
            for name, value in values.items()
            if isinstance(value, int | float) and value == value and "seconds" not in name and name != "client-id"
        )
        return reply

    monkeypatch.setattr(InProcessGrid, "_handle", heard)
    sizes = {"partition": "dirichlet", "min_samples": 4}  # unequal clients
    folder = run(report_accuracy=False, **sizes, **changes, **PRIVATE)
    assert len(numbers) == 5 and all(len(said) > 10 for said in numbers.values())
    # one client seals a key, and so answers once more
    assert (len({frozenset(said) for said in numbers.values()}) > 1) is told
    assert any("sample counts" in line for line in caplog.messages if line.startswith("private:")) is told
    facts = json.loads((folder.path / "clients.json").read_text()).values()
    assert ({one["train-samples"] for one in facts} == {None}) is not told


def test_what_leaks_is_said_at_the_start(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "corolla")
    run(method="fedcac", max_update_norm=3.0, **PRIVATE)
    said = [line for line in caplog.messages if line.startswith("private:")]
    assert len(said) == 2 and "overlap" in said[0] and "losses and accuracies" in said[0]
    assert "sample counts" not in said[0]
    assert mentions(said[1], "max-update-norm drops no", "single upload")
    assert not [line for line in caplog.messages if line.startswith("metric ")]
    caplog.clear()
    run(method="fedavg", run_name="b", report_accuracy=False, **PRIVATE)
    said = [line for line in caplog.messages if line.startswith("private:")]
    assert len(said) == 1 and "overlap" not in said[0] and "accuracies" not in said[0]


@pytest.mark.parametrize(
    "said, expected",
    [
        ({"private-members": "0,1"}, "asks for a sum of 2 clients, but only 3 or more hide each other"),
        ({"private-members": "0,1,1,2"}, "group does not fit client"),
        ({"private-members": "7,8,9"}, "group does not fit client"),
        ({"private-members": "2,1,0,3,4"}, "group does not fit client"),
        ({"private-most": 0.5}, "bound on counts cannot be"),
        ({"private-most": float("nan")}, "bound on counts cannot be"),
        ({"private-sent": "0,0,0,0,0"}, "fewer than 3 members of the sum are sent what client . is sent"),
        ({"private-sent": ""}, "does not say what each member"),
        ({"private-keys": ",".join("AAAA" for _ in range(5))}, "has not signed the keys"),
        ({"private-sealed": "AAAA"}, "was not sealed by client 0"),
        ({}, "does not name the clients to mask with"),
    ],
)
def test_a_client_sends_nothing_that_would_not_be_hidden(
    run: Run, monkeypatch: pytest.MonkeyPatch, said: dict[str, Any], expected: str
) -> None:
    scalars = PrivateRounds.scalars
    monkeypatch.setattr(PrivateRounds, "scalars", lambda *given: {**scalars(*given), **said} if said else {})
    with pytest.raises(UserError, match=expected):
        run(method="fedcac", **PRIVATE)


@pytest.mark.parametrize("sealed", ["AAAA", "A" * 80, ""])
def test_a_client_that_seals_no_key_is_left_out_and_nobody_else(
    run: Run, monkeypatch: pytest.MonkeyPatch, sealed: str, caplog: pytest.LogCaptureFixture
) -> None:
    honest = CorollaClient._answered

    def lie(self: CorollaClient, question: Download) -> dict[str, Any]:
        found = honest(self, question)
        return found if self.client_id else {"private-sealed": ",".join([sealed] * 5) if sealed else ""}

    monkeypatch.setattr(CorollaClient, "_answered", lie)
    for record in rounds(run(method="fedcac", **PRIVATE)):
        assert set(record["clients"]) == {"1", "2", "3", "4"}
        assert {failure["attempt"] for failure in record["failures"]} == {1}
    who = " that clients [0, 1, 2, 3, 4] can open" if sealed else ": the others are asked again"
    assert mentions(caplog.text, "client 0 sealed no", "key of", f"sketches{who}")


def test_at_sites_it_is_left_out_by_the_reason_that_the_others_send(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    honest = CorollaClient._answered

    def lie(self: CorollaClient, question: Download) -> dict[str, Any]:
        found = honest(self, question)
        return (
            {"private-sealed": ",".join(["A" * 80] * 5)} if "private-sealed" in found and not self.client_id else found
        )

    monkeypatch.setattr(CorollaClient, "_answered", lie)
    monkeypatch.setattr(client_app, "_place", lambda context: Place.DEPLOYMENT)
    nodes = {i: {"private-keys": str(path)} for i, path in enumerate(make(tmp_path / "keys", 5))}
    for record in rounds(run(method="fedcac", node_configs=nodes, **PRIVATE)):
        assert set(record["clients"]) == {"1", "2", "3", "4"}
        causes = {failure["cause"] for failure in record["failures"]}
        assert causes == {Reason("protocol", "private", "sealed").sentence}
    assert mentions(caplog.text, "client 0 sealed no", "key of", "[0, 1, 2, 3, 4] can open")


# what cannot be private


def test_the_docs_name_the_methods_that_can() -> None:
    text = " ".join((Path(__file__).parents[2] / "docs" / "privacy.md").read_text().split())
    listed = text.partition("can run private if its server needs only sums: ")[2].partition("; and fedcac as above")[0]
    assert listed.split(", ") == [name for name in SUMS if name != "fedcac"]


@pytest.mark.parametrize("name", sorted(set(METHODS) - set(SUMS)))
def test_other_methods_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(
        UserError,
        match=f"private: method {name} cannot run private: (its server|its clients|it sends|nothing travels|which)",
    ):
        METHODS[name].check(config(method=name, num_server_rounds=30, **PRIVATE))


def test_a_method_that_chooses_the_clients_itself_is_refused() -> None:
    class Chooses(METHODS["fedavg"].strategy):  # type: ignore[name-defined, misc]
        def sample(self, client_ids: list[int], round: int) -> list[int]:
            return client_ids[:3]

    with rejected(MethodError, "private", "fedavg cannot run", "private", "chooses the clients", "round itself"):
        replace(METHODS["fedavg"], strategy=Chooses).check(config(method="fedavg", **PRIVATE))


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"num_clients": 2}, "a round needs 3 clients, it has 2 .* among two, each knows the other's model"),
        ({"num_clients": 10, "fraction_train": 0.2}, "a round needs 3 clients, it has 2"),
        ({"num_clients": 4, "holdout_clients": 0.5}, "a round needs 3 clients, it has 2"),
        ({"robust": "median"}, "sees no single upload that median could choose among"),
        ({"collect_personal_models": True}, "collect-personal-models uploads every client's own model"),
    ],
)
def test_what_does_not_go_with_it(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        METHODS["fedavg"].check(config(**{**PRIVATE, **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        {"fedcac": {"collaboration": "top"}},
        {"fedcac": {"non_critical": "as-critical"}},
        {"fedobp": {"upload_mask": True}},
    ],
)
def test_parameters_that_do_not_go_with_it(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="private"):
        config(method=next(iter(changes)), **PRIVATE, **changes)


def test_two_clients_are_refused_when_it_is_known_that_they_are_two(run: Run, tmp_path: Path) -> None:
    with rejected(MethodError, "private", "round needs 3 clients", "it has 2"):
        run(private=True, num_clients=2)
    assert not list((tmp_path / "runs").glob("*"))


def test_a_node_without_a_key_says_so(run: Run) -> None:
    with rejected(UserError, "", "client 0", "private", "SuperNode has no", "key for private", "runs"):
        run(node_configs={i: {"private-keys": ""} for i in range(5)}, **PRIVATE)
