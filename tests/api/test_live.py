"""The live display: fed with a run's log lines, drawn on a console of fixed width."""

from __future__ import annotations

import io
import json
import time
from typing import Any

import pytest
from rich.console import Console

from client_app.client_app import app as client_app
from corolla.api import live
from fl_app import server_app
from fl_app.config import parse
from fl_app.server import events
from fl_app.server.events import EVENTS as EVENTS_FILE
from fl_app.server.events import (
    Event,
    Failed,
    Finished,
    LeftOut,
    Note,
    Progress,
    Round,
    Started,
    Stopped,
    Warned,
    decode,
    encode,
)
from fl_app.server.run_folder import read_summary
from fl_app.transport.inprocess import InProcessGrid
from strategies import METHOD_PARAMS
from tests.facts import mentions


def record(number: int = 1, **changes: Any) -> dict[str, Any]:
    """A round as metrics.jsonl has it."""
    clients = {
        "0": {"accuracy-before": 0.016, "accuracy-after": 0.88},
        "1": {"accuracy-before": 0.248, "accuracy-after": 0.984},
    }
    return {
        "round": number,
        "accuracy-before": 0.132,
        "accuracy-after": 0.932,
        "loss": 0.179,
        "upload-bytes": 700_000,
        "download-bytes": 600_000,
        "seconds": {"round": 2.5, "wait": 2.1, "personalize": 0.4, "record": 0.01},
        "failures": [{"client": 7, "cause": "no reply within 5 s"}],
        "clients": clients,
        **changes,
    }


SENTENCE = (
    "round 1/3: accuracy  13.2% ± 16.4 before,  93.2% ± 7.4 after training, loss 0.179, 2 clients, 0.7 MB up, 0.6 MB down, "
    "2.5 s (wait 2.1, personalize 0.4); 1 failed"
)
EVENTS: list[Event] = [
    Note(message="fedcac: 10 clients, 3 rounds, model mlp with 17226 parameters (17226 travel), fedcac.tau=0.5"),
    Started(folder="/runs/x", rounds=3),
    Progress(what="round 1/3", done=0, total=10),
    Progress(what="round 1/3", done=4, total=10),
    Note(message="round 1/3: client 7 dropped: no reply within 5 s"),
    Round.of(record(), 3),
    Progress(what="round 2/3", done=6, total=10),
]


def in_stream(event: Event) -> str:
    """Return an event as a line of a run's log stream."""
    return events.LOG_MARK + encode(event)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def display(terminal: bool = True, width: int = 100, height: int = 30) -> tuple[live.Display, Console]:
    file = Terminal() if terminal else io.StringIO()
    options: dict[str, Any] = {"width": width, "height": height, "highlight": False, "color_system": None}
    console = Console(file=file, force_terminal=True, _environ={"TERM": "xterm"}, **options)
    return live.Display("fedcac", console, 3), console


def drawn(shown: live.Display, width: int = 100, height: int = 30) -> list[str]:
    """What the panel looks like now."""
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(shown._panel)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


def row(lines: list[str], number: int) -> list[str]:
    return next(words for line in lines if (words := line.strip("│ ").split())[:1] == [str(number)])


def test_the_panel_shows_what_arrived() -> None:
    shown, _ = display()
    for event in EVENTS:
        shown.raw(in_stream(event))
    lines = drawn(shown)
    text = "\n".join(lines)
    assert "1/3 done" in text and "round 2/3" in text and "6/10 replies" in text
    assert row(lines, 1) == ["1", "13.2", "±", "16.4", "93.2", "±", "7.4", "0.179", "0.7", "0.6", "2.5", "1"]
    assert mentions(text, "seconds of round 1", "wait 2.1", "personalize 0.4") and "failures so far: 1" in text
    assert "fedcac" in lines[0] and max(map(len, lines)) <= 97


@pytest.mark.parametrize(("width", "height"), [(30, 24), (45, 16), (60, 24), (72, 14), (80, 24), (200, 60)])
def test_it_fits_the_terminal(width: int, height: int) -> None:
    shown, _ = display(width=width, height=height)
    for k in range(1, 31):
        shown.take(Round.of(record(k, evaluation={"accuracy": 0.987}), 40))
    lines = drawn(shown, width, height)
    assert len(lines) <= height and max(map(len, lines)) <= width - live.ECHO
    assert row(lines, 30) and not [line for line in lines if line.strip("│ ").startswith("21 ")]
    assert "…" not in "".join(lines) and "about 0:00:00 left" not in lines[-1]


def test_a_small_models_bytes_are_told_in_kilobytes() -> None:
    shown, _ = display(width=60)
    event = Round.of(record(**{"upload-bytes": 5_240, "download-bytes": 0}), 3)
    assert mentions(event.sentence, "5.2 kB up", "0.0 MB down")
    shown.take(event)
    lines = drawn(shown)
    assert row(lines, 1)[-4:] == ["5.2", "0.0", "2.5", "1"] and "kB up, down" in "".join(lines)


def test_a_narrow_panel_leaves_out_what_it_has_no_room_for() -> None:
    shown, _ = display()
    shown.take(Round.of(record(evaluation={"accuracy": 0.987}), 3))
    assert row(drawn(shown, 60), 1) == ["1", "13.2", "93.2", "98.7", "0.179", "0.7", "0.6", "1"]
    assert row(drawn(shown, 45), 1) == ["1", "13.2", "93.2", "98.7", "0.179", "1"]


def test_a_runs_own_events_are_kept_in_its_folder(raw_config: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """tests/test_all_methods.py reads the events of every method's records."""
    caplog.set_level("INFO", "corolla")
    config = parse(raw_config, METHOD_PARAMS)
    folder = server_app.run(
        InProcessGrid(client_app, raw_config, config.num_clients), config, lambda what, done, total: None
    )
    told = [decode(line) for line in (folder.path / EVENTS_FILE).read_text().splitlines()]
    assert [(e.round, e.rounds) for e in told if isinstance(e, Round)] == [(1, 2), (2, 2)]
    assert isinstance(told[0], Started) and told[0].folder == str(folder.path)
    assert isinstance(told[-1], Finished) and told[-1].summary == read_summary(folder.path)
    assert any(isinstance(event, Note) for event in told) and not any(isinstance(event, Progress) for event in told)


@pytest.mark.parametrize(
    ("changes", "tail"),
    [
        ({"failures": []}, " (wait 2.1, personalize 0.4)"),
        ({"failures": [], "seconds": {"round": 2.5}}, ""),
        ({"failures": [], "evaluation": {"accuracy": None}}, " (wait 2.1, personalize 0.4); all clients   n/a"),
        ({"evaluation": {"accuracy": 0.5}}, " (wait 2.1, personalize 0.4); all clients  50.0%; 1 failed"),
    ],
)
def test_parts_of_a_round_line(changes: dict[str, Any], tail: str) -> None:
    event = Round.of(record(2, **changes), 9)
    assert decode(encode(event)) == event and (event.round, event.rounds, event.before) == (2, 9, 0.132)
    assert event.sentence.endswith(f"2.5 s{tail}")


def test_a_mean_says_of_how_many_clients_it_is() -> None:
    lacking = {"accuracy": 0.5, "evaluated": 4, "expected": 6}
    event = Round.of(record(2, evaluation=lacking, failures=[]), 3, expected=6)
    assert decode(encode(event)) == event
    assert ", 2 of 6 clients, " in event.sentence and event.sentence.endswith("; 4 of 6 clients  50.0%")
    whole = Round.of(record(1, evaluation={**lacking, "evaluated": 6}, failures=[]), 3, expected=2)
    assert ", 2 clients, " in whole.sentence and whole.sentence.endswith("; all clients  50.0%")
    shown, _ = display()
    shown.take(whole)
    assert row(drawn(shown), 1)[-1] == "2.5"
    shown.take(event)
    lines = drawn(shown)
    assert row(lines, 1)[-1] == "2" and row(lines, 2)[-1] == "2/6"


def test_a_round_without_any_accuracy() -> None:
    nobody = {"accuracy-before": None, "accuracy-after": None, "loss": None, "clients": {"4": {}}, "failures": []}
    text = Round.of(record(**nobody), 3).sentence
    assert mentions(
        text, "round 1/3", "accuracy n/a before", "n/a after training", "loss n/a", "1 clients", "0.7 MB up"
    )


ROUND = encode(EVENTS[5])


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "{",
        '{"event":"other"}',
        '{"event":"progress","what":"x","done":"1","total":2}',
        '{"event":"round"}',
        '{"event":"finished","summary":[]}',
        ROUND.replace('"seconds":{', '"seconds":[{'),
        ROUND.replace('"before":0.132', '"before":"x"'),
    ],
)
def test_a_line_that_only_looks_like_an_event_is_another_programs(text: str) -> None:
    assert events.read(events.LOG_MARK + text) is None


@pytest.mark.parametrize("text", ["client 3 dropped: 5/10", f"client 3 dropped: {ROUND}", f" {ROUND}", SENTENCE])
def test_a_line_that_quotes_an_event_is_for_people(text: str) -> None:
    assert events.read(events.LOG_MARK + text) == Note(message=text)


def test_every_event_comes_back_as_it_was() -> None:
    every = [*EVENTS, LeftOut(who="client 2", why="x"), Stopped(round=2), Failed(kind="input", message="a\nb")]
    every += [Finished(summary={"rounds": 2, "list": [1, {"a": None}]}), Warned(message="x")]
    assert {type(event) for event in every} == set(events.KINDS.values())
    assert [decode(encode(event)) for event in every] == every


def test_plain_lines_where_there_is_no_terminal() -> None:
    shown, console = display(terminal=False)
    with shown:
        for event in EVENTS:
            shown.raw(in_stream(event))
        shown.raw(f"{events.LOG_MARK}a line for people")
        shown.raw("INFO : Flower's own line")
    expected = [EVENTS[0].sentence, EVENTS[4].sentence, SENTENCE, "a line for people"]
    assert console.file.getvalue() == "".join(f"{line}\n" for line in expected)  # type: ignore[attr-defined]


def test_plain_output_has_words_before_the_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    shown, console = display(terminal=False)
    shown.step("sending the app to the SuperLink")
    shown.raw("Successfully started run 123")
    shown.raw("INFO :  Starting Flower Simulation")
    for done in (0, 1, 2, 3):
        shown.take(Progress(what="clients connected", done=done, total=3))
        clock[0] += 4
        shown._plain.remind()
    expected = [
        "sending the app to the SuperLink",
        "starting the run's process",
        "unpacking the app, starting Ray",
        "  clients connected: 1/3 (8 s)",
        "  clients connected: 3/3 (16 s)",
    ]
    assert console.file.getvalue() == "".join(f"{line}\n" for line in expected)  # type: ignore[attr-defined]


@pytest.mark.parametrize("end", [Finished(summary={"rounds": 2}), Failed(kind="input", message="no"), Stopped(round=2)])
def test_waiting_at_the_end_is_no_step_of_the_run(end: Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, for a tracker: the last step was an evaluation, or the removal of the clients' state."""
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    shown, console = display(terminal=False)
    shown.take(Progress(what="evaluation", done=3, total=3))
    shown.take(end)
    clock[0] += 8
    shown._plain.remind()
    assert console.file.getvalue() == "  ending the run (8 s)\n"  # type: ignore[attr-defined]


def test_a_note_is_seen_whatever_happens_meanwhile(capfd: pytest.CaptureFixture[str]) -> None:
    shown, _ = display()
    shown.note("stopping after this round")
    assert mentions("".join(drawn(shown)), "stopping after", "round") and capfd.readouterr().err == ""
    display(terminal=False)[0].note("stopping after this round")
    assert capfd.readouterr().err == "stopping after this round\n"


def test_who_is_left_out_stays_on_the_panel() -> None:
    why = "refused by its site: methods: fedcac is not among fedobp"
    shown, _ = display()
    shown.take(LeftOut(who="client 2", why=why))
    shown.take(Round.of(record(), 2))
    assert any(mentions(drawn_line, "client 2 takes no", "part", why) for drawn_line in drawn(shown))


@pytest.mark.parametrize("terminal", [True, False])
def test_control_characters_never_reach_the_terminal(terminal: bool) -> None:
    """Not even those that JSON spells out; a client may have written the causes, a node's own code any other line."""
    odd = "\x1b[2J\x9b2J\x1b]0;title\x07words"
    _, console = display(terminal)
    shown = live.Display("fedcac", console, 3, verbose=True)
    with shown:
        shown.raw(f"INFO : Flower's own, {odd}")
        for event in (
            Note(message=f"round 1/3: client 7 dropped: {odd}"),
            LeftOut(who="client 2", why=odd),
            Failed(kind="input", message=odd),
            Round.of(record(), 3),
            Progress(what=odd, done=1, total=3),
        ):
            shown.raw(in_stream(event))
            shown.take(event)
        spelt = json.dumps({"event": "left-out", "who": "client 3", "why": odd})
        shown.raw(events.LOG_MARK + spelt)
        step = "".join(drawn(shown))
    out = console.file.getvalue()  # type: ignore[attr-defined]
    harmless = "[2J2J]0;titlewords"
    assert all(
        f"{what}{harmless}" in out for what in ("own, ", "dropped: ", "takes no part: " if terminal else "take part: ")
    )
    assert harmless in step and shown.failed and shown.failed.message == harmless
    for text in (out, step):
        assert not any(code in text for code in ("\x1b[2J", "\x1b]", "\x9b", "\x07"))


def test_a_resumed_run_begins_where_it_was() -> None:
    shown, _ = display()
    shown.take(Started(folder="/runs/x", round=2, rounds=3))
    shown.take(Progress(what="round 3/3", done=1, total=10))
    text = "\n".join(drawn(shown))
    assert "2/3 done" in text and "round 3/3" in text and "1/10 replies" in text


def test_what_is_not_shown_is_kept() -> None:
    shown, _ = display(terminal=False)
    shown.raw(in_stream(Started(folder="/runs/x")))
    shown.raw(in_stream(failed := Failed(kind="input", message="no data")))
    assert str(shown.folder) == "/runs/x" and shown.failed == failed
    for k in range(100):
        shown.raw(f"line {k}")
    assert list(shown.lines) == [f"line {k}" for k in range(60, 100)]


def thousand(**changes: Any) -> dict[str, Any]:
    """A round of clients with accuracies 0, 0.001 .. 0.999."""
    return record(
        clients={str(i): {"accuracy-before": i / 1000, "accuracy-after": 0.9} for i in range(1000)}, **changes
    )


def test_a_round_of_many_clients_tells_their_spread() -> None:
    found = Round.of(thousand(), 3)
    assert decode(encode(found)) == found and found.quantiles == [0.049, 0.249, 0.499, 0.749, 0.949]
    assert found.histogram == [50] * 20
    assert mentions(
        live.spread(found),
        "1000 clients before training",
        "median 49.9",
        "half 24.9 to 74.9",
        "nine tenths 4.9 to 94.9",
        "0 ████████████████████ 100 %",
    )
    shown = live.RunPanel("fedcac", 3)
    shown.add(found)
    out = io.StringIO()
    Console(file=out, width=100, height=40).print(shown)
    assert "median 49.9, half 24.9 to 74.9" in " ".join(out.getvalue().replace("│", " ").split())


def test_a_round_of_few_clients_is_told_as_ever() -> None:
    line = encode(Round.of(record(), 3))
    assert "quantiles" not in line and "histogram" not in line
    few = {str(i): {"accuracy-before": 0.5} for i in range(events.MANY)}
    assert "quantiles" not in encode(Round.of(record(clients=few), 3))


def test_the_spread_of_a_metric_without_limits_reaches_from_its_least_to_its_largest_value() -> None:
    rows = {str(i): {"mae-before": 5.0 + (i >= 90), "mae-after": 1.0} for i in range(100)}
    told = record(clients=rows, **{"mae-before": 5.1, "mae-after": 1.0})
    found = Round.of(told, 3, "mae", ratio=False)
    assert found.histogram == [90, *[0] * 18, 10]
    assert mentions(live.spread(found), "nine tenths 5 to 6", "least █··················▁ largest")


def test_the_panel_names_a_few_of_those_who_take_no_part() -> None:
    panel = live.RunPanel("fedcac", 3)
    for client in range(100):
        panel.leave_out(f"client {client}", "its site refuses")
    out = io.StringIO()
    Console(file=out, width=100, height=40).print(panel)
    text = out.getvalue()
    assert text.count("takes no part") == 3 and mentions(text, "97 more take no", "part")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_the_terminal_is_left_as_it_was(error: type[BaseException]) -> None:
    shown, console = display()
    with pytest.raises(error), shown:
        for event in EVENTS:
            shown.take(event)
        raise error
    out = console.file.getvalue()  # type: ignore[attr-defined]
    assert out.count("\x1b[?25l") == out.count("\x1b[?25h") == 1 and out.rindex("\x1b[?25h") > out.rindex("╰")
    assert mentions(out, "client 7 dropped", "no reply") and "6/10 replies" in out.rpartition("╭")[2]
    assert SENTENCE not in out


class Told(list[Event]):
    """Progress as events, at a time of its own."""

    now = 100.0

    def __init__(self) -> None:
        super().__init__()
        self.progress = events.ProgressEvents(self.append)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    found = Told()
    monkeypatch.setattr(time, "monotonic", lambda: found.now)
    return found


def test_events_of_progress_are_few(told: Told) -> None:
    for k in range(1001):
        told.progress("round 1/2", k, 1000)
        told.now += 0.001
    assert told == [Progress(what="round 1/2", done=k, total=1000) for k in (0, 250, 500, 750, 1000)]


def test_a_wait_shows_the_last_number(told: Told) -> None:
    # three replies at once, then none for a second
    for done in (0, 1, 2, 3):
        told.progress("round 1/2", done, 4)
    for _ in range(10):
        told.now += 0.1
        told.progress("round 1/2", 3, 4)
    assert told == [Progress(what="round 1/2", done=k, total=4) for k in (0, 3)]
