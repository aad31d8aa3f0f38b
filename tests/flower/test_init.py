"""`corolla flower init` writes a Flower app that Flower's own command takes."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fl_app.processes import script
from strategies.baselines.ifca import IFCAParams
from tests.conftest import Command
from tests.facts import mentions

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "flower" / "pytorch"


def files(directory: Path) -> dict[str, str]:
    found = (path for path in directory.rglob("*") if path.suffix in (".py", ".toml"))
    return {str(path.relative_to(directory)): path.read_text() for path in found}


def test_it_is_the_example(command: Command, tmp_path: Path) -> None:
    code, out, err = command("flower", "init", tmp_path / "mine")
    assert (code, err) == (0, "") and f"flwr run {tmp_path / 'mine'}" in " ".join(out.split())
    assert files(tmp_path / "mine") == files(EXAMPLE)


IMPORT = """
import sys
for directory in sys.argv[1:]:
    sys.path[0] = directory
    for name in [name for name in sys.modules if name.startswith("pytorch_app")]:
        del sys.modules[name]
    import pytorch_app.server_app, pytorch_app.client_app
    assert pytorch_app.server_app.__file__.startswith(directory)
"""


def test_another_method(command: Command, tmp_path: Path) -> None:
    places = []
    for method, cls, lines in (("lg-fedavg", "LGFedAvg", 0), ("fedprox", "FedProx", 1), ("fedrep", "FedRep", 2)):
        places.append(tmp_path / method)
        assert command("flower", "init", places[-1], "--method", method)[0] == 0
        written = files(places[-1])
        server, loop = written["pytorch_app/server_app.py"], written["pytorch_app/task.py"]
        assert mentions(server, f"from corolla.flower import {cls}") and f"strategy = {cls}(fraction_train=" in server
        assert loop.count("corolla.flower.") == lines and loop.count("import corolla.flower") == (lines > 0)
        for text in (server, loop):
            ast.parse(text)
    assert subprocess.run([sys.executable, "-c", IMPORT, *map(str, places)], cwd=tmp_path).returncode == 0


def test_a_method_that_needs_arguments_is_given_them(command: Command, tmp_path: Path) -> None:
    others = IFCAParams().clusters - 1
    for method, call in (
        ("scaffold", 'SCAFFOLD(learning_rate=float(config["learning-rate"]), batch_size='),
        ("ifca", f"IFCA(other_arrays=[ArrayRecord(Net().state_dict()) for _ in range({others})], fraction_train="),
        ("fedfomo", "FedFomo(validation_ratio=0, fraction_train="),
    ):
        assert command("flower", "init", tmp_path / method, "--method", method)[0] == 0
        assert f"strategy = {call}" in files(tmp_path / method)["pytorch_app/server_app.py"]


@pytest.mark.parametrize(
    ("options", "said"), [(["--method", "moon"], "moon"), (["--method", "fedcav"], "method"), ([], "empty")]
)
def test_what_cannot_be(command: Command, tmp_path: Path, options: list[str], said: str) -> None:
    if not options:
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "file").write_text("")
    code, _, err = command("flower", "init", tmp_path / "mine", *options)
    assert code == 2 and said in err
    assert not (tmp_path / "mine" / "pyproject.toml").exists()


@pytest.mark.parametrize("app", sorted(EXAMPLE.parent.glob("*/pyproject.toml")), ids=lambda path: path.parent.name)
def test_flower_builds_the_examples(app: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [script("flwr"), "build", "--app", str(app.parent)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0 and list(tmp_path.glob("*.fab")), done.stdout + done.stderr
    assert tomllib.loads(app.read_text())["tool"]["flwr"]["app"]["components"]
