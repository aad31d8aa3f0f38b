"""Damaged prepared data is one error that says what to do, found at once or by `corolla data verify`."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from corolla.cli import app
from fl_app import checksums, data
from fl_app.config import RunConfig
from fl_app.errors import UserError
from tests.disks import full_disk
from tests.facts import mentions, rejected


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("prepared")
    data.check(config(root))
    return root


@pytest.fixture
def root(prepared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "data"))


def config(root: Path) -> RunConfig:
    return RunConfig(dataset="digits", data_dir=str(root), num_clients=3)


def open_one(root: Path) -> None:
    data.open_client(config(root), 0)


def one(root: Path, pattern: str) -> Path:
    (path,) = root.glob(pattern)
    return path


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGE: list[tuple[str, Callable[[Path], object], str]] = [
    ("datasets/*/x_train.npy", cut, "x_train.npy has"),
    ("datasets/*/x_train.npy", lambda path: flip(path, 10), "x_train.npy has other first bytes"),
    ("datasets/*/y_test.npy", Path.unlink, "y_test.npy is missing"),
    ("datasets/*/info.json", lambda path: path.write_text("{"), "info.json has 1 bytes"),
    ("datasets/*/checksums.json", lambda path: path.write_text("[]"), "checksums.json cannot be read"),
    ("partitions/*/flat.npy", cut, "flat.npy has"),
    ("partitions/*/offsets.npy", lambda path: flip(path, 130), "offsets.npy has other first bytes"),
]


@pytest.mark.parametrize(("pattern", "damage", "words"), DAMAGE)
def test_damage_found_at_opening(pattern: str, damage: Callable[[Path], object], words: str, root: Path) -> None:
    damage(one(root, pattern))
    with rejected(UserError, "data-dir", "is damaged", words, "--force`") as error:
        open_one(root)
    assert "\n" not in str(error.value)
    data.check(config(root), force=True)
    open_one(root)
    assert [problems for path in root.glob("*/[!.]*/") if (problems := checksums.compare(path, whole=True))] == []


@pytest.mark.parametrize("pattern", ["datasets/*/x_train.npy", "datasets/*/info.json", "partitions/*/flat.npy"])
def test_damage_of_what_was_prepared_before_there_were_checksums(pattern: str, root: Path) -> None:
    for path in root.glob("*/*/checksums.json"):
        path.unlink()
    open_one(root)
    cut(one(root, pattern))
    with rejected(UserError, "data-dir", "is damaged", "`corolla data prepare", "--force`"):
        open_one(root)


def test_one_flipped_bit_is_found_by_verify(root: Path) -> None:
    verify = ["data", "verify", "--set", f"data-dir={root}"]
    sound = CliRunner().invoke(app, verify)
    assert sound.exit_code == 0 and mentions(sound.output, "2 prepared data sets", "partitions"), sound.output
    images = one(root, "datasets/*/x_train.npy")
    flip(images, images.stat().st_size - 5)
    # milliseconds: not all is read
    open_one(root)
    found = CliRunner().invoke(app, verify)
    assert isinstance(found.exception, UserError)
    assert mentions(str(found.exception), "x_train.npy has another", "checksum") and "--force" in str(found.exception)
    assert CliRunner().invoke(app, ["data", "prepare", "--force", "--clients", "3", *verify[2:]]).exit_code == 0
    assert CliRunner().invoke(app, verify).exit_code == 0


def test_comparing_takes_no_time(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(50_000_000, np.uint8))
    checksums.write(tmp_path)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        assert checksums.compare(tmp_path, whole=False) == []
        times.append(time.perf_counter() - start)
    assert min(times) < 0.005


def test_a_full_disk_while_preparing(tmp_path: Path) -> None:
    with (
        full_disk(tmp_path, free=60_000) as there,
        rejected(UserError, "data-dir", "cannot write under") as error,
    ):
        data.check(config(there))
    assert "\n" not in str(error.value)
