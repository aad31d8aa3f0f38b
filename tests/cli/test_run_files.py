"""Files of config keys: what they start from, what they extend, and where their paths lead."""

from __future__ import annotations

from pathlib import Path

import pytest

from corolla import presets
from corolla.api.settings import read_preset, resolve
from corolla.experiments import sweep
from fl_app.errors import UserError
from tests.conftest import Command
from tests.facts import mentions

PAPERS = "fedcac/cifar10-dirichlet-0.1"


@pytest.fixture
def write(tmp_path: Path):  # type: ignore[no-untyped-def]
    def written(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return written


def test_a_file_wins_over_what_it_extends_and_that_over_a_preset(write) -> None:  # type: ignore[no-untyped-def]
    write("base.toml", f'preset = "{PAPERS}"\nseed = 1\nbatch-size = 7\n[fedcac]\ntau = 0.1\nbeta = 3\n')
    file = write("sub/mine.toml", 'extends = "../base.toml"\nseed = 2\nfedcac.beta = 4\n')
    settings = presets.read_preset(str(file))
    assert settings == {
        **presets.read_preset(PAPERS),
        "seed": 2,
        "batch-size": 7,
        "fedcac.tau": 0.1,
        "fedcac.beta": 4,
    }
    # a preset is a key that is inherited like any other
    other = "fedcac/cifar10-pathological-2"
    file.write_text(f'preset = "{other}"\nextends = "../base.toml"\n')
    settings = presets.read_preset(str(file))
    assert settings["partition"] == "pathological" and (settings["seed"], settings["fedcac.tau"]) == (1, 0.1)
    assert not {"preset", "extends"} & set(settings)


def test_a_chain_of_files_and_the_users_own_beside_them(write, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    write("a/own_model.py", "def build(in_channels, num_classes, image_size):\n    raise NotImplementedError\n")
    write("a/a.toml", 'model = "own_model:build"\nseed = 1\n')
    write("b/b.toml", 'extends = "../a/a.toml"\nnum-clients = 4\n')
    file = write("c/c.toml", 'extends = "../b/b.toml"\nseed = 3\n')
    assert [path.name for path in presets.read_file(file).files] == ["c.toml", "b.toml", "a.toml"]
    settings = read_preset(str(file))
    assert settings == {"model": "own_model:build", "seed": 3, "num-clients": 4}
    from fl_app import plugins

    assert "a/own_model.py" in plugins.origin("own_model:build")
    assert resolve(settings).seed == 3


def test_what_a_file_cannot_extend_is_named(write, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    a, b = write("a.toml", 'extends = "b.toml"\n'), write("b.toml", 'extends = "sub/../a.toml"\n')
    write("sub/none", "")
    cases = {
        'extends = "b.toml"\n': f"extends: files extend each other: {a} -> {b} -> {tmp_path}/sub/../a.toml",
        'extends = "a.toml"\n': f"extends: files extend each other: {a} -> {a}",
        'extends = "bb.toml"\n': f"{a}: extends: {tmp_path}/bb.toml: no such file or directory; did you mean {tmp_path}/b.toml?",
        "extends = 3\n": f"{a}: extends: expected a string, got 3",
        "preset = [1]\n": f"{a}: preset: expected a string, got [1]",
        'preset = "b.toml"\n': f"{a}: preset: no preset 'b.toml'; `extends` names a file",
        'preset = "fedcac/cifar10-dirichlt-0.1"\n': f"no preset 'fedcac/cifar10-dirichlt-0.1'; did you mean {PAPERS}?",
        'extends = "s.toml"\n': f"{a}: extends: {tmp_path}/s.toml is a sweep, not a file of config keys",
    }
    write("s.toml", "[grid]\nseed = [1]\n")
    for text, message in cases.items():
        a.write_text(text)
        with pytest.raises(UserError) as caught:
            presets.read_preset(str(a))
        assert str(caught.value).endswith(message)


def test_paths_are_relative_to_the_file_that_names_them(write, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    write("base/base.toml", 'dataset = "folder:images"\ndata-dir = "../data"\npartition = "file:/abs/split.npz"\n')
    file = write(
        "mine/mine.toml",
        'extends = "../base/base.toml"\noutput-dir = "out"\nstate-dir = "~/state"\ninitial-weights = "w.pt"\n',
    )
    assert presets.read_preset(str(file)) == {
        "dataset": f"folder:{tmp_path}/base/images",
        "data-dir": f"{tmp_path}/data",
        "partition": "file:/abs/split.npz",
        "output-dir": f"{tmp_path}/mine/out",
        "state-dir": str(Path.home() / "state"),
        "initial-weights": f"{tmp_path}/mine/w.pt",
    }


def test_paths_of_a_sweep_are_relative_to_its_file(write, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    file = write(
        "sweeps/s.toml",
        'preset = "mine.toml"\n[settings]\ndata-dir = "d"\n[grid]\ndataset = ["npz:a.npz", "digits"]\n'
        '[[variants]]\ninitial-weights = "w.pt"\n',
    )
    write("sweeps/mine.toml", "seed = 5\n")
    read = sweep.read_sweep(file)
    here = tmp_path / "sweeps"
    assert read.settings == {"data-dir": f"{here}/d"} and read.preset == f"{here}/mine.toml"
    assert list(read.grids) == [{"dataset": [f"npz:{here}/a.npz", "digits"]}]
    assert list(read.variants) == [{"initial-weights": f"{here}/w.pt"}]


def test_the_command_runs_such_a_file_from_anywhere(write, corolla: Command, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    write("conf/base.toml", 'preset = "demo"\nmethod = "local"\nnum-server-rounds = 1\noutput-dir = "../out"\n')
    file = write("conf/mine.toml", 'extends = "base.toml"\nrun-name = "one"\nlocal-epochs = 1\n')
    (tmp_path / "elsewhere").mkdir()
    code, _, err = corolla("run", file, "--in-process", "--clients", "2")
    assert code == 0 and (tmp_path / "out" / "one" / "summary.json").is_file(), err
    code, out, _ = corolla("run", file, "--dry-run", "--set", "local-epochs=3")
    assert code == 0 and "local-epochs = 3" in out and 'method = "local"' in out


def test_a_sweep_starts_from_a_run_file_by_preset(write, corolla: Command) -> None:  # type: ignore[no-untyped-def]
    base = write("base.toml", "seed = 3\n")
    sweep = write("s.toml", f'extends = "{base.name}"\n[grid]\nmethod = ["fedavg", "local"]\n')
    code, out, err = corolla("sweep", str(sweep), "--dry-run")
    assert code == 2 and out == "" and mentions(err, 'preset = "base.toml"', "run file")
    assert not mentions(err, "keys of runs", "belong")
