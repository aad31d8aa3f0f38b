"""An address at which there is no Ray cluster: an error at once, before anything is written."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from corolla.experiments import ray_cluster
from fl_app.errors import UserError
from tests.facts import mentions


def refused(address: str, directory: Path) -> str:
    with pytest.raises(UserError) as raised:
        ray_cluster.check(address, {"output-dir": directory / "out"}, 1, 0)
    assert list(directory.iterdir()) == []
    return str(raised.value)


@pytest.mark.parametrize("address", ["ray://localhost:10001", "localhost", "localhost:70000", "auto", ""])
def test_an_address_that_is_none(address: str, tmp_path: Path) -> None:
    assert mentions(refused(address, tmp_path), "must be HOST:PORT", "`ray start --head`", "prints", f"got {address!r}")


# Ray would try for more than a minute
@pytest.mark.timeout(50)
def test_nobody_listens(tmp_path: Path) -> None:
    address = "127.0.0.1:1"
    rule = "--ray-address: no Ray cluster's head listens at"
    assert refused(address, tmp_path) == f"{rule} {address}: Connection refused"
    assert refused("no..name:6379", tmp_path).startswith(f"{rule} no..name:6379: ")


def test_nobody_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "_CONNECT_SECONDS", 0.2)
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        # it takes no more than these
        for _ in range(4):
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(full.getsockname())
        assert refused(f"127.0.0.1:{full.getsockname()[1]}", tmp_path).endswith(": timed out")
