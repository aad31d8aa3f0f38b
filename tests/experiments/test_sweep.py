"""Sweeps: combinations, problems before anything is written, resuming after SIGKILL, the table against numbers by hand."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from corolla.api import one_run
from corolla.api.settings import ready
from corolla.cli.sweeps import run_points
from corolla.experiments import sweep
from corolla.experiments.runs import RecordedRun
from fl_app.errors import UserError
from fl_app.server import checkpoint
from strategies import METHOD_PARAMS
from tests import slurm
from tests.conftest import Command, wait_for
from tests.facts import mentions, rejected

ROOT = Path(__file__).resolve().parents[2]
COROLLA = [sys.executable, "-m", "corolla.cli"]
SMALL = """
[settings]
dataset = "digits"
num-clients = 3
num-server-rounds = {rounds}
train-samples = 24
test-samples = 10
local-epochs = 1
batch-size = 8
device = "cpu"
state-dir = "state"

[grid]
method = ["fedavg", "local"]
seed = [0, 1]
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def points(path: Path, **overrides: Any) -> list[sweep.Point]:
    return sweep.expand(sweep.read_sweep(path), METHOD_PARAMS, path.parent / "out", overrides, lambda raw: raw)


# The file


def test_combinations_without_duplicates(tmp_path: Path) -> None:
    text = (
        '[settings]\nnum-clients = 4\n[grid]\nmethod = ["fedavg", "fedcac"]\n"fedcac.tau" = [0.3, 0.5]\nseed = [0, 1]\n'
    )
    found = points(write(tmp_path / "s.toml", text))
    assert [p.varying for p in found] == [
        {"method": "fedavg", "seed": 0},
        {"method": "fedavg", "seed": 1},
        {"method": "fedcac", "fedcac.tau": 0.3, "seed": 0},
        {"method": "fedcac", "fedcac.tau": 0.3, "seed": 1},
        {"method": "fedcac", "fedcac.tau": 0.5, "seed": 0},
        {"method": "fedcac", "fedcac.tau": 0.5, "seed": 1},
    ]
    assert len({p.name for p in found}) == 6
    assert found[2].name.startswith("fedcac,tau=0.3,seed=0-")
    assert all(p.parsed.num_clients == 4 and p.parsed.output_dir == str(tmp_path / "out") for p in found)
    again = points(tmp_path / "s.toml")
    assert [p.name for p in again] == [p.name for p in found]


def test_a_key_without_effect_makes_no_run(tmp_path: Path) -> None:
    """Who holds what does not depend on another partition's keys, nor on the ratio of a test part that the data set has itself."""
    text = """
[settings]
num-clients = 4
dataset = "{dataset}"
target = "y"
[grid]
partition = ["iid", "dirichlet"]
{key} = [0.2, 0.5]
seed = [0, 1]
"""
    path = tmp_path / "s.toml"
    for dataset, key, even in (
        ("digits", "dirichlet-alpha", 2),
        ("digits", "test-ratio", 2),
        ("table:/t.csv", "test-ratio", 4),
    ):
        found = points(write(path, text.format(dataset=dataset, key=key)))
        kinds = [p.parsed.partition for p in found]
        assert (kinds.count("iid"), kinds.count("dirichlet")) == (even, 4), (dataset, key)
        assert all((key in p.varying) == (p.parsed.partition == "dirichlet" or even == 4) for p in found)


def test_variants_presets_and_scale(tmp_path: Path) -> None:
    text = """
preset = "demo"
scale = "small"
[grid]
"fedcac.beta" = [4, 15]
[[variants]]
name = "alone"
"fedcac.collaboration" = "none"
[[variants]]
"fedcac.tau" = 0.2
"""
    found = points(write(tmp_path / "s.toml", text))
    assert [(p.varying["variant"], p.parsed.params.beta) for p in found] == [
        ("alone", 4),
        ("tau=0.2", 4),
        ("alone", 15),
        ("tau=0.2", 15),
    ]
    assert {p.parsed.scale for p in found} == {"small"}
    assert {p.parsed.num_server_rounds for p in points(tmp_path / "s.toml", **{"num-server-rounds": 3})} == {3}


def test_several_grids_are_put_together_without_duplicates(tmp_path: Path) -> None:
    text = """
[settings]
num-clients = 4
[[grid]]
method = ["fedavg", "local"]
seed = [0]
[[grid]]
method = ["local"]
seed = [0, 1]
"""
    found = points(write(tmp_path / "s.toml", text))
    assert [p.varying for p in found] == [
        {"method": m, "seed": s} for m, s in (("fedavg", 0), ("local", 0), ("local", 1))
    ]
    one = points(write(tmp_path / "s.toml", text.replace("[[grid]]", "[grid]", 1).partition("[[grid]]")[0]))
    # a run is the same, whichever grid it is in
    assert [p.name for p in one] == [p.name for p in found[:2]]
    with rejected(UserError, "", "grid", "must be tables", "got 3"):
        sweep.read_sweep(write(tmp_path / "s.toml", "grid = [3]\n"))


def test_a_single_value_in_a_grid_is_a_list_of_one(tmp_path: Path) -> None:
    single = 'seed = 3\nmethod = "fedcac"\n[grid.fedcac]\ntau = 0.3\n'
    listed = 'seed = [3]\nmethod = ["fedcac"]\n[grid.fedcac]\ntau = [0.3]\n'
    one, same = (points(write(tmp_path / "s.toml", f"[grid]\n{grid}")) for grid in (single, listed))
    assert one == same and dict(one[0].varying) == {"seed": 3, "method": "fedcac", "fedcac.tau": 0.3}
    with rejected(UserError, "", "grid", "list of values", "got []"):
        sweep.read_sweep(write(tmp_path / "s.toml", "[grid]\nseed = []\n"))


COLUMN = "fedobp/fashion-mnist-dirichlet-0.1"


@pytest.mark.parametrize(
    "text",
    [
        f'presets = "{COLUMN}/fed[ao]*"\n[grid]\nseed = [0, 1]\n',
        f'presets = ["{COLUMN}", "{COLUMN}/fedavg", "{COLUMN}/fedala"]\n[grid]\nseed = [0, 1]\n',
        f'[grid]\npresets = "{COLUMN}/fed[ao]*"\nseed = [0, 1]\n',
        f'presets = "demo"\n[[grid]]\npresets = ["{COLUMN}/fedobp", "{COLUMN}/fed[a]*"]\nseed = [0, 1]\n',
    ],
)
def test_every_preset_that_a_file_names_is_a_value_of_the_axis(tmp_path: Path, text: str) -> None:
    found = points(write(tmp_path / "s.toml", text))
    runs = {(str(p.varying["preset"]), p.varying["seed"], p.parsed.method) for p in found}
    names = {"fedobp": COLUMN, "fedavg": f"{COLUMN}/fedavg", "fedala": f"{COLUMN}/fedala"}
    assert runs == {(name, seed, method) for method, name in names.items() for seed in (0, 1)}


def test_a_grid_without_presets_takes_the_files(tmp_path: Path) -> None:
    text = f'presets = "{COLUMN}/fed[a]*"\n[[grid]]\nseed = [0]\n[[grid]]\npreset = "{COLUMN}"\nseed = [1]\n'
    found = points(write(tmp_path / "s.toml", text))
    assert [(p.parsed.method, p.parsed.seed) for p in found] == [("fedala", 0), ("fedavg", 0), ("fedobp", 1)]


def test_presets_that_name_none_are_refused(tmp_path: Path) -> None:
    text = (
        f'preset = "demo"\npresets = "{COLUMN}x/*"\n[[grid]]\npresets = [1]\n[[grid]]\nseed = 0\n'
        '[[grid]]\npreset = "demo"\npresets = "demo"\n'
    )
    with pytest.raises(UserError) as caught:
        sweep.read_sweep(write(tmp_path / "s.toml", text))
    for words in (
        "preset, presets: exclude each other",
        "grid: preset, presets: exclude each other",
        f"presets: none matches '{COLUMN}x/*'; did you mean {COLUMN}/* or ",
        "presets: must be a preset's name or a pattern, or a list of them, got [1]",
    ):
        assert str(caught.value).count(f"  {words}") == 1, words


def test_wrong_files_are_refused_with_all_their_problems(tmp_path: Path) -> None:
    text = 'preset = 3\nsede = 1\nscale = "tiny"\n[settings]\nrun-name = "x"\nseed = [1]\n[grid]\nmethod = []\n'
    with pytest.raises(UserError) as caught:
        sweep.read_sweep(write(tmp_path / "s.toml", text))
    for words in (
        "preset: expected",
        "sede: not a part",
        "scale: must be",
        "run-name: cannot be set",
        "seed: must be one value",
        "method: must be a value or a list",
    ):
        assert words in str(caught.value)
    with rejected(UserError, "", "named 'a'"):
        sweep.read_sweep(write(tmp_path / "s.toml", '[[variants]]\nname = "a"\n[[variants]]\nname = "a"\nseed = 1\n'))


@pytest.mark.parametrize("file", sorted(p.name for p in (ROOT / "sweeps").glob("*.toml")))
def test_sweep_files_expand(file: str) -> None:
    plan = sweep.read_sweep(ROOT / "sweeps" / file)
    full = sweep.expand(plan, METHOD_PARAMS, Path("/out"), {}, dict)
    assert len(full) > 1
    small = sweep.expand(dataclasses.replace(plan, scale="small"), METHOD_PARAMS, Path("/out"), {}, dict)
    assert {p.parsed.scale for p in small} == {"small"}


def test_problems_of_all_combinations_are_reported_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    run = lambda *words: command("sweep", "s.toml", "--in-process", *words)  # noqa: E731
    write(tmp_path / "s.toml", '[grid]\nmethod = ["fedavg", "fedcax"]\nlearning-rate = [0.1, -1.0]\nsede = [0]\n')
    code, _, err = run()
    assert code == 2
    for words in (
        "method: must be one of",
        "learning-rate: must be > 0",
        "sede: unknown key; did you mean seed?",
        "in fedavg,learning-rate=-1.0,sede=0; fedcax,learning-rate=-1.0,sede=0",
    ):
        assert err.count(words) == 1, err
    write(tmp_path / "s.toml", '[settings]\npartition = "pathological"\n[grid]\nclasses-per-client = [2, 11, 12]\n')
    code, _, err = run()
    assert code == 2
    assert err.count("classes-per-client: must be at most") == 2 and "in classes-per-client=11" in err
    assert [p.name for p in tmp_path.iterdir()] == ["s.toml"]


def test_a_pattern_of_presets_needs_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = command("sweep", "--preset", f"{COLUMN}/*", "--seeds", "0, 1,2", "--dry-run")
    names = out.splitlines()
    assert code == 0 and len(names) == len(set(names)) == 13 * 3
    assert sum(name.startswith("fedobp-fashion-mnist-dirichlet-0.1,seed=") for name in names) == 3
    same = points(write(tmp_path / "s.toml", f'presets = "{COLUMN}/*"\n[grid]\nseed = [0, 1, 2]\n'))
    assert {p.name for p in same} == set(names)
    assert command("sweep", "--preset", COLUMN, "--dry-run")[1].startswith("fedobp-fashion-mnist-dirichlet-0.1-")
    for words, problem in {
        ("--preset", "fedobp/fashon*/*"): "none matches 'fedobp/fashon*/*'; did you mean fedobp/",
        ("s.toml", "--preset", "demo"): "FILE and --preset exclude each other: got s.toml and demo",
        ("s.toml", "--seeds", "1"): "--seeds: needs --preset",
        (): "name a sweep file, or presets with --preset PATTERN",
        ("--preset", "demo", "--seeds", "1,1"): "must be distinct integers >= 0",
        ("--preset", "demo", "--seeds", "0,-1"): "must be distinct integers >= 0",
        ("--preset", "demo", "--seeds", "1.0"): "must be distinct integers >= 0",
        ("--preset", "demo", "--seeds", ""): "must be distinct integers >= 0",
        ("--preset", "demo", "--seeds", "1", "--set", "seed=2"): "--seeds and --set seed exclude each other",
        ("--preset", "demo", "--forecast", "--slurm"): "--forecast and --slurm exclude each other",
        ("--preset", "demo", "--forecast", "--dry-run"): "--forecast and --dry-run exclude each other",
    }.items():
        code, _, err = command("sweep", *words)
        assert code == 2 and problem in err, err
    assert [path.name for path in tmp_path.iterdir()] == ["s.toml"]


def test_a_slurm_task_of_a_pattern_names_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = command("sweep", "--preset", "dem?", "--seeds", "3,4", "--in-process", "--slurm", "--scale", "small")
    assert code == 0, err
    text = (tmp_path / "runs" / "dem" / "array.sbatch").read_text()
    assert (
        mentions(text, "sweep '--preset=dem?' --seeds=3,4")
        and "--scale=small" in text
        and "#SBATCH --array=0-1" in text
    )


# Runs


def test_a_pattern_is_measured_first_and_goes_on_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COROLLA_STATE_DIR", str(tmp_path / "state"))
    sets = ("num-clients=2", "local-epochs=1", "train-samples=20", "num-server-rounds=40")
    own = (*(word for pair in sets for word in ("--set", pair)), "--in-process")
    code, out, err = command("sweep", "--preset", "dem?", *own, "--set", "num-server-rounds=4", "--forecast")
    assert code == 0 and mentions(out, "no estimate", "no round is", "recorded", "fewer than 40", "left"), err
    code, out, err = command("sweep", "--preset", "dem?", *own, "--forecast")
    # the end says how to go on, with all that was chosen
    full = shlex.join(["corolla", "sweep", "--preset", "dem?", *own])
    assert mentions(out.splitlines()[-1], "next", f"{full} # 1", "not finished", "does them")
    assert code == 0 and mentions(out, "first 2", "1 run") and mentions(out, "for 1 run", "speed", "rounds so far"), err
    directory = tmp_path / "runs" / "dem"
    (folder,) = (path.parent for path in directory.glob("*/config.toml"))
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2 and not stamps(directory)
    # the first rounds are none of the sweep's runs
    assert not re.search(r"^\d+/\d+ ", out, re.MULTILINE) and f"first rounds: {folder.name}" in out
    code, out, err = command("sweep", "--preset", "dem?", "--seeds", "0,1", *own)
    assert code == 0 and mentions(out, "2 runs", "0 finished before", "2 to do"), err
    assert f"resumes {folder} after round 2" in out and len(stamps(directory)) == 2
    again = command("sweep", "--preset", "demo", "--seeds", "0,1", "--output-dir", directory, *own)[1]
    assert mentions(again, "2 runs", "2 finished before", "0 to do")
    done = command("sweep", "--preset", "dem?", "--seeds", "0,1", *own, "--forecast")[1]
    assert mentions(done.splitlines()[-1], "all runs", "finished")
    # rounds that fail are no estimate
    bad = ("--set", "learning-rate=1e30", "--set", "round-retries=0")
    code, out, err = command("sweep", "--preset", "dem?", *own, *bad, "--output-dir", "bad", "--forecast")
    assert code == 1 and "failed:" in err and "no estimate" not in out


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    # a sweep in this process sets it: restored after each test
    monkeypatch.setenv(sweep.VARIABLE, "")


def stamps(directory: Path) -> dict[str, int]:
    return {p.parent.name: p.stat().st_mtime_ns for p in directory.glob("*/summary.json")}


# twenty seconds on an idle machine
@pytest.mark.timeout(900)
@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_killed_sweep_goes_on_from_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command, jobs: int
) -> None:
    # the first of two must not be done when the second begins, on a busy machine
    rounds = 12 if jobs == 1 else 100
    text = SMALL.format(rounds=rounds).replace("seed = [0, 1]", "seed = [3]")
    write(tmp_path / "s.toml", text)
    words = [*COROLLA, "sweep", "s.toml", "--in-process", "--set", "checkpoint-every=1", "--jobs", str(jobs)]
    directory = tmp_path / "runs" / "s"

    def recorded() -> dict[str, list[str]]:
        return {p.parent.name: p.read_text().split("\n")[:-1] for p in directory.glob("*/metrics.jsonl")}

    process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL, start_new_session=True)
    wait_for(
        lambda: process.poll() is not None or sum(len(x) > 2 for x in recorded().values()) >= jobs, 120, every=0.002
    )
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = recorded()
    assert len(before) == jobs and all(2 < len(lines) < rounds for lines in before.values()) and not stamps(directory)

    now = ("--set", "round-timeout=77", "--set", "data-dir=data", "--set", "state-dir=new")
    monkeypatch.chdir(tmp_path)
    code, out, err = command(*words[len(COROLLA) :], *now)
    assert code == 0, err
    after = recorded()
    settings = {name: RecordedRun(directory / name).settings for name in after}
    said = {(its["round-timeout"], its["data-dir"]) for its in settings.values()}
    assert said == {(77, str(tmp_path / "data"))}, "what this command says was lost"
    assert all(
        its["state-dir"] == str(tmp_path / ("state" if name in before else "new")) for name, its in settings.items()
    )
    assert (
        len(after) == 2
        and all(len(lines) == rounds for lines in after.values())
        and not (directory / "unfinished").exists()
    )
    for name, lines in before.items():
        assert f"resumes {directory / name} after round " in out
        # its seconds would be others
        assert after[name][: len(lines)] == lines, "a round was repeated"

    plain = ("sweep", "s.toml", "--in-process", "--output-dir", "plain", "--set", "state-dir=elsewhere")
    assert command(*plain)[0] == 0
    found = [
        {p.parent.name: json.loads(p.read_text())["digest"] for p in where.glob("*/summary.json")}
        for where in (directory, tmp_path / "plain")
    ]
    assert len(found[0]) == 2 and found[0] == found[1]


def test_a_damaged_checkpoint_is_not_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "s.toml", SMALL.format(rounds=1).replace("seed = [0, 1]", ""))
    sweep_it = lambda: command("sweep", "s.toml", "--in-process", "--set", "keep-state=true")  # noqa: E731
    assert sweep_it()[0] == 0
    directory = tmp_path / "runs" / "s"
    local = next(directory.glob("local-*"))
    (local / "summary.json").unlink()
    for file in (local / "checkpoints").glob("*.safetensors"):
        os.truncate(file, 8)
    code, out, _ = sweep_it()
    assert code == 0 and mentions(out, "2 runs", "1 finished before", "1 to do") and "resumes" not in out
    assert {p.name for p in (directory / "unfinished").iterdir()} == {local.name}


def test_folders_of_runs_are_recognised_by_their_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    text = SMALL.format(rounds=1).replace("seed = [0, 1]", "")
    write(tmp_path / "s.toml", text)
    sweep_it = lambda: command("sweep", "s.toml", "--in-process")  # noqa: E731
    code, out, _ = sweep_it()
    assert code == 0 and "2 to do" in out
    directory = tmp_path / "runs" / "s"
    fedavg, local = (next(directory.glob(f"{method}-*")) for method in ("fedavg", "local"))
    fedavg.rename(directory / "renamed")
    (local / "summary.json").unlink()
    # of a job array that has not begun; nobody's
    for name in ("logs", "mine"):
        (directory / name).mkdir()
    shutil.copytree(local, directory / "unfinished" / local.name)
    code, out, _ = sweep_it()
    assert code == 0 and mentions(out, "2 runs", "1 finished before", "1 to do")
    assert {p.name for p in (directory / "unfinished").iterdir()} == {local.name, f"{local.name}-2"}
    assert (directory / "logs").is_dir() and (directory / "mine").is_dir()
    (local / "summary.json").rename(tmp_path / "summary")
    write(tmp_path / "s.toml", text.replace("local-epochs = 1", "local-epochs = 2"))
    code, out, _ = sweep_it()
    # what is not asked for waits
    assert code == 0 and mentions(out, "2 runs", "0 finished before", "2 to do") and "set aside" not in out
    (tmp_path / "summary").rename(local / "summary.json")
    assert (directory / "renamed" / "summary.json").is_file() and (local / "summary.json").is_file()


def test_a_failed_run_does_not_end_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "s.toml", SMALL.format(rounds=1).replace("seed = [0, 1]", ""))
    real = one_run.run_in_process

    def fails_for_fedavg(config: Any, parsed: Any, until: int) -> Path:
        if parsed.method == "fedavg":
            raise RuntimeError("no such luck")
        return real(config, parsed, until)

    monkeypatch.setattr(one_run, "run_in_process", fails_for_fedavg)
    code, out, err = command("sweep", "s.toml", "--in-process")
    assert code == 1 and mentions(err, "RuntimeError", "no such luck")
    results = (tmp_path / "runs" / "s" / "results.md").read_text()
    assert "1 run failed" in results and "| fedavg | 0 |" in results and "| local | 1 |" in results


def test_two_sweeps_do_not_share_a_directory(tmp_path: Path) -> None:
    with sweep.locked(tmp_path / "out"), rejected(UserError, "", "another `corolla sweep`", "running"):
        with sweep.locked(tmp_path / "out"):
            pass


def test_what_a_killed_sweep_left_running_is_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    ours = subprocess.Popen(command, env=dict(os.environ, **{sweep.VARIABLE: str(tmp_path)}))
    other = subprocess.Popen(command, env=dict(os.environ, **{sweep.VARIABLE: str(tmp_path / "other")}))
    try:
        time.sleep(0.2)
        assert sweep.end_leftovers(tmp_path) == 1
        assert ours.poll() is not None and other.poll() is None
        assert os.environ[sweep.VARIABLE] == str(tmp_path)
    finally:
        for process in (ours, other):
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "must have a preset, presets, settings, a grid or variants, and has nothing"),
        ("[grid]\nseed = [0, 1, 0]\n", r"grid: seed: must name every value once, got \[0, 1, 0\]"),
        ("[settings]\nseed = 1\n[grid]\nseed = [0, 2]\n", "settings: seed: grid sets it in every run"),
        ("[settings]\nseed = 1\n[[variants]]\nseed = 2\n", "settings: seed: variants sets it in every run"),
    ],
)
def test_values_that_no_run_would_have_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        sweep.read_sweep(write(tmp_path / "s.toml", text))


def test_a_setting_that_one_of_several_grids_changes_is_the_others(tmp_path: Path) -> None:
    text = "[settings]\nseed = 1\n[[grid]]\nseed = [0]\n[[grid]]\nlocal-epochs = [1, 2]\n"
    assert [p.parsed.seed for p in points(write(tmp_path / "s.toml", text))] == [0, 1, 1]


# A sweep as a Slurm job array: cut off and submitted again, every run goes on, and none is repeated -------------------

SWEEP = """
[settings]
dataset = "digits"
num-clients = 3
num-server-rounds = 60
train-samples = 24
test-samples = 10
local-epochs = 1
batch-size = 8
device = "cpu"
checkpoint-every = 1
state-dir = "state"

[grid]
method = ["fedcac", "fedavg"]
"""


@pytest.fixture
def corolla(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: Command) -> Callable[..., str]:
    """The command in a directory of its own: what it says when all is well."""
    monkeypatch.chdir(tmp_path)

    def invoke(*words: str) -> str:
        code, out, err = command(*words)
        assert code == 0, err
        return out

    return invoke


def digests(directory: Path) -> dict[str, Any]:
    return {path.parent.name: json.loads(path.read_text())["digest"] for path in directory.glob("*/summary.json")}


def cut_off(script: Path, directory: Path, task: int, folder: Path, how: signal.Signals) -> str:
    """Start a task and end it once it has a checkpoint; its output."""
    job = slurm.sbatch(script, directory=directory, task=task)
    wait_for(lambda: job.poll() is not None or max(checkpoint.rounds(folder), default=0) >= 1, 60, every=0.002)
    job.send_signal(how)
    out = job.communicate()[0]
    assert checkpoint.rounds(folder)[-1] >= 1 and not (folder / "summary.json").exists(), out
    return str(out)


@pytest.mark.parametrize(
    "how",
    [
        # as Slurm at the end of a job's time
        pytest.param(signal.SIGTERM, marks=pytest.mark.nightly),
        pytest.param(signal.SIGKILL, marks=pytest.mark.nightly),
    ],
)
def test_an_array_goes_on_where_it_was_cut_off(
    corolla: Callable[..., str], tmp_path: Path, how: signal.Signals
) -> None:
    (tmp_path / "s.toml").write_text(SWEEP)
    said = corolla("sweep", "s.toml", "--in-process", "--slurm", "--set", "learning-rate=0.05", "--jobs", "2")
    script = tmp_path / "runs" / "s" / "array.sbatch"
    assert f"sbatch {script}" in said and digests(script.parent) == {}
    asked = slurm.options(script)
    assert asked["--array"] == "0-1%2" and asked["--cpus-per-task"] == "1" and "--gpus-per-task" not in asked
    names = corolla("sweep", "s.toml", "--dry-run", "--set", "learning-rate=0.05").split()
    folders = [script.parent / name for name in names]

    cut_off(script, tmp_path, 0, folders[0], how)
    whole = slurm.sbatch(script, directory=tmp_path, task=1)
    out = whole.communicate()[0]
    assert whole.returncode == 0 and set(digests(script.parent)) == {names[1]}, out
    written = (folders[1] / "metrics.jsonl").stat().st_mtime_ns
    assert not (script.parent / "results.csv").exists()

    for task in slurm.tasks(script):
        done_before = checkpoint.rounds(folders[task])[-1]
        again = slurm.sbatch(script, directory=tmp_path, task=task)
        out = again.communicate()[0]
        assert again.returncode == 0, out
        if task == 1:
            assert f"finished before: {folders[1]}" in out
        else:
            assert f"resumes {folders[task]}" in out and f"resumed after round {done_before}" in out
    assert (folders[1] / "metrics.jsonl").stat().st_mtime_ns == written
    assert (script.parent / "results.csv").exists() and not (
        script.parent / "unfinished"
    ).exists()  # the last one's table

    corolla("sweep", "s.toml", "--in-process", "--output-dir", "plain", "--set", "learning-rate=0.05")
    assert digests(script.parent) == digests(tmp_path / "plain") and len(digests(script.parent)) == 2


def test_a_run_without_a_checkpoint_is_set_aside(corolla: Callable[..., str], command: Command, tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(SWEEP.replace("60", "1").replace(', "fedavg"', ""))
    (name,) = corolla("sweep", "s.toml", "--dry-run").split()
    (tmp_path / "runs" / "s" / name).mkdir(parents=True)
    assert "unfinished, set aside" in corolla("sweep", "s.toml", "--in-process", "--only", name)
    assert (tmp_path / "runs" / "s" / "unfinished" / name).is_dir() and digests(tmp_path / "runs" / "s")
    code, _, err = command("sweep", "s.toml", "--only", "fedprox")
    assert code == 2 and mentions(err, "s.toml has no", "run 'fedprox'")


def test_a_run_goes_on_under_the_name_that_another_version_gave_it(
    corolla: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "s.toml").write_text(SWEEP.replace("60", "3").replace(', "fedavg"', ""))
    monkeypatch.setenv(sweep.VARIABLE, "")
    directory = tmp_path / "runs" / "s"
    (point,) = sweep.expand(sweep.read_sweep(Path("s.toml")), METHOD_PARAMS, directory, {}, ready)
    assert run_points([point], None, False, until=2) == {}
    before = directory / "fedcac-000000"
    (directory / point.name).rename(before)
    said = corolla("sweep", "s.toml", "--in-process", "--only", point.name)
    assert f"resumes {before} after round 2" in said and said.count("round 2/3: acc") == 1 == said.count(
        "round 3/3: acc"
    )
    assert set(digests(directory)) == {before.name} and "finished before" in corolla(
        "sweep", "s.toml", "--only", point.name
    )


def test_single_runs_share_a_directory_that_a_whole_sweep_has_alone(tmp_path: Path) -> None:
    with sweep.locked(tmp_path, shared=True), sweep.locked(tmp_path, shared=True):
        with rejected(UserError, "", "another `corolla sweep`", "running"), sweep.locked(tmp_path):
            pass
    with sweep.locked(tmp_path), rejected(UserError, "", "another `corolla sweep`", "running"):
        with sweep.locked(tmp_path, shared=True):
            pass
