"""CIFAR's files are read as data, and nothing of the product loads a file in a form that can run code."""

from __future__ import annotations

import ast
import os
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_app import data, plain_pickle
from fl_app.errors import DataError
from tests.facts import rejected

PRODUCT = ("client_app", "corolla", "deploy", "fl_app", "strategies")
ROOT = Path(__file__).parents[2]
X = np.arange(2 * 3072).reshape(2, 3072).astype(np.uint8)


def of_python_2(x: Any) -> bytes:
    """An array as Python 2 has pickled it, in CIFAR's own archives."""
    content = x.tobytes()
    return (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n(K\x00tU\x01b\x87R"
        + b"(K\x01(K%cM\x00\x0ctcnumpy\ndtype\nU\x02u1K\x00K\x01\x87R" % len(x)
        + b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        + (b"T" + len(content).to_bytes(4, "little") + content + b"tb")
    )


def batch(labels: list[int]) -> bytes:
    more = b"".join(b"K%c" % label for label in labels)
    return b"\x80\x02}(U\x04data" + of_python_2(X) + b"U\x06labels](" + more + b"eu."


class Code:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the call that unpickling makes."""
        return os.mkdir, (self.path,)


@pytest.fixture
def batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with CIFAR-10's files, of two images each; somebody replaces files after their hashes were compared."""
    from torchvision.datasets import cifar

    monkeypatch.setattr(cifar, "check_integrity", lambda *_: True)
    directory = tmp_path / "downloads" / "cifar-10-batches-py"
    directory.mkdir(parents=True)
    for number, (name, _) in enumerate([*cifar.CIFAR10.train_list, *cifar.CIFAR10.test_list]):
        (directory / name).write_bytes(batch([number, 9]))
    (directory / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}, 2))
    return directory


def test_cifars_files_are_read(batches: Path, tmp_path: Path) -> None:
    found = data.prepare("cifar10", tmp_path)
    assert np.array_equal(found.x_test.reshape(2, 3072), X) and found.x_train.shape == (10, 3, 32, 32)
    assert found.y_train.tolist() == [0, 9, 1, 9, 2, 9, 3, 9, 4, 9] and found.info.classes == tuple("abcdefghij")


@pytest.mark.parametrize("name", ["data_batch_1", "test_batch", "batches.meta"])
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_code_in_cifars_files_is_refused(batches: Path, tmp_path: Path, name: str, protocol: int) -> None:
    (batches / name).write_bytes(pickle.dumps({"data": X, "labels": Code(tmp_path / "ran")}, protocol))
    with rejected(DataError, "dataset", "mkdir is not", "read", "could run code"):
        data.prepare("cifar10", tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_arrays_are_read_as_pickle_reads_them(tmp_path: Path, protocol: int) -> None:
    value = {"data": X, "names": ["a", "é", b"\xff"], "n": (1, None, True, 1.5)}
    (path := tmp_path / "file").write_bytes(pickle.dumps(value, protocol))
    with path.open("rb") as file:
        found = plain_pickle.load(file, encoding="latin1")
    assert np.array_equal(found.pop("data"), value.pop("data")) and found == value


@pytest.mark.parametrize("value", [np.array([None]), np.zeros(3), np.zeros((2, 3), np.uint8).T, Path("/")])
def test_anything_else_is_refused(tmp_path: Path, value: Any) -> None:
    (path := tmp_path / "file").write_bytes(pickle.dumps(value, 2))
    with path.open("rb") as file, pytest.raises(pickle.UnpicklingError):
        plain_pickle.load(file)


# between a command and its own processes, over sockets without a name
OWN_PROCESSES = {"client_app/worker.py", "corolla/experiments/pool.py"}


CALLS = re.compile(
    r"(pickle|marshal|dill|cloudpickle|joblib|shelve)\.(loads?|Unpickler|open)|yaml\.(load|unsafe_load|full_load)"
    r"|(pd|pandas)\.read_pickle|exec|eval|.*\.extractall"
)


def loads_code(call: ast.Call) -> bool:
    """Whether a call loads a file in a form that can run code."""
    named = {word.arg: ast.unparse(word.value) for word in call.keywords}
    if CALLS.fullmatch(name := ast.unparse(call.func)):
        return True
    if name == "torch.load":
        return named.get("weights_only") != "True"
    return named.get("allow_pickle", "False") != "False" or "trust_remote_code" in named


def found_in(text: str) -> list[str]:
    return [ast.unparse(node) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call) and loads_code(node)]


BAD: tuple[str, ...] = (
    "pickle.load(f)",
    "pickle.loads(b)",
    "torch.load(p)",
    "torch.load(p, weights_only=False)",
    "np.load(p, allow_pickle=True)",
    "joblib.load(p)",
    "yaml.load(t)",
    "yaml.unsafe_load(t)",
    "pd.read_pickle(p)",
    "pickle.Unpickler(f)",
    "archive.extractall(p)",
    "exec(t)",
    "load_dataset(p, trust_remote_code=True)",
)


def test_no_file_is_loaded_as_code() -> None:
    assert [line for line in BAD if not found_in(line)] == []
    found: dict[str, list[str]] = {}
    for directory in PRODUCT:
        for path in sorted((ROOT / directory).rglob("*.py")):
            if calls := found_in(path.read_text(encoding="utf-8")):
                found[path.relative_to(ROOT).as_posix()] = calls
    assert set(found) == OWN_PROCESSES, found
