"""What stays on the clients: tensors that never travel, second models, and BatchNorm statistics."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from client_app.client_app import app
from client_app.stored_state import StateStore
from fl_app import models, server_app, weights
from fl_app.config import parse
from fl_app.keys import Scalar
from fl_app.layout import Layout, Model
from fl_app.server.run_folder import RunFolder, read_metrics, read_summary
from fl_app.transport.inprocess import InProcessGrid
from strategies import METHOD_PARAMS, METHODS
from tests.conftest import Run, flat
from tests.small_models import BATCHNORM

SHAPE: dict[str, Any] = {"in_channels": 1, "num_classes": 10, "image_size": 8}


class Watched(InProcessGrid):
    """A grid that keeps, of every message and reply, all bytes of its arrays and scalars, and its arrays."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.seen: list[tuple[bytes, list[bytes]]] = []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        self.seen += map(self.read, messages)
        return super().push_messages(messages)

    def _handle(self, message: Message) -> Message:
        reply = super()._handle(message)
        self.seen.append(self.read(reply))
        return reply

    @staticmethod
    def read(message: Message) -> tuple[bytes, list[bytes]]:
        content = message.content
        arrays = [array.data for record in content.array_records.values() for array in record.values() if array.data]
        scalars = [*content.config_records.items(), *content.metric_records.items()]
        return b"".join(arrays) + repr(scalars).encode(), arrays


def stored(folder: RunFolder, directory: Path, client_id: int, round: int) -> dict[str, np.ndarray]:
    """Return the arrays of a client's state after a round. directory: the run's state-dir."""
    store = StateStore(directory, str(read_summary(folder.path)["experiment"]), client_id)
    (generation,) = store.directory.glob(f"{round:06d}-*")  # one attempt
    return dict(store.load(generation.stem).arrays)


@pytest.mark.parametrize(
    ("method", "model"),
    [
        ("fedper", {}),
        ("lg-fedavg", {}),
        ("fedrep", BATCHNORM),
        ("lg-fedavg", BATCHNORM),
        ("fedbn", BATCHNORM),
    ],
    ids=lambda value: value if isinstance(value, str) else "batchnorm" if value else "mlp",
)
def test_what_stays_local_is_absent_from_the_messages(
    raw_config: dict[str, Scalar], method: str, model: dict[str, Any]
) -> None:
    raw = raw_config | flat({"method": method, "keep_state": True, **model})
    config, grid = parse(raw, METHOD_PARAMS), Watched(app, raw, 3)
    folder = server_app.run(grid, config, lambda *_: None)
    module = models.build(config.model, **SHAPE, seed=config.seed)
    layout, initial = Layout.of(module), weights.read(module)
    shared = METHODS[method].shared(layout, config.params)
    local = layout.names - shared
    body = layout.names - layout.classifier
    assert local == {"fedbn": layout.batchnorm & layout.names, "lg-fedavg": body}.get(method, layout.classifier)
    travelling, kept = layout.subset(shared), layout.subset(local)

    sent = [arrays for _, arrays in grid.seen if arrays]
    # to three clients in two rounds and an evaluation, which returns no arrays; and from them
    assert len(sent) == 3 * (3 + 2)
    sizes = [(size,) for size in (travelling.d, travelling.b) if size]
    for arrays in sent:
        decoded = [np.load(io.BytesIO(a)) for a in arrays]
        assert [(a.shape, a.dtype) for a in decoded] == [(s, np.dtype("float32")) for s in sizes]

    everything = b"".join(contents for contents, _ in grid.seen)
    secrets = {f"initial {k}": v for k, v in kept.tensors(layout.take(initial, local)).items() if np.ptp(v) > 0}
    for client_id in range(3):
        for round in (1, 2):
            state = stored(folder, Path(config.state_dir), client_id, round)
            tensors = kept.tensors(Model(state["local.params"], state["local.buffers"]))
            secrets |= {f"client {client_id} round {round} {name}": value for name, value in tensors.items()}
    assert len(secrets) >= 2 * 3 * len(local)
    for name, value in secrets.items():
        assert value.tobytes() not in everything, name
    # the search finds what does travel
    assert all(value.tobytes() in everything for value in travelling.tensors(layout.take(initial, shared)).values())


@pytest.mark.parametrize("method", ["ditto", "pfedme"])
def test_the_second_model_is_evaluated_once_there_is_one(run: Run, tmp_path: Path, method: str) -> None:
    folder = run(method=method, num_clients=4, num_server_rounds=1, fraction_train=0.5, keep_state=True)
    (record,) = read_metrics(folder.path)
    tested, took_part = record["evaluation"]["clients"], record["clients"]
    absent = {tested[i]["sha256"] for i in tested.keys() - took_part.keys()}
    assert (len(tested), len(took_part), len(absent)) == (4, 2, 1)  # the absent ones have the global model
    for i, entry in took_part.items():
        own = stored(folder, tmp_path / "state", int(i), 1)["personal.params"]
        assert tested[i]["sha256"] == hashlib.sha256(own.tobytes()).hexdigest()
        assert entry["accuracy-after"] == tested[i]["accuracy"]


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedpake", "feddyn", "fedntd", "moon", "scaffold"])
def test_statistics_may_stay_on_the_client(run: Run, tmp_path: Path, method: str) -> None:
    folder = run(method=method, keep_state=True, **BATCHNORM, **{method: {"batchnorm_statistics": "local"}})
    layout = Layout.of(models.build(BATCHNORM["model"], **SHAPE))
    extra = 4 * layout.d if method == "scaffold" else 0
    rows = [row for record in read_metrics(folder.path) for row in record["clients"].values()]
    assert {(row["upload-bytes"], row["download-bytes"]) for row in rows} == {(4 * layout.d, 4 * layout.d + extra)}
    kept = [stored(folder, tmp_path / "state", i, 2)["local.buffers"] for i in range(3)]
    assert all(k.size == layout.b for k in kept) and not np.array_equal(kept[0], kept[1])
