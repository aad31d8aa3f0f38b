"""The `corolla` command as a user types it: parsing, bad input before anything is written, in-process runs, export."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from corolla.api.settings import name_plugins
from corolla.cli.options import parse_set
from corolla.cli.reference import config_page, pyproject_with_defaults
from corolla.experiments.runs import RecordedRun
from fl_app import models
from fl_app.errors import UserError
from strategies import METHOD_PARAMS, METHODS
from tests.conftest import Command
from tests.facts import each_mentions, mentions, rejected

ROOT = Path(__file__).resolve().parents[2]


def test_set_values_are_toml_and_bare_words_are_strings() -> None:
    words = ["a=1", "b=0.5", "c=true", 'd="x y"', "e=fedcac", "f=folder:/tmp/x=y", "g=", "h=1e-3", "i='7'"]
    expected = {
        "a": 1,
        "b": 0.5,
        "c": True,
        "d": "x y",
        "e": "fedcac",
        "f": "folder:/tmp/x=y",
        "g": "",
        "h": 1e-3,
        "i": "7",
    }
    assert parse_set(words) == expected
    with pytest.raises(UserError, match="expected KEY=VALUE"):
        parse_set(["tau"])
    with rejected(UserError, "", "string", "a number"):
        parse_set(["a=[1, 2]"])


def test_set_takes_what_stands_there_for_a_key_of_text() -> None:
    words = [
        "run-name=12",
        "target=2024",
        "classes=1,2",
        "client= true",
        "target=2024-01-01",
        "seed=3",
        "fedcac.tau=0.5",
    ]
    assert parse_set(words) == {
        "run-name": "12",
        "target": "2024-01-01",
        "classes": "1,2",
        "client": "true",
        "seed": 3,
        "fedcac.tau": 0.5,
    }
    assert parse_set(["run-name='12'", "fedcac.collaboration=none"]) == {
        "run-name": "12",
        "fedcac.collaboration": "none",
    }


def test_set_takes_a_methods_table() -> None:
    assert parse_set(["fedcac={beta=3}"]) == {"fedcac.beta": 3}
    words = [
        "seed=1",
        "fedcac.tau=0.1",
        "fedcac={tau = 0.3, collaboration = 'none'}",
        "mine={a-b=true}",
        "classes={a=1}",
    ]
    assert parse_set(words) == {
        "seed": 1,
        "fedcac.tau": 0.3,
        "fedcac.collaboration": "none",
        "mine.a-b": True,
        "classes": "{a=1}",
    }
    with pytest.raises(UserError) as caught:
        parse_set(["fedcac={beta=}", "fedcac={beta={a=1}}", "fedcac={}", "fedcac={beta=[1]}"])
    told = str(caught.value).splitlines()
    assert each_mentions(
        [line.partition(": ")[2] for line in told],
        ("not an inline", "TOML table", "as in 'fedcac={beta=3", 'selection="random"}\''),
        ("a number", "true or false"),
        ("table is empty",),
        ("a number", "true or false"),
    )


def write_npz(path: Path, num_train: int = 40, classes: int = 4, **replace: object) -> Path:
    rng = np.random.default_rng(0)
    arrays: dict[str, object] = {
        "x_train": rng.integers(0, 256, (num_train, 8, 8), dtype=np.uint8),
        "y_train": np.arange(num_train) % classes,
        "x_test": rng.integers(0, 256, (20, 8, 8), dtype=np.uint8),
        "y_test": np.arange(20) % classes,
    }
    np.savez(path, **{**arrays, **replace})  # type: ignore[arg-type]
    return path


def write_images(root: Path) -> Path:
    for part in ("train", "test"):
        for name in ("cat", "dog"):
            (root / part / name).mkdir(parents=True)
            Image.new("L", (8, 8)).save(root / part / name / "0.png")
    return root


BAD = {
    "unknown method": (["method=fedcax"], "method: must be one of"),
    "unknown key": (["fedcac.tua=0.3"], "fedcac.tua: unknown key; did you mean fedcac.tau?"),
    "another method's key": (
        ["fedavg.beta=2"],
        "fedavg.beta: unknown key; method fedavg has fedavg.batchnorm-statistics; beta is a key of fedcac, ",
    ),
    "a key of a method without any": (
        ["local.tau=2"],
        "unknown key; method local has no parameters; tau is a key of fedcac",
    ),
    "a key without its table": (["beta=2"], "beta: unknown key; did you mean fedcac.beta?"),
    "a misspelt table": (["fedcca.tau=0.3"], "fedcca.tau: unknown key; did you mean fedcac.tau?"),
    "a misspelt key of all runs": (
        ["num-server-round=3"],
        "num-server-round: unknown key; did you mean num-server-rounds?",
    ),
    "numbers that are no classes": (
        ["dataset=npz:numbers.npz"],
        "got float64; numbers are learned with task = regression",
    ),
    "a column of numbers": (
        ["dataset=table:table.csv", "target=b"],
        "got float64; numbers are learned with task = regression",
    ),
    "a table as npz": (["dataset=npz:table.csv"], "table.csv with target=COLUMN, the column to learn?"),
    "an npz as table": (["dataset=table:numbers.npz", "target=b"], "table: takes no .npz"),
    "images as npz": (["dataset=npz:images"], "did you mean folder:"),
    "wrong type": (['fedcac.tau="abc"'], "fedcac.tau: expected a number, got 'abc'"),
    "out of range": (["fedcac.tau=1.5"], "fedcac.tau: must be in [0, 1], got 1.5"),
    "missing data path": (["dataset=folder:/no/such/folder"], "/no/such/folder"),
    "corrupt npz": (["dataset=npz:corrupt.npz"], "corrupt.npz"),
    "class with no images": (["dataset=folder:images"], "dog"),
    "more classes per client than classes": (
        ["partition=pathological", "classes-per-client=12"],
        "classes-per-client: must be at most",
    ),
    "too few samples": (["train-samples=5000"], "train-samples: every client needs 5000"),
    "model module missing": (["model=nowhere:factory"], "cannot import nowhere"),
    "model factory raises": (["model=badmodel:raises"], "ZeroDivisionError"),
    "model of wrong output size": (["model=badmodel:wrong"], "[2, 10]"),
    "relative initial weights missing": (["initial-weights=none.safetensors"], "none.safetensors"),
    "a classifier where there is none": (
        ["model=badmodel:convolution", "method=fedobp", "fedobp.scope=classifier"],
        "model: this method needs",
    ),
    "more threads than there is room for": (
        ["client-threads=1000000"],
        "client-threads: must be in [1, 256], got 1000000",
    ),
    "a long name": (["run-name=" + 300 * "x"], "run-name: at most 200 bytes, got 300: xxx"),
    "a key that is a table": (["fedcac=5"], "fedcac: unknown key; it is the table of fedcac.tau"),
    "a target where there are no columns": (["target=y"], "target: digits has no columns, got 'y'"),
    "a target of an npz": (
        ["dataset=npz:numbers.npz", "target=y"],
        "has its targets in y_train and y_test; leave it unset",
    ),
    "two columns of a name": (["dataset=table:twice.csv", "target=b"], "must have every column once, got 2 named 'a'"),
    "a word among numbers": (["dataset=table:word.csv", "target=b"], "column a must hold numbers, got 'x' in row 5"),
    "a module as a file": (["model=badmodel.py:wrong"], "did you mean badmodel:wrong?"),
    "no initial weights": (
        ["initial-weights=none.pt"],
        "no such file or directory; expected a safetensors file, a folder of shards",
    ),
    "weights that are neither": (
        ["initial-weights=badmodel.py"],
        "the name of a PyTorch state dict must end in .pt or .pth",
    ),
    "no place for state": (["state-dir=/proc/x"], "state-dir: cannot write under /proc/x: "),
    "infinity": (["learning-rate=inf"], "learning-rate: must be > 0 and finite, got inf"),
    "plugins": (
        ["plugins=x"],
        "plugins: set by `corolla run` from the files that method, model and task name; it cannot be",
    ),
    "scale as a key": (["scale=small"], "scale: set by `corolla run --scale`"),
    "unknown device": (["device=tpu"], "device: must be auto, cpu, cuda or cuda:k, got 'tpu'"),
}
if not torch.cuda.is_available():
    BAD["cuda without a GPU"] = (["device=cuda"], "device: cuda asked for, this machine has 0 usable GPUs")


@pytest.mark.parametrize(
    ("case", "mode"),
    [*((case, []) for case in BAD), ("wrong type", ["--in-process"]), ("corrupt npz", ["--in-process"])],
)
def test_bad_input_is_refused_before_anything_is_written(  # type: ignore[no-untyped-def]
    corolla, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, mode: list[str]
) -> None:
    (tmp_path / "corrupt.npz").write_bytes(b"PK\x03\x04 not an archive")
    write_images(tmp_path / "images")
    write_npz(tmp_path / "numbers.npz", y_train=np.linspace(0, 1, 40))
    (tmp_path / "table.csv").write_text("a,b\n" + "".join(f"{k},{k / 2}\n" for k in range(40)))
    (tmp_path / "twice.csv").write_text("a,a,b\n" + "".join(f"{k},{k / 2},{k % 2}\n" for k in range(40)))
    (tmp_path / "word.csv").write_text("a,b\n" + "".join(f"{'x' if k == 3 else k},{k % 2}\n" for k in range(40)))
    (tmp_path / "images" / "train" / "dog" / "0.png").unlink()
    (tmp_path / "badmodel.py").write_text(
        "from torch import nn\ndef raises(**_): return 1 / 0\n"
        "def wrong(in_channels, num_classes, image_size): return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))\n"
        "def convolution(in_channels, num_classes, image_size):\n"
        "    return nn.Sequential(nn.Conv2d(in_channels, num_classes, image_size), nn.Flatten())\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    pairs, message = BAD[case]
    code, _, err = corolla("run", *mode, *[word for pair in pairs for word in ("--set", pair)])
    assert code == 2
    assert message in err, err
    assert len(err) < 1500
    assert not (tmp_path / "runs").exists()


def test_the_file_of_a_plugin_is_named_if_there_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    name_plugins([{"model": "nowhere:factory", "task": "json:Task"}])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("task json:Task: /")


def test_exit_code_and_message_of_a_real_process(tmp_path: Path) -> None:
    done = subprocess.run(
        [Path(sys.executable).parent / "corolla", "run", "--set", "fedcac.tau=2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert mentions(done.stderr, "fedcac.tau", "must be in [0, 1]", "got 2")
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("key", "prefix"), [("initial-weights", ""), ("partition", "file:")])
def test_a_dry_run_opens_the_files_that_keys_name(corolla, tmp_path: Path, key: str, prefix: str) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "weights.pt").write_bytes(b"")
    (tmp_path / "folder").mkdir()

    def dry(name: str, *more: str) -> tuple[int, str]:
        code, _, err = corolla("run", "--dry-run", "--set", f"{key}={prefix}{tmp_path / name}", *more)
        return code, err

    missing = (
        f"error: {key}: {tmp_path / 'weight.pt'}: no such file or directory; did you mean {tmp_path / 'weights.pt'}?"
    )
    assert dry("weight.pt") == (2, missing)
    assert dry("folder") == (2, f"error: {key}: cannot read {tmp_path / 'folder'}: Is a directory")
    assert dry("weights.pt") == (0, "")
    # on other machines
    assert dry("weight.pt", "--superlink", "local") == (0, "")


def test_a_misspelt_file_suggests_the_nearest(corolla, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "mine.toml").write_text("seed = 1\n")
    (tmp_path / "text.txt").write_text("seed = 1\n")
    for name, said in (
        ("mine.tml", "did you mean mine.toml?"),
        ("mien.toml", "no such file or directory; did you mean mine.toml?"),
        ("text.txt", "text.txt is a file whose name does not end in .toml"),
    ):
        code, _, err = corolla("run", name, "--dry-run")
        assert code == 2 and said in err


def test_preset_typo_suggests_the_nearest(corolla) -> None:  # type: ignore[no-untyped-def]
    code, _, err = corolla("run", "deno")
    assert code == 2
    assert mentions(err, "did you mean", "demo?")


@pytest.mark.parametrize("words", [["--set", "seed", "3"], ["demo", "--set", "seed", "3"], ["--set", "seed"]])
@pytest.mark.parametrize("verb", ["run", "sweep"])
def test_a_setting_without_an_equals_sign_is_explained(corolla, verb: str, words: list[str]) -> None:  # type: ignore[no-untyped-def]
    code, _, err = corolla(verb, *words)
    assert code == 2 and mentions(err, "error", "--set seed", "expected KEY=VALUE", "--set seed=1")


def test_a_robust_mean_of_too_few_to_outvote_anybody_is_warned_of(corolla) -> None:  # type: ignore[no-untyped-def]
    few = ("run", "--dry-run", "--clients", "10", "--set", "method=fedavg", "--set", "robust=krum", "--set")
    said = corolla(*few, "fraction-train=0.2")[2]
    assert mentions(said, "warning", "robust = krum cannot", "exclude", "2 clients a round", "needs 3 or more")
    assert corolla(*few, "fraction-train=0.3")[2] == ""


@pytest.mark.parametrize(
    ("dataset", "meant"),
    [("difits", "digits"), ("cifar-10", "cifar10"), ("tiny-imagnet:/x", "tiny-imagenet:"), ("folders:/y", "folder:")],
)
def test_a_misspelt_data_set_suggests_the_nearest(corolla, dataset: str, meant: str) -> None:  # type: ignore[no-untyped-def]
    code, _, err = corolla("run", "--dry-run", "--set", f"dataset={dataset}")
    assert code == 2 and err.endswith(f"did you mean {meant}?")


def test_settings_without_effect_are_named(corolla, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    dry = ("--dry-run", "--set", "fedcac.tau=0.3")
    code, _, err = corolla("run", *dry, "--set", "method=fedavg")
    assert code == 0
    assert mentions(err, "warning", "fedcac.tau has no", "effect", "key of method", "not of fedavg")
    assert corolla("run", *dry)[2] == ""
    # files may be for several methods
    (tmp_path / "all.toml").write_text('method = "fedavg"\n[fedcac]\ntau = 0.3\n')
    assert corolla("run", "all.toml", "--dry-run")[2] == ""
    (tmp_path / "s.toml").write_text('[grid]\nmethod = ["fedavg", "fedcac"]\n')
    assert corolla("sweep", "s.toml", *dry)[2] == ""
    code, _, err = corolla("sweep", "s.toml", *dry, "--set", "ditto.proximal-weight=1.0")
    assert (
        code == 0
        and err.count("warning:") == 1
        and "ditto.proximal-weight" in err
        and mentions(err, "not of fedavg", "fedcac")
    )


def test_gpus_of_one_process_are_refused(corolla) -> None:  # type: ignore[no-untyped-def]
    code, _, err = corolla("run", "--in-process", "--gpus-per-client", "0.5")
    assert (
        code == 2 and mentions(err, "error", "--gpus-per-client", "not with --in-process") and err.endswith("got 0.5")
    )


def test_several_methods_are_a_sweep(corolla) -> None:  # type: ignore[no-untyped-def]
    code, _, err = corolla("run", "--set", "method=fedavg,local")
    assert (
        code == 2 and mentions(err, "[grid] and below", 'method = ["fedavg", "local"]') and "corolla sweep FILE" in err
    )


def test_a_phase_that_is_never_reached_is_named(corolla) -> None:  # type: ignore[no-untyped-def]
    beta = ("run", "--dry-run", "--set", "fedcac.beta=9", "--set")
    code, _, err = corolla(*beta, "num-server-rounds=8")
    assert (
        code == 0 and mentions(err, "warning", "fedcac.beta = 9", "num-server-rounds = 8") and err.count("warning") == 1
    )
    code, _, err = corolla(*beta, "num-server-rounds=9")
    assert code == 0 and mentions(err, "warning", "fedcac.beta = 9 is not", "below num-server-rounds = 9")
    assert corolla(*beta, "num-server-rounds=10")[2] == ""
    chosen = corolla("run", "--dry-run", "--set", "method=fedcac", "--set", "num-server-rounds=10")[2]
    assert mentions(chosen, "warning", "fedcac.beta = 10 is not", "below num-server-rounds = 10")
    # a region begins in that round, not after it
    region = ("--set", "method=floco", "--set", "floco.projection-round=9", "--set", "num-server-rounds=9")
    assert corolla("run", "--dry-run", *region)[2] == ""
    assert corolla("run", "--dry-run", "--set", "num-server-rounds=2")[2] == ""  # nobody chose a beta


def test_in_process_run_ends_with_a_table_and_exports_load_strictly(corolla, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    sets = [
        "--set",
        "run-name=one",
        "--set",
        "model=resnet8",
        "--set",
        "train-samples=20",
        "--set",
        "num-server-rounds=1",
    ]
    code, out, err = corolla("run", "--in-process", "--clients", "2", "--set", "local-epochs=1", *sets)
    assert code == 0, err
    assert "fedcac" in out and str(tmp_path / "runs" / "one") in out.replace("\n", "")
    told = " ".join(out.split())
    assert mentions(told, "starting server", "clients")
    assert mentions(told, "below final") and mentions(told, "before and after", "while it runs", "model that a client")
    assert mentions(told, "next", "corolla report runs/one")
    code, out, _ = corolla("export", "runs/one", "--client", "1")
    assert code == 0 and Path("one-client-1.pt").is_file()
    model = models.build("resnet8", in_channels=1, num_classes=10, image_size=8)
    model.load_state_dict(torch.load("one-client-1.pt"))
    again = ["run-name=two", "initial-weights=one-client-1.pt"]
    words = [word for pair in again for word in ("--set", pair)]
    assert corolla("run", "--in-process", "--clients", "2", "--set", "local-epochs=1", *sets, *words)[0] == 0
    code, _, err = corolla("export", "runs/one", "--client", "7")
    assert code == 2 and mentions(err, "client", "0 to 1", "got 7")
    for how in (["--in-process"], []):  # by name and at once
        code, out, err = corolla("run", *how, "--clients", "2", *sets)
        assert code == 2 and out == "" and mentions(err, "runs/one exists already", "choose another name", "remove")


def test_client_state_is_listed_and_removed(corolla) -> None:  # type: ignore[no-untyped-def]
    sets = [
        "--set",
        "method=local",
        "--set",
        "num-server-rounds=1",
        "--set",
        "run-name=two",
        "--set",
        "keep-state=true",
    ]
    assert corolla("run", "--in-process", "--clients", "3", *sets)[0] == 0
    experiment = json.loads(Path("runs/two/summary.json").read_text())["experiment"]
    code, out, _ = corolla("state", "list")
    assert code == 0 and f"{experiment}" in out and "3 clients" in out and out.split()[-1] == "runs/two"
    assert corolla("state")[1] == out and "kB in all" in out
    assert mentions(corolla("state", "list", "--runs", "elsewhere")[1], "no run under", "elsewhere")
    code, out, _ = corolla("state", "prune", "--older-than", "30d")
    assert code == 0 and "0 experiments removed" in out
    shutil.copytree(os.environ["COROLLA_STATE_DIR"], "kept")
    long_ago = time.time() - 31 * 86400
    for path in Path(os.environ["COROLLA_STATE_DIR"]).rglob("*.state"):
        os.utime(path, (long_ago, long_ago))
    code, out, _ = corolla("state", "prune", "--older-than", "30d", "--dry-run")
    assert code == 0 and mentions(out, "1 experiment", "removed") and experiment in out
    assert experiment in corolla("state", "list")[1]
    with Path("runs/two/.lock").open("a") as other:
        Path("runs/two/summary.json").rename("runs/two/moved")
        fcntl.flock(other, fcntl.LOCK_EX)
        assert "0 experiments removed" in corolla("state", "prune", "--older-than", "4w")[1]
    Path("runs/two/moved").rename("runs/two/summary.json")
    assert "1 experiment removed" in corolla("state", "prune", "--older-than", "4w")[1]
    assert experiment not in corolla("state", "list")[1]
    for wrong in ("30", "-1d", "1y", "d"):
        code, _, err = corolla("state", "prune", "--older-than", wrong)
        assert code == 2 and mentions(err, "hours", "days or weeks")
    shutil.copytree("kept", os.environ["COROLLA_STATE_DIR"], dirs_exist_ok=True)
    assert corolla("state", "remove", experiment)[0] == 0
    assert experiment not in corolla("state", "list")[1]
    code, _, err = corolla("state", "remove", experiment)
    assert code == 2 and experiment in err


def test_version_and_help_in_short(corolla) -> None:  # type: ignore[no-untyped-def]
    assert re.fullmatch(r"corolla \d+\.\d+\.\d+ \(flwr \d.*\)\n", corolla("--version")[1])
    for command in (["-h"], ["run", "-h"], ["data", "show", "-h"], ["cluster", "up", "-h"]):
        code, out, _ = corolla(*command)
        assert code == 0 and "Usage: corolla" in out
    assert "Personalized federated learning" in corolla("-h")[1]
    assert mentions(corolla("run", "--help")[1], "preset's name", "toml file"), "help of arguments needs click<8.5"


@pytest.fixture
def completions(corolla, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:  # type: ignore[no-untyped-def]
    """What a shell is answered: by its variables, or in bash by the number of the last word."""

    def answer(words: str, last: int | None = None, shell: str = "bash") -> str:
        last = len(words.split()) - 1 if last is None else last
        given = {"_COROLLA_COMPLETE": f"complete_{shell}", "COMP_WORDS": words, "COMP_CWORD": str(last)}
        for name, value in {**given, "_TYPER_COMPLETE_ARGS": words, "COROLLA_COMPLETED": ""}.items():
            monkeypatch.setenv(name, value)
        code, out, err = corolla()
        assert code == 0 and not err
        return out

    return answer


def test_the_shell_completes_by_a_real_process() -> None:
    line = {"COMP_WORDS": "corolla run dem", "COMP_CWORD": "2", "_COROLLA_COMPLETE": "complete_bash"}
    done = subprocess.run([sys.executable, "-m", "corolla"], env={**os.environ, **line}, capture_output=True, text=True)
    assert done.stdout.split() == ["demo"], done.stderr


@pytest.mark.parametrize(("words", "completes"), [("methods fedca", "fedcac"), ("stat", "state")])
def test_the_shell_completes(completions, words: str, completes: str) -> None:  # type: ignore[no-untyped-def]
    assert completions(f"corolla {words}").split() == [completes]


BASH = """
{script}
COMP_WORDS=({words})
COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
_corolla_completion corolla
"""

IN_BASH = {
    # as bash takes them apart: at = and :
    "corolla run --set method = fedc": ["fedcac", "fedconcat"],
    "corolla run --set method = fedca": ["fedcac"],
    "corolla run --set seed = 1 --set fedcac.coll": ["fedcac.collaboration="],
    "corolla run demo --set fedcac.weighting = sa": ["samples"],
    "corolla data show --set dataset = fol": ["folder:"],
    "corolla sweep digits --set private = ''": ["true", "false"],
    "corolla run --set private =": ["true", "false"],
    "corolla run --set dataset = npz : /x": [],
    "corolla sweep dig": ["digits"],
    "corolla run --set headline = macro": ["macro-f1"],
    "corolla run --set task = regression --set headline = ''": ["rmse", "mae", "r2"],
    "corolla run --set metrics = al": ["all"],
}


def test_bash_completes_keys_and_their_values(completions, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """By the script that `--show-completion` prints, in bash itself: it asks by variables, which a program in its PATH notes."""
    program = tmp_path / "corolla"
    program.write_text(
        f'#!/bin/sh\nprintf "%s\\0%s\\0%s\\0" "$COMP_WORDS" "$COMP_CWORD" "$_COROLLA_COMPLETE" >> {tmp_path}/asked\n'
    )
    program.chmod(0o755)
    from typer._completion_shared import get_completion_script

    script = get_completion_script(prog_name="corolla", complete_var="_COROLLA_COMPLETE", shell="bash")
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    lines = "".join(BASH.format(script=script, words=words) for words in IN_BASH)
    subprocess.run(["bash", "-c", lines], env=environment, check=True)
    asked = (tmp_path / "asked").read_text().split("\0")[:-1]
    answers = {
        words: completions(given, int(last)).split()
        for words, given, last, how in zip(IN_BASH, asked[::3], asked[1::3], asked[2::3], strict=True)
        if how == "complete_bash"
    }
    assert answers == IN_BASH


@pytest.mark.parametrize(
    ("line", "completes"),
    [
        ("corolla run --set method=fedca", ['"method=fedcac"']),
        ("corolla run --set fedcac.weighting=", ['"fedcac.weighting=samples"']),
        ("corolla run --set dataset=fol", [r'"dataset=folder\\:"']),
    ],
)
def test_zsh_is_given_whole_words(completions, line: str, completes: list[str]) -> None:  # type: ignore[no-untyped-def]
    told = completions(line, shell="zsh").strip().removeprefix("_arguments '*: :((").removesuffix("))'").splitlines()
    assert told[: len(completes)] == completes


@pytest.mark.parametrize(
    ("words", "completes"),
    [
        ("export one --client B", ["Basel", "Bern"]),
        # client 3 is called 2
        ("export one --client i", ["id:2", "id:3"]),
        ("export one --client 2", []),
        ("export runs/one --output x.pt --client Be", ["Bern"]),
        ("export nothing --client B", []),
        ("compare runs/one --metric a", ["accuracy", "auc"]),
        ("compare one --metric b", ["balanced-accuracy"]),
    ],
)
def test_clients_and_metrics_of_the_runs_that_are_typed(  # type: ignore[no-untyped-def]
    completions, words: str, completes: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text('method = "fedavg"\n')
    measured = [{"name": name, "ratio": True} for name in ("accuracy", "balanced-accuracy", "auc")]
    (folder / "run.json").write_text(json.dumps({"metrics": measured}))
    (folder / "clients.json").write_text(
        json.dumps({"0": {"name": "Basel"}, "1": {"name": "Bern"}, "2": {}, "3": {"name": "2"}})
    )
    assert completions(f"corolla {words}").split() == completes


def test_runs_lists_run_folders_with_their_state(corolla, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    assert mentions(corolla("runs")[1], "no runs", "runs")
    sets = ["--set", "method=fedavg", "--set", "num-server-rounds=2", "--set", "run-name=one"]
    assert corolla("run", "--in-process", "--clients", "2", *sets)[0] == 0
    shutil.copytree("runs/one", "runs/sweep/two")
    (tmp_path / "runs" / "sweep" / "two" / "summary.json").unlink()
    (tmp_path / "runs" / "bad").mkdir()
    (tmp_path / "runs" / "bad" / "config.toml").write_text("method = ")
    final = json.loads(Path("runs/one/summary.json").read_text())["final-accuracy"]

    def rows() -> list[list[str]]:
        return [line.split() for line in corolla("runs")[1].splitlines()]

    header, bad, one, two = rows()
    assert header == ["run", "state", "rounds", "method", "dataset", "seed", "accuracy", "written"]
    assert bad == ["runs/bad", "unreadable"]
    assert one[:7] == ["runs/one", "finished", "2/2", "fedavg", "digits", "0", f"{100 * final:.2f}"]
    assert two[:6] == ["runs/sweep/two", "interrupted", "2/2", "fedavg", "digits", "0"]
    with (tmp_path / "runs" / "sweep" / "two" / ".lock").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert rows()[3][1] == "running"
    assert len(corolla("runs", "runs/one")[1].splitlines()) == 2


def test_data_show_tells_who_gets_what(corolla, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    write_npz(tmp_path / "d.npz")
    options = [
        "dataset=npz:d.npz",
        "partition=iid",
        "num-clients=2",
        "train-samples=0",
        "test-samples=0",
        "data-dir=data",
    ]
    code, out, err = corolla("data", "show", *[w for o in options for w in ("--set", o)])
    assert code == 0, err
    assert mentions(" ".join(out.split()), "40 training and 20 test", "images", "1 x 8 x 8", "4 classes")
    sets = [w for o in options if "num-clients" not in o for w in ("--set", o)]
    code, out, _ = corolla("data", "show", "--clients", "4", *sets)
    assert code == 0 and [line.split()[1] for line in out.splitlines() if line.startswith("│")] == ["0", "1", "2", "3"]
    assert "deviation per channel: 0." in out and "held by" not in out and "unused" not in out
    code, _, err = corolla("data", "show", "--clients", "4", *sets, "--set", "num-clients=3")
    assert code == 2 and mentions(err, "--clients 4", "num-clients=3 contradict each", "other")


def test_data_show_lists_both_mixes_and_how_far_apart_they_are(corolla, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    y_train, y_test = np.arange(12) % 3, np.array([0, 1] * 4)
    x = np.random.default_rng(0).normal(size=(12, 2))
    np.savez(tmp_path / "d.npz", x_train=x, y_train=y_train, x_test=x[:8], y_test=y_test)
    own, other = np.flatnonzero(y_train < 2), np.flatnonzero(y_train == 2)
    np.savez(
        tmp_path / "p.npz", train_idx_0=own, train_idx_1=other, test_idx_0=[0, 1], test_idx_1=[2, 3], allow_pickle=False
    )
    words = ["--clients", "2", "--set", "dataset=npz:d.npz", "--set", "partition=file:p.npz", "--set", "data-dir=data"]
    code, out, err = corolla("data", "show", *words)
    assert code == 0, err
    told = [" ".join(line.replace("│", " ").split()) for line in out.splitlines() if line.startswith("│")]
    assert told == ["0 8 2 0: 4/1, 1: 4/1 0 %", "1 4 2 0: 0/1, 1: 0/1, 2: 4/0 100 %"]
    foreign = "test: samples of classes that a client does not train on: client 1: 100 %"
    lacking = "test: the data set has no test samples of 2"
    assert foreign in out and lacking in out
    code, _, err = corolla("run", "--in-process", "--set", "num-server-rounds=1", *words)
    assert code == 0 and f"warning: {foreign}" in err and f"warning: {lacking}" in err


def test_data_show_tells_who_is_tested_on_less(corolla, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    x = np.random.default_rng(0).normal(size=(600, 2))
    y, y_test = np.repeat([0, 1, 2], 200), np.repeat([0, 1, 2], [50, 50, 13])
    np.savez(tmp_path / "d.npz", x_train=x, y_train=y, x_test=x[:113], y_test=y_test)
    sets = ["dataset=npz:d.npz", "dirichlet-alpha=0.001", "train-samples=60", "test-samples=20", "data-dir=data"]
    code, out, err = corolla("data", "show", "--clients", "2", *[word for pair in sets for word in ("--set", pair)])
    assert code == 0, err
    fewer = "test: fewer than 20 samples, to keep the class mix of training: client 0: 13, client 1: 13"
    assert fewer in out


def test_data_show_tells_targets_that_are_numbers(corolla, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    rows = [f"{k % 3},{k},{'ab'[k % 2]}" for k in range(20)]
    (tmp_path / "t.csv").write_text("\n".join(["x,y,site", *rows]))
    sets = [
        "dataset=table:t.csv",
        "target=y",
        "client=site",
        "partition=by-column",
        "task=regression",
        "test-ratio=0.0",
    ]
    code, out, err = corolla("data", "show", "--clients", "2", *[word for pair in sets for word in ("--set", pair)])
    assert code == 0, err
    told = " ".join(out.split())
    assert (
        mentions(told, "20 training and 0 test", "samples", "1 feature", "1 output")
        and "classes" not in told
        and "per class" not in told
    )
    assert mentions(told, "training targets", "mean ± standard deviation", "9.5 ± 5.8")
    assert "y: 9 ± 5.7" in told and "y: 10 ± 5.7" in told
    rows = [[cell.strip() for cell in line.split("│")] for line in out.splitlines() if "│" in line]
    assert [row[1] for row in rows[-2:]] == ["a", "b"]


def test_data_show_takes_presets_and_files_as_run_does(corolla, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "my.toml").write_text('num-clients = 3\npartition = "iid"\n[fedcac]\ntau = 0.3\n')
    for words in (["my.toml"], ["demo", "--clients", "3"]):
        code, out, err = corolla("data", "show", *words, "--set", "train-samples=30")
        assert code == 0, err
        rows = [line.split()[1:4:2] for line in out.splitlines() if line.startswith("│")]
        assert [row for row in rows if row[0] != "│"] == [[str(i), "30"] for i in range(3)]
    assert corolla("data", "prepare", "my.toml", "--scale", "small")[0] == 0
    code, _, err = corolla("data", "show", "deno")
    assert code == 2 and mentions(err, "did you mean", "demo?")


def test_data_show_names_repeated_and_unused_images(corolla, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    pixels = np.full((40, 8, 8), 9, np.uint8)
    write_npz(tmp_path / "d.npz", x_train=pixels)
    np.savez(tmp_path / "p.npz", train_idx=[[0] * 5, [0, 1, 2, 3, 4]], test_idx=[[0, 1], [2, 3]])
    sets = ["dataset=npz:d.npz", "partition=file:p.npz", "data-dir=data"]
    words = ["--clients", "2", *[word for pair in sets for word in ("--set", pair)]]
    code, out, err = corolla("data", "show", *words)
    assert code == 0, err
    assert mentions(out, "training", "1 of 5", "several clients", "each by 2")
    assert mentions(out, "training", "images", "client holds repeatedly", "client 0", "4 of 5")
    assert mentions(out, "unused", "35 of 40", "16 of 20 test images")
    assert "0.035 ± 0.000" in out and mentions(err, "warning", "data set")
    assert "held by several" in corolla("data", "show")[1]  # of the default partition
    code, _, err = corolla("run", "--in-process", "--set", "num-server-rounds=1", *words)
    assert code == 0 and mentions(err, "warning", "training", "client holds repeatedly", "client 0", "4 of 5")


@pytest.mark.parametrize(
    ("clients", "sets", "told"),
    [
        (
            3,
            ["train-samples=0"],
            "947 of 1347 images (449 per client) are of other classes than drawn, because no class has more than 137",
        ),
        (3, ["train-samples=200", "test-samples=0"], "set train-samples to 137 or less, or raise num-clients"),
        (3, ["train-samples=100", "test-samples=20"], ""),
        (3, ["train-samples=0", "partition=iid"], ""),
    ],
)
def test_clients_that_are_not_of_one_class_as_a_tiny_alpha_says(  # type: ignore[no-untyped-def]
    corolla, tmp_path: Path, clients: int, sets: list[str], told: str
) -> None:
    given = ["dirichlet-alpha=0.001", "method=local", "num-server-rounds=1", "local-epochs=1", *sets]
    words = ["--clients", str(clients), *[word for pair in given for word in ("--set", pair)]]
    code, out, err = corolla("data", "show", *words)
    assert code == 0 and (mentions(" ".join(out.split()), "less skewed", "dirichlet-alpha = 0.001")) == bool(told), err
    code, _, err = corolla("run", "--in-process", *words)
    assert code == 0
    if told:
        assert mentions(err, "warning", "training", "3 of 3", "dirichlet-alpha = 0.001 makes them")
        assert told in err
    else:
        assert "less skewed" not in err


def test_methods_lists_every_method_and_key(corolla) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = corolla("methods")
    assert code == 0
    for name in METHODS:
        assert name in out
    assert "fedcac.tau = 0.5" in out
    # as `--set` takes it
    assert "fedpake.normalize = false" in out


def test_generated_reference_is_up_to_date() -> None:
    config, project = ((ROOT / name).read_text(encoding="utf-8") for name in ("docs/config.md", "pyproject.toml"))
    assert config == config_page(METHOD_PARAMS), "run `corolla reference`"
    assert project == pyproject_with_defaults(project, METHOD_PARAMS), "run `corolla reference`"


@pytest.mark.parametrize("text", [None, "[project]\nname = 'another'\n"])
def test_the_reference_is_written_into_clones_alone(corolla, tmp_path: Path, text: str | None) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "other").mkdir()
    if text is not None:
        (tmp_path / "other" / "pyproject.toml").write_text(text)
    before = sorted(tmp_path.rglob("*"))
    code, _, err = corolla("reference", str(tmp_path / "other"))
    assert code == 2 and mentions(err, "ROOT", "clone of Corolla")
    assert sorted(tmp_path.rglob("*")) == before


# The example of a cross-device study ----------------------------------------------------------------------------------

EXAMPLE = ROOT / "examples" / "cross-device.toml"


def test_the_example_is_a_run_of_ten_thousand_clients(command: Command) -> None:
    code, out, err = command("run", EXAMPLE, "--dry-run")
    assert code == 0, err
    told = dict(re.findall(r"^([\w.-]+) *= *(\S+)", out, re.MULTILINE))
    assert (told["num-clients"], told["num-server-rounds"]) == ("10000", "200")
    assert round(float(told["fraction-train"]) * int(told["num-clients"])) == 20


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_example_runs(command: Command, tmp_path: Path) -> None:
    """With fewer clients and rounds, as many of them a round; more clients than digits has training samples."""
    settings = {"num-server-rounds": 3, "fraction-train": 0.01, "run-name": "study", "state-dir": tmp_path / "state"}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    options = ["--in-process", "--clients", "2000", "--output-dir", tmp_path]
    code, _, err = command("run", EXAMPLE, *options, *words)
    assert code == 0, err
    run = RecordedRun(tmp_path / "study")
    assert run.finished and run.failures == []
    assert [len(record["clients"]) for record in run.rounds.values()] == [20, 20, 20]
    assert run.coverage == (2000, 2000)
