"""site.toml: how it is read, and which runs each of its rules keeps out."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy import site, supernode
from deploy.site import Site
from fl_app import weight_files
from fl_app.config import RunConfig
from fl_app.errors import DeploymentError, UserError
from fl_app.keys import specs
from fl_app.paths import path_keys
from fl_app.site_directory import site_directory
from tests.conftest import Command
from tests.facts import rejected
from tests.fl_app.test_models import small
from tests.fl_app.test_weight_files import INDEX, SHARDS, in_shards

HASH = "ab" * 32


def written(directory: Path, text: str, mode: int = 0o644) -> Path:
    path = directory / "site.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_every_key_is_read(tmp_path: Path) -> None:
    text = (
        f'applications = ["{HASH}"]\nmethods = ["fedcac"]\nmin-samples = 50\nmax-upload = 20_000_000\n'
        'max-evaluations = 9\nreadable-paths = ["/data"]\nconfine = true\nsite-dir = "/notes"\n'
        'approval = "ask"\ninitial-weights = "/w"\n[bounds]\nlocal-epochs = {max = 10}\ndevice = {one-of = ["cpu"]}\n'
        "[bounds.fedcac]\ntau = {min = 0.1, max = 0.9}\n"
    )
    path = written(tmp_path, text)
    bounds: dict[str, Any] = {
        "local-epochs": {"max": 10},
        "device": {"one-of": ["cpu"]},
        "fedcac.tau": {"min": 0.1, "max": 0.9},
    }
    assert site.read_site(path) == Site(
        (HASH,),
        ("fedcac",),
        50,
        20_000_000,
        ("/data",),
        True,
        "ask",
        bounds,
        str(path),
        "/notes",
        9,
        initial_weights="/w",
    )
    assert site.read_site(written(tmp_path, "")) == Site(source=str(path))


def test_problems_are_reported_together(tmp_path: Path) -> None:
    text = 'site-dir = "notes"\ninitial-weights = "w.safetensors"\n'
    text += 'method = ["x"]\nmin-samples = 0\napproval = "maybe"\nreadable-paths = ["data"]\napplications = ["12"]\n'
    text += "[bounds]\ntau = 3\n"
    with pytest.raises(UserError) as error:
        site.read_site(written(tmp_path, text))
    for expected in (
        "method: unknown key; did you mean methods?",
        "min-samples: must be an integer >= 1, got 0",
        "approval: must be ask or none, got 'maybe'",
        "readable-paths: must be a list of absolute paths",
        "site-dir: must be an absolute path, got 'notes'",
        "initial-weights: must be an absolute path, got 'w.safetensors'",
        "applications: must be a list of sha256 values",
        "bounds: must be a table of run-config keys",
    ):
        assert expected in str(error.value)


def test_a_file_that_others_may_change_is_no_rule(tmp_path: Path) -> None:
    with rejected(DeploymentError, "site.toml", "others may change", "mode 664"):
        site.read_site(written(tmp_path, "", 0o664))


def test_where_the_file_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COROLLA_SITE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert site.find() is None
    (tmp_path / "corolla").mkdir()
    usual = written(tmp_path / "corolla", "")
    assert site.find() == usual
    monkeypatch.setenv("COROLLA_SITE", "/etc/site.toml")
    assert site.find() == Path("/etc/site.toml") and site.find("/given.toml") == Path("/given.toml")


def test_rules_that_cannot_be_seen_are_not_no_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COROLLA_SITE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "corolla").mkdir()
    usual = tmp_path / "corolla" / "site.toml"
    usual.symlink_to(tmp_path / "gone.toml")
    found = site.find()
    assert found == usual
    with pytest.raises(UserError):
        site.read_site(usual)
    # a directory in which no file can be seen, as another account's with mode 0700
    monkeypatch.setattr(Path, "lstat", lambda path: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    with pytest.raises(UserError, match="cannot be seen"):
        site.find()
    # a given directory holds the rules, or there is an error
    assert site.find(str(tmp_path)) == tmp_path / "site.toml"
    for given in (tmp_path, tmp_path / "misspelt"):
        with pytest.raises(UserError):
            site.read_site(site.find(str(given)) or Path())


def test_an_empty_name_is_not_no_rules(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COROLLA_STATE_HOME", str(tmp_path))
    words = [sys.executable, "-m", "deploy.supernode", "--name", "a", "--site", "", "--"]
    done = subprocess.run(words, capture_output=True, text=True)
    for code, _, said in ((done.returncode, "", done.stderr), command("node", "start", "a", "--site", "")):
        assert code == 2 and "--site" in said and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "rules, config, expected",
    [
        (Site(), {"method": "fedavg", "state-dir": "/anywhere"}, ""),
        (Site(applications=(HASH,)), {}, ""),
        (Site(applications=("cd" * 32,)), {}, f"applications: {HASH} is not among"),
        (Site(applications=()), {}, "applications:"),
        (Site(methods=("fedcac", "fedobp")), {"method": "fedavg"}, "methods: fedavg is not among fedcac, fedobp"),
        (Site(methods=("fedcac",)), {}, ""),  # the default
        (Site(bounds={"local-epochs": {"max": 10}}), {"local-epochs": 10}, ""),
        (
            Site(bounds={"local-epochs": {"max": 10}}),
            {"local-epochs": 11},
            "bounds: local-epochs must be at most 10, got 11",
        ),
        (Site(bounds={"local-epochs": {"max": 4}}), {}, "bounds: local-epochs must be at most 4, got 5"),  # by default
        (
            Site(bounds={"learning-rate": {"min": 0.01}}),
            {"learning-rate": 0.001},
            "bounds: learning-rate must be at least",
        ),
        (
            Site(bounds={"learning-rate": {"max": 1}}),
            {"learning-rate": float("nan")},
            "bounds: learning-rate must be a number",
        ),
        (
            Site(bounds={"learning-rate": {"max": 1}}),
            {"learning-rate": "0.1"},
            "bounds: learning-rate must be a number",
        ),
        (
            Site(bounds={"device": {"one-of": ["cpu"]}}),
            {"device": "cuda"},
            "bounds: device must be one of cpu, got cuda",
        ),
        (Site(bounds={"fedcac.tau": {"max": 0.5}}), {"method": "fedavg", "fedcac.tau": 0.9}, ""),  # not this run's
        (Site(bounds={"fedcac.tau": {"max": 0.5}}), {"method": "fedcac", "fedcac.tau": 0.9}, "bounds: fedcac.tau"),
        (
            Site(bounds={"local-epochs": {"max": 10}}),
            {"local-epochs": 1, "local-steps": 10**9},
            "bounds: local-steps takes the place of local-epochs, which has a bound here, got 1000000000",
        ),
        (Site(bounds={"local-epochs": {"max": 10}, "local-steps": {"max": 50}}), {"local-steps": 50}, ""),
        (
            Site(bounds={"local-epochs": {"max": 10}, "local-steps": {"max": 50}}),
            {"local-steps": 51},
            "bounds: local-steps",
        ),
        (Site(bounds={"local-steps": {"max": 50}}), {}, ""),
        # what other keys imply
        (Site(bounds={"partition": {"one-of": ["dirichlet-client"]}}), {"client": "ward"}, "bounds: partition must be"),
        (Site(confine=True), {"state-dir": ""}, ""),
        (Site(confine=True), {"state-dir": "/state"}, "confine: state-dir is this site's to choose, got /state"),
        (Site(bounds={"epochs": {"max": 1}}), {}, "bounds: epochs is not in the run's config"),
    ],
)
def test_rules(rules: Site, config: dict[str, Any], expected: str) -> None:
    found = site.refusal(rules, HASH, config)
    assert found.startswith(expected) and bool(found) == bool(expected)


def test_paths_of_a_run_must_lie_where_the_site_says(tmp_path: Path) -> None:
    inside, outside = tmp_path / "open", tmp_path / "closed"
    inside.mkdir()
    outside.mkdir()
    (inside / "link").symlink_to(outside)
    rules = Site(readable_paths=(str(inside),))
    good = {"dataset": f"npz:{inside}/x.npz", "state-dir": str(inside / "state"), "data-dir": "", "partition": "iid"}
    assert site.refusal(rules, HASH, good) == "" and site.refusal(rules, HASH, {"dataset": "digits"}) == ""
    for key, value in (
        ("dataset", f"folder:{outside}"),
        ("dataset", f"tiny-imagenet:{inside}/../closed"),
        ("dataset", f"npz:{inside}/link/x.npz"),
        ("partition", f"file:{outside}/p.npz"),
        ("state-dir", str(outside)),
        ("data-dir", "~"),
        ("state-dir", "state"),
        ("initial-weights", str(outside / "internal.safetensors")),
    ):
        assert site.refusal(rules, HASH, {key: value}).startswith(f"readable-paths: {key}"), (key, value)
    assert site.refusal(Site(readable_paths=()), HASH, {"state-dir": "/tmp"}).startswith("readable-paths: state-dir")
    # a path of the run that nobody opens here
    own = Site(readable_paths=(), initial_weights=str(outside / "own.safetensors"))
    assert site.refusal(own, HASH, {"initial-weights": "/of/the/server.safetensors"}) == ""
    assert site.refusal(own, HASH, {"dataset": f"npz:{outside}/x.npz"}).startswith("readable-paths: dataset")


def test_a_key_that_says_that_it_takes_the_place_of_another_declares_it() -> None:
    told = {
        spec.name: found[1] for spec in specs(RunConfig) if (found := re.search("in place of `([a-z-]+)`", spec.doc))
    }
    assert told == {spec.name: spec.instead_of for spec in specs(RunConfig) if spec.instead_of}


def test_every_key_with_a_path_is_ruled_or_the_servers() -> None:
    at_site = {name: spec.path.at_site for name, spec in path_keys().items() if spec.path}
    assert {name for name, here in at_site.items() if not here} == {
        "output-dir",
        "replay",
        "speeds",
        "resume",
        "from-run",
    }
    assert {name for name, here in at_site.items() if here} == {
        "dataset",
        "partition",
        "data-dir",
        "state-dir",
        "initial-weights",
        "tokenizer",
    }


def test_the_gate_tells_applications_where_the_site_keeps_its_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Path] = []
    monkeypatch.setattr(supernode, "install", lambda *given: lambda: seen.append(site_directory()))
    monkeypatch.setattr(supernode, "sites_directory", lambda: tmp_path / "sites")
    monkeypatch.setattr("fl_app.log_format.configure", lambda *given, **more: None)
    rules = written(tmp_path, f'site-dir = "{tmp_path}/ruled"\n')
    supernode.run("a", str(rules), [])
    monkeypatch.delenv("COROLLA_SITE_DIR")
    supernode.run("b", str(rules), [])
    assert seen == [tmp_path / "site", tmp_path / "ruled"]


def test_a_supernode_starts_with_all_of_its_own_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[str]()
    monkeypatch.setattr(supernode, "install", lambda *given: lambda: seen.append(weight_files.at_site("/servers.pt")))
    monkeypatch.setattr(supernode, "sites_directory", lambda: tmp_path / "sites")
    monkeypatch.setattr("fl_app.log_format.configure", lambda *given, **more: None)
    monkeypatch.setenv(weight_files.VARIABLE, "")
    folder = in_shards(small("mlp"), tmp_path / "own")
    rules = written(tmp_path, f'initial-weights = "{folder}"\n')
    supernode.run("a", str(rules), [])
    assert seen == [str(folder)] and weight_files.at_site("") == ""
    (folder / SHARDS[1]).unlink()
    with rejected(UserError, f"{rules}: initial-weights {folder / INDEX}", "lacks 1 of 3 shards", SHARDS[1]):
        supernode.run("b", str(rules), [])
    with rejected(UserError, f"{rules}: initial-weights", "gone.pt", "no such file"):
        supernode.run("b", str(written(tmp_path, f'initial-weights = "{tmp_path}/gone.pt"\n')), [])
    assert len(seen) == 1 and not (tmp_path / "sites" / "b").exists()


@pytest.mark.parametrize("variable", ["COROLLA_STATE_HOME", "COROLLA_STATE_DIR", "COROLLA_DATA_DIR"])
def test_a_supernode_does_not_start_with_other_things_in_the_sites_own_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.delenv("COROLLA_SITE_DIR")
    for name in ("COROLLA_STATE_HOME", "COROLLA_STATE_DIR", "COROLLA_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "elsewhere"))
    monkeypatch.setenv(variable, str(tmp_path / "srv" / "x"))
    monkeypatch.setattr(supernode, "install", lambda *given: lambda: None)
    monkeypatch.setattr("fl_app.log_format.configure", lambda *given, **more: None)
    rules = written(tmp_path, f'site-dir = "{tmp_path}/srv"\n')
    with rejected(DeploymentError, "site-dir", "/srv must hold", "nothing else", "for example", "/srv/notes"):
        supernode.run("a", str(rules), [])
    monkeypatch.setenv("COROLLA_SITE_DIR", str(tmp_path / "srv" / "notes"))
    supernode.run("a", str(rules), [])
