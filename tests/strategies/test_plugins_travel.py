"""The user's own files: where they are looked up, what is refused, how they travel, and what a run keeps of them."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from client_app.client_app import app
from fl_app import plugins, server_app
from fl_app.config import parse, parse_recorded
from fl_app.errors import ConfigurationError, UserError
from fl_app.keys import Scalar
from fl_app.server.run_folder import RunFolder, read_config, read_metrics, read_summary
from fl_app.transport.app_bundle import bundle
from fl_app.transport.inprocess import InProcessGrid
from strategies import METHOD_PARAMS
from tests.conftest import PLUGINS, SMALL, Command
from tests.facts import mentions, rejected
from tests.strategies.test_plugins import HEAD, PLAIN, example, settings

# How they travel


def test_a_bundle_is_the_app_with_the_users_files_and_keys(here: Path) -> None:
    (here / "mine.py").write_text("import tables\n")
    (here / "tables.py").write_text("")
    with bundle({"method": "mine:METHOD", "mine.alpha": 0.5, "seed": 3}) as directory:
        files = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
        config = tomllib.loads((directory / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert config["mine"] == {"alpha": 0.5} and config["fedcac"]["tau"] == 0.5 and config["seed"] == 0
    assert {
        "mine.py",
        "tables.py",
        "fl_app/server_app.py",
        "strategies/engine/rounds.py",
        "client_app/client_app.py",
    } <= files
    assert all(name.endswith(".py") or name == "pyproject.toml" for name in files) and not directory.exists()


def test_a_module_that_does_not_travel_is_refused_before_a_deployment(
    here: Path, corolla: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "installed").mkdir()
    text = "from torch import nn\n\ndef make(**_):\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    (here / "installed" / "left_behind.py").write_text(text)
    monkeypatch.syspath_prepend(here / "installed")
    words = [word for word in settings(model="left_behind:make") if word != "--in-process"]
    code, _, err = corolla("run", "--superlink", "nowhere", "--clients", "3", *words)
    assert code == 2 and mentions(
        " ".join(err.split()), "model left_behind:make", "site takes left_behind", "run alone"
    )


def refused(raw: dict[str, Scalar], sent: dict[str, Scalar]) -> str:
    """Why the clients of a run, to whom `sent` is sent, cannot take part."""
    with pytest.raises(UserError) as error:
        server_app.run(InProcessGrid(app, sent, 3), parse(raw, METHOD_PARAMS), lambda *_: None)
    return str(error.value)


def test_a_node_without_the_file_or_with_another_one_is_named(here: Path, raw_config: dict[str, Scalar]) -> None:
    why = refused(raw_config, {**raw_config, "method": "elsewhere:METHOD"})
    assert mentions(why, "client 0", "method elsewhere:METHOD", "cannot import elsewhere")
    (here / "mine.py").write_text(PLAIN.format(name="mine"))
    raw = {**raw_config, "method": "mine:METHOD"}
    raw["plugins"] = plugins.fingerprint(plugins.files(raw))
    for plugin, what in (
        ("mine.py", f"{here / 'mine.py'} differs from"),
        ("gone.py", "the run's file gone.py is missing"),
    ):
        why = refused(raw, {**raw, "plugins": f"{plugin}:{'0' * 16}"})
        assert f"client 0: plugins: {what}" in why
    with rejected(ConfigurationError, "plugins", "mine.py differs", "run was started"):
        RunFolder.create(parse({**raw, "plugins": f"mine.py:{'0' * 16}"}, METHOD_PARAMS), "e")
    assert not Path(str(raw["output-dir"])).exists()


FAILING = (
    HEAD
    + """
class Update(LocalUpdate):
    def train(self, start, state, ctx):
        def objective(module, x, y):
            loss = ctx.trainer.loss(ctx.trainer.logits(module, x), y)
            return {bad} if ctx.client_id == 1 else loss
        return ctx.trainer.train(start, objective=objective)
METHOD = Method("failing", NoParams, FedAvg, Update, all_tensors)
"""
)
BARE = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self, inputs, classes):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(inputs, classes))
    def forward(self, x):
        return x.flatten(1) @ self.w
def net(in_channels, num_classes, image_size):
    return Net(in_channels * image_size**2, num_classes)
"""


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("loss[None]", "objective: must return a scalar tensor, the batch's mean, got shape (1,)"),
        ("0.5", "objective: must return a scalar tensor, the batch's mean, got float"),
        ("loss * float('nan')", "training diverged: its loss is nan"),
        (
            "loss + ctx.trainer.forward(module, x)[0].mean()",
            "needs features, but no single module holds its classifier w",
        ),
        ("loss + 1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_round_goes_on_without_a_client_whose_objective_fails(
    here: Path, raw_config: dict[str, Scalar], bad: str, why: str
) -> None:
    (here / "failing.py").write_text(FAILING.replace("{bad}", bad))
    (here / "bare.py").write_text(BARE)
    raw = {**raw_config, "method": "failing:METHOD", "model": "bare:net", "num-server-rounds": 1}
    folder = server_app.run(InProcessGrid(app, raw, 3), parse(raw, METHOD_PARAMS), lambda *_: None)
    (record,) = read_metrics(folder.path)
    assert list(record["clients"]) == ["0", "2"]
    (failure,) = record["failures"]
    assert failure["client"] == 1 and why in failure["cause"]


WRONG = (
    HEAD
    + """
class Server(FedAvg):
    def personalize(self, round, uploads):
        super().personalize(round, uploads)
        {wrong}
METHOD = Method("wrong", NoParams, Server, LocalUpdate, all_tensors)
"""
)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (
            "self.global_model = type(self.global_model)(self.global_model.params.astype('f8'), self.global_model.buffers)",
            r"the params of a model must be float32 \[17226\], got float64 \[17226\]",
        ),
        ("self.memory['rate'] = 0.5", r"memory\['rate'\] must be a NumPy array of numbers, got float"),
    ],
)
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
    assert code == 0 and mentions(err, "mentor.py has changed", "run started", "run uses")
    (here / "mentor.py").unlink()
    code, _, err = corolla("run", "--in-process", "--resume", str(run), "--set", "num-server-rounds=4")
    assert code == 0 and "warning" not in err
    whole = settings(**{"method": "mentor:METHOD", "num-server-rounds": 4, "run-name": "whole", "mentor.weight": 0.5})
    (here / "mentor.py").write_text(example())
    assert corolla("run", *whole)[0] == 0
    assert read_summary(here / "runs" / "whole")["digest"] == read_summary(run)["digest"]
    (run / "plugins" / "mentor.py").write_text(example() + "# changed\n")
    code, _, err = corolla("run", "--in-process", "--resume", str(run), "--set", "num-server-rounds=5")
    assert code == 2 and mentions(err, "these keys", "not change", "plugins", "'mentor.py")


def test_a_sweep_runs_own_methods_beside_others_and_repeats_them_when_their_file_changes(
    here: Path, corolla: Command
) -> None:
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
    assert [name.rpartition("-")[0] for name in first] == [
        "fedavg",
        "mentor-METHOD,weight=0.0",
        "mentor-METHOD,weight=1.0",
    ]
    assert sweep() == first
    (here / "mentor.py").write_text(example() + "# changed\n")
    assert len(sweep()) == 5
    digests = {name: read_summary(here / "runs" / "mine" / name)["digest"] for name in first}
    assert digests[first[0]] == digests[first[1]] != digests[first[2]]

    # what is there can be read without any code
    (here / "mentor.py").unlink()
    code, out, err = corolla("compare", "runs/mine")
    assert code == 0 and out.partition("\n\n")[0].count("mentor:METHOD") == 4, out + err
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
