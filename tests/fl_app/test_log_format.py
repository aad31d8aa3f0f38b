"""Log lines as JSON: one schema, readable by displays, whatever a client wrote."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fl_app import debugging, log_format
from fl_app.errors import UserError
from fl_app.log_format import JsonFormatter, TextFormatter, about
from fl_app.server import events as run_log
from fl_app.server.events import JsonLines, LeftOut, Round, Started, Warned, read, tell
from tests.facts import rejected

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "operations.md"


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The JSON lines of a ServerApp's log."""
    out = io.StringIO()
    log = logging.getLogger("corolla")
    handler = logging.StreamHandler(out)
    handler.setFormatter(JsonLines())
    monkeypatch.setattr(log, "handlers", [handler])
    monkeypatch.setattr(log, "propagate", False)
    monkeypatch.setattr(log, "level", logging.INFO)

    class Lines(list[str]):
        def __iter__(self) -> Iterator[str]:
            return iter(out.getvalue().splitlines())

    yield Lines()


RECORD = {
    "round": 2,
    "accuracy-before": 0.5,
    "accuracy-after": 0.75,
    "loss": 0.25,
    "clients": {"0": {}},
    "upload-bytes": 10,
    "download-bytes": 20,
    "seconds": {"round": 1.0},
    "failures": [],
}
LOG = logging.getLogger("corolla")


def test_a_display_reads_what_it_reads_without_json(lines: list[str]) -> None:
    told = [
        Started(folder="/runs/demo"),
        Round.of(RECORD, 5),
        LeftOut(who="client 3", why="refused by its site: methods"),
    ]
    for event in told:
        tell(event)
    LOG.warning("%s", odd := 'a client said "corolla: error: {}\\"\u202e\x1b[31m')
    assert [read(line) for line in lines] == [*told, Warned(message=odd)]
    found = [json.loads(line) for line in lines]
    assert all(line.isascii() and line.isprintable() for line in lines)
    assert [entry.get("run") for entry in found] == ["demo"] * 4
    assert found[1]["round"] == 2 and found[1]["message"] == told[1].sentence
    assert found[2]["client"] == 3 and found[2]["level"] == "warning" and found[2]["component"] == "serverapp"


def test_a_text_line_cannot_look_like_another_or_move_the_cursor() -> None:
    record = logging.LogRecord(
        "corolla", logging.INFO, "", 0, "refused: %s", ("\x1b[2J\r\ncorolla: all is well\u202e",), None
    )
    assert TextFormatter().format(record) == "corolla: refused: [2J\n  corolla: all is well"


def test_a_traceback_is_one_line_and_no_line_of_a_display(lines: list[str]) -> None:
    debugging.show_trace("Traceback:\n  x")
    try:
        raise ValueError("y\nz")
    except ValueError:
        LOG.exception("it failed")
    first, second = [json.loads(line) for line in lines]
    assert (
        first["trace"] == "Traceback:\n  x" and second["message"] == "it failed" and "ValueError: y" in second["trace"]
    )
    assert [read(line) for line in lines] == [None, None]


@pytest.mark.parametrize(
    "line", ['{"time":', '{"time":1}', '{"time":"x","component":"superlink","message":"error: x"}', "[]", "corolla", ""]
)
def test_another_programs_line(line: str) -> None:
    assert read(line) is None


def test_fields_of_a_call_and_of_every_line() -> None:
    record = logging.LogRecord("flwr", logging.INFO, "", 0, "to %s\n", ("here",), None)
    vars(record).update(about(run="7", client=2))
    record.created = 1.5
    assert json.loads(JsonFormatter("supernode", node="lab/supernode-2").format(record)) == {
        "time": "1970-01-01T00:00:01.500Z",
        "level": "info",
        "component": "supernode",
        "message": "to here",
        "node": "lab/supernode-2",
        "run": "7",
        "client": 2,
        "logger": "flwr",
    }


def test_the_run_folder_has_the_log_as_json_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(log_format.VARIABLE, "json")
    monkeypatch.setattr(LOG, "level", logging.INFO)
    logs = run_log.begin_logs(tmp_path)
    tell(Round.of(RECORD, 5))
    for log in logs:
        log.ended_by(UserError("the end"))
        log.close()
    text = (tmp_path / run_log.NAME).read_text().splitlines()
    found = [json.loads(line) for line in (tmp_path / run_log.JSON_NAME).read_text().splitlines()]
    assert [line.partition(" ")[2].partition(" ")[2] for line in text] == [entry["message"] for entry in found]
    assert [(entry["level"], entry["run"]) for entry in found] == [("info", tmp_path.name), ("error", tmp_path.name)]
    assert found[0]["round"] == 2 and found[0]["event"]["event"] == "round"

    monkeypatch.delenv(log_format.VARIABLE)
    for again in run_log.begin_logs(tmp_path):
        assert not again.baseFilename.endswith(run_log.JSON_NAME)
        again.close()


def test_other_loggers_write_the_same_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = logging.getLogger("a-package")
    log.addHandler(logging.StreamHandler(io.StringIO()))
    log_format.reformat(log, JsonFormatter("superlink"))
    log.warning("x")
    assert json.loads(capsys.readouterr().err)["logger"] == "a-package"


def test_a_format_that_there_is_not() -> None:
    with rejected(UserError, "--log-format", "text or json", value="xml"):
        log_format.choose("xml")


def test_the_page_lists_the_fields() -> None:
    section = PAGE.read_text().partition("## Logs")[2].partition("\n## ")[0]
    names = set(re.findall(r"`([a-z_]+)`", section.partition("\nFields: ")[2].partition("\n\n")[0]))
    always: dict[str, Any] = {"time", "level", "component", "message"}  # type: ignore[assignment]
    assert names == {*always, "logger", "node", "run", "round", "client", "message_type", "event", "trace"}


def test_flowers_text_lines_obey_no_name_that_a_server_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(log_format.VARIABLE, raising=False)
    written = io.StringIO()
    flower, own = logging.getLogger("flwr"), logging.getLogger("corolla")
    handler = logging.StreamHandler(written)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    for log in (flower, own):
        monkeypatch.setattr(log, "handlers", [handler] if log is flower else [])
        monkeypatch.setattr(log, "propagate", False)
    log_format.configure("supernode")
    flower.warning("[RUN %s, ROUND %s]", 7, "1\x1b]0;title\x07\ncorolla: run 8 is approved")
    assert written.getvalue() == "WARNING: [RUN 7, ROUND 1]0;title\n  corolla: run 8 is approved]\n"
