"""The tutorials of docs/tutorials: their commands, run in the order of the page, and the results that the pages promise.

A block of shell goes through bash, which writes files and expands loops and patterns; `corolla` and `python` only note their
arguments there. The commands then run in this process, simulations without processes of their own. A block of code whose first line
is a comment with a file's name is that file.
"""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from corolla.cli import build_command
from deploy.inventory import read_inventory
from fl_app.server.run_folder import read_summary
from tests.conftest import Command
from tests.facts import mentions

DOCS = Path(__file__).resolve().parents[2] / "docs" / "tutorials"
PAGES = sorted(path.stem for path in DOCS.glob("*.md"))
BLOCK = re.compile(r"^ *```(\w+)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"# (\S+\.(?:py|yaml))\n")
NOTED = """
note() { printf '%s\\0' "$@" $'\\n' >> .noted; }
corolla() { note corolla "$@"; }
python() { note python "$@"; }
set -e
"""


@dataclass(frozen=True)
class Tutorial:
    """A page in an empty directory."""

    page: str
    corolla: Command

    @property
    def text(self) -> str:
        """The page's Markdown."""
        return (DOCS / f"{self.page}.md").read_text(encoding="utf-8")

    def commands(self) -> Iterator[list[str]]:
        """Yield each command's words; write the page's files on the way."""
        for kind, content in BLOCK.findall(self.text):
            if named := FILE.match(content):
                Path(named[1]).write_text(content, encoding="utf-8")
            elif kind == "sh":
                Path(".noted").write_bytes(b"")
                subprocess.run(["bash", "-c", NOTED + content], check=True)
                for line in Path(".noted").read_text(encoding="utf-8").split("\0\n\0")[:-1]:
                    yield line.split("\0")

    def run(self, rounds: int = 0) -> dict[str, str]:
        """Run the page, with fewer rounds if so many are given; return the output of each command."""
        outputs = {}
        for program, *words in self.commands():
            called = " ".join((program, *words))
            if program == "python":
                run_script(*words)
                continue
            if rounds:
                words = [re.sub(r"^num-server-rounds=\d+$", f"num-server-rounds={rounds}", word) for word in words]
                if words[0] == "run" and (fewer := f"num-server-rounds={rounds}") not in words:
                    words += ["--set", fewer]
            if words[0] == "run" and "--in-process" not in words:
                words.append("--in-process")
            code, out, err = self.corolla(*words)
            assert code == 0, f"{called}\n{out}\n{err}"
            outputs[called] = out
        return outputs


def run_script(name: str) -> None:
    """Run a script of the page as Python does, in this process, which then forgets the modules beside it."""
    before, sys.path[:0] = {*sys.modules}, [str(Path.cwd())]
    try:
        runpy.run_path(name, run_name="__main__")
    finally:
        sys.path.remove(str(Path.cwd()))
        for module in {*sys.modules} - before:
            if Path(getattr(sys.modules[module], "__file__", None) or "/").parent == Path.cwd():
                del sys.modules[module]


@pytest.fixture
def tutorial(request: pytest.FixtureRequest, corolla: Command) -> Tutorial:
    return Tutorial(request.param, corolla)


def of(page: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("tutorial", [page], indirect=True)


def final(name: str) -> float:
    """Return a run's final accuracy in per cent."""
    return 100 * float(read_summary(Path("runs") / name)["final-accuracy"])


# the figures that a page names are by night
by_day = pytest.mark.parametrize("rounds", [2, pytest.param(0, marks=pytest.mark.nightly, id="whole")])


@of("first-run")
@pytest.mark.usefixtures("undrawn")
@by_day
def test_the_first_run(tutorial: Tutorial, rounds: int) -> None:
    outputs = tutorial.run(rounds)
    if not rounds:
        assert mentions(tutorial.text, f"FedCAC reaches about {final('mine'):.0f} %", f"FedAvg {final('base'):.0f} %")
    assert "undecided: needs 3 seeds" in outputs["corolla compare runs/mine runs/base"]
    *_, all_seeds = (words for words in outputs if words.startswith("corolla compare"))
    assert re.search(r"^fedcac +3 +\d+\.\d+ ± ", outputs[all_seeds], re.MULTILINE)
    assert Path("report/report.html").is_file() and Path("three.pt.json").is_file()


@of("your-table")
def test_a_table(tutorial: Tutorial) -> None:
    outputs = tutorial.run(rounds=3)
    shown = outputs["corolla data show tumours.toml"]
    compared = outputs["corolla compare runs/alone runs/together runs/ditto"]
    for hospital in ("village", "town", "university"):
        assert hospital in shown and re.search(rf"^{hospital} ", compared, re.MULTILINE)
    predicted = outputs["corolla predict village.pt tumours.csv"].splitlines()
    assert re.fullmatch(r"auc \d+\.\d+ % on 569 samples; these rows are the run's own data, .*", predicted[-1])


@of("your-images")
@by_day
def test_images(tutorial: Tutorial, rounds: int) -> None:
    outputs = tutorial.run(rounds)
    assert "digit-0" in outputs["corolla data show photos.toml"]
    # 17 to more than 20 points, by the machine's way to compute convolutions
    assert rounds or final("own-classifier") > final("one-model") + 10
    *_, predicted = outputs.values()
    assert predicted.count("photos/test/digit-0/") == len(list(Path("photos/test/digit-0").iterdir()))


@of("your-method")
def test_a_method(tutorial: Tutorial) -> None:
    outputs = tutorial.run(rounds=2)
    assert "halfway.own" in outputs["corolla methods halfway:METHOD"]
    digests = {name: read_summary(Path("runs") / name)["digest"] for name in ("halfway", "off", "fedavg")}
    assert digests["off"] == digests["fedavg"] != digests["halfway"]
    assert digests["off"] in outputs["corolla summary off"]


@of("adapters")
@by_day
def test_adapters(tutorial: Tutorial, rounds: int) -> None:
    pytest.importorskip("peft")
    tutorial.run(rounds)
    assert rounds or final("own") > final("one") + 20
    assert Path("room-1/adapter_config.json").is_file() and Path("merged/config.json").is_file()


@of("two-machines")
def test_two_machines(tutorial: Tutorial) -> None:
    """Commands that start nothing run; the others are parsed. `tests/e2e/test_cluster.py` starts a cluster of two clients."""
    seen = []
    for program, *words in tutorial.commands():
        assert program == "corolla"
        seen.append(parsed(words))
        if seen[-1] in ("cluster keys", "cluster commands"):
            code, out, err = tutorial.corolla(*words)
            assert code == 0, err
    assert seen == [f"cluster {name}" for name in ("keys", "commands", "up", "status")] + [
        "run",
        *(f"cluster {name}" for name in ("logs", "restart", "down")),
    ]
    found = read_inventory(Path("lab.yaml"))
    assert [node.client_id for node in found.supernodes] == [0, 1] and found.secure
    assert "user@node2" in out and found.superlink.fleet_port == 9092


def parsed(words: list[str]) -> str:
    """Parse a command line without running it; return the command's name. Raises click.UsageError for wrong words."""
    command, names = build_command(), []
    context = command.make_context("corolla", list(words), resilient_parsing=True)
    while isinstance(command, click.Group):
        name, command, words = command.resolve_command(context, words)
        assert name and command
        names.append(name)
    command.make_context(name, list(words))
    return " ".join(names)


def test_every_tutorial_is_short_and_in_the_navigation() -> None:
    navigation = (DOCS.parents[1] / "mkdocs.yml").read_text(encoding="utf-8")
    tested = {"first-run", "your-table", "your-images", "your-method", "adapters", "two-machines"}
    assert set(PAGES) == tested | {"index"}
    for page in PAGES:
        assert f"- tutorials/{page}.md" in navigation
        assert len((DOCS / f"{page}.md").read_text(encoding="utf-8").split()) <= 500
