"""Presets: every published row parses and dry-runs; figures typed here from the papers, independently of the files."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from corolla import presets
from corolla.api.checks import warn_of_settings
from corolla.api.console import begin_warnings, console
from corolla.api.settings import Scale, resolve, scaled
from corolla.experiments import dry_run
from fl_app.config import parse
from fl_app.errors import ConfigurationError, UserError
from fl_app.server.run_folder import read_summary
from fl_app.toml import flatten
from strategies import METHOD_PARAMS, METHODS
from tests.conftest import Command
from tests.experiments.preset_settings import SETTINGS
from tests.facts import mentions, rejected


def paper_of(name: str) -> str:
    """Return the first part of a preset's name: a paper, or demo."""
    return name.partition("/")[0]


ALL = presets.all_presets()
PAPERS = sorted({paper_of(name) for name in ALL})

# Figures read in the papers, not in the preset files: (mean, std), None where the table prints no deviation.
FIGURES = {
    "fedcac/tiny-imagenet-pathological-2/fedbn": (89.41, 0.32),
    "fedcac/cifar100-pathological-2": (93.05, 0.90),
    "fedcac/cifar10-pathological-2/local": (85.85, 0.93),
    "fedcac/cifar10-dirichlet-0.1": (86.82, 1.18),
    "fedcac/cifar100-dirichlet-0.1": (57.22, 1.52),
    "fedcac/tiny-imagenet-dirichlet-0.5/fedper": (12.69, 0.42),
    "fedcac/cifar10-dirichlet-0.5/fedavg": (60.41, 1.36),
    "fedcac/cifar100-dirichlet-0.01/fedamp": (85.11, 1.15),
    "fedcac/cifar10-dirichlet-1.0/fedrep": (60.52, 0.72),
    "fedcac/tiny-imagenet-dirichlet-0.1/as-critical": (37.97, 0.63),
    "fedpake/cifar100-pathological-10": (69.72, 0.25),
    "fedpake/cifar100-dirichlet-0.1-resnet34": (39.12, 0.04),
    "fedpake/tiny-imagenet-dirichlet-0.1/fedprox": (19.64, 0.22),
    "fedpake/cifar10-pathological-2/ditto": (90.53, 0.04),
    "fedpake/cifar10-dirichlet-0.1-100-clients-half": (88.63, 0.22),
    "fedpake/cifar100-dirichlet-0.1-50-clients/fedavg": (29.71, 0.11),
    "fedpake/cifar100-dirichlet-0.01/fedbabu": (71.67, 0.16),
    "fedpake/cifar100-dirichlet-1.0": (39.41, 0.10),
    "fedpake/cifar10-dirichlet-0.1-cnn/fedconcat": (57.7, None),
    "fedpake/cifar10-dirichlet-0.1-cnn": (59.7, None),
    "fedpake/cifar10-dirichlet-0.1-ablation": (90.60, None),
    "fedpake/cifar10-dirichlet-0.1-ablation/random-micro": (14.86, None),
    "fedpake/cifar10-dirichlet-0.1-ablation/random-macro": (17.74, None),
    "fedpake/cifar10-dirichlet-0.1-ablation/random-micro-macro": (24.51, None),
    "fedobp/cifar100-dirichlet-0.1": (50.37, 0.16),
    "fedobp/svhn-dirichlet-0.5/fedavg": (90.24, 0.66),
    "fedobp/emnist-dirichlet-0.1/fedrep": (94.36, 0.22),
    "fedobp/fashion-mnist-dirichlet-0.5": (93.11, 0.04),
    "fedobp/mnist-dirichlet-0.1/lg-fedavg": (97.82, 0.13),
    "fedobp/medmnist-c-dirichlet-0.5/fedper": (41.35, 0.06),
    "fedobp/mnist-dirichlet-0.1-resnet18/fedper": (99.63, None),
    "fedobp/cifar100-dirichlet-0.1-resnet18": (64.58, None),
    **{
        f"fedobp/{data}-table8/{row}": (mean, None)
        for data, means in {
            "cifar10": (87.36, 85.00, 87.36, 87.37),
            "cifar100": (45.98, 41.83, 45.98, 44.89),
            "emnist": (94.92, 94.14, 94.92, 94.78),
            "svhn": (95.88, 93.34, 95.88, 95.88),
            "mnist": (99.38, 99.27, 99.38, 99.39),
            "fashion-mnist": (96.82, 96.31, 96.82, 96.81),
            "medmnist-a": (67.47, 67.39, 67.47, 67.47),
            "medmnist-c": (66.60, 65.17, 66.60, 66.38),
        }.items()
        for row, mean in zip(("no-norm", "layer-norm", "global-norm", "global-norm-cls"), means, strict=True)
    },
    "feddac/cifar100-dirichlet-0.1": (57.94, None),
    "feddac/tiny-imagenet-dirichlet-0.1": (37.53, None),
}


def test_published_figures() -> None:
    published = {name: ALL[name].published for name in FIGURES}
    assert {name: found and (found.mean, found.std) for name, found in published.items()} == FIGURES


def test_there_is_one_preset_per_cell_of_the_tables() -> None:
    per_table = Counter((p.paper, p.source.partition(":")[0]) for p in ALL.values() if p.published)
    assert sorted(per_table.values()) == sorted(
        [7 * 3, 7 * 9, 3, 9 * 7, 9 * 6, 9 * 3, 13 * 8, 13 * 8, 11 * 6, 4 * 8, 2, 4, 4, 4]
    )
    # FedDAC's other cells (of eight methods, its figure on k, its code), demo
    assert sum(p.published is None for p in ALL.values()) == (8 * 8 - 2) + 3 + 8 + 1


def test_the_readme_counts_the_published_figures() -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text()
    assert mentions(text, f"{sum(p.published is not None for p in ALL.values())} published results come", "presets")


def test_every_preset_resolves_and_dry_runs() -> None:
    # the rest is priced in test_every_preset_starts_by_its_name
    priced = set[str]()
    for preset in ALL.values():
        config = parse(preset.settings, METHOD_PARAMS)
        shape = dry_run.known_shape(config)
        assert shape is not None, preset.name
        if not {config.method, config.model} <= priced:
            priced |= {config.method, config.model}
            cost = dry_run.round_bytes(config, METHODS[config.method], shape)
            assert cost.participants == max(1, round(config.fraction_train * config.num_clients))
            assert cost.upload > 0 or config.method == "local", preset.name
        assert preset.metric or preset.name.endswith("demo"), preset.name
        small = parse(dict(preset.settings) | presets.small(config), METHOD_PARAMS)
        assert small.scale == "small" and small.num_clients <= 10 and small.num_server_rounds <= 20


def test_settings_are_those_of_the_papers() -> None:
    assert {name: ALL[name].settings for name in SETTINGS} == SETTINGS


def test_every_quantile_is_the_papers() -> None:
    quantiles = {
        "cifar10-dirichlet-0.1": 0.99998,
        "cifar10-dirichlet-0.5": 0.99979,
        "cifar100-dirichlet-0.1": 0.9998,
        "cifar100-dirichlet-0.5": 0.99992,
        "emnist-dirichlet-0.5": 0.9991,
        "svhn-dirichlet-0.1": 0.99997,
        "svhn-dirichlet-0.5": 0.9998,
        "mnist-dirichlet-0.1": 0.9998,
        "fashion-mnist-dirichlet-0.5": 0.9999,
    }
    assert {name: ALL[f"fedobp/{name}"].settings["fedobp.quantile"] for name in quantiles} == quantiles


def test_the_quantiles_of_table_8_are_those_of_its_logs() -> None:
    # all parameters, the classifier alone
    quantiles = {
        "cifar10": (0.9999, 0.983),
        "cifar100": (0.99505, 0.91078),
        "emnist": (0.995, 0.9057),
        "svhn": (0.9999, 0.9495),
        "mnist": (0.9995, 0.9433),
        "fashion-mnist": (0.999705, 0.9908),
        "medmnist-a": (0.97, 0.9484),
        "medmnist-c": (0.99995, 0.9949),
    }
    for data, (of_all, of_classifier) in quantiles.items():
        for row in ("no-norm", "layer-norm", "global-norm"):
            assert ALL[f"fedobp/{data}-table8/{row}"].settings["fedobp.quantile"] == of_all
        assert ALL[f"fedobp/{data}-table8/global-norm-cls"].settings["fedobp.quantile"] == of_classifier


OTHER_METHODS = ("apfl", "fedala", "feddpa", "fedselect", "flute", "pfedfda")


INCOMPARABLE = [
    ("feddac/cifar100-dirichlet-0.1", "concentration is the code's 0.1"),
    ("feddac/tiny-imagenet-dirichlet-0.1", "FedCAC prints 57.22 (CIFAR-100) and 40.19 (Tiny ImageNet) with 0.1"),
    ("feddac/cifar100-dirichlet-0.1", "not comparable without initial-weights"),
    ("feddac/cifar10-pathological-2", "follows the text: SGD with momentum (0.9 is ours)"),
    ("feddac/cifar10-pathological-2-code", "follows the code: no momentum"),
    ("feddac/emnist-dirichlet-0.1/fedprox", "mu is not in the text"),
    ("fedcac/cifar100-dirichlet-0.1", "has tau 0.4"),
    (
        "fedobp/cifar10-dirichlet-0.1-resnet18/fedper",
        "ImageNet weights and scores running statistics too: not comparable",
    ),
    ("fedcac/cifar100-dirichlet-0.1/fedrep", "does not give its parameters: our defaults"),
    ("fedcac/cifar100-dirichlet-0.1", "augment=crop-flip-rotate"),
    ("fedcac/cifar10-dirichlet-0.1", "momentum 0.9"),
    ("fedpake/cifar10-dirichlet-0.1", "PFLlib"),
    ("fedpake/cifar10-dirichlet-0.1/moon", "PFLlib's default 0"),
    ("fedpake/cifar10-dirichlet-0.1/fedntd", "PFLlib's default 0"),
    ("fedpake/cifar10-dirichlet-0.1/fedgen", "the paper cites another FedGen"),
    ("fedpake/cifar10-dirichlet-0.1/fedbabu", "figures of the other rows are of the global model: not comparable"),
    ("fedpake/cifar10-dirichlet-0.1/fedbabu", "fine-tunes the classifier alone"),
    ("fedpake/cifar10-dirichlet-0.1/fedala", "aggregated global model"),
    ("fedpake/cifar10-dirichlet-0.1/ditto", "Ditto's global model"),
    ("fedpake/cifar10-dirichlet-0.1-ablation/random-micro", "does not name its split"),
    ("fedpake/cifar100-pathological-10", "pathological-assignment=blocks-unbalanced"),
    ("fedpake/cifar10-dirichlet-0.1-cnn/fedconcat", "hyperparameters are not in the paper"),
    ("fedpake/cifar10-dirichlet-0.1-cnn", "the simple CNN is not in the paper"),
]


def test_what_cannot_be_compared_is_said() -> None:
    assert [] == [(name, words) for name, words in INCOMPARABLE if not any(words in note for note in ALL[name].notes)]
    for method in OTHER_METHODS:
        cells = [p for name, p in ALL.items() if name.startswith("fedobp/") and p.settings["method"] == method]
        assert len(cells) in (16, 22)
        for preset in cells:
            assert preset.ran and mentions(preset.notes, "FedOBP's table", "another method under", "name", preset.ran)


def test_bytes_of_a_round_by_hand() -> None:
    config = parse(ALL["fedcac/cifar10-dirichlet-0.1"].settings, METHOD_PARAMS)
    cost = dry_run.round_bytes(config, METHODS["fedcac"], {"in_channels": 3, "num_classes": 10, "image_size": 32})
    # per block two BatchNorms, one more: stem or shortcut
    d, b = 1_235_274, 2 * (64 * 3 + 128 * 3 + 256 * 3)
    assert (cost.participants, cost.upload, cost.download) == (40, 4 * (d + b) + -(-d // 8), 4 * (d + b))


def test_small_scales_rounds_clients_samples_and_beta() -> None:
    full = dict(ALL["fedcac/cifar10-dirichlet-0.1"].settings)
    changes = presets.small(parse(full, METHOD_PARAMS))
    assert {k: v for k, v in changes.items() if not k.startswith("feddac")} == {
        "scale": "small",
        "num-server-rounds": 20,
        "num-clients": 10,
        "batch-size": 20,
        "train-samples": 100,
        "test-samples": 40,
        "private-regroup": 1,
        "fedcac.beta": 4,
    }
    again = presets.small(parse(full | changes, METHOD_PARAMS))
    assert again == {}
    sparse = dict(ALL["fedobp/cifar10-dirichlet-0.1/fedavg"].settings)
    changes = presets.small(parse(sparse, METHOD_PARAMS))
    assert (changes["partition"], changes["fraction-train"], changes["num-clients"]) == ("dirichlet-client", 0.5, 10)
    drawn = parse(ALL["fedobp/mnist-table8/no-norm"].settings, METHOD_PARAMS)
    assert drawn.partition == "dirichlet-fl-bench" and presets.small(drawn)["partition"] == "dirichlet-client"
    with rejected(ConfigurationError, "--scale small", "cannot cut", "clients"):
        presets.small(parse({"partition": "file:/x.npz"}, METHOD_PARAMS))


@pytest.mark.parametrize("scale", list(Scale))
def test_a_preset_warns_of_nothing_that_its_notes_do_not_tell(scale: Scale, capsys: pytest.CaptureFixture[str]) -> None:
    warned: dict[str, str] = {}
    for preset in ALL.values():
        begin_warnings()
        config = scaled(dict(preset.settings), scale)
        warn_of_settings([], [(resolve(config), config)])
        if text := capsys.readouterr().err:
            warned[preset.name] = text
    alpha = 200 if scale is Scale.full else 20
    assert sorted(warned) == ["feddac/cifar10-dirichlet-0.1-code", "feddac/cifar10-pathological-2-code"]
    for name, text in warned.items():
        assert mentions(text, "warning", f"feddac.alpha = {alpha} is not", f"below num-server-rounds = {alpha}")
        assert text.count("warning:") == 1
        assert any(mentions(note, "feddac.alpha = 200", "code's") for note in ALL[name].notes)


def test_notes_name_keys_of_their_presets_and_no_figure_that_does_not_exist() -> None:
    for preset in ALL.values():
        assert all(set(keys) <= set(preset.settings) for keys in preset.bound.values()), preset.name
        assert set(preset.notes_on(resolve(preset.settings))) == set(preset.notes), preset.name
        if preset.published is None:
            assert not [note for note in preset.notes if "the figure is" in note or "this figure" in note], preset.name


def test_cutting_a_preset_takes_out_the_keys_of_its_former_partition() -> None:
    full = dict(ALL["fedpake/cifar10-dirichlet-0.1"].settings)
    lost = {"test-ratio", "min-samples", "dirichlet-balance"}
    assert full["partition"] == "dirichlet" and lost <= set(full)
    small = scaled(full, Scale.small)
    assert small["partition"] == "dirichlet-client" and small["dirichlet-alpha"] == full["dirichlet-alpha"]
    assert set(full) - set(small) == lost
    # what the user chose stays, also if it never had an effect
    iid = {"partition": "iid", "test-ratio": 0.5}
    assert scaled(dict(iid), Scale.small).items() >= iid.items()


def test_a_wrong_name_suggests_the_nearest() -> None:
    with rejected(ConfigurationError, "preset", "did you mean", "fedcac/cifar10-dirichlet-0.1?"):
        presets.read_preset("fedcac/cifar10-dirichlt-0.1")
    with pytest.raises(UserError, match="none matches"):
        presets.find("nothing-of-this-name")
    assert [p.name for p in presets.find("fedcac/*-pathological-2")] == [
        f"fedcac/{d}-pathological-2" for d in ("cifar10", "cifar100", "tiny-imagenet")
    ]


def test_a_columns_pattern_has_the_papers_own_method_too() -> None:
    found = [preset.name for preset in presets.find("fedobp/fashion-mnist-dirichlet-0.1/*")]
    assert found[0] == "fedobp/fashion-mnist-dirichlet-0.1" and len(found) == 13
    assert all(name.startswith(f"{found[0]}/") for name in found[1:])
    assert [preset.name for preset in presets.find("fedobp/cifar10-dirichlet-0.?/fedobp")] == [
        "fedobp/cifar10-dirichlet-0.1",
        "fedobp/cifar10-dirichlet-0.5",
    ]
    # one name is one preset, not also those whose names it begins
    assert presets.named(["fedobp/cifar10-dirichlet-0.1", "fedobp/cifar10-dirichlet-0.?/fed[ao]*"]) == [
        "fedobp/cifar10-dirichlet-0.1",
        "fedobp/cifar10-dirichlet-0.1/fedala",
        "fedobp/cifar10-dirichlet-0.1/fedavg",
        "fedobp/cifar10-dirichlet-0.5",
        "fedobp/cifar10-dirichlet-0.5/fedala",
        "fedobp/cifar10-dirichlet-0.5/fedavg",
    ]
    with rejected(
        ConfigurationError, "preset", "did you", "fedobp/fashion-mnist-dirichlet-0.1/* or fedobp/fashion-mnist"
    ):
        presets.find("fedobp/fashon-mnist-dirichlet-0.1/*")


def test_presets_stand_by_column_in_the_papers_order() -> None:
    columns = presets.by_column(presets.find())
    assert sum(len(cells) for cells in columns.values()) == len(ALL)
    fedcac = [(table, column) for paper, table, column in columns if paper.startswith("FedCAC")]
    assert fedcac[:4] == [
        ("Table 1", "fedcac/cifar10-pathological-2"),
        ("Table 1", "fedcac/cifar100-pathological-2"),
        ("Table 1", "fedcac/tiny-imagenet-pathological-2"),
        ("Table 2", "fedcac/cifar10-dirichlet-0.1"),
    ]
    cells = columns["FedCAC (Wu et al., ICCV 2023)", "Table 4", "fedcac/cifar10-pathological-2"]
    assert [(cell.row, cell.label) for cell in cells] == [("pfedgate", "CIFAR-10"), ("perfedmask", "CIFAR-10")]
    assert [cell.name for cell in columns["", "", ""]] == ["demo"]


def test_small_keeps_the_quantile_of_either_scope() -> None:
    full = dict(ALL["fedobp/cifar10-dirichlet-0.1"].settings) | {"fedobp.quantile": 0.983}
    for scope in ("all", "classifier"):
        config = parse(full | {"fedobp.scope": scope}, METHOD_PARAMS)
        assert not [key for key in presets.small(config) if key.startswith("fedobp.")]


def test_files_are_read_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('method = "fedavg"\n[fedcac]\ntau = 0.3\n')
    assert presets.read_preset(str(path)) == {"method": "fedavg", "fedcac.tau": 0.3}
    path.write_text("[grid]\nseed = [0]\n")
    with rejected(ConfigurationError, "", "is a sweep", "use `corolla sweep"):
        presets.read_preset(str(path))
    path.write_text("method = fedavg")
    with pytest.raises(UserError, match="not valid TOML"):
        presets.read_preset(str(path))
    with rejected(ConfigurationError, "", "none.toml", "no such file"):
        presets.read_preset(str(tmp_path / "none.toml"))


def test_dry_run_prints_what_a_run_would_use_and_touches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COROLLA_DATA_DIR", str(tmp_path / "data"))
    name = "fedcac/tiny-imagenet-dirichlet-0.1"
    code, out, _ = command("run", name, "--dry-run", "--set", "seed=3")
    assert code == 0
    assert "# published: 40.19 ± 1.20 %" in out and "40 of 40 clients" in out
    printed = parse(flatten(tomllib.loads(out)), METHOD_PARAMS)
    expected = parse(ALL[name].settings, METHOD_PARAMS).resolved | {"seed": 3, "output-dir": str(tmp_path / "runs")}
    expected["dataset"] = f"tiny-imagenet:{tmp_path}/tiny-imagenet-200"
    assert printed.resolved == expected
    code, out, _ = command("run", name, "--dry-run", "--scale", "small", "--set", "num-server-rounds=7")
    small = tomllib.loads(out)
    assert (code, small["scale"], small["num-clients"], small["num-server-rounds"]) == (0, "small", 10, 7)
    assert list(tmp_path.iterdir()) == []


def test_the_command_lists_every_preset_in_order(command: Command) -> None:
    code, out, err = command("presets")
    names = out.splitlines()
    assert (code, err, set(names)) == (0, "", set(ALL))
    assert names == sorted(names, key=lambda name: name.split("/"))


def test_on_a_terminal_it_lists_the_columns(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.setattr(type(console), "is_terminal", True)
    _, out, _ = command("presets")
    lines = out.splitlines()
    at = lines.index("FedOBP (anonymous authors, under review), Table 6")
    assert lines[at + 3].split() == ["fedobp/fashion-mnist-dirichlet-0.1", "13", "methods", "FMNIST,", "Dir(0.1)"]
    assert "fedobp/fashion-mnist-dirichlet-0.1/local" not in out
    for words in (("--all",), ("fedobp/fashion-mnist-dirichlet-0.1/*",)):
        _, out, _ = command("presets", *words)
        assert "fedobp/fashion-mnist-dirichlet-0.1/local" in out and "94.93 ± 0.08" in out


def test_as_json_a_preset_has_its_table_and_column(command: Command) -> None:
    _, out, _ = command("presets", "fedcac/cifar10-dirichlet-0.1/as-*", "--json")
    assert json.loads(out) == [
        {
            "preset": "fedcac/cifar10-dirichlet-0.1/as-critical",
            "published": "85.42 ± 1.39",
            "paper": "FedCAC (Wu et al., ICCV 2023)",
            "source": "Table 3: AS CRITICAL, CIFAR-10",
            "table": "Table 3",
            "column": "fedcac/cifar10-dirichlet-0.1",
        }
    ]


@pytest.mark.nightly
@pytest.mark.parametrize("paper", PAPERS)
def test_every_preset_starts_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command, paper: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, preset in ALL.items():
        if paper_of(name) != paper:
            continue
        code, out, err = command("run", name, "--dry-run")
        assert (code, err) == (0, ""), f"{name}: {err}"
        printed = tomllib.loads(out)
        assert printed["method"] == preset.settings.get("method", "fedcac") and "# bytes per round, " in out
        if published := preset.published:
            assert f"# published: {published} %, {preset.paper}, {preset.source}\n" in out
    assert list(tmp_path.iterdir()) == []


def test_listing_is_one_name_a_line_when_piped(command: Command) -> None:
    code, out, err = command("presets", "fedpake/cifar10-pathological-2")
    assert (code, err) == (0, "")
    assert out.splitlines() == sorted(name for name in ALL if "fedpake/cifar10-pathological-2" in name)
    assert command("presets", "fedpake/cifar10-pathological-2", "--all") == (0, out, "")
    code, _, err = command("presets", "fedcak/cifar10-dirichlet-0.1")
    assert code == 2 and mentions(err, "did you mean", "fedcac/cifar10-dirichlet-0.1?")


def test_a_scaled_run_says_so_in_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COROLLA_STATE_DIR", str(tmp_path / "state"))
    sets = ["dataset=digits", "model=mlp", "num-server-rounds=1", "num-clients=2", "local-epochs=1", "run-name=one"]
    words = ["run", "fedcac/cifar10-dirichlet-0.1/fedavg", "--in-process", "--scale", "small"]
    code, _, err = command(*words, *[w for s in sets for w in ("--set", s)])
    assert code == 0, err
    assert read_summary(tmp_path / "runs" / "one")["scale"] == "small"
    assert 'scale = "small"' in (tmp_path / "runs" / "one" / "config.toml").read_text()
