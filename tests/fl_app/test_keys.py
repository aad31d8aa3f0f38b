"""Every declared key, of all runs and of all methods, and what follows from what it is about."""

from __future__ import annotations

import importlib
import json
import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from corolla.api.starting import flat
from corolla.cli.options import parse_set
from corolla.experiments import compare, sweep
from corolla.experiments.sweep import read_sweep
from corolla.presets import read_preset
from deploy.site import read_site, refusal
from fl_app.config import RunConfig, earlier_keys, parse, parse_recorded
from fl_app.errors import UserError
from fl_app.keys import KeySpec, Rule, Scalar, affects, key, own, specs
from fl_app.known_names import OWN_TEST_PART, PARTITIONS
from fl_app.server.run_folder import CONFIG, check_unchanged, read_config
from fl_app.sources import NODE, SOURCES
from fl_app.toml import flatten, read_toml, to_toml
from strategies import METHOD_PARAMS
from strategies.kernels import aggregate
from strategies.registry import PAPERS
from tests.conftest import Run
from tests.facts import mentions, rejected

# by hand, so that a new key is classed by somebody who thought about it
RUNNING = {
    "available-timeout",
    "round-timeout",
    "round-retries",
    "server-memory-limit",
    "checkpoint-every",
    "keep-state",
    "track",
    "callbacks",
    "collect-personal-models",
    "discover",
    "record-matrices",
    "keep-uploads",
    "gradient-checkpointing",
}
# what a run that goes on may change, although it changes what comes out
EXTENDING = {"num-server-rounds", "min-available-clients", "without"}
PLACES = {"data-dir", "overwrite", "run-name", "output-dir", "state-dir", "resume", "strict"}
OTHER_WORDS: dict[str, Scalar] = {
    "method": "local",
    "dataset": "mnist",
    "partition": "iid",
    "model": "cnn",
    "device": "cuda",
    "classes": "a,b",
    "initial-weights": "/w.safetensors",
    "task": "multi-label",
    "track": "tensorboard",
    "callbacks": "tests.tracking.watching:Watch",
    "keep-uploads": "every 3",
    "speeds": "lognormal:1",
    "schedule": "cosine",
    "replay": "/run",
    "heterofl.rates": "0.5",
    "without": "1",
}


# keys that a key is refused without
NEEDED: dict[str, dict[str, Scalar]] = {
    "initial-weights-partial": {"initial-weights": "/w.safetensors"},
    "frozen-dtype": {"train": "classifier.*"},
    "keep-best": {"validation-ratio": 0.2, "evaluate-every": 2},
    "staleness": {"quorum": 0.8},
    "availability": {"speeds": "lognormal:1"},
    "day-length": {"speeds": "lognormal:1"},
    "drop-rate": {"speeds": "lognormal:1"},
}


def other(spec: KeySpec) -> Scalar:
    """Return an allowed value that is not the default, nor what that means for the data of these tests."""
    if spec.name == "normalize":
        # of images auto is unit
        return "mean-std"
    if spec.choices:
        return next(c for c in spec.choices if c != spec.default)
    if isinstance(spec.default, bool):
        return not spec.default
    if isinstance(spec.default, str):
        return OTHER_WORDS.get(spec.name, "elsewhere")
    values = [spec.default + 1] if isinstance(spec.default, int) else [spec.default / 2, spec.default + 1, 0.25, 0.75]
    return next(v for v in values if v != spec.default and (spec.rule is None or spec.rule.admits(v)))


# each with a method that has it
EVERY_KEY = [
    *(("fedcac", spec) for spec in specs(RunConfig)),
    *((method, spec) for method, params in METHOD_PARAMS.items() for spec in specs(params, method)),
]


def configs(method: str, spec: KeySpec, **more: Scalar) -> tuple[RunConfig, RunConfig]:
    """Return a run's config, and the same with another value of one key."""
    base: dict[str, Scalar] = {"method": method, "num-clients": 4, **NEEDED.get(spec.name, {}), **more}
    return parse(base, METHOD_PARAMS), parse(base | {spec.name: other(spec)}, METHOD_PARAMS)


# What keys are about


def test_the_classes_of_keys() -> None:
    every = [spec for cls in (RunConfig, *METHOD_PARAMS.values()) for spec in specs(cls)]
    assert {spec.name for spec in every if spec.about == "running"} == RUNNING
    assert {spec.name for spec in every if spec.about == "place"} == PLACES
    assert {spec.about for spec in every} == {"data", "training", "running", "place"}
    assert all(set(spec.partitions) <= {*PARTITIONS, OWN_TEST_PART, *SOURCES, NODE} for spec in every)


def test_a_sweep_repeats_a_run_for_another_value_exactly_if_that_may_change_what_comes_out() -> None:
    same = set()
    for method, spec in EVERY_KEY:
        where = {"partition": spec.partitions[0]} if spec.partitions else {}
        before, after = configs(method, spec, **where)
        same |= {spec.name} if sweep.identity(before) == sweep.identity(after) else set()
    assert same == RUNNING | PLACES


def test_a_partitions_key_changes_nothing_where_there_is_another_partition() -> None:
    for spec in specs(RunConfig):
        if spec.partitions and spec.name != "seed":
            before, after = configs("fedcac", spec, partition="file:/p.npz", dataset="digits")
            assert sweep.identity(before) == sweep.identity(after), spec.name
            assert compare.settings(before, "") == compare.settings(after, ""), spec.name


def test_a_run_is_resumed_with_another_value_only_where_its_rounds_stay_what_they_were(tmp_path: Path) -> None:
    for method, spec in EVERY_KEY:
        before, after = configs(method, spec)
        (tmp_path / CONFIG).write_text(to_toml(before.resolved))
        if spec.name in RUNNING | PLACES | EXTENDING:
            check_unchanged(tmp_path, after)
        else:
            with pytest.raises(UserError, match=f"must not change:\n  {spec.name}: "):
                check_unchanged(tmp_path, after)


SPANNING: list[dict[str, Scalar]] = [
    {"schedule": "cosine"},
    {"dp-epsilon": 4.0},
    {"schedule": "cosine", "learning-rate-decay": 0.5, "fedcac.beta": 2},
]


@pytest.mark.parametrize("given", SPANNING, ids=str)
@pytest.mark.parametrize("rounds", [3, 5, 40])
def test_a_run_whose_keys_span_its_rounds_is_not_resumed_with_other_rounds(
    tmp_path: Path, given: dict[str, Scalar], rounds: int
) -> None:
    base: dict[str, Scalar] = {"method": "fedcac", "num-clients": 4, "num-server-rounds": 4, **given}
    before = parse(base, METHOD_PARAMS)
    (tmp_path / CONFIG).write_text(to_toml(before.resolved))
    check_unchanged(tmp_path, before)
    name, value = next(iter(given.items()))
    shown = f"{name} = {str(value).removesuffix('.0')}"
    with rejected(UserError, "resume", "num-server-rounds", "4 in the run", f"now {rounds}", shown, "4 rounds"):
        check_unchanged(tmp_path, parse(base | {"num-server-rounds": rounds}, METHOD_PARAMS))


def test_which_keys_span_a_run() -> None:
    every = [
        spec for specs_of in (specs(RunConfig), *(specs(c, m) for m, c in METHOD_PARAMS.items())) for spec in specs_of
    ]
    assert {spec.name for spec in every if spec.schedule_dependent} == {"schedule", "dp-epsilon", "pfedsim.warmup"}
    assert parse({"method": "fedavg", "num-clients": 4}, METHOD_PARAMS).spanning_keys() == []


@dataclass(frozen=True)
class WarmUp:
    share: float = key(0.25, "Part of all rounds that warm up.", schedule_dependent=True)


def test_a_key_of_ones_own_may_span_the_run_at_its_default(tmp_path: Path) -> None:
    methods = {**METHOD_PARAMS, "warm:METHOD": WarmUp}
    base: dict[str, Scalar] = {"method": "warm:METHOD", "num-clients": 4, "num-server-rounds": 4}
    for share, refused in ((0.25, True), (0.0, False)):
        run = base | {"warm.share": share}
        (tmp_path / CONFIG).write_text(to_toml(own(parse(run, methods).resolved, "warm:METHOD")))
        longer = parse(run | {"num-server-rounds": 8}, methods)
        if refused:
            with rejected(UserError, "resume", "4 in the run", "now 8", "warm.share = 0.25", "4 rounds"):
                check_unchanged(tmp_path, longer)
        else:
            check_unchanged(tmp_path, longer)


def test_other_methods_keys_change_nothing() -> None:
    before = parse({"method": "fedper"}, METHOD_PARAMS)
    for spec in (spec for _, spec in EVERY_KEY if "." in spec.name):
        after = parse({"method": "fedper", spec.name: other(spec)}, METHOD_PARAMS)
        assert sweep.identity(before) == sweep.identity(after), spec.name
        assert compare.settings(before, "") == compare.settings(after, ""), spec.name
        assert spec.name not in {key.name for key, _ in after.own_keys()}


def test_running_keys_and_places_do_not_change_what_comes_out(run: Run, tmp_path: Path) -> None:
    changes: dict[str, Any] = {spec.name: other(spec) for spec in specs(RunConfig) if spec.name in RUNNING}
    places = {"state-dir": str(tmp_path / "other-state"), "data-dir": str(tmp_path / "other-data"), "run-name": "other"}

    def outcome(**given: Any) -> tuple[Mapping[str, Any], list[Any]]:
        # a model that offers gradient checkpointing
        model = "tests.fl_app.test_gradient_checkpointing:earlier"
        folder = run(model=model, num_server_rounds=3, evaluate_every=1, **given)
        summary = json.loads((folder.path / "summary.json").read_text())
        rounds = [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()]
        for record in rounds:
            del record["seconds"]
            for client in record["clients"].values():
                del client["seconds"]
        return {k: v for k, v in summary.items() if k not in ("seconds", "experiment")}, rounds

    assert outcome() == outcome(**changes, **places)


def test_what_is_counted_in_rounds() -> None:
    counted = {spec.name for m, cls in METHOD_PARAMS.items() for spec in specs(cls, m) if spec.counts_rounds}
    assert counted == {
        "fedcac.beta",
        "feddac.alpha",
        "fedamp.alpha-decay-every",
        "floco.projection-round",
        "cfl.start",
        "apple.loosen-rounds",
        "fedconcat.encoder-rounds",
    }


# Flat keys


def test_whose_a_key_is() -> None:
    assert affects("seed", "fedcac") and affects("fedcac.tau", "fedcac")
    assert not affects("fedcac.tau", "fedavg") and not affects("fedcac.tau", "fedcac2")
    flat = flatten({"seed": 1, "fedcac": {"tau": 0.5}, "feddac": {"tau": 0.3}})
    assert own(flat, "feddac") == {"seed": 1, "feddac.tau": 0.3}


@dataclass(frozen=True)
class Params:
    warm_up: int = key(3, "Rounds.", Rule(low=1), "training", True)
    note: str = ""


def test_a_declaration_carries_everything() -> None:
    (spec,) = specs(Params, "mine")
    assert (spec.name, spec.field, spec.type, spec.default, spec.doc) == ("mine.warm-up", "warm_up", int, 3, "Rounds.")
    assert spec.counts_rounds and spec.about == "training" and spec.range == ">= 1"


@pytest.mark.parametrize("value", [True, 3, 0.1, 1e-5, 500.0, 'a "b" \\ ü\n\x7f', ""])
def test_toml_comes_back_with_its_types(tmp_path: Path, value: Scalar) -> None:
    flat = {"fedcac.tau": value, "seed": value, "fedcac.beta": 2}
    (tmp_path / "a.toml").write_text(to_toml(flat), encoding="utf-8")
    back = flatten(read_toml(tmp_path / "a.toml"))
    assert back == flat and all(type(back[name]) is type(v) for name, v in flat.items())


# Earlier names of keys and values mean the current ones wherever a config is read, for one release --------------------

BEFORE = {"robust-liars": 0.2, "private-absent": "alone"}
NOW = {"byzantine-ratio": 0.2, "private-left-out": "client"}


def test_a_config_with_earlier_names_is_the_same_run() -> None:
    given = {"method": "fedavg", "num-clients": 5}
    for read in (parse, parse_recorded):
        assert read({**given, **BEFORE}, METHOD_PARAMS) == read({**given, **NOW}, METHOD_PARAMS)
    with pytest.raises(UserError, match="robust-liars: unknown key"):
        parse({**given, "robust-liars": 0.2, "byzantine-ratio": 0.3}, METHOD_PARAMS)


def test_all_places_that_take_keys_take_earlier_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    earlier_keys._warn.cache_clear()
    assert parse_set(["discover=drawn"]) == {"discover": "sampled"}
    assert parse_set(["robust-liars=0.2", "private-absent=alone"]) == NOW
    assert [record.getMessage() for record in caplog.records] == [
        f"{name}: the earlier name of the key {now}, valid for one release" for name, now in earlier_keys.KEYS.items()
    ]
    assert flat({"robust_liars": 0.2, "private_absent": "alone"}) == NOW
    path = tmp_path / "given.toml"
    path.write_text(to_toml({"extends": "base.toml", "robust-liars": 0.2}))
    (tmp_path / "base.toml").write_text(to_toml({"byzantine-ratio": 0.1, "private-absent": "alone"}))
    assert read_preset(str(path)) == NOW
    path.write_text('[settings]\nrobust-liars = 0.2\n[grid]\nprivate-absent = ["alone", "company"]\n')
    sweep = read_sweep(path)
    assert sweep.settings == {"byzantine-ratio": 0.2} and sweep.grids == [{"private-left-out": ["client", "group"]}]


def test_a_run_folder_with_earlier_names_is_the_same_run(run: Run) -> None:
    folder = run().path
    saved = read_config(folder)
    before = {"robust-liars": saved.pop("byzantine-ratio"), "private-absent": "company"}
    assert saved.pop("private-left-out") == "group"
    (folder / CONFIG).write_text(to_toml({**saved, **before}))
    assert read_config(folder) == {**saved, "byzantine-ratio": 0.3, "private-left-out": "group"}


@pytest.mark.parametrize("key", ["private-absent", "private-left-out"])
@pytest.mark.parametrize(
    "bound", ["private-absent = {one-of = ['company']}", "private-left-out = {one-of = ['group']}"]
)
def test_a_sites_bound_holds_under_both_names(key: str, bound: str, tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text(f"[bounds]\n{bound}\n")
    path.chmod(0o600)
    site, (before, now) = read_site(path), (("alone", "company"), ("client", "group"))
    allowed, refused = (before if key == "private-absent" else now)[::-1]
    assert refusal(site, "", {"method": "fedavg", key: allowed}) == ""
    assert mentions(refusal(site, "", {"method": "fedavg", key: refused}), "private-left-out", "group", "got client")


# The names that modules had before they moved into folders still import the same modules ------------------------------


@pytest.mark.parametrize(
    ("earlier", "now"),
    [
        ("strategies.fedavg", "strategies.baselines.fedavg"),
        ("strategies.lg_fedavg", "strategies.baselines.lg_fedavg"),
        ("strategies.aggregate", "strategies.kernels.aggregate"),
        ("strategies.averages", "strategies.kernels.averages"),
        ("fl_app.wire", "fl_app.transport.wire"),
        ("fl_app.server.exchange", "fl_app.transport.exchange"),
        ("fl_app.site", "fl_app.site_directory"),
        ("deploy.processes", "deploy.detached"),
        ("client_app.state", "client_app.stored_state"),
        ("strategies.averages.krum", "strategies.kernels.averages.krum"),
    ],
)
def test_an_earlier_name_is_the_same_module(earlier: str, now: str) -> None:
    sys.modules.pop(earlier, None)
    with pytest.warns(DeprecationWarning, match=now):
        module = importlib.import_module(earlier)
    assert module is importlib.import_module(now)
    assert module.__spec__ is not None and module.__spec__.name == now


def test_other_names_do_not_exist() -> None:
    for name in (
        "strategies.nothing",
        "strategies.averages.nothing",
        "strategies.fedavg.nothing",
        "fl_app.wire.nothing",
    ):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)


def test_from_the_package_and_in_a_new_process() -> None:
    line = "from strategies import fedprox, masks; import strategies.robust as r; print(*(m.__name__ for m in (fedprox, masks, r)))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", line], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [
        "strategies.baselines.fedprox",
        "strategies.kernels.masks",
        "strategies.kernels.robust",
    ]
    assert pickle.loads(pickle.dumps(aggregate.weighted_mean)) is aggregate.weighted_mean


def test_an_earlier_name_of_a_command_runs_it() -> None:
    done = subprocess.run([sys.executable, "-P", "-m", "deploy.metrics", "-h"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("usage: deploy.prometheus"), done


def test_the_papers_stay() -> None:
    for name in PAPERS:
        assert importlib.import_module(f"strategies.{name}").__name__ == f"strategies.{name}"
