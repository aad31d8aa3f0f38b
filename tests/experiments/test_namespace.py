"""A network of one's own, as another account than root; every step in a process of its own."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from corolla.experiments import namespace

NOBODY = 65534


def become(uid: int) -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        # PR_SET_DUMPABLE: as after exec, its /proc/self is its own
        ctypes.CDLL(None).prctl(4, 1)


def connect(port: int) -> int:
    """0, or the error's number; loads no module, which another account may not read."""
    with socket.socket() as sock:
        sock.settimeout(5)
        return sock.connect_ex(("127.0.0.1", port))


def fork(work: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return child


def ended_well(child: int) -> bool:
    return os.waitpid(child, 0)[1] == 0


def allowed() -> None:
    become(NOBODY)
    assert namespace.why_not() == ""


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory for both accounts."""
    if not ended_well(fork(allowed)):
        pytest.skip("an ordinary account cannot have a network of its own here")
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        yield Path(name)


def test_a_network_with_nothing_but_a_loopback(directory: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as outside:

        def look() -> None:
            become(NOBODY)
            assert connect(outside.getsockname()[1]) == 0
            uid, gid = os.getuid(), os.getgid()
            namespace.unshare()
            assert (os.getuid(), os.getgid()) == (uid, gid)
            (directory / "mine").touch()
            assert [name for _, name in socket.if_nameindex()] == ["lo"]
            assert connect(outside.getsockname()[1]) == errno.ECONNREFUSED
            with socket.create_server(("127.0.0.1", 0)) as inside:
                assert connect(inside.getsockname()[1]) == 0

        assert ended_well(fork(look))
    assert (directory / "mine").stat().st_uid == (NOBODY if os.geteuid() == 0 else os.geteuid())


def test_only_its_own_account_enters(directory: Path) -> None:
    os.mkfifo(directory / "open")
    os.mkfifo(directory / "done")
    for name in ("open", "done"):
        (directory / name).chmod(0o666)

    def serve() -> None:
        become(NOBODY)
        namespace.unshare()
        with socket.create_server(("127.0.0.1", 0)) as server:
            (directory / "open").write_text(str(server.getsockname()[1]))
            (directory / "done").read_text()

    server = fork(serve)
    try:
        port = int((directory / "open").read_text())

        def visit() -> None:
            become(NOBODY)
            namespace.enter(server)
            assert connect(port) == 0

        def intrude() -> None:
            become(NOBODY - 1)
            with pytest.raises(PermissionError):
                namespace.enter(server)
            assert connect(port) == errno.ECONNREFUSED

        assert ended_well(fork(visit))
        assert connect(port) == errno.ECONNREFUSED
        if os.geteuid() == 0:
            assert ended_well(fork(intrude))
    finally:
        (directory / "done").write_text("")
        assert ended_well(server)


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root to be where the kernel refuses")
def test_a_refusal_says_why(tmp_path: Path) -> None:
    def ask() -> None:
        # in which there are no user namespaces
        os.chroot(tmp_path)
        become(NOBODY)
        assert "not permitted" in namespace.why_not()

    assert ended_well(fork(ask))
