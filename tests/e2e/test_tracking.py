"""A simulation that is started from Python: its trackers are reached though its server lies in a network of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

import corolla
from tests.e2e.conftest import rounds

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture
def refusing() -> Iterator[tuple[str, list[str]]]:
    """The address of a server that is no tracker's, and what it was asked for."""
    asked: list[str] = []

    class Refuse(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Refuse)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_simulation_from_python_with_trackers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], refusing: tuple[str, list[str]]
) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    address, asked = refusing
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    keys = dict(
        method="fedavg", clients=3, num_server_rounds=2, train_samples=24, local_epochs=1, state_dir=tmp_path / "state"
    )
    found = corolla.run(track="mlflow,tensorboard", **keys)
    told = capfd.readouterr()
    assert asked and (told.out + told.err).count("warning: track: mlflow") == 1
    events = EventAccumulator(str(found.path / "tensorboard"))
    events.Reload()
    assert [s.value for s in events.Scalars("loss/training")] == pytest.approx(
        [r["loss"] for r in rounds(found.path)], rel=1e-5
    )
    plain = corolla.run(in_process=True, progress=False, run_name="plain", **keys)
    assert plain.summary["digest"] == found.summary["digest"]
