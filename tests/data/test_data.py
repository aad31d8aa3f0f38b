""""""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict
from flwr.compat.common import recorddict_compat as compat
from flwr.compat.common.typing import GetPropertiesIns
from PIL import Image

from client_app.client_app import app
from fl_app import data
from fl_app.config import RunConfig, parse
from fl_app.data import decode as decoding
from fl_app.errors import DataError, UserError
from fl_app.keys import Scalar
from fl_app.server.run_folder import RunFolder, read_metrics, read_summary
from fl_app.server_app import run
from fl_app.transport.inprocess import InProcessGrid
from fl_app.transport.wire import IN_PROCESS, QUERY
from strategies import METHOD_PARAMS
from tests.data.test_data_folder import write_folder
from tests.data.test_data_npz import write_npz
from tests.facts import rejected

APP = Path(__file__).resolve().parents[2]
CIFAR_IMAGES = APP.parent / "shared" / "data" / "cifar10-images.tar.gz"


def run_python(code: str, **env: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=APP, env=os.environ | env
    ).stdout


def digest(prepared: data.Prepared) -> str:
    arrays = (prepared.x_train, prepared.y_train, prepared.x_test, prepared.y_test)
    return hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()


# digits and what every data set shares


def test_digits_are_the_real_ones_split_by_class(tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    p = data.prepare("digits", tmp_path)
    assert p.x_train.shape == (1347, 1, 8, 8) and p.x_test.shape == (450, 1, 8, 8)
    assert p.x_train.dtype == np.uint8 and p.y_train.dtype == np.int64 and not p.x_train.flags.writeable
    assert p.x_train.max() == 255 and p.x_train.min() == 0
    ours = np.concatenate([p.x_train, p.x_test]).reshape(-1, 64)
    theirs = np.rint(load_digits().data * 255 / 16).astype(np.uint8)
    assert sorted(map(bytes, ours)) == sorted(map(bytes, theirs))
    train, test = np.bincount(p.y_train), np.bincount(p.y_test)
    assert np.all(np.abs(test / (train + test) - 0.25) < 0.01)
    assert p.info.num_classes == 10 and (p.info.num_train, p.info.num_test) == (1347, 450)
    scaled = np.asarray(p.x_train, np.float64) / 255
    assert np.allclose([p.info.mean[0], p.info.std[0]], [scaled.mean(), scaled.std()])
    assert data.DatasetInfo.from_json(p.info.to_json()) == p.info


def test_import_is_light() -> None:
    heavy = "torch torchvision sklearn PIL datasets flwr flwr_datasets scipy"
    loaded = run_python(f"import sys, fl_app.data; print([m for m in {heavy.split()} if m in sys.modules])")
    assert loaded.strip() == "[]"


def test_data_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COROLLA_DATA_DIR", "/b")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert data.data_root(RunConfig(data_dir="/a")) == Path("/a")
    assert data.data_root(RunConfig()) == Path("/b")
    monkeypatch.delenv("COROLLA_DATA_DIR")
    assert data.data_root(RunConfig()) == Path("/c/corolla")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data.data_root(RunConfig()) == Path.home() / ".cache" / "corolla"


def test_processes_convert_once_and_agree(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images", {"a": 40, "b": 40})
    code = f"""
import hashlib, os, time
from pathlib import Path
from fl_app import data
from fl_app.data import decode as module
decode = module.decode
def logged(*args):
    os.write(os.open({str(tmp_path / "log")!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT), b"x")
    time.sleep(0.5)
    decode(*args)
module.decode = logged
p = data.prepare("folder:{folder}", Path({str(tmp_path / "root")!r}))
print(hashlib.sha256(b"".join(a.tobytes() for a in (p.x_train, p.y_train, p.x_test, p.y_test))).hexdigest(), p.key)
"""
    procs = [subprocess.Popen([sys.executable, "-c", code], cwd=APP, stdout=subprocess.PIPE) for _ in range(3)]
    outputs = {proc.communicate()[0] for proc in procs}
    assert all(proc.returncode == 0 for proc in procs)
    assert len(outputs) == 1
    assert (tmp_path / "log").read_bytes() == b"x"


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = f"folder:{write_folder(tmp_path / 'images', {'a': 2, 'b': 2})}"
    decode = decoding.decode

    def interrupted(directory: Path, *args: Any) -> None:
        decode(directory, *args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(decoding, "decode", interrupted)
        data.prepare(dataset, tmp_path / "root")
    assert [p.suffix for p in (tmp_path / "root" / "datasets").iterdir()] == [".lock"]
    lock = next((tmp_path / "root" / "datasets").glob(".*.lock"))
    # as a killed process leaves it
    stale = lock.with_suffix(".tmp-1")
    stale.mkdir()
    (stale / "x_train.npy").write_bytes(b"half")
    prepared = data.prepare(dataset, tmp_path / "root")
    assert prepared.info.num_train == 4 and not stale.exists()


def test_force_converts_again(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images", {"a": 2, "b": 2})
    before = data.prepare(f"folder:{folder}", tmp_path / "root")
    (folder / "train" / "a" / "000.png").write_bytes((folder / "train" / "b" / "000.png").read_bytes())  # in place
    assert digest(data.prepare(f"folder:{folder}", tmp_path / "root")) == digest(before)
    after = data.prepare(f"folder:{folder}", tmp_path / "root", force=True)
    assert np.array_equal(after.x_train[0], after.x_train[2])
    # the open map still has the old file
    assert not np.array_equal(before.x_train[0], before.x_train[2])
    assert len([p for p in (tmp_path / "root" / "datasets").iterdir() if not p.name.startswith(".")]) == 1


def test_an_unwritable_data_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with rejected(UserError, "data-dir", "cannot write under", "file/datasets"):
        data.prepare("digits", tmp_path / "file")


# a site's own data


def test_site_folder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "site", {"b": 3})
    (folder / "test" / "b").rename(folder / "kept")
    (folder / "test").rmdir()
    config = RunConfig(num_clients=3, dataset="node", classes="a, b, c", data_dir=str(tmp_path / "root"))
    mine = data.open_client(config, 2, data_path=str(folder))
    assert mine.y_train.tolist() == [1, 1, 1] and mine.x_test.shape == (0, 3, 8, 8) and mine.info.num_test == 0
    assert mine.info.classes == ("a", "b", "c")
    (folder / "train" / "d").mkdir()
    with rejected(DataError, "dataset", "class 'd' is not", "one of classes"):
        data.open_client(config, 2, data_path=str(folder))
    (folder / "train" / "d").rmdir()
    for file in (folder / "train" / "b").iterdir():
        file.unlink()
    with rejected(DataError, "dataset", "no images", "class directories", "site/train"):
        data.open_client(config, 2, data_path=str(folder))


def test_site_npz(tmp_path: Path) -> None:
    config = RunConfig(dataset="node", classes="a,b", data_dir=str(tmp_path))
    path = write_npz(tmp_path / "site.npz", x_test=None, y_test=None, y_train=np.full(12, 1))
    site = data.prepare_for(config, str(path))
    assert site.info.num_test == 0 and site.info.classes == ("a", "b") and set(site.y_train.tolist()) == {1}
    path = write_npz(tmp_path / "other.npz")
    with rejected(DataError, "dataset", "class 2", "below 2", "(a, b)"):
        data.prepare_for(config, str(path))
    for gone in ("gone.npz", "gone"):
        with pytest.raises(UserError, match="no f.*gone"):
            data.prepare_for(config, str(tmp_path / gone))


def test_node_needs_a_data_path(tmp_path: Path) -> None:
    config = RunConfig(num_clients=3, dataset="node", classes="a,b", data_dir=str(tmp_path))
    with pytest.raises(UserError, match="--node-config 'data-path=\"/site\"'"):
        data.open_client(config, 0)


# clients


def test_clients_open_what_the_partition_gives_them(tmp_path: Path) -> None:
    config = RunConfig(
        dataset=f"npz:{write_npz(tmp_path / 'd.npz')}",
        data_dir=str(tmp_path / "root"),
        num_clients=2,
        partition="dirichlet",
        min_samples=1,
        dirichlet_alpha=10.0,
        test_ratio=0.5,
    )
    info = data.check(config)
    everyone = [data.open_client(config, i) for i in range(2)]
    p = data.prepare(config.dataset, tmp_path / "root")
    seen = [bytes(x) for c in everyone for x in (*c.x_train, *c.x_test)]
    assert sorted(seen) == sorted(map(bytes, (*p.x_train, *p.x_test)))  # all of both sets, mixed
    label = {bytes(x): y for x, y in zip((*p.x_train, *p.x_test), (*p.y_train, *p.y_test), strict=True)}
    for c in everyone:
        assert c.info == info and c.x_train.dtype == np.uint8 and c.y_test.dtype == np.int64
        assert [label[bytes(x)] for x in c.x_train] == c.y_train.tolist()
        assert [label[bytes(x)] for x in c.x_test] == c.y_test.tolist()
    for bad in (-1, 2):
        with rejected(DataError, f"client {bad}", ">= 0", "num-clients (2)"):
            data.open_client(config, bad)


def test_check_refuses_before_training(tmp_path: Path) -> None:
    config = RunConfig(data_dir=str(tmp_path), num_clients=3, train_samples=5000)
    with rejected(DataError, "train-samples", "5000 samples", "digits has 1347"):
        data.check(config)
    assert not list(tmp_path.glob("partitions/[!.]*"))
    assert data.check(dataclasses.replace(config, train_samples=50)).num_train == 1347


def test_open_takes_milliseconds(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images", {f"class{k:02}": 10 for k in range(20)}, side=16)
    data.check(RunConfig(dataset=f"folder:{folder}", data_dir=str(tmp_path / "root"), num_clients=4, train_samples=40))
    code = f"""
import sys, time
from fl_app import config, data
times = []
for client_id in range(4):
    start = time.perf_counter()
    run = config.RunConfig(dataset="folder:{folder}", data_dir={str(tmp_path / "root")!r}, num_clients=4,
                           train_samples=40)
    assert len(data.open_client(run, client_id).y_train) == 40
    times.append(time.perf_counter() - start)
assert not {{"torch", "datasets", "PIL", "sklearn"}} & set(sys.modules)
print(min(times))
"""
    assert float(run_python(code)) < 0.05


def test_real_images(tmp_path: Path) -> None:
    if not CIFAR_IMAGES.exists():
        pytest.skip(f"{CIFAR_IMAGES.name} is not in shared/data")
    count = 0
    with tarfile.open(CIFAR_IMAGES) as tar:
        # the archive is sorted: test/ comes first, so stop early and use its images for both
        for member in tar:
            if member.isfile() and member.name.endswith(".jpg") and int(Path(member.name).stem) < 10:
                split, name, file = Path(member.name).parts[-3:]
                for target in ("train", "test"):
                    path = tmp_path / "images" / target / name / file
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(tar.extractfile(member).read())  # type: ignore[union-attr]
                count += 1
            if count == 100:
                break
    assert split == "test"
    config = RunConfig(
        dataset=f"folder:{tmp_path / 'images'}",
        data_dir=str(tmp_path / "root"),
        num_clients=5,
        partition="iid",
        train_samples=20,
        test_samples=20,
    )
    info = data.check(config)
    assert info.classes[0] == "airplane" and info.num_classes == 10 and info.image_size == 32 and info.in_channels == 3
    assert all(0.3 < m < 0.7 for m in info.mean) and all(0.15 < s < 0.4 for s in info.std)
    assert data.open_client(config, 4).x_train.shape == (20, 3, 32, 32)


# Sites that train on their own data (`dataset = node`): label order, missing and unknown classes, shapes that differ --


def site(root: Path, classes: str, size: int = 8, count: int = 6) -> str:
    """Write an image folder whose class c has gray level 40 * ord(c) mod 256, and return its path."""
    for part in ("train", "test"):
        for name in classes:
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                image = np.full((size, size), (40 * ord(name) + i) % 256, np.uint8)
                Image.fromarray(image).save(root / part / name / f"{i}.png")
    return str(root)


def start(tmp_path: Path, sites: list[str], **config: Scalar) -> RunFolder:
    raw: dict[str, Scalar] = {
        "dataset": "node",
        "classes": "a,b,c",
        "method": "fedcac",
        "num-server-rounds": 2,
        "local-epochs": 1,
        "output-dir": str(tmp_path / "runs"),
        "state-dir": str(tmp_path / "state"),
        "data-dir": str(tmp_path / "data"),
        "available-timeout": 5.0,
        "device": "cpu",
        **{k.replace("_", "-"): v for k, v in config.items()},
    }
    nodes: dict[int, Mapping[str, Scalar]] = {i: {"data-path": path} for i, path in enumerate(sites) if path}
    grid = InProcessGrid(app, raw, len(sites), nodes)
    return run(grid, parse(raw, METHOD_PARAMS), lambda *_: None)


def test_sites_may_lack_classes_and_mix_folders_with_arrays(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {k: rng.integers(0, 256, (n, 8, 8), dtype=np.uint8) for k, n in (("x_train", 9), ("x_test", 3))}
    np.savez(tmp_path / "c.npz", y_train=np.arange(9) % 2 + 1, y_test=np.array([1, 2, 2]), **arrays)
    sites = [site(tmp_path / "one", "abc"), site(tmp_path / "two", "ac"), str(tmp_path / "c.npz")]
    folder = start(tmp_path, sites)
    summary = read_summary(folder.path)
    assert summary["digest"] and summary["failures"] == 0
    clients = next(read_metrics(folder.path))["clients"]
    assert [clients[str(i)]["train-samples"] for i in range(3)] == [18, 12, 9]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ("abx", "client 1: .*x"),
        ("", "client 1: .*data-path"),
        ("missing", "client 1: .*missing"),
    ],
)
def test_a_site_that_does_not_fit_fails_by_name_before_anything_is_written(
    tmp_path: Path, second: str, message: str
) -> None:
    path = {"abx": lambda: site(tmp_path / "two", "abx"), "": lambda: "", "missing": lambda: str(tmp_path / "missing")}
    with pytest.raises(UserError, match=message):
        start(tmp_path, [site(tmp_path / "one", "abc"), path[second]()])
    assert not (tmp_path / "runs").exists()


def test_sites_with_other_image_sizes_are_named(tmp_path: Path) -> None:
    with rejected(UserError, "", "clients [0]", "1 channels", "3 classes", "8 pixels", "clients [1]", "12 pixels"):
        start(tmp_path, [site(tmp_path / "one", "abc"), site(tmp_path / "two", "abc", size=12)])
    folder = start(tmp_path, [site(tmp_path / "three", "abc"), site(tmp_path / "four", "abc", size=12)], image_size=8)
    assert read_summary(folder.path)["rounds"] == 2


@pytest.mark.parametrize("form", ["table:{}/patient.csv", "{}/patient.csv", "csv:{}/patient.csv", "npz:{}/patient.npz"])
def test_a_sites_error_does_not_name_other_files(tmp_path: Path, form: str) -> None:
    (tmp_path / "patients.csv").write_text("a,y\n1,0\n")
    (tmp_path / "patients.npz").write_text("")
    config: dict[str, Scalar] = {"method": "fedavg", "target": "y", "dataset": form.format(tmp_path), "num-clients": 1}
    texts = {}
    for place in ({}, {IN_PROCESS: True}):
        context = Context(1, 1, {"partition-id": 0, "num-partitions": 1, **place}, RecordDict(), dict(config))
        query = compat.getpropertiesins_to_recorddict(GetPropertiesIns({}))
        message = Message(query, dst_node_id=1, message_type=QUERY)
        texts[bool(place)] = str(app(message, context).content)
    assert "readable" in texts[False] or "configuration/" in texts[False]
    assert "patient" not in texts[False]
    assert "did you mean" in texts[True] and "patients." in texts[True]
