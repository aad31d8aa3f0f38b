"""A new source of data is one file and one line: `h5:` is added to a copy of Corolla and tried wherever sources are known."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.facts import mentions

CLONE = Path(__file__).resolve().parents[2]
PACKAGES = ("fl_app", "strategies", "client_app", "deploy", "corolla")

FILE = '''
"""Data sets of named columns in an .h5 file (here a JSON object: HDF5's own library is no dependency of the tests)."""

import json

import numpy as np

from fl_app.data.prepared import DataRequest, Prepared
from fl_app.data.table import open_columns
from fl_app.errors import UserError


def prepare(request: DataRequest) -> Prepared:
    """Open an .h5 file."""
    path = request.path
    if not path.is_file():
        raise UserError(f"dataset: no file {path}")

    def read():
        columns = json.loads(path.read_text())
        return [{name: np.array(values) for name, values in columns.items()}], ()

    return open_columns(request, "h5", [path], read)
'''
LINE = '    Source("h5", "fl_app.data.h5:prepare", "/path.h5", reads=(".h5",), has_columns=True, tells_classes=True),\n'
AFTER = "REGISTERED: tuple[Source, ...] = (\n"

# a process that imports the copy: runs code in a directory, and answers with what it prints
DRIVER = """
import contextlib, io, json, os, sys
sys.path.insert(0, sys.argv[1])
for line in sys.stdin:
    directory, code, arguments = json.loads(line)
    os.chdir(directory)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {"arguments": arguments})
    print(json.dumps(printed.getvalue()), flush=True)
"""
COMMANDS = """
import json
from corolla import cli
from typer.testing import CliRunner
said = []
for given in arguments:
    result = CliRunner().invoke(cli.app, given)
    said.append(result.output + (str(result.exception) if result.exception else ""))
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of Corolla with one more file and one more line."""
    root = tmp_path_factory.mktemp("clone")
    for package in PACKAGES:
        shutil.copytree(CLONE / package, root / package)
    shutil.copy(CLONE / "pyproject.toml", root)
    (root / "docs").mkdir()
    (root / "fl_app" / "data" / "h5.py").write_text(FILE)
    registry = root / "fl_app" / "sources.py"
    text = registry.read_text()
    assert text.count(AFTER) == 1
    registry.write_text(text.replace(AFTER, AFTER + LINE))
    return root


@pytest.fixture(scope="module")
def driver(clone: Path) -> Iterator[subprocess.Popen[str]]:
    """The process of all tests here: importing the copy takes it seconds."""
    words = [sys.executable, "-P", "-c", DRIVER, str(clone)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin
        process.stdin.close()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A directory with 40 rows of two hospitals as h5 and as npz, and an empty one beside them."""
    draw = np.random.default_rng(0)
    columns = {
        "age": draw.normal(size=40).tolist(),
        "dose": draw.normal(size=40).tolist(),
        "hospital": ["A", "B"] * 20,
        "outcome": ["ill", "ill", "well", "well"] * 10,
    }
    (tmp_path / "mine.h5").write_text(json.dumps(columns))
    np.savez(tmp_path / "mine.npz", **columns)
    return tmp_path


def python(driver: subprocess.Popen[str], directory: Path, code: str, *arguments: list[str]) -> str:
    """Run code in a directory, where it imports the copy; its output."""
    assert driver.stdin and driver.stdout
    driver.stdin.write(json.dumps([str(directory), code, arguments]) + "\n")
    driver.stdin.flush()
    answer = driver.stdout.readline()
    assert answer, f"the process has ended with {driver.wait()}"
    return str(json.loads(answer))


def commands(driver: subprocess.Popen[str], directory: Path, *arguments: list[str]) -> list[str]:
    """What each command prints and complains of, on one line."""
    said = json.loads(python(driver, directory, COMMANDS, *arguments).splitlines()[-1])
    return [" ".join(text.split()) for text in said]


def sets(**config: Any) -> list[str]:
    pairs = {"data-dir": "prepared", "state-dir": "state", **{k.replace("_", "-"): v for k, v in config.items()}}
    return [word for key, value in pairs.items() for word in ("--set", f"{key}={value}")]


def test_a_run_of_it(driver: subprocess.Popen[str], data: Path) -> None:
    """Its path becomes absolute, its column says whose rows are, and its classes are told whatever `report-class-counts` says."""
    config = sets(
        dataset="h5:mine.h5",
        target="outcome",
        client="hospital",
        partition="by-column",
        method="fedavg",
        num_server_rounds=1,
        local_epochs=1,
        device="cpu",
        report_class_counts="false",
        run_name="mine",
    )
    commands(driver, data, ["run", "--in-process", "--clients", "2", *config])
    folder = data / "runs" / "mine"
    assert tomllib.loads((folder / "config.toml").read_text())["dataset"] == f"h5:{data / 'mine.h5'}"
    assert json.loads((folder / "summary.json").read_text())["rounds"] == 1
    assert json.loads((folder / "run.json").read_text())["classes"] == ["ill", "well"]
    assert [path.name.partition("-")[0] for path in (data / "prepared" / "datasets").glob("[!.]*")] == ["h5"]


def test_what_is_wrong_with_it_is_said_before_anything_starts(driver: subprocess.Popen[str], data: Path) -> None:
    cases = {
        "h5x:mine.h5": "did you mean h5:mine.h5?",
        "h5": "dataset: h5 needs its path: h5:/path.h5, got 'h5'",
        "h5:": "dataset: h5 needs its path: h5:/path.h5, got 'h5:'",
        "nothing": "h5:/path.h5",
        "h5:none.h5": f"dataset: {data / 'none.h5'}: no such file or directory",
        "npz:mine.h5": f"npz: takes no .h5, got {data / 'mine.h5'}; did you mean h5:{data / 'mine.h5'} with target=COLUMN",
        "h5:mine.npz": f"h5: takes no .npz, got {data / 'mine.npz'}; did you mean npz:{data / 'mine.npz'}?",
        "h5:.": f"h5: takes no folder, got {data}; did you mean folder:{data}, or hf:{data} (saved by `datasets`)?",
    }
    shown = commands(driver, data, *(["data", "show", *sets(dataset=dataset, target="outcome")] for dataset in cases))
    for (dataset, expected), text in zip(cases.items(), shown, strict=True):
        assert expected in text, (dataset, text)
    without, other = commands(
        driver,
        data,
        ["run", "--dry-run", *sets(dataset="h5:mine.h5")],
        ["data", "show", *sets(dataset="h5:mine.h5", target="outcom")],
    )
    assert mentions(without, "target", f"h5:{data / 'mine.h5'} needs", "column to learn")
    assert mentions(other, "no column 'outcom'", "it has age", "dose")


def test_a_sites_rules_and_a_nodes_own_data_know_it(driver: subprocess.Popen[str], data: Path) -> None:
    code = f"""
from deploy import site
from fl_app import data
from fl_app.config import parse
from fl_app.keys import NoParams
rules = site.Site(readable_paths=("/allowed",))
print(site.refusal(rules, "", {{"method": "any", "dataset": "h5:/elsewhere/mine.h5"}}))
print(repr(site.refusal(rules, "", {{"method": "any", "dataset": "h5:/allowed/mine.h5"}})))
raw = {{"method": "any", "num-clients": 1, "dataset": "node", "classes": "ill,well", "target": "outcome",
       "client": "hospital", "data-dir": "prepared"}}
part = data.open_client(parse(raw, {{"any": NoParams}}), 0, data_path={str(data / "mine.h5")!r})
print(len(part.y_train), len(part.y_test), part.info.classes)
"""
    refused, allowed, node = python(driver, data, code).splitlines()
    assert mentions(refused, "readable-paths", "dataset names")
    assert (allowed, node) == ("''", "30 10 ('ill', 'well')")


def test_the_reference_and_the_keys_list_it(driver: subprocess.Popen[str], clone: Path, data: Path) -> None:
    commands(driver, data, ["reference", str(clone)])
    rows = {
        line.split("`")[1]: line for line in (clone / "docs" / "config.md").read_text().splitlines() if "| `" in line
    }
    assert "`h5:/path.h5`" in rows["dataset"] and "`h5:`" in rows["target"] and "`h5:`" in rows["test-ratio"]
    code = """
from corolla.experiments.grouping import tells_runs_apart
print(tells_runs_apart("test-ratio", {"dataset": "h5:/x", "partition": "iid"}))
print(tells_runs_apart("test-ratio", {"dataset": "npz:/x", "partition": "iid"}))
"""
    assert python(driver, data, code).split() == ["True", "False"]
