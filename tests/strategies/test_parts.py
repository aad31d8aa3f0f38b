"""Uploads of a part of the model: how far their clients moved, and what fills up a late one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_app.client_app import app
from fl_app import server_app
from fl_app.config import parse
from fl_app.layout import Model
from fl_app.server.run_folder import read_metrics
from strategies import METHOD_PARAMS
from strategies.engine.attempt import RoundAttempt
from strategies.engine.plain import PlainRounds
from strategies.engine.screening import Screening, compared, reference
from strategies.kernels.parts import Part
from tests.conftest import flat
from tests.methods.federation import Federation, close
from tests.methods.one_client import small
from tests.strategies.test_late import Late

KEYS: dict[str, dict[str, Any]] = {"heterofl": {"rates": "1, 0.4"}, "perfedmask": {"capacity": 0.6, "masks": "random"}}


def test_a_client_has_not_moved_beyond_its_part(tmp_path: Path) -> None:
    """The distance of a client that adds 0.1 to each of its k elements is 0.1 sqrt(k)."""
    fed: Any = Federation(tmp_path, "heterofl", network=lambda: small(batchnorm=True), heterofl=KEYS["heterofl"])
    server, protocol = fed.server, PlainRounds(fed.server)
    attempt = RoundAttempt(server.config, 1)
    server.begin(attempt)
    attempt.buffer = protocol.open(attempt, [0, 1, 2])
    held = {}
    for i in range(3):
        part = held[i] = server.submodel_of(i, attempt)
        start = part.take(server.global_model)
        upload = fed.upload(i, fed.initial)
        changed = Model(start.params + np.float32(0.1), start.buffers)
        whole = protocol.check(
            i, type(upload)(changed, upload.mask, upload.extras, upload.metrics, upload.num_examples)
        )
        assert (whole.model.params[~part.params] == server.global_model.params[~part.params]).all()
        attempt.buffer.add(i, whole, {}, 0)
    assert len({part.d for part in held.values()}) > 1
    screening = Screening()

    def sent(client_id: int) -> Any:
        return reference(server.outliers, attempt.sent_to(client_id))

    screening.measure(1, attempt.buffer, compared(server, attempt.buffer, sent), 3.0, sent)
    moved = np.array([0.1 * math.sqrt(part.d) for part in held.values()])
    for i in range(3):
        close(np.linalg.norm(attempt.buffer.W[i] - sent(i)["parameters"]), moved[i], atol=1e-5)
    # the usual distance is the median of these, or of those to the median upload
    apart = np.linalg.norm(attempt.buffer.W - np.median(attempt.buffer.W, axis=0), axis=1)
    close(np.array(screening.usual["parameters"][1]), max(np.median(moved), np.median(apart)), atol=1e-5)


@pytest.mark.parametrize("method", list(KEYS))
def test_a_late_part_is_filled_with_the_model_that_its_client_was_sent(
    raw_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """A deployment's client 2 is asked in round 1, and answers in round 2, when there is another global model."""
    models: dict[int, Model] = {}
    seen: list[tuple[Part, Model, Model]] = []
    original = PlainRounds.check

    def check(self: PlainRounds, client_id: int, upload: Any) -> Any:
        whole = original(self, client_id, upload)
        models[self.server.attempt.round] = self.server.global_model
        if client_id == 2:
            part = self.server.submodel_of(2, self.server.attempt)
            assert part is not None
            seen.append((part, whole.model, self.server.sent_to(2)))
        return whole

    monkeypatch.setattr(PlainRounds, "check", check)
    keys = {"method": method, "quorum": 0.6, "staleness": 1, "num_server_rounds": 2, "num_clients": 3}
    raw = raw_config | flat({**keys, method: KEYS[method]})
    folder = server_app.run(Late(app, raw, 3), parse(raw, METHOD_PARAMS), lambda *_: None, math.inf, hears=False)
    assert [record["clients"].get("2", {}).get("age") for record in read_metrics(folder.path)] == [None, 1]
    ((part, upload, sent),) = seen
    beyond = ~part.params
    assert beyond.any() and (models[1].params[beyond] != models[2].params[beyond]).any()
    assert (upload.params[beyond] == models[1].params[beyond]).all()
    assert sent.params.tobytes() == models[1].params.tobytes()
    assert (upload.params[part.params] != models[1].params[part.params]).any()
