"""Malicious files and names, all tried in one process: each is refused by a UserError that names it, and runs no code."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from client_app.notes import Notes
from client_app.stored_state import StateStore
from fl_app import data, npz_file, plugins, weights
from fl_app.config import parse
from fl_app.errors import UserError
from fl_app.server.run_folder import read_metrics
from strategies import METHOD_PARAMS
from tests.conftest import Run

pytestmark = [pytest.mark.hostile, pytest.mark.filterwarnings("ignore:.*[Ss]parse")]

Make = Callable[[Path], Any]


class Code:
    """Makes a file named `ran` when it is unpickled."""

    def __init__(self, directory: Path) -> None:
        self.ran = str(directory / "ran")

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the call that unpickling makes."""
        return os.mkdir, (self.ran,)


def use_data(kind: str, path: Path) -> None:
    data.prepare(f"{kind}:{path}", path.parent / "root", **({} if kind == "npz" else {"target": "y"}))


def use_weights(path: Path) -> None:
    weights.load_initial(nn.Linear(2, 1), str(path))


def pickled_npz(path: Path) -> None:
    np.savez(path, x_train=np.array([Code(path.parent)], object), y_train=np.zeros(1, int))


def disguised_npz(path: Path) -> None:
    path.write_bytes(pickle.dumps(Code(path.parent)))


def claimed_npz(path: Path, count: int = 10**15) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (count,)})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x_train.npy", header.getvalue())


def bomb_npz(path: Path) -> None:
    np.savez_compressed(path, x_train=np.zeros((10, 2**20), np.uint8), y_train=np.arange(10))


def strange_npz(path: Path) -> None:
    """A member with a compression that does not exist."""
    np.savez(path, x_train=np.zeros(3))
    path.write_bytes(
        path.read_bytes().replace(
            b"PK\x01\x02\x2d\x03\x2d\x00\x00\x00\x00\x00", b"PK\x01\x02\x2d\x03\x2d\x00\x00\x00\x63\x00"
        )
    )


def sparse_pt(path: Path) -> None:
    none = torch.zeros((2, 0), dtype=torch.long)
    torch.save({"weight": torch.sparse_coo_tensor(none, torch.zeros(0), (10**9, 10**4)), "bias": torch.zeros(1)}, path)


def safetensors(header: bytes, size: int | None = None) -> Make:
    return lambda path: path.write_bytes(
        (len(header) if size is None else size).to_bytes(8, "little") + header + b"0000"
    )


def shaped(shape: list[int]) -> bytes:
    return json.dumps({"weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}).encode()


FILES: tuple[tuple[str, Make, Callable[[Path], None]], ...] = (
    ("pickled.npz", pickled_npz, lambda path: use_data("npz", path)),
    ("disguised.npz", disguised_npz, lambda path: use_data("npz", path)),
    ("claimed.npz", claimed_npz, lambda path: use_data("npz", path)),
    ("bomb.npz", bomb_npz, lambda path: use_data("npz", path)),
    ("strange.npz", strange_npz, lambda path: use_data("npz", path)),
    ("pickled.pt", lambda path: torch.save({"weight": Code(path.parent)}, path), use_weights),
    ("legacy.pt", disguised_npz, use_weights),
    ("sparse.pt", sparse_pt, use_weights),
    (
        "stretched.pt",
        lambda path: torch.save({"weight": torch.ones(1).expand(10**12), "bias": torch.ones(1)}, path),
        use_weights,
    ),
    ("header.safetensors", safetensors(b"{}", 2**62), use_weights),
    ("shape.safetensors", safetensors(shaped([10**9, 10**9])), use_weights),
    ("deep.safetensors", safetensors(b"[" * 100_000), use_weights),
    ("pickled.safetensors", disguised_npz, use_weights),
    ("pickled.parquet", disguised_npz, lambda path: use_data("table", path)),
    (
        "cut.parquet",
        lambda path: path.write_bytes(b"PAR1" + b"\xff" * 64 + b"PAR1"),
        lambda path: use_data("table", path),
    ),
    ("pickled.csv", disguised_npz, lambda path: use_data("table", path)),
)


def test_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npz_file, "available_memory", lambda: 8e6)
    for name, make, use in FILES:
        path = tmp_path / name
        make(path)
        with pytest.raises(UserError) as error:
            use(path)
        assert name in str(error.value) and len(str(error.value)) < 2000, name
        assert not (tmp_path / "ran").exists(), name


def test_an_onnx_file_reads_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    from corolla.experiments.exported.loading import inference_session

    secret = tmp_path / "secret"
    secret.write_bytes(np.ones(4, np.float32).tobytes())
    inside = tmp_path / "here"
    inside.mkdir()
    monkeypatch.chdir(inside)
    for place in (str(secret), "../secret"):
        tensor = onnx.TensorProto(name="w", data_type=1, dims=[4], data_location=onnx.TensorProto.EXTERNAL)
        tensor.external_data.add(key="location", value=place)
        output = onnx.helper.make_tensor_value_info("y", 1, [4])
        graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["w"], ["y"])], "g", [], [output], [tensor])
        made = onnx.helper.make_model(graph, ir_version=8, opset_imports=[onnx.helper.make_opsetid("", 17)])
        with pytest.raises(UserError, match="ONNX Runtime"):
            inference_session(made.SerializeToString(), "stolen.onnx")


PATHS = ("../x", "/etc/passwd", "a/b", "..", "a\0b", "a\nb")


@pytest.mark.usefixtures("own_methods")
def test_names_that_are_paths(tmp_path: Path) -> None:
    for name in PATHS:
        with pytest.raises(UserError, match="run-name: letters, digits"):
            parse({"method": "fedavg", "run-name": name}, METHOD_PARAMS)
        with pytest.raises(UserError, match="malformed experiment id"):
            StateStore(tmp_path, name, 0)
        with pytest.raises(UserError, match="malformed experiment id"):
            Notes(tmp_path, name, 0)
        with pytest.raises(UserError, match="malformed state version"):
            StateStore(tmp_path, "e", 0).load(name)
        plugins.reset(tmp_path)
        assert plugins.source(f"{name}:NAME") is None
        with pytest.raises(UserError):
            plugins.load("method", f"{name}:NAME")
    assert not list(tmp_path.iterdir())


OWN_METHOD = """
from corolla.method import FedAvg, LocalUpdate, Method, NoParams, all_tensors, local_epochs


class Update(LocalUpdate[NoParams]):
    def train(self, start, state, ctx):
        trainer = ctx.trainer
        {train}
        return trainer.train(start)


METHOD = Method("{name}", NoParams, FedAvg[NoParams], Update, all_tensors{declares})
"""
WAYS = {
    "objective": "return trainer.train(start, objective=lambda module, x, y: trainer.loss(trainer.logits(module, x), y))",
    "part": "return trainer.train(start, max_batches=1)",
    "loop": "next(iter(trainer.batches()))",
    "counts": "trainer.class_counts",
    "losses": "trainer.sample_losses(start)",
    "samples": "trainer.samples",
}


@pytest.mark.usefixtures("own_methods")
def test_a_budget_needs_a_method_that_declares_it(run: Run, raw_config: dict[str, Any], tmp_path: Path) -> None:
    """A method that declares plain steps and uses records otherwise trains nobody: nothing of its records leaves a client."""
    for name, train in {"undeclared": "pass", **WAYS}.items():
        declares = "" if name == "undeclared" else ", dp_epochs=local_epochs"
        (tmp_path / f"{name}.py").write_text(OWN_METHOD.format(name=name, train=train, declares=declares))
    plugins.reset(tmp_path)
    with pytest.raises(UserError, match="dp-epsilon: method undeclared:METHOD"):
        run(method="undeclared:METHOD", dp_epsilon=8.0)
    assert not Path(str(raw_config["output-dir"])).exists()
    for name in WAYS:
        with pytest.raises(UserError, match=rf"dp-epsilon: method {name}:METHOD reads records by "):
            run(method=f"{name}:METHOD", run_name=name, dp_epsilon=8.0)
        assert not list(read_metrics(Path(str(raw_config["output-dir"])) / name))
