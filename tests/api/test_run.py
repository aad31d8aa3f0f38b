"""`corolla.run`: keywords, results, and errors in the command's words."""

from __future__ import annotations

import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import corolla
from corolla import cli
from corolla.api import starting
from fl_app.errors import ConfigurationError, UserError
from fl_app.server.run_folder import read_metrics, read_summary
from tests.api.conftest import Start
from tests.conftest import Run as RunHere
from tests.facts import mentions, rejected


def test_importing_corolla_is_cheap() -> None:
    code = "import sys; from corolla import run, load, compare; print(' '.join(sys.modules))"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    unwanted = {"torch", "pandas", "flwr", "rich", "typer", "altair", "scipy", "sklearn", "IPython", "strategies"}
    assert "corolla.api" in loaded and not unwanted & loaded


def test_a_run_is_the_commands_run(start: Start, run: RunHere, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    found = start(method="fedcac", clients=3, fedcac={"beta": np.int64(1)}, output_dir=tmp_path / "mine", seed=4)
    assert torch.get_num_threads() == threads
    same = run(method="fedcac", fedcac={"beta": 1}, seed=4)
    assert found.path == tmp_path / "mine" / "run" and found.state == "finished"
    assert found.summary == read_summary(found.path) and found.summary["digest"] == read_summary(same.path)["digest"]
    assert found.config["fedcac.beta"] == 1 and found.config["num-clients"] == 3

    records = list(read_metrics(found.path))
    assert list(found.rounds.index) == [1, 2]
    assert list(found.rounds["accuracy-before"]) == [r["accuracy-before"] for r in records]
    assert found.rounds["evaluation-accuracy"].iloc[-1] == found.summary["final-accuracy"]
    assert list(found.rounds["seconds-round"]) == [r["seconds"]["round"] for r in records]
    assert list(found.clients.index) == [(t, i) for t in (1, 2) for i in range(3)]
    assert found.clients.loc[2, 1]["accuracy-after"] == records[1]["clients"]["1"]["accuracy-after"]
    assert (found.clients["train-samples"] == 24).all()
    mean = found.clients.loc[2]["evaluation-accuracy"].mean()
    assert mean == pytest.approx(found.summary["final-accuracy"])


@pytest.mark.usefixtures("undrawn")
def test_its_page_and_its_table(start: Start) -> None:
    found = start()
    page = found.report()
    assert (
        page == found.path / "report.html"
        and "fedavg" in page.read_text()
        and list(page.parent.glob("report-figures/*.png"))
    )
    shown = found._repr_html_()
    assert f"{100 * found.summary['final-accuracy']:.2f} %" in shown and str(found.path) in shown
    (found.path / "summary.json").unlink()
    assert "interrupted" in corolla.Run(found.path)._repr_html_()
    (found.path / "config.toml").write_text("half a [")
    assert "unreadable" in corolla.Run(found.path)._repr_html_()


def test_presets_and_files_come_first_as_for_the_command(start: Start, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('method = "fedavg"\n[fedprox]\nmu = 0.5\n')
    config = start(tmp_path / "mine.toml", method="fedprox", num_server_rounds=1).config
    assert (config["method"], config["fedprox.mu"], config["num-server-rounds"]) == ("fedprox", 0.5, 1)


def test_keys_are_spelt_as_python_can_or_as_the_config_does() -> None:
    given = {
        "num_server_rounds": 5,
        "lg_fedavg": {"shared": "body"},
        "feddac": {"self_weight": 0.5},
        "fedcac.non-critical": "all",
    }
    assert starting.flat(given) == {
        "num-server-rounds": 5,
        "lg-fedavg.shared": "body",
        "feddac.self-weight": 0.5,
        "fedcac.non-critical": "all",
    }
    assert starting.flat({"my_method": {"a_b": 1}}) == {"my_method.a-b": 1}  # a user's own file's name
    assert starting.flat({"seed": np.int64(3), "learning_rate": np.float32(0.5), "initial_weights": Path("/w.pt")}) == {
        "seed": 3,
        "learning-rate": 0.5,
        "initial-weights": "/w.pt",
    }
    with rejected(UserError, "fedcac.beta", "given twice", "5 and 6"):
        starting.flat({"fedcac": {"beta": 5}, "fedcac.beta": 6})


NETWORK = (
    "from torch import nn\ndef net(in_channels, num_classes, image_size):\n    return nn.Sequential(nn.Flatten(), {})\n"
)

BAD: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a typo": ({"num_server_round": 5}, ["--set", "num-server-round=5"]),
    "a typo in a table": ({"fedcac": {"bta": 5}}, ["--set", "fedcac.bta=5"]),
    "a typo in a method": ({"method": "fedcax"}, ["--set", "method=fedcax"]),
    "two wrong values": ({"seed": "x", "min_results": 3.0}, ["--set", "seed=x", "--set", "min-results=3.0"]),
    "two numbers of clients": ({"clients": 3, "num_clients": 4}, ["--clients", "3", "--set", "num-clients=4"]),
    "no clients": ({"clients": 0}, ["--clients", "0"]),
    "half a client": ({"clients": 2.5}, ["--clients", "2.5"]),
    "a scale": ({"scale": "smal"}, ["--scale", "smal"]),
    "two ways": ({"superlink": "lab", "in_process": True}, ["--superlink", "lab", "--in-process"]),
    "resume and a preset": ({"preset": "demo", "resume": "runs/x"}, ["demo", "--resume", "runs/x"]),
    "no run to resume": ({"resume": "runs/x"}, ["--resume", "runs/x"]),
    "an unknown preset": ({"preset": "fedcac/cifar"}, ["fedcac/cifar"]),
    "no data": ({"dataset": "npz:none.npz"}, ["--set", "dataset=npz:none.npz"]),
    "a tracker": ({"track": "mlfow"}, ["--set", "track=mlfow"]),
}


def test_what_only_python_can_get_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for keywords, message in (
        ({"in_process": "yes"}, "in_process: must be True or False, got 'yes'"),
        ({"clients": np.int64(0)}, "^clients: 0 is not in the range x>=1"),
        ({"clients": 2.5}, "^clients: '2.5' is not a valid int"),
        ({"cpus_per_client": 0}, "^cpus_per_client: 0.0 is not in the range x>=0.1"),
        ({"cpus_per_client": math.nan, "progress": False}, "cpus_per_client: this machine has .* cores, got nan"),
        ({"gpus_per_client": math.inf, "progress": False}, "gpus_per_client: this machine has .* GPUs, got inf"),
        ({"clients": "many"}, "^clients: 'many' is not a valid int"),
    ):
        with pytest.raises(UserError, match=message):
            corolla.run(**keywords)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError):
        corolla.run(clients=0)
    for call in (lambda: corolla.load(None), lambda: corolla.compare([5]), lambda: corolla.compare(5)):  # type: ignore
        with rejected(UserError, "", "Run", "path of its"):
            call()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("case", BAD)
def test_errors_are_the_commands(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    keywords, arguments = BAD[case]
    with pytest.raises(UserError) as raised:
        corolla.run(**keywords)
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["corolla", "run", *arguments])
    with pytest.raises(SystemExit):
        cli.main()
    said, theirs = words(str(raised.value)), words(capsys.readouterr().err)
    assert said in starting.in_python(re.sub(r"Invalid value for '--([a-z-]+)'", r"\1", theirs)) and "--" not in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (
            "--clients-at-once needs --in-process, got 2 without it",
            "clients_at_once needs in_process, got 2 without it",
        ),
        ("--clients 3 and --set num-clients=4 contradict", "clients 3 and num-clients=4 contradict"),
        ("overwrite = true replaces it (--overwrite)", "overwrite = true replaces it"),
        ("dataset: must be one of these, got '--clients'", "dataset: must be one of these, got '--clients'"),
        ("dataset: /tmp/x (--foo): no such file", "dataset: /tmp/x (--foo): no such file"),
        ("set by `corolla run --scale`", "set by `corolla run --scale`"),
        ("runs/--resume: no such file; --resumed", "runs/--resume: no such file; --resumed"),
    ],
)
def test_errors_name_keywords(message: str, told: str) -> None:
    assert starting.in_python(message) == told


def test_a_key_that_is_none_is_not_set() -> None:
    assert starting.flat({"run_name": None, "fedcac": {"beta": None, "tau": 0.5}, "seed": 0}) == {
        "fedcac.tau": 0.5,
        "seed": 0,
    }


def words(text: str) -> str:
    """A message without the frame that the command may draw around it, and without line breaks."""
    return " ".join(re.sub("[│╭╮╰╯─]", " ", text).split())


def test_settings_without_effect_are_named(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    start(fedcac={"beta": 5})
    assert mentions(
        words(capsys.readouterr().err), "fedcac.beta has no", "effect", "key of method", "fedcac", "not of fedavg"
    )


def test_keys_that_another_key_makes_void_are_named(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    start(server_tau=0.1, dp_clip=2.0, private_regroup=9, staleness_rule="fedbuff", byzantine_ratio=0.1, dp_delta=1e-5)
    said = words(capsys.readouterr().err)
    for line in (
        "server-tau has no effect with server-optimizer = none",
        "dp-clip has no effect with dp-epsilon = 0.0",
        "private-regroup has no effect with private = false",
        "staleness-rule has no effect with staleness = 0",
        "byzantine-ratio has no effect with robust = none",
    ):
        assert line in said
    # the default value
    assert "dp-delta" not in said and "is never reached" not in said
    start(server_tau=0.1, server_optimizer="adam", finetune_epochs=1, finetune_learning_rate=0.1, run_name="b")
    assert "no effect" not in capsys.readouterr().err


def test_progress_is_lines_or_nothing(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    start(run_name="a")
    assert "round 2/2: accuracy" in capsys.readouterr().out
    start(run_name="b", progress=False)
    assert capsys.readouterr().out == ""
    start(run_name="c")
    assert "round 2/2: accuracy" in capsys.readouterr().out


def test_a_run_in_another_thread(start: Start) -> None:
    found: list[corolla.Run] = []
    thread = threading.Thread(target=lambda: found.append(start()))
    thread.start()
    thread.join()
    assert found[0].summary["rounds"] == 2


def test_a_finished_run_goes_on_with_more_rounds(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    found = start()
    again = corolla.run(resume=found, in_process=True)
    assert again.path == found.path and "nothing to resume" in capsys.readouterr().out
    more = corolla.run(resume=found, in_process=True, num_server_rounds=3)
    assert list(more.rounds.index) == [1, 2, 3]


def test_an_interrupt_ends_it_after_its_round_and_it_can_go_on(start: Start, tmp_path: Path) -> None:
    metrics = tmp_path / "runs" / "long" / "metrics.jsonl"
    ended = threading.Event()

    def interrupt() -> None:
        while not ended.wait(0.01):
            if metrics.exists() and metrics.stat().st_size:
                os.kill(os.getpid(), signal.SIGINT)
                return

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            start(run_name="long", num_server_rounds=16)
    finally:
        ended.set()
        thread.join()
    stopped = corolla.load(tmp_path / "runs" / "long")
    assert stopped.state == "interrupted" and 1 <= len(stopped.rounds) < 16
    whole = corolla.run(resume=stopped, in_process=True, progress=False)
    assert whole.summary["digest"] == start(run_name="whole", num_server_rounds=16, progress=False).summary["digest"]


def test_a_file_of_ones_own_is_read_again_when_it_has_changed(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "mynet.py"
    shapes = []
    for name, layers in (("a", "nn.Linear(64, 10)"), ("b", "nn.Linear(64, 7), nn.Linear(7, 10)")):
        file.write_text(NETWORK.format(layers))
        found = start(model="mynet:net", run_name=name)
        shapes.append([tuple(p.shape) for p in found.model(client=1).parameters()])
    assert shapes == [[(10, 64), (10,)], [(7, 64), (7,), (10, 7), (10,)]]


def test_a_folder_on_another_machine_is_said(tmp_path: Path) -> None:
    elsewhere = corolla.Run(tmp_path / "there")
    for what in (lambda: elsewhere.metrics, lambda: elsewhere.summary, elsewhere.report, elsewhere.model):
        with rejected(UserError, "", "SuperLink's machine", "not on"):
            what()
    assert mentions(elsewhere._repr_html_(), "not on")


def test_a_run_leaves_the_callers_generators_as_they_were(start: Start) -> None:
    import torch

    def drawn() -> tuple[float, ...]:
        return torch.rand(1).item(), np.random.rand(), random.random()  # noqa: NPY002 - the caller's

    torch.manual_seed(1), np.random.seed(2), random.seed(3)  # noqa: NPY002
    first, then = drawn(), drawn()
    torch.manual_seed(1), np.random.seed(2), random.seed(3)  # noqa: NPY002
    assert drawn() == first
    start(in_process=True)
    assert drawn() == then


def test_a_first_run_leaves_the_callers_generator_as_it_was_and_torchs_compiler_alone(tmp_path: Path) -> None:
    """It imports libraries that draw; no network needs the compiler, whose import takes seconds."""
    (tmp_path / "mynet.py").write_text(NETWORK.format("nn.Linear(64, 10)"))
    code = (
        "import random, sys, corolla; random.seed(1); before = random.getstate(); "
        "corolla.run(method='fedavg', model='mynet:net', clients=2, num_server_rounds=1, in_process=True, progress=False); "
        "print(random.getstate() == before, 'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True False"
