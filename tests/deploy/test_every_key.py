"""Every key of a run, with a path of a site as its value: the answer is the same whether there is such a file or not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from client_app import client_app
from client_app.counting import train_samples
from deploy import site
from deploy.site import Site
from fl_app.config import RunConfig
from fl_app.errors import UserError
from fl_app.keys import KeySpec, Scalar, specs, table_of
from fl_app.sources import path_prefixes
from fl_app.transport import wire
from strategies import METHOD_PARAMS, METHODS

KEYS = [*specs(RunConfig), *(spec for name in METHODS for spec in specs(METHOD_PARAMS[name], table_of(name)))]
# keys with a path whose files the server alone opens
RULES = Site(readable_paths=(), min_samples=5)


def values(path: Path) -> Iterator[str]:
    """Every form in which a key could name a path."""
    yield from (str(path), f"{path}:{'0' * 16}", f"x,{path}", f"every {path}", f"{path.with_suffix('')}:name")
    yield from (f"{path.stem}:name", f"{path.parent.name}.{path.stem}:name")
    yield from (f"{prefix}{path}" for prefix in ("file:", "x=", "lognormal:", *path_prefixes("dataset")))


def answer(spec: KeySpec, value: Scalar) -> str:
    """What a site answers to a run with this value: its gate, or its client."""
    table = spec.name.rpartition(".")[0]
    base: dict[str, Scalar] = {"num-clients": 2, "train-samples": 20, "test-samples": 5}
    config = base | ({"method": next(m for m in METHODS if table_of(m) == table)} if table else {}) | {spec.name: value}
    if why := site.refusal(RULES, "0" * 64, config):
        return why
    try:
        if train_samples(config, 0, 2, "") < 5:
            return "min-samples"
    except UserError as error:
        return str(error)
    TaskIdentity.task_id = TaskIdentity.node_id = TaskIdentity.run_id = 0
    message = Message(wire.encode_query(), 1, wire.QUERY)
    reply = client_app.app(message, Context(7, 1, {"partition-id": 0, "num-partitions": 2}, RecordDict(), config))
    return json.dumps(dict(reply.content.config_records["getpropertiesres.properties"]))


def make_file(path: Path) -> None:
    path.write_text("a,b\n1,0\n")


def make_archive(path: Path) -> None:
    x, y = np.zeros((20, 3), np.float32), np.arange(20) % 2
    with path.open("wb") as file:
        np.savez(file, x_train=x, y_train=y, x_test=x, y_test=y)


def make_directory(path: Path) -> None:
    for part in ("train", "test"):
        for name in ("no", "yes"):
            (path / part / name).mkdir(parents=True)


def make_link(path: Path) -> None:
    path.symlink_to(path)


# how each is made, and the forms that open one of its kind; a file of rows has every form
MADE = {
    "there.csv": (make_file, [""]),
    "there.npz": (make_archive, ["npz:", "file:"]),
    "there": (make_directory, ["folder:", "hf:"]),
    "there.py": (make_link, [":name"]),
}


@pytest.mark.parametrize("spec", KEYS, ids=lambda spec: spec.name)
def test_no_key_shows_which_files_a_site_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: KeySpec) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    free = spec.type is str and not spec.choices
    # others refuse every text
    for name in MADE if free else ["there.csv"]:
        path, (make, opened_by) = tmp_path / name, MADE[name]
        forms = [form for form in values(path) if form == str(path) or any(way in form for way in opened_by)]
        forms = forms if free else [str(path)]
        missing = [answer(spec, value) for value in forms]
        make(path)
        assert [answer(spec, value) for value in forms] == missing
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


@pytest.mark.parametrize("name", ["dataset", "partition", "data-dir", "state-dir", "initial-weights"])
def test_one_text_answers_every_path_that_no_run_may_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "out").symlink_to(tmp_path / "closed")
    (tmp_path / "open" / "loop").symlink_to(tmp_path / "loop")
    rules = Site(readable_paths=(str(tmp_path / "open"),))
    prefix = {"dataset": "npz:", "partition": "file:"}.get(name, "")
    outside = ("closed", "none", "loop", "loop/x", "open/../closed", "open/out", "open/out/x", "open/loop", "open\0")
    paths = [
        *(str(tmp_path / path) for path in outside),
        "/",
        "x",
        "~",
        "~root",
        "~no-such-account",
        "/proc/self/environ",
    ]
    answers = {site.refusal(rules, "", {name: f"{prefix}{path}"}) for path in paths}
    assert answers == {f"readable-paths: {name} names a path that no run may name here"}
    assert site.refusal(rules, "", {name: f"{prefix}{tmp_path}/open/x"}) == ""


def test_no_method_declares_a_key_that_names_a_file() -> None:
    """A site's gate knows the keys of the run alone."""
    assert not [spec.name for spec in KEYS if "." in spec.name and spec.path]
