"""The wheel in an empty environment and an empty directory: every command and every mode works without the source tree.

The environment sees the third-party packages that the wheel's own metadata asks for, and no others. It links to them where the
tests' own environment has them.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from fl_app.plugins import PACKAGES
from fl_app.processes import flower_environment, free_ports, processes_with
from fl_app.transport.app_bundle import application_hash
from tests.e2e.conftest import summary
from tests.test_package import (
    ELSEWHERE,
    FOREIGN,
    HERE_FIRST,
    check_ignored,
    check_named,
    normalized,
    put_foreign,
    undeclared,
)

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[2]
OWN_METHOD = ROOT / "tests" / "plugins" / "twins.py"
SMALL = """
num-clients = 2
num-server-rounds = 2
train-samples = 24
test-samples = 10
local-epochs = 1
"""

# The wheel and its environments ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel in it."""

    python: Path
    environment: dict[str, str]

    @property
    def packages(self) -> Path:
        """Its site-packages."""
        (directory,) = self.python.parents[1].glob("lib/python*/site-packages")
        return directory

    def run(self, directory: Path, *command: str) -> subprocess.CompletedProcess[str]:
        """Run one of its commands in a directory."""
        return subprocess.run(
            [str(self.python.with_name(command[0])), *command[1:]],
            cwd=directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    def output(self, directory: Path, *command: str) -> str:
        """Run one of its commands in a directory, which must succeed, and return what it prints."""
        done = self.run(directory, *command)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
        return done.stdout


def builds() -> list[Path]:
    """Return what builds leave in a source tree."""
    return sorted(path for pattern in ("build", "dist/*", "*.egg-info") for path in ROOT.glob(pattern))


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dist")
    before = builds()
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(directory), str(ROOT)]
    subprocess.run(command, check=True)
    assert builds() == before
    (built,) = directory.glob("corolla-*.whl")
    return built


def requirements(wheel: Path) -> list[Requirement]:
    """Return what the wheel's metadata asks for."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    return [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]


def needed(wheel: Path, extra: str) -> set[str]:
    """Return the distributions that pip would install beside corolla[extra]."""
    found: set[tuple[str, str]] = set()
    todo = [("corolla", ""), ("corolla", extra)]
    while todo:
        name, wanted = todo.pop()
        if (name, wanted) in found:
            continue
        found.add((name, wanted))
        if name == "corolla":
            theirs = requirements(wheel)
        else:
            theirs = [Requirement(line) for line in importlib.metadata.distribution(name).requires or []]
        for requirement in theirs:
            if requirement.marker is None or requirement.marker.evaluate({"extra": wanted}):
                todo += [(normalized(requirement.name), more) for more in ("", *requirement.extras)]
    return {name for name, _ in found} - {"corolla"}


def install(directory: Path, wheel: Path, extra: str = "") -> Installed:
    """Make an environment with corolla[extra], in a directory of its own."""
    venv.create(directory / "venv", with_pip=False)
    installed = Installed(directory / "venv" / "bin" / "python", environment(directory))
    pip = [sys.executable, "-m", "pip", "--python", str(installed.python), "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, str(wheel)], check=True)
    for name in needed(wheel, extra):
        link(importlib.metadata.distribution(name), installed)
    return installed


def environment(directory: Path) -> dict[str, str]:
    """Return the variables of an environment that keeps all that it writes in a directory, and marks its processes."""
    (directory / "flwr").mkdir()
    found = flower_environment(directory / "flwr")
    found.pop("PYTHONPATH", None)
    found.pop("VIRTUAL_ENV", None)
    return found | {
        "PATH": os.pathsep.join([str(directory / "venv" / "bin"), "/usr/bin", "/bin"]),
        "COROLLA_STATE_HOME": str(directory / "state-home"),
        "COROLLA_STATE_DIR": str(directory / "state"),
        "COROLLA_DATA_DIR": str(directory / "data"),
        "WHEEL_TEST": str(directory),
    }


def link(distribution: importlib.metadata.Distribution, installed: Installed) -> None:
    """Let an environment see a distribution, and have its commands."""
    for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
        # Several distributions may have files in one package, as NVIDIA's.
        if not (installed.packages / name).exists():
            (installed.packages / name).symlink_to(str(distribution.locate_file(name)))
    for command in distribution.entry_points.select(group="console_scripts"):
        script = installed.python.with_name(command.name)
        script.write_text(
            f"#!{installed.python}\n"
            "import sys\n"
            f"from {command.module} import {command.attr.partition('.')[0]}\n"
            f"sys.exit({command.attr}())\n"
        )
        script.chmod(0o755)


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """The wheel without any extra."""
    directory = tmp_path_factory.mktemp("base")
    yield install(directory, wheel)
    assert processes_with(f"WHEEL_TEST={directory}") == []


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A directory with a run's config alone."""
    directory = tmp_path / "here"
    directory.mkdir()
    (directory / "small.toml").write_text(SMALL)
    return directory


# What is installed ----------------------------------------------------------------------------------------------------


def test_the_environment_sees_the_wheel_and_what_it_needs_alone(installed: Installed, here: Path) -> None:
    names = (*PACKAGES, "torch", "altair", "pandas", "opacus", "torchmetrics", "datasets", "flwr_datasets")
    code = f"import importlib.util as u; print(*(s.origin if (s := u.find_spec(n)) else '-' for n in {names}))"
    origins = dict(zip(names, installed.output(here, "python", "-c", code).split(), strict=True))
    for name in PACKAGES:
        assert origins.pop(name) == str(installed.packages / name / "__init__.py")
    assert origins.pop("torch") == str(installed.packages / "torch" / "__init__.py")
    assert set(origins.values()) == {"-"}, origins


def test_its_metadata_asks_for_all_that_it_imports(wheel: Path, installed: Installed) -> None:
    every = [path for name in PACKAGES for path in (installed.packages / name).rglob("*.py")]
    # the examples are apps of their own
    files = [path for path in every if "examples" not in path.parts]
    assert len(files) > 200
    assert undeclared(files, [str(requirement) for requirement in requirements(wheel)]) == {}


def test_the_application_is_that_of_a_clone(installed: Installed, here: Path) -> None:
    assert installed.output(here, "corolla", "node", "application").strip() == application_hash({})


# What it does ---------------------------------------------------------------------------------------------------------


def test_demo_and_presets(installed: Installed, here: Path) -> None:
    shown = installed.output(here, "corolla", "demo")
    assert all(method in shown for method in ("fedcac", "fedavg", "local"))
    assert "fedcac/cifar10-dirichlet-0.1" in installed.output(here, "corolla", "presets").splitlines()
    printed = installed.output(here, "corolla", "run", "fedcac/cifar10-dirichlet-0.1", "--dry-run")
    assert "# bytes per round, " in printed


@pytest.mark.nightly
def test_a_sweep_and_tables_of_its_runs(installed: Installed, here: Path) -> None:
    (here / "many.toml").write_text(f"[settings]\n{SMALL}\n[grid]\nseed = [0, 1]\n")
    installed.output(here, "corolla", "sweep", "many.toml", "--in-process", "--jobs", "2")
    assert (here / "runs" / "many" / "results.csv").is_file()
    assert "fedcac" in installed.output(here, "corolla", "compare", "runs/many")
    assert "many" in installed.output(here, "corolla", "runs")


@pytest.mark.nightly
def test_ones_own_method_beside_foreign_folders_runs_alike_in_every_mode(installed: Installed, here: Path) -> None:
    fleet, control = free_ports(2)
    lab = {"superlink": {"fleet-port": fleet, "control-port": control}, "hosts": [{"host": "local", "supernodes": 2}]}
    (here / "lab.yaml").write_text(yaml.safe_dump(lab))
    for name in FOREIGN:
        put_foreign(here, name, "folder")
    (here / "mine.py").write_text(OWN_METHOD.read_text().replace('"twins"', '"mine"'))
    modes = {"one-process": ["--in-process"], "simulation": [], "deployment": ["--superlink", "lab"]}
    installed.output(here, "corolla", "cluster", "up", "lab.yaml")
    try:
        for name, words in modes.items():
            words = [*words, "--clients", "2", "--set", "method=mine:METHOD", "--set", f"run-name={name}"]
            installed.output(here, "corolla", "run", "small.toml", *words)
    finally:
        installed.output(here, "corolla", "cluster", "down", "lab.yaml")
    summaries = [summary(here / "runs" / name) for name in modes]
    assert {found["method"] for found in summaries} == {"mine:METHOD"}
    assert len({found["digest"] for found in summaries}) == 1


def test_a_missing_extra_is_named(installed: Installed, here: Path) -> None:
    done = installed.run(here, "corolla", "report", "runs")
    assert done.returncode == 2 and "pip install 'corolla[report]'" in " ".join(done.stderr.split())


@pytest.mark.nightly
def test_with_every_extra_from_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory, here: Path) -> None:
    with_all = install(tmp_path_factory.mktemp("all"), wheel, "all")
    code = (
        "from corolla import compare, run\n"
        "one = run('small.toml', in_process=True, metrics='auc', partition='dirichlet', run_name='mine')\n"
        "print(len(one.metrics), list(compare(one)['n']))\n"
    )
    assert with_all.output(here, "python", "-c", code).splitlines()[-1] == "2 [1]"
    with_all.output(here, "corolla", "report", "runs/mine", "--output", "page")
    assert (here / "page" / "report.html").is_file()


# Foreign modules in the working directory -----------------------------------------------------------------------------


def test_foreign_modules_are_ignored_or_named(installed: Installed, tmp_path: Path) -> None:
    python = str(installed.python)
    for kind in ("file", "package"):
        for name in FOREIGN:
            foreign = put_foreign(tmp_path / f"{name}-{kind}", name, kind)
            for way in HERE_FIRST:
                check_named(way, foreign, name, python, installed.environment)
            put_foreign(tmp_path / kind, name, kind)
        for way in ELSEWHERE:
            check_ignored(way, tmp_path / kind, python, installed.environment)
    for name in FOREIGN:
        put_foreign(tmp_path / "folder", name, "folder")
    for way in (*ELSEWHERE, *HERE_FIRST):
        check_ignored(way, tmp_path / "folder", python, installed.environment)


def test_a_run_beside_foreign_modules(installed: Installed, here: Path) -> None:
    for name, kind in zip(FOREIGN, ("file", "package", "folder", "file"), strict=True):
        put_foreign(here, name, kind)
    run = ["corolla", "run", "small.toml", "--set", "run-name=beside"]
    simulation = installed.run(here, *run, "--backend", "ray")
    assert simulation.returncode == 2
    assert f"error: {here / FOREIGN[0]}.py would be imported" in simulation.stderr
    installed.output(here, *run, "--in-process")
    assert summary(here / "runs" / "beside")["rounds"] == 2
