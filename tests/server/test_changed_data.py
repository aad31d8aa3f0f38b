"""A run is made of its data: what it was made of is recorded, and whoever goes on, repeats or compares asks for the same."""

from __future__ import annotations

import csv
import json
import logging
import re
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corolla.experiments import compare, significance
from corolla.experiments.runs import RecordedRun, find
from fl_app import models, weights
from fl_app.checksums import KEY_DIGITS, DataHashes
from fl_app.config import parse
from fl_app.data import open_data
from fl_app.errors import UserError
from fl_app.keys import Scalar
from fl_app.layout import Layout
from fl_app.server.run_folder import read_about, read_clients, read_hashes
from fl_app.weights import save_safetensors
from strategies import METHOD_PARAMS
from tests.conftest import Command, Run
from tests.facts import each_mentions, mentions, rejected

EVERYTHING = ["--set", "partition=iid", "--set", "train-samples=0", "--set", "test-samples=0"]


def write_data(path: Path, seed: int) -> Path:
    random = np.random.default_rng(seed)
    y = random.integers(0, 3, 180)
    x = (np.eye(3)[y] * 5 + random.normal(size=(180, 3)) * 0.1).astype(np.float32)
    np.savez(path, x_train=x[:120], y_train=y[:120], x_test=x[120:], y_test=y[120:])
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path / "data.npz", 0)


def arguments(tmp_path: Path, data: Path, name: str = "one", *more: str, rounds: int = 1) -> list[str]:
    sets = {
        "method": "fedavg",
        "model": "mlp",
        "dataset": f"npz:{data}",
        "num-server-rounds": rounds,
        "local-epochs": 1,
        "run-name": name,
        "output-dir": tmp_path,
        "state-dir": tmp_path / "state",
        "data-dir": tmp_path / "prepared",
        "keep-state": "true",
    }
    words = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    return ["run", "--in-process", "--clients", "3", *words, *EVERYTHING, *more]


def again(tmp_path: Path, rounds: int) -> list[str]:
    return [
        "run", "--in-process", "--resume", str(tmp_path / "one"), "--set", f"num-server-rounds={rounds}",
        "--set", f"state-dir={tmp_path / 'state'}",
    ]  # fmt: skip


def test_a_run_records_what_it_is_made_of(command: Command, tmp_path: Path, data: Path) -> None:
    assert command(*arguments(tmp_path, data, "one", "--set", "normalize=mean-std"))[0] == 0
    about = read_about(tmp_path / "one")["data"]
    x = np.load(data)["x_train"].astype(np.float64)
    assert about["normalization"]["mean"] == pytest.approx(x.mean(0)) and set(about) == {
        "sha256",
        "partition-sha256",
        "normalization",
        "input",
    }
    # the same samples under another name, prepared elsewhere
    (tmp_path / "other").mkdir()
    copy = write_data(tmp_path / "other" / "copy.npz", 0)
    more = ["--set", "normalize=mean-std", "--set", f"data-dir={tmp_path / 'elsewhere'}", "--set", "seed=1"]
    assert command(*arguments(tmp_path, copy, "two", *more))[0] == 0
    other = read_about(tmp_path / "two")["data"]
    assert other["sha256"] == about["sha256"] and other["partition-sha256"] != about["partition-sha256"]


def test_a_run_does_not_go_on_with_other_data(command: Command, tmp_path: Path, data: Path) -> None:
    assert command(*arguments(tmp_path, data))[0] == 0
    metrics = (tmp_path / "one" / "metrics.jsonl").read_bytes()
    write_data(data, 1)
    code, out, err = command(*again(tmp_path, 2))
    assert code == 2 and mentions(" ".join((out + err).split()), "resume", data, "data set (sha256")
    assert (tmp_path / "one" / "metrics.jsonl").read_bytes() == metrics
    write_data(data, 0)
    code, _, err = command(*again(tmp_path, 2))
    assert code == 0 and "recorded no hashes" not in err


def test_a_run_does_not_go_on_with_another_partition(command: Command, tmp_path: Path, data: Path) -> None:
    def parts(test: int) -> None:
        train = np.arange(90).reshape(3, 30)
        np.savez(tmp_path / "mine.npz", train_idx=train, test_idx=np.arange(60).reshape(3, 20)[:, :test])

    parts(20)
    mine = ["--set", f"partition=file:{tmp_path / 'mine.npz'}"]
    assert command(*arguments(tmp_path, data, "one", *mine))[0] == 0
    parts(10)
    code, out, err = command(*again(tmp_path, 2))
    assert code == 2 and mentions(
        " ".join((out + err).split()), "resume", tmp_path / "mine.npz", "its partition (sha256"
    )


def test_a_run_does_not_go_on_with_other_initial_weights(run: Run, tmp_path: Path) -> None:
    file, start = tmp_path / "start.safetensors", {"model": "mlp", "num_clients": 2, "method": "fedavg"}
    module = models.build("mlp", in_channels=1, num_classes=10, image_size=8)

    def save(scale: float) -> None:
        model = weights.read(module)
        save_safetensors(file, Layout.of(module), type(model)(scale * model.params, model.buffers))

    save(1.0)
    folder = run(run_name="one", initial_weights=str(file), keep_state=True, num_server_rounds=1, **start)
    save(2.0)
    again = {"resume": str(folder.path), "run_name": "one", "initial_weights": str(file), "keep_state": True}
    with rejected(UserError, "initial-weights", "changed since", "run started"):
        run(num_server_rounds=2, **again, **start)
    save(1.0)
    run(num_server_rounds=2, **again, **start)


def test_the_server_refuses_a_site_whose_data_have_changed(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sites = {i: write_data(tmp_path / f"site{i}.npz", i) for i in range(3)}
    nodes: Any = {i: {"data-path": str(path)} for i, path in sites.items()}
    setting: dict[str, Any] = {
        "method": "fedavg",
        "dataset": "node",
        "classes": "0,1,2",
        "num_clients": 3,
        "keep_state": True,
        "run_name": "one",
        "min_available_clients": 2,
        "available_timeout": 1.0,
    }
    folder = run(node_configs=nodes, num_server_rounds=1, **setting)
    told = read_clients(folder.path)
    hashes = {i: told[str(i)]["data-sha256"] for i in range(3)}
    assert len(set(hashes.values())) == 3 and set(read_about(folder.path)["data"]) == {"normalization", "input"}
    assert read_hashes(folder.path) == {i: DataHashes(hashes[i], "") for i in range(3)}
    write_data(sites[1], 7)
    caplog.set_level(logging.WARNING, logger="corolla")
    run(node_configs=nodes, num_server_rounds=2, resume=str(folder.path), **setting)
    (line,) = [line for line in caplog.messages if "client 1" in line]
    assert re.search(r"data set \(sha256 .*\) has changed", line)
    last = [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()][-1]
    assert last["round"] == 2 and set(last["clients"]) == {"0", "2"}


def test_a_hash_of_a_sites_own_data_means_nothing_elsewhere(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = write_data(tmp_path / "site.npz", 0)
    nodes: Any = {i: {"data-path": str(site)} for i in range(2)}
    found = []
    for where in ("here", "here", "there"):
        monkeypatch.setenv("COROLLA_SITE_DIR", str(tmp_path / where))
        folder = run(
            method="fedavg", dataset="node", classes="0,1,2", num_clients=2, num_server_rounds=1, node_configs=nodes,
            run_name=f"run{len(found)}",
        )  # fmt: skip
        found.append(read_hashes(folder.path)[0].data)
    assert found[0] == found[1] != found[2]


def test_hashes_of_two_readings_do_not_show_which_values_a_site_has(tmp_path: Path) -> None:
    """Equal ones would show that no record has the value that the second reading takes for a missing number."""
    table = tmp_path / "site.csv"
    table.write_text("age,label\n" + "".join(f"{age},{age % 2}\n" for age in range(30, 70)))
    base: dict[str, Scalar] = {
        "dataset": "node",
        "target": "label",
        "classes": "0,1",
        "num-clients": 2,
        "dp-epsilon": 1.0,
    }

    def told(**more: Scalar) -> DataHashes:
        config = parse({**base, **{name.replace("_", "-"): value for name, value in more.items()}}, METHOD_PARAMS)
        return open_data(config, str(table)).hidden_hashes

    first = told()
    assert told(learning_rate=0.5, num_server_rounds=7) == first
    for more in ({"na_values": "93"}, {"na_values": "33"}, {"seed": 1}, {"separator": ","}):
        found = told(**more)
        assert found.data[:KEY_DIGITS] != first.data[:KEY_DIGITS] and found.difference(first) == ""


def test_the_server_refuses_a_client_that_holds_another_data_set(run: Run, tmp_path: Path) -> None:
    """Its file has the same name, and other content than the others'."""
    from client_app import client

    true = client.CorollaClient._data_hashes

    def other(self: client.CorollaClient) -> Any:
        found = true(self)
        return {**found, "data-sha256": "0" * 64} if self.client_id == 2 else found

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(client.CorollaClient, "_data_hashes", other)
        with rejected(UserError, "", "client 2", "data set (sha256 000000000000", "differs", "others'"):
            run(method="fedavg", num_clients=3, available_timeout=1.0, run_name="one")
        folder = run(method="fedavg", num_clients=3, min_available_clients=2, available_timeout=1.0, run_name="two")
    assert set(read_clients(folder.path)) == {"0", "1"}


def test_which_hash_differs_is_said() -> None:
    a, b = DataHashes("a" * 64, "c" * 64), DataHashes("b" * 64, "c" * 64)
    assert a.difference(a) == ""
    assert mentions(a.difference(b), "data set (sha256", "expected bbbbbbbbbbbb...")
    assert DataHashes("a" * 64, "d" * 64).difference(a).startswith("partition (sha256 dddddddddddd")
    # the first 16 digits of a keyed hash name the key: of another one nothing is known
    mine = DataHashes("a" * 64, "")
    assert mine.difference(DataHashes("b" * 64, "")) == ""
    assert mentions(
        mine.difference(DataHashes("a" * 16 + "b" * 48, "")), "data set (sha256", "expected bbbbbbbbbbbb..."
    )


@pytest.mark.parametrize("more", [{"private": True}, {"dp_epsilon": 8.0}])
def test_a_run_that_hides_its_data_tells_keyed_hashes_and_no_statistics(
    run: Run, tmp_path: Path, data: Path, more: dict[str, Any]
) -> None:
    setting: dict[str, Any] = {
        "method": "fedavg", "dataset": f"npz:{data}", "partition": "iid", "train_samples": 0, "test_samples": 0,
        "num_clients": 3, "num_server_rounds": 1, "normalize": "mean-std", "model": "mlp",
    }  # fmt: skip
    plain = run(run_name="plain", **setting)
    hidden = run(run_name="hidden", **setting, **more)
    assert "data" not in read_about(hidden.path)
    told = (hidden.path / "clients.json").read_text() + (hidden.path / "run.json").read_text()
    assert read_about(plain.path)["data"]["sha256"] not in told and "normalization" not in told
    assert len(read_hashes(hidden.path)) == 3


def test_a_site_that_cannot_keep_a_key_takes_part_and_says_so(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COROLLA_SITE_DIR", str(tmp_path / "file" / "site"))
    site = write_data(tmp_path / "site.npz", 0)
    nodes: Any = {i: {"data-path": str(site)} for i in range(2)}
    caplog.set_level(logging.WARNING, logger="corolla")
    folder = run(
        method="fedavg", dataset="node", classes="0,1,2", num_clients=2, num_server_rounds=1, node_configs=nodes
    )
    assert read_hashes(folder.path) == {} and "keep a key" in caplog.text


@pytest.mark.parametrize("more", ["", "private = true\n"], ids=["open", "private"])
def test_a_sweep_runs_again_what_was_made_of_other_data(
    command: Command, tmp_path: Path, data: Path, more: str
) -> None:
    sweep = tmp_path / "s.toml"
    sweep.write_text(
        f'[settings]\ndataset = "npz:{data}"\nmodel = "mlp"\nnum-clients = 3\nnum-server-rounds = 1\nlocal-epochs = 1\n'
        f'partition = "iid"\ntrain-samples = 0\ntest-samples = 0\ndata-dir = "{tmp_path / "prepared"}"\n'
        f'state-dir = "{tmp_path / "state"}"\nmethod = "fedavg"\n{more}[grid]\nseed = [0, 1]\n'
    )
    words = ["sweep", "--in-process", str(sweep), "--output-dir", str(tmp_path / "out")]
    assert command(*words)[0] == 0
    code, out, _ = command(*words)
    assert code == 0 and mentions(out, "2 finished before", "0 to do")
    found = [json.loads(path.read_text())["final-accuracy"] for path in (tmp_path / "out").glob("*/summary.json")]
    (row,) = csv.DictReader((tmp_path / "out" / "results.csv").open())
    figures = [float(row[f"final-accuracy-{name}"]) for name in ("mean", "std")]
    assert figures == pytest.approx([statistics.fmean(found), statistics.stdev(found)]) and row["n"] == "2"
    assert f"{100 * figures[0]:.2f} ± {100 * figures[1]:.2f}" in (tmp_path / "out" / "results.md").read_text()
    write_data(data, 1)
    code, out, _ = command(*words)
    assert code == 0 and mentions(out, "0 finished before", "2 to do")
    assert out.count("; set aside") == 2
    assert len(list((tmp_path / "out" / "other-data").iterdir())) == 2
    code, out, _ = command(*words)
    assert code == 0 and mentions(out, "2 finished before", "0 to do")


def test_compare_tells_runs_of_other_samples_apart(command: Command, tmp_path: Path, data: Path) -> None:
    for name, method, content in (("a", "fedavg", 0), ("b", "local", 0), ("c", "local", 1), ("d", "fedavg", 1)):
        write_data(data, content)
        assert command(*arguments(tmp_path, data, name, "--set", f"method={method}"))[0] == 0
    runs = {run.path.name: run for run in find([tmp_path / name for name in "abcd"], METHOD_PARAMS)}
    groups = compare.group(runs.values())
    assert [[run.path.name for run in group] for group in groups] == [["a"], ["b"], ["c"], ["d"]]
    (header, *rows) = significance.differences_table(groups)
    assert "data-sha256" in header
    assert each_mentions(
        [row[-1] for row in rows],
        ("(first)",),
        ("undecided: needs 3 seeds",),
        ("not the same", "samples"),
        ("not the same", "samples"),
    )
    code, out, _ = command("compare", *(str(tmp_path / name) for name in "abcd"))
    assert code == 0 and out.count("the same samples") == 2
    # without runs of other samples nothing is said of them
    same = compare.group([runs["a"], runs["b"]])
    assert "data-sha256" not in significance.differences_table(same)[0]


def test_sites_whose_data_have_changed_are_not_paired(run: Run, tmp_path: Path) -> None:
    sites = {i: write_data(tmp_path / f"site{i}.npz", i) for i in range(3)}
    nodes: Any = {i: {"data-path": str(path)} for i, path in sites.items()}
    setting: dict[str, Any] = {"dataset": "node", "classes": "0,1,2", "num_clients": 3, "num_server_rounds": 1}
    run(node_configs=nodes, method="fedavg", run_name="a", **setting)
    write_data(sites[1], 7)
    folder = run(node_configs=nodes, method="local", run_name="b", **setting)
    one, other = (RecordedRun(folder.path.parent / name, METHOD_PARAMS) for name in "ab")
    found = significance.paired([other], [one])
    assert found is not None and found.pairs == 2


def test_what_is_exported_later_is_normalised_as_the_run_was(command: Command, tmp_path: Path, data: Path) -> None:
    assert command(*arguments(tmp_path, data, "one", "--set", "normalize=mean-std"))[0] == 0
    mean = np.load(data)["x_train"].astype(np.float64).mean(0)
    write_data(data, 1)
    code, _, err = command("export", str(tmp_path / "one"), "--output", str(tmp_path / "m.pt"))
    assert code == 0, err
    (card,) = tmp_path.glob("m*.json")
    assert json.loads(card.read_text())["input"]["mean"] == pytest.approx(mean)


def test_what_is_exported_later_is_shifted_as_the_run_was(command: Command, tmp_path: Path) -> None:
    """Seconds since 1970 are stored less the smallest of them; the card says so when the file is gone, too."""
    random = np.random.default_rng(0)
    y = random.integers(0, 2, 120)
    x = np.stack([1709251200.0 + 10 * y + random.normal(size=120), random.normal(size=120)], axis=1)
    file = tmp_path / "seconds.npz"
    np.savez(file, x_train=x[:80], y_train=y[:80], x_test=x[80:], y_test=y[80:])
    assert command(*arguments(tmp_path, file, "one", "--set", "normalize=mean-std"))[0] == 0
    cards = []
    for name in ("there", "gone"):
        code, _, err = command("export", str(tmp_path / "one"), "--output", str(tmp_path / f"{name}.pt"))
        assert code == 0, err
        (card,) = tmp_path.glob(f"{name}*.json")
        cards.append(json.loads(card.read_text())["input"])
        file.rename(tmp_path / "elsewhere.npz") if name == "there" else None
    assert cards[0]["shift"][0] == pytest.approx(x[:80, 0].min()) and cards[0]["shift"][1] == 0
    assert cards[0] == cards[1]
