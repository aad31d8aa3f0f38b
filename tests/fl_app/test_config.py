from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from fl_app.config import RunConfig, parse
from fl_app.errors import UserError
from fl_app.keys import Rule, specs
from strategies import METHOD_PARAMS

ROOT = Path(__file__).resolve().parents[2]


def problems(**raw: Any) -> list[str]:
    """Parse keys written with _ for - and __ for the dot of a table; return the lines of the error."""
    with pytest.raises(UserError) as info:
        good(**raw)
    first, *lines = str(info.value).splitlines()
    assert first == "invalid configuration:"
    return [line.strip() for line in lines]


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
    ("name", "value", "words"),
    [
        ("learning_rat", 0.1, "learning-rat: unknown key; did you mean learning-rate?"),
        ("fedcac__tua", 0.1, "fedcac.tua: unknown key; did you mean fedcac.tau?"),
        ("zzz", 1, "zzz: unknown key"),
        ("fedcac__tau", "abc", "fedcac.tau: expected a number, got 'abc'"),
        ("num_server_rounds", 1.0, "num-server-rounds: expected an integer, got 1.0"),
        ("num_server_rounds", "3", "num-server-rounds: expected an integer, got '3'"),
        ("num_server_rounds", True, "num-server-rounds: expected an integer, got True"),
        ("learning_rate", True, "learning-rate: expected a number, got True"),
        ("collect_personal_models", 1, "collect-personal-models: expected true or false, got 1"),
        ("model", 3, "model: expected a string, got 3"),
        ("num_server_rounds", 0, "num-server-rounds: must be >= 1, got 0"),
        ("learning_rate", 0, "learning-rate: must be > 0, got 0.0"),
        ("learning_rate", float("nan"), "learning-rate: must be > 0, got nan"),
        ("learning_rate", float("inf"), "learning-rate: must be > 0 and finite, got inf"),
        ("fraction_train", 0.0, "fraction-train: must be in (0, 1], got 0.0"),
        ("fraction_train", 1.01, "fraction-train: must be in (0, 1], got 1.01"),
        ("momentum", 1.0, "momentum: must be in [0, 1), got 1.0"),
        ("seed", -1, "seed: must be >= 0, got -1"),
        ("fedcac__tau", 1.5, "fedcac.tau: must be in [0, 1], got 1.5"),
        ("fedcac__beta", 0, "fedcac.beta: must be >= 1, got 0"),
        ("normalize", "half", "normalize: must be one of auto, unit, mean-std, symmetric, got 'half'"),
        ("fedcac__weighting", "sample", "fedcac.weighting: must be one of samples, uniform, got 'sample'"),
        ("run_name", "../x", "run-name: letters, digits and _.+=,@- only, not starting with a dot, got '../x'"),
        ("run_name", ".hidden", "run-name: "),
        ("initial_weights", "a.safetensors", "initial-weights: must be an absolute path, got 'a.safetensors'"),
        ("initial_weights_partial", True, "initial-weights-partial: needs initial-weights"),
        ("classes", "cat,dog,cat", "classes: every name once, got 'cat,dog,cat'"),
    ],
)
def test_a_problem(name: str, value: Any, words: str) -> None:
    (line,) = problems(**{name: value})
    assert line.startswith(words), line


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("method", "fedcaq", "did you mean fedcac?"),
        ("dataset", "cifar-10", "did you mean cifar10?"),
        ("model", "resnet81", "did you mean resnet8?"),
        ("partition", "dirichlet-clients", "did you mean dirichlet-client?"),
    ],
)
def test_unknown_words(name: str, value: str, hint: str) -> None:
    (line,) = problems(**{name: value})
    assert line.startswith(f"{name}: must be one of ") and f"got '{value}'" in line and line.endswith(hint)


def test_a_name_is_meant_rather_than_a_folder_of_this_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "digits-sweep").mkdir()
    monkeypatch.chdir(tmp_path)
    (line,) = problems(dataset="digit")
    assert line.endswith("did you mean digits?")
    (line,) = problems(dataset="digits-sweeq/")
    assert "did you mean folder:digits-sweep" in line


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
    (line,) = problems(**{name: value})
    assert line.startswith(f"{name}: "), line


def test_node_needs_classes() -> None:
    (line,) = problems(dataset="node")
    assert line == "classes: dataset node needs at least two class names, got ''"
    (line,) = problems(dataset="node", classes="cat,")
    assert line.startswith("classes: dataset node needs at least two")
    assert good(dataset="node", classes="cat, dog").classes == "cat, dog"


def test_more_clients_to_wait_for_than_there_are() -> None:
    (line,) = problems(num_clients=4, min_available_clients=5)
    assert line == "min-available-clients: must be at most num-clients (4), got 5"
    # num-clients is not known yet
    assert good(min_available_clients=5).min_available_clients == 5


def test_all_problems_are_reported_together() -> None:
    lines = problems(num_server_rounds=0, learning_rate="x", momentum=2.0, method="fedx", fedcac__tau=-1.0, unknown=1)
    assert [line.split(":")[0] for line in lines] == [
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
    assert RunConfig(num_clients=clients, fraction_train=fraction).drawn(clients) == n
