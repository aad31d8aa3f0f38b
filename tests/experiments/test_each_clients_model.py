"""Each client's model as a file of its own, from its own data alone."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from corolla.experiments.exported import loading, predict, run_models
from corolla.experiments.exported.export import export
from deploy import bubblewrap
from fl_app import data, model_card, weight_files
from fl_app.config import parse
from fl_app.errors import UserError
from fl_app.server.run_folder import PLUGINS, read_config, read_metrics
from fl_app.site_directory import site_directory
from strategies import METHOD_PARAMS, METHODS
from tests.conftest import Command, Run, config
from tests.experiments.months import SETTING, WINE, cancer, wine

SITES: dict[str, Any] = {
    "dataset": "node",
    "classes": "malignant,benign",
    "target": "kind",
    "normalize_over": "site",
    "num_clients": 3,
    "num_server_rounds": 1,
    "collect_personal_models": True,
}


def test_only_the_clients_own_data_give_its_scaling(run: Run, tmp_path: Path) -> None:
    files = [cancer(tmp_path / f"{k}.csv", slice(k, None, 3)) for k in range(3)]
    folder = run(**SITES, node_configs={k: {"data-path": str(path)} for k, path in enumerate(files)})
    other = cancer(tmp_path / "other.csv", slice(1, 90, 2))
    for path, words in ((other, "clients.json"), (files[2], "client 2")):
        with pytest.raises(UserError, match=f"^--data-path: .*{words}"):
            export(folder.path, METHODS, 1, tmp_path / "1.pt", data_path=str(path))
    with pytest.raises(UserError, match="any client"):
        export(folder.path, METHODS, None, tmp_path / "g.pt", data_path=str(other))
    _, card = export(folder.path, METHODS, 1, tmp_path / "1.pt", data_path=str(files[1]))
    assert card["input"]["mean"]


def test_another_sites_key_cannot_prove_the_data(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [cancer(tmp_path / f"{k}.csv", slice(k, None, 3)) for k in range(3)]
    folder = run(**SITES, node_configs={k: {"data-path": str(path)} for k, path in enumerate(files)})
    monkeypatch.setenv("COROLLA_SITE_DIR", str(tmp_path / "elsewhere"))
    with pytest.raises(UserError, match="at the site"):
        export(folder.path, METHODS, 1, tmp_path / "1.pt", data_path=str(files[1]))


def test_every_client_gets_its_model_and_nothing_of_others(run: Run, tmp_path: Path, command: Command) -> None:
    table = wine(tmp_path / "june.csv")
    folder = run(
        dataset=f"table:{table}", method="fedper", collect_personal_models=True, **SETTING, num_server_rounds=2
    )
    code, out, err = command("export", folder.path, "--to", tmp_path / "plants")
    assert code == 0 and "celle.pt" in out and not err
    rows = list(read_metrics(folder.path))[-1]["evaluation"]["clients"]
    for k, name in enumerate(("celle", "uelzen", "verden")):
        card = model_card.read(tmp_path / "plants" / f"{name}.pt")
        assert card["client"] == name and card["metrics"]["accuracy"] == rows[str(k)]["accuracy"]  # type: ignore[typeddict-item]
        text = model_card.beside(tmp_path / "plants" / f"{name}.pt").read_text()
        assert (
            not any(other in text for other in {"celle", "uelzen", "verden"} - {name}) and "final-accuracy" not in text
        )
    code, out, _ = command("export", folder.path, "--client", "celle", "--to", tmp_path / "one")
    assert code == 0 and [p.name for p in sorted((tmp_path / "one").iterdir())] == ["celle.pt", "celle.pt.json"]


@pytest.mark.parametrize(
    ("over", "method"),
    [
        *(("sites", name) for name in ("ifca", "fedem", "floco", "fedproto")),
        ("site", "fedper"),
        *(
            pytest.param("sites", name, marks=pytest.mark.nightly)
            for name in ("fedavg", "fedper", "fedbn", "local", "ditto")
        ),
    ],
)
def test_a_site_exports_its_own_model(run: Run, tmp_path: Path, command: Command, method: str, over: str) -> None:
    """The server holds no personal model. The site's predicts its own raw rows as well as the run recorded."""
    files = [cancer(tmp_path / f"{k}.csv", slice(k, None, 3)) for k in range(3)]
    nodes = {k: {"data-path": str(path)} for k, path in enumerate(files)}
    setting = {**SITES, "collect_personal_models": False, "normalize_over": over, "num_server_rounds": 2}
    folder = run(**setting, method=method, run_name="june", node_configs=nodes)
    row = list(read_metrics(folder.path))[-1]["evaluation"]["clients"]
    code, out, err = command("node", "export", "june", "--to", tmp_path / "own", "--name", "celle")
    assert code == 0 and "celle.pt" in out, err
    card = model_card.read(tmp_path / "own" / "celle.pt")
    last = max(site_directory().glob("models/*/june/summary.json"), key=lambda path: path.stat().st_mtime)
    k = last.parent.parent.name.rpartition("-")[2]
    assert row[k]["sha256"] == card["parameters-sha256"]  # type: ignore[typeddict-item]
    assert card["client"] == "celle" and card["run"]["name"] == "june"  # type: ignore[typeddict-item]
    assert not {"uelzen", "class-counts"} & set(card["data"])
    assert card["metrics"]["accuracy"] == pytest.approx(row[k]["accuracy"])
    found = data.prepare_for(parse(read_config(folder.path), METHOD_PARAMS), str(files[int(k)]))
    answers, _ = predict.ask(loading.open_file(tmp_path / "own" / "celle.pt", card, METHODS), found.x_test, card)
    assert np.mean(answers.argmax(1) == found.y_test) == pytest.approx(row[k]["accuracy"])


def test_a_client_at_a_site_has_the_sites_name(run: Run, tmp_path: Path, command: Command) -> None:
    names = ("celle", "uelzen", "verden")
    files = [cancer(tmp_path / f"{name}.csv", slice(k, None, 3)) for k, name in enumerate(names)]
    nodes = {k: {"data-path": str(path), "name": names[k]} for k, path in enumerate(files)}
    setting = SITES | {"normalize_over": "sites"}
    folder = run(**setting, run_name="june", node_configs=nodes)
    assert [facts["name"] for facts in json.loads((folder.path / "clients.json").read_text()).values()] == [*names]
    code, out, err = command("export", folder.path, "--client", "uelzen", "--to", tmp_path / "one")
    assert code == 0 and "uelzen.pt" in out, err
    code, out, err = command("node", "export", "june", "--to", tmp_path / "own")
    (card,) = (model_card.read(path) for path in (tmp_path / "own").glob("*.pt"))
    assert code == 0 and card["client"] in names, err  # type: ignore[typeddict-item]
    # nothing that a confidential run may not tell
    private = run(**SITES | {"collect_personal_models": False}, private=True, run_name="private", node_configs=nodes)
    assert not any(facts.get("name") for facts in json.loads((private.path / "clients.json").read_text()).values())


@pytest.mark.parametrize(
    ("method", "more", "words"),
    [
        ("fedper", {}, "keep-state = true"),
        ("fedem", {"keep_state": True}, "--resume {path} --set collect-personal-models=true"),
        ("fedem", {"keep_state": True, "collect_personal_models": True}, ""),
        *[(method, {}, "") for method in ("fedavg", "fedcac")],
        ("fedavg", {"private": True}, ""),
    ],
)
def test_a_finished_run_without_clients_models_names_how_to_collect_them(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str, more: dict[str, Any], words: str
) -> None:
    caplog.set_level("INFO")
    setting = {
        **SETTING,
        "dataset": f"table:{wine(tmp_path / 'june.csv')}",
        "classes": ",".join(WINE),
        "num_server_rounds": 1,
    }
    folder = run(**{**setting, **more}, method=method)
    lines = [line for line in caplog.messages if line.startswith("models/ lacks the models of")]
    assert len(lines) == bool(words) and all(words.format(path=folder.path) in line for line in lines)
    if words:
        with pytest.raises(UserError, match="--resume"):
            export(folder.path, METHODS, 0, tmp_path / "0.pt")
    elif not more.get("private"):
        for client in range(3):
            export(folder.path, METHODS, client, tmp_path / f"{client}.pt")
    else:
        # no such run may collect them
        with pytest.raises(UserError, match="corolla node export"):
            export(folder.path, METHODS, 0, tmp_path / "0.pt")


def test_a_site_without_a_model_says_so(command: Command) -> None:
    code, _, err = command("node", "export", "june")
    assert code == 2 and "june" in err


def test_a_site_exports_from_the_directory_that_its_rules_name(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site.toml").write_text(f'site-dir = "{tmp_path / "notes"}"\n')
    monkeypatch.setenv("COROLLA_SITE", str(tmp_path / "site.toml"))
    monkeypatch.setenv("COROLLA_SITE_DIR", "")
    monkeypatch.delenv("COROLLA_SITE_DIR")
    code, _, err = command("node", "export", "june")
    assert code == 2 and str(tmp_path / "notes") in err


@pytest.mark.parametrize("method", ["ifca", "cfl", "fedamp"])
def test_a_server_that_holds_the_models_writes_every_clients(run: Run, method: str) -> None:
    folder = run(method=method, num_clients=4)
    for client in range(4):
        assert not run_models.load(folder.path, client, METHODS).missing
        assert (folder.path / "models" / f"client-{client}.safetensors").is_file()


@pytest.mark.parametrize("method", ["fedem", "fedper"])
def test_a_finished_run_collects_its_models_later(run: Run, tmp_path: Path, command: Command, method: str) -> None:
    folder = run(method=method, keep_state=True)
    before = (folder.path / "metrics.jsonl").read_text()
    code, _, err = command("run", "--in-process", "--resume", folder.path, "--set", "collect-personal-models=true")
    assert code == 0, err
    for client in range(3):
        assert not run_models.load(folder.path, client, METHODS).missing
    assert (folder.path / "metrics.jsonl").read_text() == before
    code, out, _ = command("run", "--in-process", "--resume", folder.path, "--set", "collect-personal-models=true")
    assert code == 0 and "nothing to resume" in out


CODE = """
import os
from pathlib import Path

from torch import nn

Path({seen!r}).parent.mkdir(exist_ok=True)
Path({seen!r}).open("a").write(str(os.path.exists({secret!r})))


def mlp(in_channels, num_classes, image_size):
    return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * image_size**2, num_classes))
"""


@pytest.mark.skipif(bubblewrap.find() is None, reason=bubblewrap.why_not() or "bubblewrap makes its walls here")
def test_an_export_at_a_confined_site_runs_the_runs_own_files_behind_walls(
    run: Run, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch, site_dir: Path
) -> None:
    """Applications write the site's directory, the plugins of its kept models included."""
    secret, seen = tmp_path / "secret", site_dir / "seen"
    secret.write_text("secret")
    own = tmp_path / "code"
    own.mkdir()
    (own / "walled.py").write_text(CODE.format(seen=str(seen), secret=str(secret)))
    monkeypatch.syspath_prepend(own)
    monkeypatch.chdir(own)
    files = [cancer(tmp_path / f"{k}.csv", slice(k, None, 3)) for k in range(3)]
    run(
        **SITES,
        model="walled:mlp",
        run_name="june",
        node_configs={k: {"data-path": str(p)} for k, p in enumerate(files)},
    )
    seen.unlink()
    for folder in site_dir.glob("models/*/june"):
        (folder / PLUGINS).mkdir(exist_ok=True)
        (folder / PLUGINS / "walled.py").write_text((own / "walled.py").read_text())
    rules = tmp_path / "site.toml"
    rules.write_text("confine = true\n")
    monkeypatch.setenv("COROLLA_SITE", str(rules))
    code, out, err = command("node", "export", "june", "--to", tmp_path / "own", "--name", "celle")
    assert code == 0, err
    assert seen.read_text() == "False"
    assert model_card.read(tmp_path / "own" / "celle.pt")["client"] == "celle"  # type: ignore[typeddict-item]


ADAPTED = """
import peft
from torch import nn


def mlp(in_channels, num_classes, image_size):
    plain = nn.Sequential(nn.Flatten(), nn.Linear(in_channels * image_size**2, 16), nn.ReLU(), nn.Linear(16, num_classes))
    return peft.get_peft_model(plain, peft.LoraConfig(r=2, target_modules=["1", "3"]))
"""


@pytest.mark.parametrize(("confined", "dtype"), [(False, "float32"), (False, "bfloat16"), (True, "bfloat16")])
def test_a_site_exports_its_adapter_and_the_merged_model(
    run: Run,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    site_dir: Path,
    confined: bool,
    dtype: str,
) -> None:
    """The frozen tensors are read at the site's own path; the server's is gone."""
    peft = pytest.importorskip("peft")
    if confined and bubblewrap.find() is None:
        pytest.skip(bubblewrap.why_not())
    code, servers, own = tmp_path / "code", tmp_path / "servers.safetensors", tmp_path / "own.safetensors"
    # a process imports one module of a name
    module = f"adapted_{confined}_{dtype}".lower()
    code.mkdir()
    (code / f"{module}.py").write_text(ADAPTED)
    monkeypatch.syspath_prepend(code)
    monkeypatch.chdir(code)
    files = [cancer(tmp_path / f"{k}.csv", slice(k, None, 3)) for k in range(3)]
    width = data.prepare_for(config(**SITES), str(files[0])).x_train.shape[1]
    build = importlib.import_module(module).mlp
    for file in (servers, own):
        torch.manual_seed(5)
        save_file(build(width, 2, 1).state_dict(), file)
    frozen = {"model": f"{module}:mlp", "train": "*lora_*", "initial_weights": str(servers), "learning_rate": 0.1}
    frozen |= {"frozen_dtype": dtype}
    nodes = {k: {"data-path": str(path)} for k, path in enumerate(files)}
    run(**SITES | frozen | {"collect_personal_models": False}, run_name="june", node_configs=nodes)
    servers.unlink()
    for folder in site_dir.glob("models/*/june") if confined else ():
        (folder / PLUGINS).mkdir(exist_ok=True)
        (folder / PLUGINS / f"{module}.py").write_text(ADAPTED)
    rules, to = tmp_path / "site.toml", tmp_path / "to"
    rules.write_text(f'initial-weights = "{own}"\n{"confine = true" * confined}\n')
    monkeypatch.setenv("COROLLA_SITE", str(rules))
    monkeypatch.setenv(weight_files.VARIABLE, "")
    for form in ([], ["--peft"], ["--merged"]):
        done, _, err = command("node", "export", "june", "--to", to, "--name", "celle", *form)
        assert done == 0, err
        # behind walls the other process prints it
        assert confined or ("frozen-dtype" in err) == (form == ["--peft"] and dtype == "bfloat16")
    done, _, err = command("node", "export", "june", "--to", to, "--peft", "--onnx")
    assert done != 0 and "--onnx and --peft exclude each other" in err

    x = torch.randn(4, width)
    whole = build(width, 2, 1)
    before = whole.eval()(x)
    whole.load_state_dict(torch.load(to / "celle.pt"))
    expected = whole(x)
    assert not torch.allclose(before, expected, atol=1e-3)
    base = build(width, 2, 1)
    base.load_state_dict(load_file(own))
    with torch.no_grad():
        for matrix in (parameter for parameter in base.parameters() if parameter.dim() > 1):
            matrix.copy_(matrix.to(getattr(torch, dtype)))
    loaded = peft.PeftModel.from_pretrained(base.unload(), to / "celle-adapter")
    torch.testing.assert_close(loaded.eval()(x), expected)
    merged = loaded.unload()
    merged.load_state_dict(load_file(to / "celle-merged" / "model.safetensors"))
    torch.testing.assert_close(merged(x), expected)
    card = model_card.read(to / "celle-adapter" / "adapter_model.safetensors")
    assert card["client"] == "celle"  # type: ignore[typeddict-item]
