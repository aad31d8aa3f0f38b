"""What the command says so that nobody is misled: what figures are of, and what was probably meant."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.main import get_command

from corolla.cli import app
from corolla.cli.output import fit, needed, show_table
from fl_app.errors import counted
from fl_app.keys import closest
from fl_app.server.run_folder import read_about
from strategies.base import OWN_MODEL
from tests.conftest import Command
from tests.facts import mentions


def test_a_table_in_a_pipe_is_as_wide_as_its_cells(capsys: pytest.CaptureFixture[str]) -> None:
    """What has no room between lines stands in plain columns there: no heading, and no number, is cut."""
    lines = [["method", "final", "balanced-accuracy"], ["fedavg", "87.88 % (5 of 6 clients)", "74.60 %"]]
    show_table(lines, boxed=True)
    assert "│ fedavg │ 87.88 % (5 of 6 clients) │" in capsys.readouterr().out
    show_table([[*line, *line[1:]] for line in lines], boxed=True)
    header, row = capsys.readouterr().out.splitlines()
    assert header.split() == ["method", *["final", "balanced-accuracy"] * 2]
    assert re.split("  +", row) == ["fedavg", *["87.88 % (5 of 6 clients)", "74.60 %"] * 2]


def test_a_method_with_a_second_model_says_which_one_is_tested(corolla: Command) -> None:
    sets = ["--set", "num-server-rounds=1", "--set", "local-epochs=1", "--set", "train-samples=20"]
    # at the start, and below the table
    for method, count in (("ditto", 2), ("fedavg", 0)):
        code, out, err = corolla(
            "run", "--in-process", *sets, "--set", f"method={method}", "--set", f"run-name={method}"
        )
        assert code == 0, err
        assert " ".join(out.split()).count(f"{method}: {OWN_MODEL}") == count
        assert read_about(Path("runs", method))["tested"] == (OWN_MODEL if count else "")


def helps(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield every help text with brackets, and the words of its command."""
    for shown in (command, *command.params):
        if "[" in (shown.help or ""):
            yield words, shown.help
    for name, below in getattr(command, "commands", {}).items():
        yield from helps(below, (*words, name))


def test_brackets_in_a_help_text_are_shown(corolla: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    found = list(helps(get_command(app)))
    assert any("corolla[onnx]" in text for _, text in found)
    for words, text in found:
        _, out, _ = corolla(*words, "--help")
        shown = " ".join(out.replace("\u2502", " ").split())
        for part in re.findall(r"\S*\[\S*", text):
            assert part in shown, (words, part)


def drawn(lines: list[list[str]], width: int, may_be_missing: tuple[str, ...] = ()) -> tuple[str, list[str]]:
    """Return what a terminal of a width shows, and the columns that are left out."""
    table, missing = fit(lines, width, may_be_missing)
    console = Console(width=width, highlight=False, emoji=False)
    with console.capture() as captured:
        console.print(table, soft_wrap=isinstance(table, str))
    return captured.get(), missing


RUNS = [
    ["run", "state", "rounds", "method", "dataset", "seed", "accuracy", "written"],
    [
        "runs/20261126-092527-fedcac-digits-seed0",
        "finished",
        "30/30",
        "fedcac",
        "digits",
        "0",
        "100.00 %",
        "2026-11-26 09:25",
    ],
    ["runs/k3", "interrupted", "5/30", "mymethod:METHOD", "fashion-mnist", "10", "9.00 %", "2026-11-26 10:25"],
]
OF_RUNS = ("written", "dataset", "seed", "method")
COMPARED = [
    ["method", "fedcac.collaboration", "n", "final-accuracy", "final-accuracy-finetuned", "best-accuracy"],
    ["fedcac", "time-varying", "3", "86.82 ± 1.18 (4 of 6 clients)", "91.67 ± 10.10", "100.00 ± 0.00"],
    ["fedavg", "–", "3", "6.82 ± 11.18", "1.67 ± 0.10", "n/a"],
]


def test_a_narrow_terminal_has_fewer_columns_of_results() -> None:
    lines = [
        ["method", "final", "pooled", "best", "upload", "download", "seconds"],
        ["fedcac", "100.00 %", "98.25 %", "91.67 %", "11.4 MB", "11 MB", "24.4"],
    ]
    less = ("pooled", "download", "upload", "best")
    for width, lined, left_out in ((72, True, 0), (71, False, 0), (62, False, 0), (61, False, 1), (50, False, 2)):
        text, missing = drawn(lines, width, less)
        assert ("│" in text, missing) == (lined, list(less[:left_out]))
        assert [word for word in lines[0] if word in text] == [word for word in lines[0] if word not in missing]


@pytest.mark.parametrize("lines", [RUNS, COMPARED], ids=["runs", "compare"])
@pytest.mark.parametrize("width", [160, 120, 100, 80, 72, 60, 50, 40, 30, 20])
def test_no_width_cuts_a_cell(lines: list[list[str]], width: int) -> None:
    text, missing = drawn(lines, width, OF_RUNS if lines is RUNS else ())
    shown = [row[k] for row in lines[1:] for k in range(len(row)) if lines[0][k] not in missing]
    assert all(part in text for cell in shown for part in cell.split(" "))
    # a note stays whole
    assert lines is RUNS or "(4 of 6 clients)" in text
    if "run: " not in text and "method: " not in text:
        assert max(map(len, text.splitlines())) <= width


def test_a_comparison_at_80_columns_is_a_table() -> None:
    text, _ = drawn(COMPARED, 80)
    *_, heading, row, note, _ = text.splitlines()
    assert heading.split() == ["method", "collaboration", "n", "final-accuracy", "finetuned", "best-accuracy"]
    assert row.split()[:6] == ["fedcac", "time-varying", "3", "86.82", "±", "1.18"] and note.split()[0] == "(4"


def test_a_listing_at_80_columns_has_names_and_figures() -> None:
    text, missing = drawn(RUNS, 80, OF_RUNS)
    assert text.splitlines()[0].split() == ["run", "state", "rounds", "accuracy"]
    short = [[line[0].replace("20261126-092527-", ""), *line[1:]] for line in RUNS]
    assert drawn(short, 80, OF_RUNS)[1] == ["written", "dataset"]


def test_wide_letters_count_as_they_are_wide() -> None:
    assert needed([["client", "accuracy"], ["東京大学病院", "50.00"]]) == 12 + 8 + 7


ENDING = """
import atexit, threading
from corolla import cli

class Kept:
    def __del__(self):
        print("taken apart")

def late():
    threading.main_thread().join()
    print("thread")

cli.kept = Kept()
atexit.register(print, "atexit")
threading.Thread(target=late).start()
cli.{}()
"""


def test_it_ends_as_python_does_but_takes_nothing_apart() -> None:
    """Which of torch takes seconds on a busy machine."""
    words = ["run", "--set", "seed"]
    done = {
        name: subprocess.run([sys.executable, "-c", ENDING.format(name), *words], capture_output=True, text=True)
        for name in ("main", "command")
    }
    assert done["main"].returncode == done["command"].returncode == 2
    assert done["main"].stderr == done["command"].stderr and "expected KEY=VALUE" in done["main"].stderr
    assert done["command"].stdout.splitlines()[-2:] == ["thread", "atexit"]
    assert done["main"].stdout == done["command"].stdout + "taken apart\n"


def test_it_ends_where_nobody_reads_its_words() -> None:
    command = subprocess.Popen(
        [sys.executable, "-m", "corolla", "methods", "--table"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert command.stdout and command.stderr
    command.stdout.close()
    said = command.stderr.read()
    assert command.wait() != 0 and "Traceback" not in said


def test_one_is_no_plural() -> None:
    assert [counted(n, "client") for n in (0, 1, 2)] == ["0 clients", "1 client", "2 clients"]
    assert [counted(n, "process", "processes") for n in (1, 3)] == ["1 process", "3 processes"]


def test_a_run_of_one_client_is_spoken_of_as_such(corolla: Command) -> None:
    sets = ["num-server-rounds=1", "local-epochs=1", "method=local", "keep-state=true"]
    words = [word for pair in sets for word in ("--set", pair)]
    assert corolla("run", "--in-process", "--clients", "1", *words)[0] == 0
    told = corolla("state")[1]
    assert "1 experiment, " in told and "  1 client  " in told
    assert "1 of 1 client: " in corolla("run", "--dry-run", "--clients", "1", *words)[1]


@pytest.mark.parametrize(
    "words",
    [
        ("run", "wards.tml.toml"),
        ("data", "show", "wards.tml.toml"),
        ("sweep", "wards.tml.toml"),
        ("data", "show", "--set", "dataset=table:wards.tml.toml", "--set", "target=y"),
        ("compare", "wards.tml.toml"),
        ("report", "wards.tml.toml"),
        ("summary", "wards.tml.toml"),
        ("export", "wards.tml.toml"),
        ("verify", "wards.tml.toml"),
        ("predict", "wards.tml.toml", "a.csv"),
        ("predict", "wards.toml", "wards.tml.toml"),
    ],
)
def test_a_missing_path_has_one_error_everywhere(corolla: Command, words: tuple[str, ...]) -> None:
    Path("wards.toml").write_text("seed = 1\n")
    code, out, err = corolla(*words)
    assert code == 2 and out == "" and mentions(err, "wards.tml.toml", "no such file", "directory")
    if words[0] not in ("compare", "report", "summary", "export"):
        # these name runs, not files
        assert err.rstrip().endswith("wards.toml?")


@pytest.mark.parametrize(
    ("dataset", "meant"),
    [
        ("wards.csv", "table:wards.csv"),
        ("ward.csv", "table:wards.csv"),
        ("csv:wards.csv", "table:wards.csv"),
        ("gone.parquet", "table:gone.parquet"),
        ("scan.npz", "npz:scans.npz"),
        ("images", "folder:images or hf:images"),
        ("difits", "digits"),
    ],
)
def test_a_path_without_its_source_suggests_one(corolla: Command, dataset: str, meant: str) -> None:
    Path("wards.csv").touch()
    Path("scans.npz").touch()
    Path("images").mkdir()
    code, _, err = corolla("run", "--dry-run", "--set", f"dataset={dataset}")
    assert code == 2 and err.rstrip().endswith(f"did you mean {meant}?")


def test_the_beginning_of_a_name_is_enough_to_suggest_it() -> None:
    metrics = ("accuracy", "balanced-accuracy", "macro-f1", "auc")
    assert [closest(word, metrics) for word in ("acc", "AU", "a", "f1", "macro")] == [
        "accuracy",
        "auc",
        "",
        "",
        "macro-f1",
    ]


def test_a_client_column_that_does_not_exist_is_one_problem(corolla: Command) -> None:
    Path("wards.csv").write_text("hospital,age,outcome\nBern,3,yes\nChur,4,no\nBern,5,no\n")
    for key, name in (("client", "clinic"), ("target", "xyz")):
        keys = {"target": "outcome", "client": "hospital"} | {key: name}
        words = [word for pair in keys.items() for word in ("--set", "=".join(pair))]
        code, _, err = corolla("data", "show", "--set", "dataset=table:wards.csv", *words)
        assert code == 2 and f"error: {key}: " in err and mentions(err, "wards.csv has no", "column")
        assert "problems" not in err and mentions(err, "it has hospital", "outcome")


@pytest.mark.parametrize(
    ("wrong", "meant"), [(["rnu"], "run"), (["data", "shw"], "show"), (["node", "strat"], "start")]
)
def test_a_command_is_suggested_once(corolla: Command, wrong: list[str], meant: str) -> None:
    code, _, err = corolla(*wrong)
    assert code == 2 and err.count("Did you mean") == 1 and f"'{meant}'" in err


@pytest.mark.parametrize("value", ["2.5", "0", "'x'"])
def test_a_number_of_clients_is_refused(corolla: Command, value: str) -> None:
    code, _, err = corolla("run", "--clients", value.strip("'"))
    assert code == 2 and mentions(" ".join(err.split()), "'--clients'", value.strip("'"))


@pytest.mark.parametrize("words", [("--clients",), ("--set", "num-clients="), ("--set", "learning-rate=")])
def test_huge_integers_are_refused(corolla: Command, words: tuple[str, ...]) -> None:
    *before, last = words
    number = "9" * 400
    arguments = [*before, last + number] if before else [last, number]
    code, _, err = corolla("run", "--in-process", *arguments)
    assert code == 2 and mentions(" ".join(err.split()), "integer", "most 63 bits", "got one of 1329"), err
