"""Replies as the ServerApp receives them: in pieces."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from fl_app.errors import UserError
from fl_app.layout import Model
from fl_app.processes import flower_environment, script
from fl_app.transport import flower_patches as receiving
from fl_app.transport import wire
from fl_app.transport.flower_patches import ReceivedArray
from fl_app.transport.wire import Expected, Upload
from tests.conftest import f32
from tests.fl_app.test_wire import npy, refuse, reply

receiving.install()


def received(content: RecordDict, tamper: Any = lambda contents: None) -> RecordDict:
    """Take a reply apart and put it together again as the ServerApp does."""
    contents = {name: found.deflate() for name, found in get_all_nested_objects(content).items()}
    tamper(contents)
    got = inflate_object_from_contents(content.object_id, contents)
    assert isinstance(got, RecordDict)
    return got


def test_a_received_array_is_put_together_from_its_pieces() -> None:
    # 12 MiB: three of Flower's pieces
    n = 3 * 2**20
    sent = Upload(Model(np.arange(n, dtype=np.float32), f32(1)), num_examples=3)
    content = received(reply(sent))
    array = content.array_records["fitres.parameters"]["0"]
    assert isinstance(array, ReceivedArray) and len(array.pieces) == 3
    got = wire.decode_upload(content, Expected(n, 1))
    assert got.model.params.tobytes() == sent.model.params.tobytes() and got.model.buffers.tolist() == [1]
    assert array.data == npy(sent.model.params)


def test_pieces_of_an_array_that_is_refused_are_not_joined() -> None:
    content = received(
        reply(Upload(Model(np.zeros(2**24, np.float32), f32()), num_examples=3))
    )  # 64 MiB: one piece, 13 times
    array = content.array_records["fitres.parameters"]["0"]
    assert isinstance(array, ReceivedArray) and len(array.pieces) == 13
    tracemalloc.start()
    refuse(content, "array params has shape (16777216,), expected (10,)", expected=Expected(10, 0))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


def test_an_array_whose_header_is_cut_over_pieces() -> None:
    whole = npy(f32(1, 2, 3))
    array = ReceivedArray(dtype="", shape=(), stype="", data=b"")
    array.pieces = [memoryview(whole)[i : i + 5] for i in range(0, len(whole), 5)]
    content = reply(Upload(Model(f32(4, 5, 6), f32()), num_examples=1))
    content.array_records["fitres.parameters"]["0"] = array
    assert wire.decode_upload(content, Expected(3, 0)).model.params.tolist() == [1, 2, 3]


def test_pieces_that_are_not_there() -> None:
    def lose_one(contents: dict[str, bytes]) -> None:
        head = next(name for name, found in contents.items() if found.startswith(b"Array "))
        contents[head] = contents[head].replace(b'"arraychunk_ids": [0', b'"arraychunk_ids": [  ')

    content = received(reply(Upload(Model(f32(1), f32()), num_examples=3)), lose_one)
    refuse(content, "array params is not a NumPy array", expected=Expected(1, 0))


# Where Flower's commands are found: beside Python, where Flower is installed, on the path -----------------------------


def test_an_environment_that_borrows_flower_finds_its_commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    beside = Path(script("flwr"))
    assert beside.parent == Path(sys.executable).parent
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert Path(script("flower-superlink")).samefile(beside.with_name("flower-superlink"))
    places = flower_environment()["PATH"].split(os.pathsep)
    assert places[0] == str(tmp_path) and Path(places[1]).samefile(beside.parent)
    monkeypatch.setattr(importlib.metadata, "files", lambda name: None)
    monkeypatch.setenv("PATH", str(beside.parent))
    assert script("flwr") == str(beside)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="flwr"):
        script("flwr")
