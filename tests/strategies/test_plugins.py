"""The user's own files: where they are looked up, what is refused, how they travel, and what a run keeps of them."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fl_app import plugins
from fl_app.config import parse
from fl_app.errors import ConfigurationError, UserError
from fl_app.server.run_folder import read_metrics, read_summary
from strategies import METHOD_PARAMS, METHODS
from tests.conftest import SMALL, Command
from tests.facts import mentions, rejected

HEAD = """
from dataclasses import dataclass
from typing import Literal
from fl_app.keys import NoParams, Rule, key
from strategies.base import LocalUpdate, Method, all_tensors
from strategies.baselines.fedavg import FedAvg
"""
PLAIN = HEAD + 'METHOD = Method("{name}", NoParams, FedAvg, LocalUpdate, all_tensors)\n'
HOWTO = Path(__file__).parents[2] / "docs" / "methods-howto.md"


def settings(**changes: object) -> list[str]:
    """Options for a small run in this process."""
    values = {**SMALL, **{k.replace("_", "-"): v for k, v in changes.items()}}
    return ["--in-process", *(word for k, v in values.items() for word in ("--set", f"{k}={json.dumps(v)}"))]


# The page that teaches it


def example() -> str:
    """The howto's method."""
    text = HOWTO.read_text(encoding="utf-8")
    return text.partition("```python\n")[2].partition("```")[0]


def test_the_howtos_example_is_complete_and_short(here: Path, corolla: Command) -> None:
    (here / "mentor.py").write_text(example())
    assert len(example().splitlines()) <= 60
    for name, weight in (("on", 1.0), ("off", 0.0)):
        words = settings(
            **{"method": "mentor:METHOD", "run-name": name, "mentor.weight": weight, "num-server-rounds": 3}
        )
        assert corolla("run", *words)[0] == 0
    assert corolla("run", *settings(**{"method": "fedavg", "run-name": "fedavg", "num-server-rounds": 3}))[0] == 0
    on, off, fedavg = (read_summary(here / "runs" / name)["digest"] for name in ("on", "off", "fedavg"))
    assert off == fedavg != on
    assert all(record["mentor-distance"] >= 0 for record in read_metrics(here / "runs" / "on"))
    code, _, err = corolla("report", "runs/on", "runs/fedavg")
    assert code == 0, err
    assert mentions((here / "report.html").read_text(), "Distance", "mentor")


def test_the_howtos_test_holds(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "mentor.py").write_text(example())
    shown = HOWTO.read_text(encoding="utf-8").partition("## Testing\n")[2]
    code = shown.partition("```python\n")[2].partition("```")[0]
    assert code.count("assert") == 2
    monkeypatch.syspath_prepend(here)
    exec(code, {})  # noqa: S102
    del sys.modules["mentor"]


def test_a_methods_own_parameters_are_listed(here: Path, corolla: Command) -> None:
    (here / "mentor.py").write_text(example())
    code, out, _ = corolla("methods", "mentor:METHOD")
    assert (
        code == 0
        and mentions(out, "Clients learn", "mentor")
        and mentions(out, "mentor.inertia = 0.9 (in [0, 1))", "Part of")
    )
    assert corolla("methods", "fedcac")[1].count("fedcac.") == 10 and "fedprox" in corolla("methods")[1]
    assert mentions(corolla("methods", "fedcax")[2], "did you mean", "fedcac?")


# Where files are looked up


def test_the_config_files_directory_comes_first_then_the_current_one(here: Path, corolla: Command) -> None:
    (here.parent / "there").mkdir()
    for directory in (here, here.parent / "there"):
        (directory / "mine.py").write_text(PLAIN.format(name="mine") + f"# in {directory}\n")
    config = here.parent / "there" / "my.toml"
    config.write_text('method = "mine:METHOD"\n')
    code, _, err = corolla("run", str(config), *settings(run_name="a", method="mine:METHOD"))
    assert code == 0 and err.count(f"method mine:METHOD: {config.parent / 'mine.py'}") == 1
    code, _, err = corolla("run", *settings(run_name="b", method="mine:METHOD"))
    assert code == 0 and f"method mine:METHOD: {here / 'mine.py'}" in err
    copies = [(here / "runs" / run / "plugins" / "mine.py").read_text() for run in "ab"]
    assert [str(config.parent) in copies[0], str(here) in copies[1]] == [True, True]


def test_a_model_in_the_current_directory_wins_over_any_importable_one(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for directory, attribute in ((tmp_path, "other"), (here, "small")):
        (directory / "mymodel.py").write_text(f"def {attribute}(): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert plugins.load("model", "mymodel:small").__name__ == "small"
    plugins.reset()
    sys.path.remove(str(here))
    with rejected(ConfigurationError, "model mymodel:small", "mymodel", "has no small"):
        plugins.load("model", "mymodel:small")


def test_files_travel_with_what_they_import_beside_them(here: Path) -> None:
    (here / "pack").mkdir()
    written = {
        "mine.py": "import json, tables\nfrom pack import first\nimport strategies, fl_app.keys\n",
        "tables.py": "def f():\n  import late\n",
        "late.py": "",
        "json.py": "",
        "strategies.py": "",
        "unused.py": "",
        "pack/__init__.py": "",
        "pack/first.py": "from . import second\n",
        "pack/second.py": "from ..pack.third import x\n",
        "pack/third.py": "x = 1\n",
        "pack/fourth.py": "",
    }
    for name, content in written.items():
        (here / name).write_text(content)
    found = plugins.files({"method": "mine:METHOD", "model": "mlp"})
    assert list(found) == [
        "late.py",
        "mine.py",
        "pack/__init__.py",
        "pack/first.py",
        "pack/second.py",
        "pack/third.py",
        "tables.py",
    ]
    assert list(plugins.files({"model": "pack.second:x"})) == ["pack/__init__.py", "pack/second.py", "pack/third.py"]
    assert plugins.read(plugins.fingerprint(found)) == found


# Modules that the user's program has imported itself


FILES = {
    "net.py": "import parts\nfrom pack import piece\n",
    "parts.py": "",
    "pack/__init__.py": "",
    "pack/piece.py": "",
}


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """Return a directory on the import path, and a copy of its files, in which modules are looked up."""
    mine, copy = tmp_path / "mine", tmp_path / "copy"
    for directory in (mine, copy):
        plugins.write({name: (text + "def made(): pass\n").encode() for name, text in FILES.items()}, directory)
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [str(mine), *sys.path])
    plugins.reset(copy)
    yield mine, copy
    plugins.reset()
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize("imported", ["net", "parts", "pack", "pack.piece"])
def test_a_module_of_equal_files_is_taken(copies: tuple[Path, Path], imported: str) -> None:
    own = importlib.import_module(imported)
    assert plugins.load("model", "net:made").__code__.co_filename == str(copies[imported != "net"] / "net.py")
    assert plugins.load("model", "net:made") is plugins.load("model", "net:made")
    plugins.reset(copies[1])
    # what the program imported stays its own
    assert sys.modules[imported] is own and ("net" in sys.modules) == (imported == "net")


@pytest.mark.parametrize("changed", FILES)
@pytest.mark.parametrize("imported", ["net", "parts", "pack"])
def test_a_module_of_another_file_is_refused(copies: tuple[Path, Path], imported: str, changed: str) -> None:
    with (copies[1] / changed).open("a") as file:
        file.write("# another\n")
    importlib.import_module(imported)
    module = changed.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    is_used = imported == "net" or imported == module.partition(".")[0]
    for _ in range(2):
        if is_used:
            there = copies[0] / changed
            with rejected(ConfigurationError, "model net:made", changed, f"module {module} already", there, "process"):
                plugins.load("model", "net:made")
        else:
            plugins.load("model", "net:made")
            assert sys.modules[module].__file__ == str(copies[1] / changed)


def test_a_module_in_the_place_of_a_package_is_refused(copies: tuple[Path, Path]) -> None:
    (copies[0] / "pack" / "__init__.py").rename(copies[0] / "other.py")
    (copies[0] / "pack").rename(copies[0] / "gone")
    (copies[0] / "pack.py").write_text("")
    importlib.import_module("pack")
    for name in ("pack/__init__.py", ""):
        with rejected(ConfigurationError, "model net:made", "pack", "already", copies[0] / "pack.py", "process"):
            plugins.load("model", "net:made")
        if name:
            (copies[1] / name).unlink()
            plugins.reset(copies[1])


@pytest.mark.parametrize("changed", FILES)
def test_the_next_directory_has_modules_of_its_own(copies: tuple[Path, Path], changed: str) -> None:
    module = changed.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for directory in copies:
        (directory / changed).write_text(FILES[changed] + f"def made(): return {directory.name!r}\n")
        plugins.reset(directory)
        plugins.load("model", "net:made")
        assert sys.modules[module].made() == directory.name


# What is refused

BAD = {
    "nowhere": ("", r"cannot import nowhere \(ModuleNotFoundError.*beside the config file"),
    "broken": ("def", r"cannot import broken \(SyntaxError"),
    "absent": (HEAD, r"absent .*absent.py\) has no METHOD"),
    "nomethod": ("METHOD = {}", "must be a strategies.base.Method, got dict"),
    "misnamed": (PLAIN.format(name="other"), "its name must be its file's, misnamed, got 'other'"),
    "fedavg": (
        PLAIN.format(name="fedavg"),
        "fedavg, its file's name, exists already: Corolla has a method of that name",
    ),
    "seed": (PLAIN.format(name="seed"), "seed, its file's name, exists already: Corolla has a key of that name"),
    "json": (PLAIN.format(name="json"), "json.py: Python has a module json already; choose another name"),
    "deploy": (PLAIN.format(name="deploy"), "Corolla has a module deploy already"),
    "numpy": (PLAIN.format(name="numpy"), "there is a module numpy already"),
    "halves": (
        HEAD + 'METHOD = Method("halves", NoParams, LocalUpdate, LocalUpdate, all_tensors)',
        "strategy must be a class made of",
    ),
    "arguments": (
        HEAD
        + "class S(FedAvg):\n  def personalize(self, uploads): pass\n  @staticmethod\n  def sample(ids): return ids\n"
        + 'METHOD = Method("arguments", NoParams, S, LocalUpdate, all_tensors)',
        r"arguments.py:\d+: personalize\(\) must take \(round, uploads\); arguments.py:\d+: sample\(\) must take \(client_ids,",
    ),
    "arguments2": (
        HEAD
        + "class L(LocalUpdate):\n  def train(self, *given): return given[0]\n  def upload(self, after): pass\n"
        + 'METHOD = Method("arguments2", NoParams, FedAvg, L, all_tensors)',
        r"arguments2.py:\d+: upload\(\) must take \(before, after, state, ctx\)$",
    ),
    "sentences": (
        HEAD
        + "@dataclass\nclass P:\n  a: float = key(1.0, Rule(high=3), 'A')\n  b: int = key(1, '')\n"
        + "  c: int = key(9, 'C', 'high')\nMETHOD = Method('sentences', P, FedAvg, LocalUpdate, all_tensors)",
        r"sentences.a: the second value of key\(\) must be its sentence, got Rule\(.*; sentences.b: the second .*; "
        r"sentences.c: the third value of key\(\) must be a Rule, got 'high'",
    ),
    "noparams": (
        HEAD + 'METHOD = Method("noparams", int, FedAvg, LocalUpdate, all_tensors)',
        "params must be a dataclass",
    ),
    "params": (
        HEAD + "@dataclass\nclass P:\n  a: float = 0.5\n  b: list = key(1, 'B')\n  c: int = key(9, 'C', Rule(high=3))\n"
        "  d: int = key(1, 'D', about='running')\nMETHOD = Method('params', P, FedAvg, LocalUpdate, all_tensors)",
        r"params: a: must be declared, as in .*; params.b: must be a bool.*; params.c: must be .* 3.*; "
        r"params.d: `about` of key\(\) must be 'training', got 'running'",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_method_is_refused_by_name(here: Path, name: str) -> None:
    content, message = BAD[name]
    if content:
        (here / f"{name}.py").write_text(content)
    with pytest.raises(UserError, match=f"(?s)^method {name}:METHOD: .*{message}"):
        parse({"method": f"{name}:METHOD"}, METHOD_PARAMS)


def test_only_the_built_in_methods_are_counted(here: Path) -> None:
    (here / "mine.py").write_text(PLAIN.format(name="mine"))
    assert METHODS["mine:METHOD"].name == "mine" and "mine:METHOD" in METHODS
    assert "mine:METHOD" not in list(METHODS) and len(METHODS) == len(list(METHODS))
    with rejected(ConfigurationError, "method", "must be one", "or module:METHOD", "got 'mine'"):
        parse({"method": "mine"}, METHOD_PARAMS)
    with rejected(ConfigurationError, "mine.alpha", "unknown key"):
        parse({"method": "mine:METHOD", "mine.alpha": 1}, METHOD_PARAMS)
