from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from fl_app import plugins
from fl_app.config import RunConfig, parse
from fl_app.errors import ConfigurationError, UserError
from fl_app.keys import Rule, specs
from strategies import METHOD_PARAMS
from tests.facts import mentions

ROOT = Path(__file__).resolve().parents[2]


def problems(**raw: Any) -> tuple[UserError, ...]:
    """Parse keys written with _ for - and __ for the dot of a table; return the error of each bad value."""
    with pytest.raises(ConfigurationError) as info:
        good(**raw)
    error, found = info.value, info.value.problems
    assert [line.strip() for line in str(error).splitlines()[1:]] == [str(problem) for problem in found]
    assert (error.key, error.rule, error.value) == (found[0].key, found[0].rule, found[0].value)
    return found


def good(**raw: Any) -> RunConfig:
    return parse({k.replace("__", ".").replace("_", "-"): v for k, v in raw.items()}, METHOD_PARAMS)


def flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in table.items():
        out |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return out


# defaults


def test_pyproject_has_exactly_the_codes_defaults() -> None:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    expected = {spec.name: spec.default for spec in specs(RunConfig)}
    for method, params in METHOD_PARAMS.items():
        expected |= {spec.name: spec.default for spec in specs(params, method)}
    in_file = flat(table)
    assert in_file == expected
    assert {k: type(v) for k, v in in_file.items()} == {k: type(v) for k, v in expected.items()}  # 1 == 1.0 == True


def test_defaults_are_valid_and_of_their_type() -> None:
    config = good()
    assert (config.method, config.num_server_rounds, config.learning_rate) == ("fedcac", 30, 0.1)
    for cls in (RunConfig, *METHOD_PARAMS.values()):
        for spec in specs(cls):
            assert type(spec.default) is spec.type, spec.name
            assert spec.doc.rstrip().endswith("."), spec.name
            assert not spec.rule or spec.rule.admits(float(spec.default)), spec.name
            assert not spec.choices or spec.default in spec.choices, spec.name


@pytest.mark.parametrize("method", sorted(METHOD_PARAMS))
def test_the_chosen_methods_parameters(method: str) -> None:
    config = good(method=method, fedcac__tau=0.25)
    assert type(config.params) is METHOD_PARAMS[method]
    if method == "fedcac":
        assert config.params.tau == 0.25  # type: ignore[attr-defined]
    assert config.resolved["fedcac.tau"] == 0.25 and config.resolved["seed"] == 0


# one problem each


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("learning_rat", "learning-rate"),
        ("fedcac__tua", "fedcac.tau"),
        ("zzz", ""),
        ("rounds", "num-server-rounds"),
        ("clients", "num-clients"),
        ("lr", "learning-rate"),
        ("alpha", "dirichlet-alpha"),
        ("join_ratio", "fraction-train"),
        ("jr", "fraction-train"),
        ("gr", "num-server-rounds"),
        ("ls", "local-epochs"),
        ("lbs", "batch-size"),
        ("device_id", "device"),
        ("retries", "round-retries"),
        ("seeds", "seed"),
    ],
)
def test_an_unknown_key(name: str, meant: str) -> None:
    (problem,) = problems(**{name: 1})
    assert (problem.key, problem.rule) == (name.replace("__", ".").replace("_", "-"), "unknown key")
    assert str(problem).endswith(f"did you mean {meant}?" if meant else problem.rule)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("fedcac__tau", "abc", "expected a number"),
        ("num_server_rounds", 1.0, "expected an integer"),
        ("num_server_rounds", "3", "expected an integer"),
        ("num_server_rounds", True, "expected an integer"),
        ("num_server_rounds", 2**70, "63 bits"),
        ("learning_rate", True, "expected a number"),
        ("collect_personal_models", 1, "true or false"),
        ("model", 3, "expected a string"),
        ("num_server_rounds", 0, ">= 1"),
        ("learning_rate", 0, "> 0"),
        ("learning_rate", float("nan"), "> 0"),
        ("learning_rate", float("inf"), "finite"),
        ("fraction_train", 0.0, "(0, 1]"),
        ("fraction_train", 1.01, "(0, 1]"),
        ("momentum", 1.0, "[0, 1)"),
        ("seed", -1, ">= 0"),
        ("fedcac__tau", 1.5, "[0, 1]"),
        ("fedcac__beta", 0, ">= 1"),
        ("normalize", "half", "auto, unit, mean-std, symmetric"),
        ("fedcac__weighting", "sample", "samples, uniform"),
        ("run_name", "../x", "letters"),
        ("run_name", ".hidden", "letters"),
        ("initial_weights", "a.safetensors", "absolute"),
        ("classes", "cat,dog,cat", "once"),
        ("speeds", "slow", "lognormal:"),
        ("quorum", 0.1, "min-results"),
    ],
)
def test_a_problem(name: str, value: Any, rule: str) -> None:
    (problem,) = problems(**{name: value})
    assert problem.key == name.replace("__", ".").replace("_", "-") and rule in problem.rule
    assert problem.value == value or value != value  # NaN


def test_a_key_without_the_one_that_it_needs() -> None:
    (problem,) = problems(initial_weights_partial=True)
    assert problem.key == "initial-weights-partial" and "initial-weights" in problem.rule


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("method", "fedcaq", "did you mean fedcac?"),
        ("method", "FedAvg", "did you mean fedavg?"),
        ("dataset", "cifar-10", "did you mean cifar10?"),
        ("model", "resnet81", "did you mean resnet8?"),
        ("partition", "dirichlet-clients", "did you mean dirichlet-client?"),
        ("partition", "noniid", "did you mean dirichlet?"),
        ("partition", "pat", "did you mean pathological?"),
        ("optimizer", "Adam", "did you mean adam?"),
        ("device", "gpu", "did you mean cuda?"),
    ],
)
def test_unknown_words(name: str, value: str, hint: str) -> None:
    (problem,) = problems(**{name: value})
    assert (problem.key, problem.value) == (name, value) and str(problem).endswith(hint)


def test_a_file_of_the_users_own_is_meant(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from corolla.method import Method\nOURS = Method('mine')\n")
    (tmp_path / "net.py").write_text("this is no Python")
    plugins.reset(tmp_path)
    try:
        assert mentions(str(problems(method="mine")[0]), "did you mean", "mine:OURS?")
        assert mentions(str(problems(model="net")[0]), "did you mean", "net:NAME?")
    finally:
        plugins.reset()


def test_a_name_is_meant_rather_than_a_folder_of_this_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "digits-sweep").mkdir()
    monkeypatch.chdir(tmp_path)
    (problem,) = problems(dataset="digit")
    assert mentions(str(problem), "did you mean", "digits?")
    (problem,) = problems(dataset="digits-sweeq/")
    assert mentions(str(problem), "did you mean", "folder:digits-sweep")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dataset", "x" * 400),
        ("dataset", "folder:"),
        ("dataset", "npz:"),
        ("dataset", "tiny-imagenet"),
        ("dataset", ""),
        ("partition", "file:"),
        ("model", "module:"),
        ("model", ":factory"),
        ("model", "a b:c"),
        ("device", "cuda:"),
        ("device", "gpu"),
        ("device", "cuda:-1"),
        ("device", "cuda:0x"),
    ],
)
def test_incomplete_words(name: str, value: str) -> None:
    (problem,) = problems(**{name: value})
    assert (problem.key, problem.value) == (name, value)


def test_node_needs_classes() -> None:
    for classes in ("", "cat,"):
        (problem,) = problems(dataset="node", classes=classes)
        assert (problem.key, problem.value) == ("classes", classes)
    assert good(dataset="node", classes="cat, dog").classes == "cat, dog"


def test_more_clients_to_wait_for_than_there_are() -> None:
    (problem,) = problems(num_clients=4, min_available_clients=5)
    assert (problem.key, problem.value) == ("min-available-clients", 5)
    # num-clients is not known yet
    assert good(min_available_clients=5).min_available_clients == 5


def test_all_problems_are_reported_together() -> None:
    found = problems(num_server_rounds=0, learning_rate="x", momentum=2.0, method="fedx", fedcac__tau=-1.0, unknown=1)
    assert [problem.key for problem in found] == [
        "unknown",
        "num-server-rounds",
        "learning-rate",
        "momentum",
        "fedcac.tau",
        "method",
    ]


# what is accepted


def test_an_integer_is_accepted_for_a_number() -> None:
    config = good(learning_rate=1, fedcac__tau=0)
    assert config.learning_rate == 1.0 and type(config.learning_rate) is float
    assert type(config.params.tau) is float and type(config.resolved["fedcac.tau"]) is float


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device", "auto"),
        ("device", "cpu"),
        ("device", "cuda"),
        ("device", "cuda:3"),
        ("dataset", "folder:/data/cats"),
        ("dataset", "npz:/x.npz"),
        ("dataset", "tiny-imagenet:/x"),
        ("partition", "file:/p.npz"),
        ("model", "nets:make"),
        ("model", "my.nets:make"),
        ("run_name", "a-b_c.1+2=3,@"),
        ("initial_weights", "/w.safetensors"),
        ("fraction_train", 1.0),
        ("momentum", 0.0),
        ("fedcac__tau", 1.0),
        ("fedcac__tau", 0.0),
    ],
)
def test_accepted(name: str, value: Any) -> None:
    good(**{name: value})


def test_rules() -> None:
    assert str(Rule(0, 1, low_open=True)) == "in (0, 1]" and str(Rule(low=1)) == ">= 1" and str(Rule()) == "any"
    assert Rule(0, 1).admits(0) and Rule(0, 1).admits(1)
    assert not Rule(0, 1, low_open=True).admits(0) and not Rule(0, 1, high_open=True).admits(1)
    assert not Rule().admits(float("nan")) and not Rule().admits(float("inf"))


@pytest.mark.parametrize(
    ("fraction", "clients", "n"), [(1.0, 3, 3), (0.1, 100, 10), (0.5, 3, 2), (0.01, 3, 1), (0.25, 10, 3)]
)
def test_a_round_draws_a_share_with_halves_up_and_at_least_one(fraction: float, clients: int, n: int) -> None:
    assert RunConfig(num_clients=clients, fraction_train=fraction).cohort_size(clients) == n
