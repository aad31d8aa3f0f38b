"""The key `keep-uploads`: which rounds are kept, what their files hold, and which runs it is refused in."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corolla.experiments import dry_run
from fl_app.config import parse
from fl_app.errors import ConfigurationError, MethodError, UserError
from fl_app.layout import Layout, Model, Slot
from fl_app.server import kept_uploads
from fl_app.server.checkpoint import read_tensors
from fl_app.server.run_folder import read_config, read_summary
from strategies import METHOD_PARAMS, METHODS
from tests.conftest import Run, config, f32
from tests.facts import mentions, rejected

LAYOUT = Layout((Slot("c.weight", (1, 2), 0, 2), Slot("c.bias", (1,), 2, 3)), (), frozenset(["c.weight", "c.bias"]))
W, B, BITS = f32(1, 2, 3, 4, 5, 6).reshape(2, 3), np.zeros((2, 0), np.float32), np.array([[5], [2]], np.uint8)


def save(run: Path, sent: Callable[[int], list[float]], bits: Any = None, layout: Layout = LAYOUT) -> None:
    def model(i: int) -> Model:
        return Model(f32(*sent(i)), f32())

    kept_uploads.save(run, 4, layout, [7, 2], np.array([30.0, 10.0]), (W, B, bits), model)


def test_a_file_holds_uploads_and_one_row_where_all_were_sent_the_same(tmp_path: Path) -> None:
    save(tmp_path, lambda i: [1, 1, 1], BITS)
    path = tmp_path / "uploads" / "round-4.npz"
    with np.load(path) as file:
        assert {name: (file[name].dtype.str[1:], file[name].tolist()) for name in file.files if name != "layout"} == {
            "clients": ("i8", [7, 2]),
            "samples": ("f8", [30, 10]),
            "params": ("f4", [[1, 2, 3], [4, 5, 6]]),
            "buffers": ("f4", [[], []]),
            "sent.params": ("f4", [[1, 1, 1]]),
            "sent.buffers": ("f4", [[]]),
            "mask": ("u1", [[5], [2]]),
        }
        assert json.loads(file["layout"].item()) == {
            "params": [["c.weight", [1, 2]], ["c.bias", [1]]],
            "buffers": [],
            "classifier": ["c.bias", "c.weight"],
        }
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    found = kept_uploads.read(tmp_path, 4)
    assert found is not None and found.sent is not None and found.bits is not None
    assert found.params == LAYOUT.params and found.classifier == LAYOUT.classifier
    assert found.W.tolist() == W.tolist() and found.sent.tolist() == [[1, 1, 1]] and found.clients.tolist() == [7, 2]
    assert isinstance(found.W, np.memmap) and not found.W.flags.writeable


def test_a_row_each_where_clients_were_sent_their_own_models(tmp_path: Path) -> None:
    save(tmp_path, lambda i: [i, i, 1])
    found = kept_uploads.read(tmp_path, 4)
    assert found is not None and found.sent is not None and found.bits is None
    assert found.sent.tolist() == [[7, 7, 1], [2, 2, 1]]


def test_uploads_of_another_form_than_the_sent_models_are_one_tensor(tmp_path: Path) -> None:
    save(tmp_path, lambda i: [0] * 6, layout=Layout((Slot("w", (6,), 0, 6),), ()))
    found = kept_uploads.read(tmp_path, 4)
    assert found is not None and found.sent is None and found.W.tolist() == W.tolist()
    assert [(slot.name, slot.size) for slot in found.params] == [("parameters", 3)]


def test_equal_uploads_give_equal_bytes_of_the_predicted_size(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save(tmp_path / name, lambda i: [i, i, 1], BITS)
    first, second = ((tmp_path / name / "uploads" / "round-4.npz").read_bytes() for name in ("a", "b"))
    assert first == second
    with np.load(tmp_path / "a" / "uploads" / "round-4.npz") as file:
        held = sum(file[name].nbytes for name in file.files if name != "layout")
    assert kept_uploads.size(2, 3, 0, 1, 2) == held


@pytest.mark.parametrize("damage", ["cut", "other", "compressed"])
def test_a_damaged_file_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    save(tmp_path, lambda i: [1, 1, 1])
    path = tmp_path / "uploads" / "round-4.npz"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-40])
    elif damage == "other":
        path.write_bytes(b"no archive")
    else:
        with np.load(path) as file:
            arrays = dict(file)
        np.savez_compressed(path, **arrays)
    assert kept_uploads.read(tmp_path, 4) is None and mentions(caplog.text, "round-4.npz cannot be", "read")
    assert kept_uploads.read(tmp_path, 5) is None


# Runs ------------------------------------------------------------------------------------------------------------------


def kept(path: Path, round: int) -> kept_uploads.KeptUploads:
    found = kept_uploads.read(path, round)
    assert found is not None and found.sent is not None
    return found


@pytest.mark.parametrize(("every", "rounds"), [("every 3", [1, 3, 6, 7]), (" every  1 ", [1, 2, 3, 4, 5, 6, 7])])
def test_rounds_that_are_kept(run: Run, every: str, rounds: list[int]) -> None:
    folder = run(keep_uploads=every, num_server_rounds=7)
    assert kept_uploads.rounds(folder.path) == rounds
    folder.rewind(6, {})
    assert kept_uploads.rounds(folder.path) == [t for t in rounds if t <= 6]


def test_the_mean_of_a_round_is_sent_in_the_next_and_the_last_is_the_final_model(run: Run) -> None:
    path = run(keep_uploads="every 1", model="tests.small_models:batchnorm", num_server_rounds=3).path
    for t in (1, 2):
        with (
            np.load(path / "uploads" / f"round-{t}.npz") as now,
            np.load(path / "uploads" / f"round-{t + 1}.npz") as next,
        ):
            for name in ("params", "buffers"):
                mean = np.average(now[name].astype(np.float64), axis=0, weights=now["samples"])
                assert now[name].shape[1] > 0 and next[f"sent.{name}"].shape[0] == 1
                np.testing.assert_allclose(next[f"sent.{name}"][0], mean, rtol=1e-6, atol=1e-7)
    last = kept(path, 3)
    with np.load(path / "uploads" / "round-3.npz") as file:
        mean = np.average(file["params"], axis=0, weights=file["samples"])
    final = read_tensors(path / "models" / "global.safetensors", [slot.name for slot in last.params])
    for slot in last.params:
        np.testing.assert_allclose(final[slot.name].reshape(-1), mean[slot.start : slot.stop], rtol=1e-5, atol=1e-6)


# tests/fl_app/test_keys.py compares FedAvg's
@pytest.mark.parametrize("method", ["fedcac", "ifca"])
def test_keeping_changes_no_result(run: Run, method: str) -> None:
    digests = [
        read_summary(run(run_name=f"run{len(every)}", method=method, keep_uploads=every).path)["digest"]
        for every in ("", "every 1")
    ]
    assert digests[0] == digests[1]


def test_masks_and_own_models_are_kept(run: Run) -> None:
    path = run(method="fedcac", keep_uploads="every 1", num_server_rounds=3, num_clients=4, fedcac={"beta": 9}).path
    first, last = kept(path, 1), kept(path, 3)
    assert first.sent is not None and len(first.sent) == 1 and last.sent is not None and len(last.sent) == 4
    for found in (first, last):
        assert found.bits is not None
        # tau = 0.5 of every tensor
        ones = np.unpackbits(found.bits, axis=1, bitorder="little").sum(axis=1)
        assert ones.tolist() == [sum(slot.size // 2 for slot in found.params)] * 4


def test_the_last_round_of_a_run_that_ends_early_is_kept(run: Run) -> None:
    rule = "loss: 2 rounds without better by 100"
    folder = run(keep_uploads="every 2", num_server_rounds=9, stop_when=rule)
    assert read_summary(folder.path)["rounds"] == 3
    assert kept_uploads.rounds(folder.path) == [1, 2, 3]
    assert kept_uploads.rounds(run(run_name="b", keep_uploads="every 9", num_server_rounds=9, stop_when=rule).path) == [
        1,
        3,
    ]


def test_a_method_that_adds_up_says_why_it_keeps_a_stack(
    run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("corolla"), "propagate", True)
    caplog.set_level(logging.INFO, "corolla")
    run(keep_uploads="every 2")
    assert mentions(caplog.text, "kept", "row for each", "keep-uploads writes each")


@pytest.mark.parametrize("text", ["10", "every", "every 0", "every ten", "each 10", "every -1", "every 1.5"])
def test_another_text_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(UserError, match=r"keep-uploads: must be `every N`, with N rounds .* got '" + text):
        config(keep_uploads=text)


def test_private_runs_and_methods_without_uploads_are_refused(run: Run) -> None:
    with rejected(ConfigurationError, "keep-uploads", "server", "private", "no single upload"):
        config(keep_uploads="every 1", private=True)
    with rejected(MethodError, "keep-uploads", "method local", "no parameters"):
        run(method="local", keep_uploads="every 1")


@pytest.mark.parametrize("method", ["fedavg", "fedcac"])
def test_the_predicted_size_is_that_of_the_file(run: Run, method: str) -> None:
    folder = run(method=method, keep_uploads="every 1", num_server_rounds=3)
    settings = parse(read_config(folder.path), METHOD_PARAMS)
    cost = dry_run.round_bytes(settings, METHODS[method], {"in_channels": 1, "num_classes": 10, "image_size": 8})
    with np.load(folder.path / "uploads" / "round-3.npz") as file:
        held = sum(file[name].nbytes for name in file.files if name != "layout")
    assert (cost.kept, cost.kept_rounds) == (held, 3)
