"""What an author sees of a failure: the traceback from the own frame on, the own line, printed lines, refused breakpoints."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fl_app import debugging, plugins
from fl_app.errors import Diverged, UserError
from fl_app.tasks.scoring import aucs
from tests.facts import mentions, rejected

OWN = """
def train(given):
    return step(given)

def step(given):
    return given()

def stop(given):
    breakpoint()
"""


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Callable[..., object]]:
    """A function of a user's file, by its name."""
    (tmp_path / "own_debugged.py").write_text(OWN)
    plugins.reset(tmp_path)
    yield lambda name: plugins.load("method", f"own_debugged:{name}")
    plugins.reset()


def raised(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except BaseException as error:
        # without the frame of this test, which is a user's own too
        assert error.__traceback__ is not None
        return error.with_traceback(error.__traceback__.tb_next.tb_next if error.__traceback__.tb_next else None)
    raise AssertionError("nothing was raised")


def test_an_exception_is_told_from_the_users_frame_on(own: Callable[..., Callable[..., object]]) -> None:
    error = raised(lambda: own("train")(lambda: aucs(None, None)))  # type: ignore[arg-type]
    trace = debugging.trace_of(error)
    lines = [line for line in trace.splitlines() if line.startswith("  File")]
    assert "own_debugged.py" in lines[0] and "in train" in lines[0] and "scoring.py" in lines[-1]
    assert debugging.place_of(error).startswith(("tests/fl_app/test_debugging.py:", "own_debugged.py:"))


def test_the_cause_names_the_users_line_without_its_directory(own: Callable[..., Callable[..., object]]) -> None:
    error = raised(lambda: own("train")(None))
    assert mentions(
        debugging.reason(error), "TypeError", "'NoneType' object", "not callable (own_debugged.py:6", "step"
    )
    elsewhere = debugging.reason(error, "the log of its SuperNode")
    assert mentions(elsewhere, "own_debugged.py:6, in step", "SuperNode")


def test_bad_input_needs_no_traceback_unless_the_users_code_made_it(own: Callable[..., Callable[..., object]]) -> None:
    def refuse() -> None:
        raise UserError("no scalar")

    def diverge() -> None:
        raise Diverged("its loss is inf")

    assert "in step" in debugging.trace_to_show(raised(lambda: own("train")(refuse)))
    assert debugging.trace_to_show(raised(lambda: own("train")(diverge))) == ""
    assert debugging.trace_to_show(UserError("bad")) == ""
    assert debugging.reason(UserError("bad")) == "bad"


def test_a_refused_breakpoint_names_its_line(
    own: Callable[..., Callable[..., object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "breakpointhook", sys.breakpointhook)
    debugging.refuse_breakpoints()
    with rejected(UserError, "", "breakpoint()", "at own_debugged.py:9", "--in-process") as refused:
        own("stop")(None)
    assert debugging.is_refused_breakpoint(str(refused.value))
    assert not debugging.is_refused_breakpoint("breakpoint() at home")


def test_printed_lines_are_whole_and_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    with debugging.printed_lines(lines.append):
        print("one\ttwo", end="")
        print("\x1b[31m, three")
        with debugging.printed_lines(lambda line: lines.append(f"inner: {line}")):
            print("four")
        print("five", end="", flush=True)
        assert lines[-1] == "inner: four"
    assert lines == ["one two[31m, three", "inner: four", "five"] and capsys.readouterr().out == ""


def test_a_text_that_travels_is_cut() -> None:
    text = debugging.cut(["x" * debugging.MOST_PRINTED, "yy"])
    assert text.endswith("x\n... 3 more characters")
