"""A user's own callbacks get every round's record, and can neither change nor end a run."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from fl_app import plugins
from fl_app.errors import UserError
from fl_app.server import trackers
from fl_app.server.events import LOG_MARK, Note, Started, Warned, encode, event_of, read
from fl_app.server.run_folder import read_metrics, read_summary
from tests.conftest import Run

OWN = """
import json
from pathlib import Path

got = Path({got!r})

class Keeps:
    def on_run_start(self, folder):
        self.found = [str(folder)]
    def on_round_end(self, record):
        self.found.append(record)
        print("round", record["round"], end="")
    def on_run_end(self, summary):
        got.write_text(json.dumps([*self.found, summary]))

class Fails:
    def on_round_end(self, record):
        1 / (2 - record["round"])

class Sleeps:
    def on_run_end(self, summary):
        import time
        time.sleep(600)

class Other:
    def on_epoch_end(self, record):
        pass

class Asks:
    def __init__(self, address):
        pass
    def on_run_end(self, summary):
        pass

class Nothing:
    pass

made = Keeps()
"""


@pytest.fixture(autouse=True)
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "watch.py").write_text(OWN.format(got=str(tmp_path / "got.json")))
    plugins.reset(tmp_path / "beside")
    monkeypatch.setattr(trackers, "SECONDS", 240.0)
    yield
    plugins.reset()


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "corolla")
    return caplog


def said(told: pytest.LogCaptureFixture, by: str, kind: type[Note] = Note) -> list[str]:
    events = map(event_of, told.records)
    return [event.message for event in events if type(event) is kind and by in event.message]


@pytest.mark.parametrize("name", ["Keeps", "made"])
def test_a_callback_gets_the_folder_every_record_and_the_summary(
    run: Run, told: pytest.LogCaptureFixture, tmp_path: Path, name: str
) -> None:
    found = run(callbacks=f"watch:{name}", num_server_rounds=3)
    folder, *records, summary = json.loads((tmp_path / "got.json").read_text())
    assert folder == str(found.path) and records == list(read_metrics(found.path))
    assert summary == read_summary(found.path)
    assert said(told, "watch:") == [f"watch:{name}: round {number}" for number in (1, 2, 3)]


def test_one_that_fails_is_named_with_its_line_and_the_run_goes_on(
    run: Run, told: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    without = run(run_name="without", num_server_rounds=3)
    found = run(callbacks="watch:Fails, watch:Keeps", num_server_rounds=3)
    assert read_summary(found.path)["digest"] == read_summary(without.path)["digest"]
    (warning,) = said(told, "callbacks", Warned)
    assert "watch:Fails" in warning and "ZeroDivisionError" in warning and "watch.py:18" in warning
    # the other one is not bothered
    assert len(json.loads((tmp_path / "got.json").read_text())) == 5


def test_one_that_never_ends_is_left(run: Run, told: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "SECONDS", 2.0)
    run(callbacks="watch:Sleeps")
    (warning,) = said(told, "callbacks", Warned)
    assert "watch:Sleeps" in warning and "2 s" in warning


def test_a_command_starts_callbacks_where_the_log_tells_the_folder(run: Run, tmp_path: Path) -> None:
    """As for a simulation. A resumed run's callback gets the rounds that follow."""
    path = run(num_server_rounds=3).path
    passed: list[str] = []
    with trackers.following_log({"callbacks": "watch:Keeps"}, passed.append) as take:
        take(LOG_MARK + encode(Started(folder=str(path), round=1)))
    _, *records, _ = json.loads((tmp_path / "got.json").read_text())
    assert records == list(read_metrics(path))[1:]
    assert [event.message for event in map(read, passed) if isinstance(event, Note)] == [
        "watch:Keeps: round 2",
        "watch:Keeps: round 3",
    ]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("watch", ("'watch'", "module:Class")),
        ("missing:Keeps", ("missing:Keeps", "cannot import")),
        ("watch:Missing", ("watch:Missing", "has no Missing")),
        ("watch:Nothing", ("watch:Nothing", "on_round_end")),
        ("watch:Other", ("watch:Other", "on_epoch_end")),
        ("watch:Asks", ("watch:Asks", "address")),
        ("watch:Keeps,watch:Other", ("watch:Other", "on_epoch_end")),
    ],
)
def test_what_cannot_work_is_refused_before_the_start(
    run: Run, tmp_path: Path, value: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(UserError) as refused:
        run(callbacks=value)
    assert "callbacks" in str(refused.value) and all(word in str(refused.value) for word in words)
    assert not (tmp_path / "runs").exists()


def test_its_file_travels_and_changes_no_experiment(tmp_path: Path) -> None:
    from corolla.api.settings import ready

    config = {"callbacks": "watch:Keeps"}
    assert list(plugins.files(config)) == ["watch.py"]
    assert ready({**config, "method": "fedavg"})["plugins"] == ""
