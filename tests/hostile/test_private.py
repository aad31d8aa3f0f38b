"""A server that records everything: what it can make of a private run, over real gRPC, of what the same clients send otherwise.

All clients are light SuperNodes of this process with keys of their own in files; the SuperLink and the ServerApp are real ones. One
client's upload of the last round but one comes too late, so the others' sum is opened without it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from scipy.stats import rankdata

from client_app.client_app import app as client_app
from fl_app import models, server_app
from fl_app.config import RunConfig, parse
from fl_app.data import open_client
from fl_app.layout import Layout
from fl_app.privacy import masking
from fl_app.server import matrices
from fl_app.transport import wire
from fl_app.transport.inprocess import InProcessGrid
from strategies import METHOD_PARAMS
from strategies.base.state import UploadBuffer
from strategies.fedcac import FedCACUpdate
from strategies.kernels import masks
from tests.e2e.conftest import BackgroundRun, own_cluster, replay, rounds, summary
from tests.hostile.supernode import Reply, SuperNode
from tests.privacy.attack import Attack, Sum
from tests.privacy.keys import make

pytestmark = [pytest.mark.hostile, pytest.mark.timeout(1800)]

CLIENTS, ROUNDS, LATE, LATE_ROUND = 14, 12, 5, 11
CONFIG: dict[str, Any] = {
    "method": "fedcac",
    "private": True,
    "private-left-out": "client",
    "model": "mlp",
    "dataset": "digits",
    "train-samples": 40,
    "test-samples": 10,
    "num-server-rounds": ROUNDS,
    "fedcac.beta": ROUNDS,
    "fedcac.weighting": "uniform",
    "client-threads": 1,
    "device": "cpu",
    "report-accuracy": False,
    "round-timeout": 40.0,
    "min-available-clients": CLIENTS,
}


@dataclass
class Recorded:
    """By (round, attempt, client): `arrived`, what the server got, and `members`, with whom it was summed up. By (round, client):
    `sent`, the model and the mask behind it.
    """

    run: BackgroundRun
    directory: Path
    layout: Layout
    # bool [N, C]: which labels a client holds
    has: np.ndarray
    arrived: dict[tuple[int, int, int], wire.Upload] = field(default_factory=dict)
    members: dict[tuple[int, int, int], tuple[int, ...]] = field(default_factory=dict)
    sent: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    @property
    def models(self) -> dict[tuple[int, int], np.ndarray]:
        """What each client would have sent, by (round, client)."""
        return {at: params for at, (params, _) in self.sent.items()}

    def sums(self, last: int) -> list[Sum]:
        """Every sum that the server could open until a round; all count alike."""
        groups = {(round, attempt, own) for (round, attempt, _), own in self.members.items()}
        return [
            (round, {i: 1.0 for i in own if (round, i) != (LATE_ROUND, LATE)})
            for round, _, own in sorted(groups)
            if round <= last
        ]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    directory = tmp_path_factory.mktemp("private")
    nodes: list[SuperNode] = []
    config = {**CONFIG, "state-dir": str(directory / "state"), "data-dir": str(directory / "data")}
    parsed = parse({**config, "num-clients": CLIENTS}, METHOD_PARAMS)
    labels = [open_client(parsed, i).y_train for i in range(CLIENTS)]
    layout = Layout.of(models.build("mlp", in_channels=1, num_classes=10, image_size=8))
    expected = wire.Expected(0, 0, layout.d, extras={wire.SUM: ("<u8", (layout.d + 1,))})
    upload = FedCACUpdate.upload
    arrived: dict[tuple[int, int, int], wire.Upload] = {}
    members: dict[tuple[int, int, int], tuple[int, ...]] = {}
    sent: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}

    def noted(self: Any, before: Any, after: Any, state: Any, ctx: Any) -> wire.Upload:
        made = upload(self, before, after, state, ctx)
        assert made.mask is not None
        sent[ctx.round, ctx.client_id] = made.model.params.copy(), masks.unpack(made.mask, layout.d)
        return made

    def recording(client_id: int) -> Any:
        def alter(reply: Reply, message: Message) -> Reply:
            said = message.content.config_records.get("fitins.config", {})
            if said.get("task") == "train" and not reply.message.has_error():
                attempt = int(said["round"]), int(said["attempt"]), client_id
                arrived[attempt] = wire.decode_upload(reply.content, expected)
                members[attempt] = tuple(map(int, str(said["private-members"]).split(",")))
                if attempt == (LATE_ROUND, 0, LATE):
                    reply.delay = CONFIG["round-timeout"] + 5
            return reply

        return alter

    with pytest.MonkeyPatch.context() as patch, own_cluster(directory, COLUMNS="400") as cluster:
        patch.setattr(FedCACUpdate, "upload", noted)
        try:
            cluster.start_superlink()
            for client_id, key in enumerate(make(directory / "keys", CLIENTS)):
                partition = {"partition-id": client_id, "num-partitions": CLIENTS, "private-keys": str(key)}
                nodes.append(SuperNode(cluster.fleet, partition, recording(client_id)))
            run = BackgroundRun(cluster, directory / "private", CLIENTS, config)
            run.process.wait(timeout=1500)
            trouble = {i: (node.trouble, node.refused) for i, node in enumerate(nodes) if node.trouble or node.refused}
            assert run.process.returncode == 0, (run.log, trouble)
            missing = {(record["round"], f["client"]) for record in rounds(run.folder) for f in record["failures"]}
            assert missing == {(LATE_ROUND, LATE)}, (missing, trouble, run.log)  # nobody else was ever away
            has = np.array([np.bincount(y, minlength=10) > 0 for y in labels])
            yield Recorded(run, directory, layout, has, arrived, members, dict(sent))
        finally:
            for node in nodes:
                node.stop()


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Chance that a random positive scores above a random negative."""
    ranks, positive = rankdata(scores), int(labels.sum())
    return float((ranks[labels].sum() - positive * (positive + 1) / 2) / (positive * (labels.size - positive)))


def row_densities(bits: np.ndarray, layout: Layout) -> np.ndarray:
    """The label attack: how many ones each row of the classifier has, against the client's mean."""
    slot = next(s for s in layout.params if s.name in layout.classifier and len(s.shape) == 2)
    density = bits[slot.start : slot.stop].reshape(slot.shape).mean(axis=1)
    return np.asarray(density - density.mean())


@pytest.fixture
def plain_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[int, np.ndarray]:
    """What the same clients send in the last round of a run that is not private, by client."""
    config = {
        **CONFIG,
        "private": False,
        "num-clients": CLIENTS,
        "output-dir": str(tmp_path),
        "state-dir": str(tmp_path / "state"),
    }
    found: dict[int, np.ndarray] = {}
    decode = UploadBuffer.add

    def noted(self: UploadBuffer, client_id: int, upload: wire.Upload, metrics: Any, nbytes: int | None = None) -> None:
        assert upload.mask is not None
        found[client_id] = masks.unpack(upload.mask, self.expected.num_params)
        decode(self, client_id, upload, metrics, nbytes)

    monkeypatch.setattr(UploadBuffer, "add", noted)
    grid = InProcessGrid(client_app, config, CLIENTS)
    server_app.run(grid, parse(config, METHOD_PARAMS), lambda what, done, total: None)
    return found


def test_labels_are_read_off_masks_and_not_off_sketches(recorded: Recorded, plain_masks: dict[int, np.ndarray]) -> None:
    layout, found = recorded.layout, []
    for round in range(1, ROUNDS + 1):
        z = {i: upload.mask for (r, _, i), upload in recorded.arrived.items() if r == round and upload.mask is not None}
        scores = np.array([row_densities(masks.unpack(z[i], layout.d), layout) for i in sorted(z)])
        found.append(auc(scores.ravel(), recorded.has[sorted(z)].ravel()))
    behind, plain = (
        auc(np.array([row_densities(bits[i], layout) for i in range(CLIENTS)]).ravel(), recorded.has.ravel())
        for bits in ({i: recorded.sent[ROUNDS, i][1] for i in range(CLIENTS)}, plain_masks)
    )
    sketches = f"sketches {np.mean(found):.3f} ({min(found):.3f} to {max(found):.3f})"
    print(f"AUC of the label attack: {sketches}, the masks behind them {behind:.3f}, a plain run's masks {plain:.3f}")
    assert plain > 0.9 and behind > 0.9 and abs(np.mean(found) - 0.5) < 0.05


def test_overlaps_are_those_of_the_masks(recorded: Recorded) -> None:
    for record in rounds(recorded.run.folder):
        ids = [int(i) for i in record["clients"]]
        bits = np.array([masks.pack(recorded.sent[record["round"], i][1]) for i in ids])
        exact = masks.overlap(bits, int(recorded.sent[1, 0][1].sum()))
        overlap = matrices.matrix_of(recorded.run.folder, record, "overlap")
        assert overlap is not None and overlap.rows.tolist() == ids
        assert (overlap.values == exact.astype(np.float16)).all()


def test_no_single_model_is_closer_than_a_random_one(recorded: Recorded) -> None:
    """Least squares for every client's model from all sums of the rounds in which nobody was away; uploads taken as they are."""
    sums = recorded.sums(LATE_ROUND - 1)
    attack = Attack(sums, recorded.models, CLIENTS)
    for i in range(CLIENTS):
        # those whose estimate is the same
        alike = attack.alike(i)
        own, of_all = attack.place(i, alike), attack.place(i, attack.truth)
        print(
            f"client {i}: the estimate is also that of {alike}; own model's place {own:.2f} among them, {of_all:.2f} of all"
        )
    assert len(sums) > LATE_ROUND and attack.rank > 1  # it had groups
    assert all(len(attack.alike(i)) >= 3 for i in range(CLIENTS)) and attack.rank <= CLIENTS // 3
    s = masking.scale(CLIENTS, RunConfig.private_range)
    for (round, _, i), upload in recorded.arrived.items():
        bare = upload.extras[wire.SUM][:-1].view(np.int64) / 2.0**s
        # 17,000 values: 6 standard deviations
        assert abs(np.corrcoef(bare, recorded.sent[round, i][0])[0, 1]) < 0.05


def test_of_who_was_away_the_difference_tells(recorded: Recorded) -> None:
    """The exception (docs/privacy.md), and that the attack works: `private-left-out = "group"` is what helps."""
    attack = Attack(recorded.sums(ROUNDS), recorded.models, CLIENTS)
    assert attack.alike(LATE) == [LATE] and attack.place(LATE, attack.truth) == 0


def test_the_late_upload_is_thrown_away_and_nobody_trains_again(recorded: Recorded) -> None:
    record, layout = rounds(recorded.run.folder)[LATE_ROUND - 1], recorded.layout
    assert [(f["client"], f.get("attempt")) for f in record["failures"]] == [(LATE, None)] and "no reply" in record[
        "failures"
    ][0]["cause"]
    assert str(LATE) not in record["clients"] and len(record["clients"]) == CLIENTS - 1
    assert {attempt for round, attempt, _ in recorded.arrived if round == LATE_ROUND} == {0}
    # what the server has without the answers that open it, with the late upload and without
    uploads = {i: recorded.arrived[LATE_ROUND, 0, i].extras[wire.SUM] for i in range(CLIENTS)}
    for ids in (range(CLIENTS), [i for i in range(CLIENTS) if i != LATE], [LATE]):
        total = np.add.reduce([uploads[i] for i in ids], axis=0, dtype=np.uint64)
        with pytest.raises(ValueError, match="clients can"):
            masking.decode(total, layout.d, CLIENTS, len(ids), RunConfig.private_range)
    assert len(rounds(recorded.run.folder)[LATE_ROUND]["clients"]) == CLIENTS


def test_the_digest_is_that_of_one_process(recorded: Recorded) -> None:
    assert summary(recorded.run.folder)["digest"] == replay(recorded.run, recorded.directory)


def test_the_server_was_told_no_accuracy_no_label_and_no_count(recorded: Recorded) -> None:
    text = (recorded.run.folder / "clients.json").read_text()
    assert "class-counts" not in text and json.loads(text)["0"]["train-samples"] is None
    assert all(record["accuracy-after"] is None and record["loss"] is None for record in rounds(recorded.run.folder))
