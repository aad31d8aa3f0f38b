"""The user's own files: where they are looked up, what is refused, how they travel, and what a run keeps of them."""

from __future__ import annotations

import dataclasses
import json
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from client_app.client_app import app
from fl_app import cli, plugins, server_app
from fl_app.config import parse, parse_recorded
from fl_app.errors import UserError
from fl_app.experiments.bundle import bundle
from fl_app.keys import Scalar
from fl_app.server.inprocess import InProcessGrid
from fl_app.server.run_folder import RunFolder, read_config, read_metrics, read_summary
from strategies import METHOD_PARAMS, METHODS
from tests.conftest import PLUGINS, SMALL

HEAD = """
from dataclasses import dataclass
from typing import Literal
from fl_app.keys import NoParams, Rule, key
from strategies.base import LocalUpdate, Method, all_tensors
from strategies.fedavg import FedAvg
"""
PLAIN = HEAD + 'METHOD = Method("{name}", NoParams, FedAvg, LocalUpdate, all_tensors)\n'
HOWTO = Path(__file__).parents[2] / "docs" / "methods-howto.md"

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's working directory."""
    path = sys.path[:]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    plugins.look_in(Path())
    yield tmp_path / "here"
    plugins.look_in()
    sys.path[:] = path


@pytest.fixture
def corolla(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], data_dir: Path) -> Command:
    monkeypatch.setenv("COROLLA_STATE_DIR", str(here / "state"))
    monkeypatch.setenv("COROLLA_DATA_DIR", str(data_dir))

    def invoke(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["corolla", *arguments])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        out, err = capsys.readouterr()
        return int(exit_.value.code or 0), out, " ".join(err.split())

    return invoke


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
        words = settings(**{"method": "mentor:METHOD", "run-name": name, "mentor.weight": weight, "num-server-rounds": 3})
        assert corolla("run", *words)[0] == 0
    assert corolla("run", *settings(**{"method": "fedavg", "run-name": "fedavg", "num-server-rounds": 3}))[0] == 0
    on, off, fedavg = (read_summary(here / "runs" / name)["digest"] for name in ("on", "off", "fedavg"))
    assert off == fedavg != on
    assert all(record["mentor-distance"] >= 0 for record in read_metrics(here / "runs" / "on"))
    code, _, err = corolla("report", "runs/on", "runs/fedavg")
    assert code == 0, err
    assert "Distance of the mentor" in (here / "report.html").read_text()


def test_a_methods_own_parameters_are_listed(here: Path, corolla: Command) -> None:
    (here / "mentor.py").write_text(example())
    code, out, _ = corolla("methods", "mentor:METHOD")
    assert code == 0 and "Clients learn from a mentor" in out and "mentor.inertia = 0.9  (in [0, 1))  Part of" in out
    assert corolla("methods", "fedcac")[1].count("fedcac.") == 8 and "fedprox" in corolla("methods")[1]
    assert "did you mean fedcac?" in corolla("methods", "fedcax")[2]


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
    plugins.look_in()
    sys.path.remove(str(here))
    with pytest.raises(UserError, match="model mymodel:small: mymodel .* has no small"):
        plugins.load("model", "mymodel:small")


def test_files_travel_with_what_they_import_beside_them(here: Path) -> None:
    (here / "pack").mkdir()
    written = {
        "mine.py": "import json, tables\nfrom pack import first\nimport strategies, fl_app.keys\n",
        "tables.py": "def f():\n  import late\n", "late.py": "", "json.py": "", "strategies.py": "", "unused.py": "",
        "pack/__init__.py": "", "pack/first.py": "from . import second\n",
        "pack/second.py": "from ..pack.third import x\n", "pack/third.py": "x = 1\n", "pack/fourth.py": "",
    }  # fmt: skip
    for name, content in written.items():
        (here / name).write_text(content)
    found = plugins.files({"method": "mine:METHOD", "model": "mlp"})
    assert list(found) == [
        "late.py", "mine.py", "pack/__init__.py", "pack/first.py", "pack/second.py", "pack/third.py", "tables.py",
    ]  # fmt: skip
    assert list(plugins.files({"model": "pack.second:x"})) == ["pack/__init__.py", "pack/second.py", "pack/third.py"]
    assert plugins.read(plugins.fingerprint(found)) == found


# What is refused

BAD = {
    "nowhere": ("", r"cannot import nowhere \(ModuleNotFoundError.*beside the config file"),
    "broken": ("def", r"cannot import broken \(SyntaxError"),
    "absent": (HEAD, r"absent .*absent.py\) has no METHOD"),
    "nomethod": ("METHOD = {}", "must be a strategies.base.Method, got dict"),
    "misnamed": (PLAIN.format(name="other"), "its name must be its file's, misnamed, got 'other'"),
    "fedavg": (PLAIN.format(name="fedavg"), "fedavg, its file's name, exists already: Corolla has a method of that name"),
    "seed": (PLAIN.format(name="seed"), "seed, its file's name, exists already: Corolla has a key of that name"),
    "json": (PLAIN.format(name="json"), "json.py: Python has a module json already; choose another name"),
    "deploy": (PLAIN.format(name="deploy"), "Corolla has a module deploy already"),
    "numpy": (PLAIN.format(name="numpy"), "there is a module numpy already"),
    "halves": (
        HEAD + 'METHOD = Method("halves", NoParams, LocalUpdate, LocalUpdate, all_tensors)', "strategy must be a class made of",
    ),
    "noparams": (HEAD + 'METHOD = Method("noparams", int, FedAvg, LocalUpdate, all_tensors)', "params must be a dataclass"),
    "params": (
        HEAD + "@dataclass\nclass P:\n  a: float = 0.5\n  b: list = key(1, 'B')\n  c: int = key(9, 'C', Rule(high=3))\n"
        "  d: int = key(1, 'D', about='running')\nMETHOD = Method('params', P, FedAvg, LocalUpdate, all_tensors)",
        r"params: a: must be declared, as in .*; params.b: must be a bool.*; params.c: must be .* 3.*; params.d: .*about training",
    ),
}  # fmt: skip


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
    with pytest.raises(UserError, match="method: must be one of .* or module:METHOD, got 'mine'"):
        parse({"method": "mine"}, METHOD_PARAMS)
    with pytest.raises(UserError, match="mine.alpha: unknown key"):
        parse({"method": "mine:METHOD", "mine.alpha": 1}, METHOD_PARAMS)


# How they travel


def test_a_bundle_is_the_app_with_the_users_files_and_keys(here: Path) -> None:
    (here / "mine.py").write_text("import tables\n")
    (here / "tables.py").write_text("")
    with bundle({"method": "mine:METHOD", "mine.alpha": 0.5, "seed": 3}) as directory:
        files = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
        config = tomllib.loads((directory / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert config["mine"] == {"alpha": 0.5} and config["fedcac"]["tau"] == 0.5 and config["seed"] == 0
    assert {"mine.py", "tables.py", "fl_app/server_app.py", "strategies/base/rounds.py", "client_app/client_app.py"} <= files
    assert all(name.endswith(".py") or name == "pyproject.toml" for name in files) and not directory.exists()


def refused(raw: dict[str, Scalar], sent: dict[str, Scalar]) -> str:
    """Why the clients of a run, to whom `sent` is sent, cannot take part."""
    with pytest.raises(UserError) as error:
        server_app.run(InProcessGrid(app, sent, 3), parse(raw, METHOD_PARAMS), lambda *_: None)
    return str(error.value)


def test_a_node_without_the_file_or_with_another_one_is_named(here: Path, raw_config: dict[str, Scalar]) -> None:
    why = refused(raw_config, {**raw_config, "method": "elsewhere:METHOD"})
    assert "client 0: method elsewhere:METHOD: cannot import elsewhere" in why
    (here / "mine.py").write_text(PLAIN.format(name="mine"))
    raw = {**raw_config, "method": "mine:METHOD"}
    raw["plugins"] = plugins.fingerprint(plugins.files(raw))
    for plugin in (f"mine.py:{'0' * 16}", f"gone.py:{'0' * 16}"):
        why = refused(raw, {**raw, "plugins": plugin})
        assert f"client 0: plugins: {here / 'mine.py' if 'mine' in plugin else 'gone.py'} is not" in why
    with pytest.raises(UserError, match="plugins: .*mine.py is not the file the run was started with"):
        RunFolder.create(parse({**raw, "plugins": f"mine.py:{'0' * 16}"}, METHOD_PARAMS), "e")
    assert not Path(str(raw["output-dir"])).exists()


FAILING = HEAD + """
class Update(LocalUpdate):
    def train(self, start, state, ctx):
        def objective(module, x, y):
            loss = ctx.trainer.loss(ctx.trainer.logits(module, x), y)
            return {bad} if ctx.client_id == 1 else loss
        return ctx.trainer.train(start, objective=objective)
METHOD = Method("failing", NoParams, FedAvg, Update, all_tensors)
"""
CONVOLUTION = """
from torch import nn
def net(in_channels, num_classes, image_size):
    return nn.Sequential(nn.Conv2d(in_channels, num_classes, image_size), nn.Flatten())
"""


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("loss[None]", "objective: must return a scalar tensor, the batch's mean, got shape (1,)"),
        ("0.5", "objective: must return a scalar tensor, the batch's mean, got float"),
        ("loss * float('nan')", "training diverged: its loss is nan"),
        ("loss + ctx.trainer.forward(module, x)[0].mean()", "has no Linear layer, whose input the features are"),
        ("loss + 1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_round_goes_on_without_a_client_whose_objective_fails(
    here: Path, raw_config: dict[str, Scalar], bad: str, why: str
) -> None:
    (here / "failing.py").write_text(FAILING.replace("{bad}", bad))
    (here / "convolution.py").write_text(CONVOLUTION)
    raw = {**raw_config, "method": "failing:METHOD", "model": "convolution:net", "num-server-rounds": 1}
    folder = server_app.run(InProcessGrid(app, raw, 3), parse(raw, METHOD_PARAMS), lambda *_: None)
    (record,) = read_metrics(folder.path)
    assert list(record["clients"]) == ["0", "2"]
    (failure,) = record["failures"]
    assert failure["client"] == 1 and why in failure["cause"]


WRONG = HEAD + """
class Server(FedAvg):
    def personalize(self, round, uploads):
        super().personalize(round, uploads)
        {wrong}
METHOD = Method("wrong", NoParams, Server, LocalUpdate, all_tensors)
"""


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("self.global_model = type(self.global_model)(self.global_model.params.astype('f8'), self.global_model.buffers)",
         r"the params of a model must be float32 \[17226\], got float64 \[17226\]"),
        ("self.memory['rate'] = 0.5", r"memory\['rate'\] must be a NumPy array, got float"),
    ],
)  # fmt: skip
def test_what_a_server_half_cannot_send_or_keep_is_named(
    here: Path, raw_config: dict[str, Scalar], wrong: str, why: str
) -> None:
    (here / "wrong.py").write_text(WRONG.replace("{wrong}", wrong))
    raw = {**raw_config, "method": "wrong:METHOD"}
    with pytest.raises(UserError, match=f"method wrong:METHOD: {why}"):
        server_app.run(InProcessGrid(app, raw, 3), parse(raw, METHOD_PARAMS), lambda *_: None)


# What a run keeps


def test_a_run_is_resumed_from_anywhere_with_its_own_copy(here: Path, corolla: Command) -> None:
    (here / "mentor.py").write_text(example())
    words = settings(**{"method": "mentor:METHOD", "checkpoint-every": 1, "mentor.weight": 0.5})
    assert corolla("run", *words)[0] == 0
    run = here / "runs" / "run"
    assert (run / "plugins" / "mentor.py").read_text() == example()
    assert read_config(run)["plugins"] == plugins.fingerprint({"mentor.py": example().encode()})
    (here / "mentor.py").write_text(example() + "# changed\n")
    code, _, err = corolla("run", "--in-process", "--resume", str(run), "--set", "num-server-rounds=3")
    assert code == 0 and "warning: mentor.py has changed since the run was started, which goes on with" in err
    (here / "mentor.py").unlink()
    code, _, err = corolla("run", "--in-process", "--resume", str(run), "--set", "num-server-rounds=4")
    assert code == 0 and "warning" not in err
    whole = settings(**{"method": "mentor:METHOD", "num-server-rounds": 4, "run-name": "whole", "mentor.weight": 0.5})
    (here / "mentor.py").write_text(example())
    assert corolla("run", *whole)[0] == 0
    assert read_summary(here / "runs" / "whole")["digest"] == read_summary(run)["digest"]
    (run / "plugins" / "mentor.py").write_text(example() + "# changed\n")
    code, _, err = corolla("run", "--in-process", "--resume", str(run), "--set", "num-server-rounds=5")
    assert code == 2 and "these keys must not change: plugins: 'mentor.py:" in err


def test_a_sweep_runs_own_methods_beside_others_and_repeats_them_when_their_file_changes(here: Path, corolla: Command) -> None:
    (here / "mentor.py").write_text(example())
    small = "\n".join(f"{k} = {json.dumps(v)}" for k, v in SMALL.items() if k not in ("run-name", "method"))
    (here / "mine.toml").write_text(
        f'[settings]\n{small}\n[grid]\nmethod = ["fedavg", "mentor:METHOD"]\n"mentor.weight" = [0.0, 1.0]\n'
    )

    def sweep(*more: str) -> list[str]:
        code, out, err = corolla("sweep", "mine.toml", "--in-process", *more)
        assert code == 0, err
        return sorted(path.parent.name for path in here.glob("runs/mine/*/summary.json"))

    first = sweep()
    assert [name.rpartition("-")[0] for name in first] == ["fedavg", "mentor-METHOD,weight=0.0", "mentor-METHOD,weight=1.0"]
    assert sweep() == first
    (here / "mentor.py").write_text(example() + "# changed\n")
    assert len(sweep()) == 5
    digests = {name: read_summary(here / "runs" / "mine" / name)["digest"] for name in first}
    assert digests[first[0]] == digests[first[1]] != digests[first[2]]

    (here / "mentor.py").unlink()  # what is there can be read without any code
    code, out, err = corolla("compare", "runs/mine")
    assert code == 0 and out.count("mentor:METHOD") == 4, out + err
    config = parse_recorded(read_config(here / "runs" / "mine" / first[1]), METHOD_PARAMS)
    assert dataclasses.asdict(config.params) == {"weight": 0.0, "inertia": 0.9}


def test_a_config_file_of_an_own_method_serves_others_too(here: Path, corolla: Command) -> None:
    (here / "penalty.py").write_text((PLUGINS / "penalty.py").read_text())
    (here / "my.toml").write_text('method = "penalty:METHOD"\n[penalty]\nweight = 0.0\n')
    words: dict[str, Any] = {k: v for k, v in SMALL.items() if k not in ("method", "run-name")}
    for name in ("penalty", "fedavg"):
        method = ["--set", "method=fedavg"] if name == "fedavg" else []
        options = [word for k, v in words.items() for word in ("--set", f"{k}={json.dumps(v)}")]
        code, _, err = corolla("run", "my.toml", "--in-process", *options, *method, "--set", f"run-name={name}")
        assert code == 0, err
    penalty, fedavg = (here / "runs" / name for name in ("penalty", "fedavg"))
    assert read_summary(penalty)["digest"] == read_summary(fedavg)["digest"]
    assert "penalty.weight" not in read_config(fedavg) and read_config(fedavg)["plugins"] == ""
    code, out, _ = corolla("run", "my.toml", "--dry-run")
    assert code == 0 and "weight = 0.0" in out and "[fedcac]" not in out
