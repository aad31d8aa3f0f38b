"""A package that is not installed is named, with the extra that brings it, before anything is done."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import corolla
from client_app.client_app import app
from fl_app import extras, plugins, server_app
from fl_app.config import parse
from fl_app.errors import ConfigurationError, UserError
from fl_app.keys import Scalar
from fl_app.transport.inprocess import InProcessGrid
from strategies import METHOD_PARAMS
from tests.conftest import SMALL, Command, Run
from tests.facts import mentions, rejected

ROOT = Path(__file__).resolve().parents[2]
Without = Callable[[str], None]


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Without:
    """Let a package seem not to be installed."""
    find = importlib.util.find_spec

    def missing(package: str) -> None:
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *rest: None if name == package else find(name, *rest)
        )

    return missing


# distributions whose packages have other names
OTHER_NAMES = {"vl_convert": "vl-convert-python"}


def test_every_extra_brings_its_packages() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for package, extra in extras.EXTRAS.items():
        names = [re.split(r"[<>=!\[ ]", word)[0] for word in declared["optional-dependencies"][extra]]
        distribution = OTHER_NAMES.get(package, package.replace("_", "-"))
        assert distribution in names
        assert not any(re.split(r"[<>=!\[ ]", word)[0] == distribution for word in declared["dependencies"])
    (everything,) = declared["optional-dependencies"]["all"]
    # whoever searches with Optuna installs it, which brings a database; so does who exports peft's adapters
    assert {*extras.EXTRAS.values()} - {"search", "peft"} == set(
        everything.removeprefix("corolla[").removesuffix("]").split(",")
    )


NEEDS: dict[str, tuple[dict[str, Scalar], str, str]] = {
    "dp-epsilon": ({"dp-epsilon": 8.0}, "opacus", "dp-epsilon needs opacus, .* 'corolla[dp]'"),
    "a metric": (
        {"task": "measured:Own"},
        "torchmetrics",
        "metrics: own of task measured:Own needs .* 'corolla[metrics]'",
    ),
    "a partition": ({"partition": "dirichlet"}, "flwr_datasets", "partition: dirichlet needs .* 'corolla[partitions]'"),
}


OWN_TASK = """
from fl_app.tasks import Classification, Metric

class Own(Classification):
    metrics = (*Classification.metrics[:1], Metric("own"))
    usual = ("own",)
    by_torchmetrics = frozenset({"own"})
"""


@pytest.fixture
def own_task(tmp_path: Path) -> Iterator[None]:
    """A task whose metric needs torchmetrics."""
    (tmp_path / "measured.py").write_text(OWN_TASK)
    plugins.reset(tmp_path)
    yield
    plugins.reset()


@pytest.mark.usefixtures("own_task")
@pytest.mark.parametrize("case", NEEDS)
def test_a_run_that_needs_more_is_refused_before_it_starts(
    case: str, command: Command, without: Without, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keys, package, words = NEEDS[case]
    without(package)
    sets = [
        word for k, v in (SMALL | keys | {"data-dir": str(tmp_path / "data")}).items() for word in ("--set", f"{k}={v}")
    ]
    code, _, err = command("run", "--in-process", *sets)
    assert code == 2 and re.search(words.replace("[", r"\["), err), err
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("own_task")
@pytest.mark.parametrize("case", NEEDS)
def test_a_node_without_it_is_named_before_the_run_starts(
    case: str, raw_config: dict[str, Scalar], without: Without, tmp_path: Path
) -> None:
    keys, package, words = NEEDS[case]
    raw = {**raw_config, **keys, "data-dir": str(tmp_path / "data")}
    without(package)
    with pytest.raises(UserError, match="client 0: " + words.replace("[", r"\[")):
        server_app.run(InProcessGrid(app, raw, 3), parse(raw, METHOD_PARAMS), lambda *_: None)
    assert not Path(str(raw["output-dir"])).exists()


def test_what_needs_nothing_more_runs_without(run: Run, without: Without) -> None:
    without("torchmetrics")
    assert run(num_server_rounds=1, metrics="all").path.is_dir()
    assert run(num_server_rounds=1, run_name="iid", partition="iid").path.is_dir()


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_table_names_its_package(command: Command, without: Without, tmp_path: Path, suffix: str) -> None:
    table = tmp_path / f"table{suffix}"
    table.write_text("a,b\n1,2\n")
    without("pandas")
    code, _, err = command("data", "show", "--set", f"dataset=table:{table}", "--set", "target=b")
    assert code == 2 and f"dataset: {table} needs pandas, " in err and mentions(err, "pip install 'corolla[tables]'")


def test_reports_and_data_frames(command: Command, without: Without, run: Run, tmp_path: Path) -> None:
    found = corolla.load(run().path)
    for package in ("altair", "vl_convert"):
        without(package)
        code, _, err = command("report", found.path, "--output", tmp_path / "page")
        assert (
            code == 2 and f"corolla report needs {package}, " in err and mentions(err, "pip install 'corolla[report]'")
        )
        with rejected(ConfigurationError, "", f"run's report needs {package}", "'corolla[report]'"):
            found.report(tmp_path / "page")
    assert not (tmp_path / "page").exists()
    without("pandas")
    asked: tuple[Callable[[], Any], ...] = (
        lambda: found.metrics,
        lambda: found.clients,
        lambda: corolla.compare(found),
    )
    for ask in asked:
        with rejected(ConfigurationError, "", "needs pandas", "not installed here", "pip install 'corolla[tables]'"):
            ask()
