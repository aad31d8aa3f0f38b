"""Bubblewrap's walls on this machine: what is behind them, what comes through, and what is said where there are none."""

from __future__ import annotations

import contextlib
import errno
import http.server
import importlib
import json
import os
import platform
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

from deploy import bubblewrap, confine, supernode, unanswered
from deploy.audit import Audit
from deploy.bubblewrap import Walls
from deploy.confine import Confinement
from deploy.site import Site
from fl_app import foreign_files
from fl_app.errors import DeploymentError, UserError
from tests.conftest import wait_for
from tests.facts import mentions, rejected

needs_bubblewrap = pytest.mark.skipif(
    bubblewrap.find() is None, reason=bubblewrap.why_not() or "bubblewrap makes its walls here"
)
NOBODY = 65534

TRIES = """
import json, os, socket, sys, urllib.request
def tried(work):
    try:
        return work() or "done"
    except OSError as error:
        return type(error).__name__
root, port = sys.argv[1], sys.argv[2]
json.dump({
    "port": tried(lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/").status),
    "read": tried(lambda: open(f"{root}/read/file").read()), "write there": tried(lambda: open(f"{root}/read/new", "w").close()),
    "inside": tried(lambda: open(f"{root}/read/write/new", "w").close()), "link": tried(lambda: open(f"{root}/link/file").read()),
    "beside": tried(lambda: open(f"{root}/secret").read()), "passwd": len(open("/etc/passwd").readlines()),
    "home": os.environ["HOME"] == os.getcwd() == f"{root}/read/write", "pid": os.getpid() < 5,
    "unix": tried(lambda: socket.socket(socket.AF_UNIX)), "pair": tried(lambda: socket.socketpair()[0].close()),
    "settings": [name for name in ("sys/kernel/core_pattern", "sys/vm/swappiness", "sysrq-trigger", "irq/default_smp_affinity")
                 if tried(lambda: open(f"/proc/{name}", "a").close()) == "done"],
    "input": os.read(0, 1).decode(),
    "files": [n for n in range(3, 64) if tried(lambda: "/proc/" in os.readlink(f"/proc/self/fd/{n}") or "open") == "open"],
}, sys.stdout)
"""
# lets process 1 call getpid and socket
TRACE = """
import ctypes, json, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
libc.ptrace.restype = ctypes.c_long
ATTACH, DETACH, STEP, GET, SET = 16, 17, 9, 12, 13
RAX, RIP, RDI, RSI, RDX, ORIG = 10, 16, 14, 13, 12, 15
def ptrace(request, data=None):
    if libc.ptrace(request, 1, None, data) < 0:
        raise OSError(ctypes.get_errno(), "ptrace")
def call(number, *given):
    now = (ctypes.c_ulonglong * 27)(*saved)
    # back to the instruction in which it waits
    now[RIP], now[RAX], now[ORIG] = saved[RIP] - 2, number, 2**64 - 1
    for place, value in zip((RDI, RSI, RDX), given):
        now[place] = value
    ptrace(SET, now)
    ptrace(STEP)
    os.waitpid(1, 0x40000000)
    ptrace(GET, now)
    return ctypes.c_longlong(now[RAX]).value
ptrace(ATTACH)
os.waitpid(1, 0x40000000)
saved = (ctypes.c_ulonglong * 27)()
ptrace(GET, saved)
found = {"getpid": call(39), "socket": call(41, 1, 1, 0)}
saved[RAX] = 2**64 - 4
ptrace(SET, saved)
ptrace(DETACH)
json.dump(found, sys.stdout)
"""


@pytest.fixture
def port() -> Iterator[int]:
    """Yield the port of a server on this machine's loopback."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # noqa: N802
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command behind this machine's walls, in the test's directory unless rules say another; return its output."""
    walls = bubblewrap.find()
    if walls is None:
        pytest.skip(bubblewrap.why_not())

    def run(command: list[str], rules: Confinement | None = None, environment: Mapping[str, str] = os.environ) -> str:
        rules = rules or Confinement(confine.installation(), (str(tmp_path),), ())
        inside = walls.start(rules, command, rules.write[0], confine.cleaned(environment, rules.write))
        assert inside.wait() == 0, capfd.readouterr()
        inside.output.join(30)
        return capfd.readouterr().err

    return run


def test_what_is_named_is_there_and_nothing_else(tmp_path: Path, port: int, said: Callable[..., str]) -> None:
    home = tmp_path / "read" / "write"
    home.mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "read" / "file").write_text("data")
    (tmp_path / "link").symlink_to(tmp_path / "read")
    read = (*confine.installation(), str(tmp_path / "read"), str(tmp_path / "link"), str(tmp_path / "missing"))
    command = [sys.executable, "-P", "-c", TRIES, str(tmp_path), str(port)]
    assert json.loads(said(command, Confinement(read, (str(home),), (port,)))) == {
        "port": 204,
        "read": "data",
        "write there": "OSError",
        "inside": "done",
        "link": "data",
        "beside": "FileNotFoundError",
        "passwd": 1,
        "home": True,
        "pid": True,
        "unix": "OSError",
        "pair": "done",
        "settings": [],
        "input": "",
        "files": [],
    }


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the test knows this architecture's registers")
def test_the_first_process_has_no_more_than_the_others(
    monkeypatch: pytest.MonkeyPatch, said: Callable[..., str]
) -> None:
    """Without Landlock in the kernel an application may trace bubblewrap's own process, and let it make a Unix socket."""
    command = confine.confined_command

    def without_landlock(*given: Any) -> list[str]:
        python, safe, _, _, *words = command(*given)
        switch = "from deploy import confine; confine.landlock_version = lambda: 0; confine.main()"
        return [python, safe, "-c", switch, *words]

    monkeypatch.setattr(confine, "confined_command", without_landlock)
    # getpid and socket(AF_UNIX, SOCK_STREAM), as the first process calls them
    traced = json.loads(said([sys.executable, "-P", "-c", TRACE]))
    assert traced == {"getpid": 1, "socket": -errno.EAFNOSUPPORT}


def test_no_module_of_the_home_directory_is_imported(tmp_path: Path, said: Callable[..., str]) -> None:
    """An application writes its home, and what is there would run before the walls inside are closed."""
    # the Python of a virtual environment has no such directory
    command = ["/usr/bin/env", sys._base_executable, "-c", "import site; print(site.ENABLE_USER_SITE)"]  # type: ignore[attr-defined]
    rules = Confinement((*confine.installation(), sys._base_executable), (str(tmp_path),), ())  # type: ignore[attr-defined]
    assert said(command, rules) == "False\n"


def test_a_socket_from_inside_leads_to_no_port_but_the_named(port: int) -> None:
    ours, theirs = socket.socketpair()
    inside = bubblewrap.Inside(["/bin/true"], {}, (), ours, (port,))
    with theirs, socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        socket.send_fds(theirs, [b"p"], [listener.fileno()])
    # it listens until all who have it close it
    wait_for(lambda: not answers(address), 10)
    inside.wait()


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n"])
def test_silent_connections_do_not_block_the_way(port: int, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    """What an earlier application has left keeps them open. A later one still reaches its SuperNode."""
    listener = socket.create_server(("127.0.0.1", 0))
    carrying = bubblewrap._in_background(lambda: bubblewrap._carry_all(listener, ("127.0.0.1", port)))
    before = threading.active_count()
    with contextlib.ExitStack() as left:
        for _ in range(3 * bubblewrap._MOST_CONNECTIONS):
            silent = left.enter_context(socket.create_connection(listener.getsockname()))
            silent.sendall(sent)
        address = "http://{}:{}/".format(*listener.getsockname())
        with urllib.request.urlopen(address, timeout=20) as answer:
            assert answer.status == 204
    wait_for(lambda: threading.active_count() <= before, 20)
    listener.shutdown(socket.SHUT_RDWR)
    carrying.join(20)
    assert not carrying.is_alive()


def answers(address: tuple[str, int]) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(address, 5).close()
        return True
    return False


@needs_bubblewrap
@pytest.mark.skipif(os.geteuid() != 0, reason="another account takes root")
def test_an_ordinary_account_has_the_same_walls(monkeypatch: pytest.MonkeyPatch) -> None:
    walls = bubblewrap.find()
    assert walls is not None
    monkeypatch.setattr(sys, "executable", "/bin/sh")
    mounts = bubblewrap.mounts(Confinement(("/usr", "/bin", "/lib", "/lib64"), (), ()))
    look = "id -u; grep Cap /proc/self/status | grep -v 0000000000000000; test -e /home || test -e /run || echo closed"
    done = subprocess.run(
        [walls.program, *walls.options, *mounts, "--", "/bin/sh", "-c", look],
        capture_output=True,
        text=True,
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
    )
    assert done.stdout.split() == [str(NOBODY), "closed"], done.stderr


@needs_bubblewrap
def test_all_processes_end_with_the_one_outside() -> None:
    walls = bubblewrap.find()
    assert walls is not None
    code = """
import os, sys
from deploy import bubblewrap, confine
from deploy.confine import Confinement
sleep = [sys.executable, "-c", "print(1, flush=True); import time; time.sleep(600)"]
bubblewrap.find().start(Confinement(confine.installation(), (), ()), sleep, "/tmp", confine.cleaned(os.environ)).wait()
"""
    outside = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert outside.stderr is not None
    with outside.stderr as output:
        assert output.readline() == "1\n"
        outside.kill()
        outside.wait()
        # every process that held the other end has ended
        assert output.read() == ""


@pytest.mark.parametrize(
    "program, why",
    [
        ("", "bubblewrap (bwrap) is not installed"),
        ("echo 'bwrap: no namespaces' >&2; exit 1", "bubblewrap can make no walls here (bwrap: no namespaces)"),
    ],
)
def test_the_reason_is_given_where_there_are_none(
    program: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if program:
        (tmp_path / "bwrap").write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(bubblewrap, "_found", bubblewrap._found.__wrapped__)
    monkeypatch.setattr(confine, "landlock_version", lambda: 4)
    assert bubblewrap.find() is None and bubblewrap.why_not() == why
    assert supernode.walls_for(True) is None
    for line in confine.OPEN:
        assert f"not stopped: {line}" in caplog.text
    assert why in caplog.text
    with pytest.raises(UserError, match="^confine: strict: bubblewrap"):
        supernode.walls_for("strict")
    monkeypatch.setattr(confine, "landlock_version", lambda: 0)
    with rejected(DeploymentError, "confine", "bubblewrap", "has no Landlock"):
        supernode.walls_for(True)


def test_lower_walls_are_named_and_not_strict(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    low = Walls("bwrap", (), network=False)
    monkeypatch.setattr(bubblewrap, "find", lambda: low)
    monkeypatch.setattr(bubblewrap, "why_not", lambda: "")
    assert supernode.walls_for(True) is low and "not stopped: network:" in caplog.text
    with pytest.raises(UserError, match="^confine: strict: network"):
        supernode.walls_for("strict")
    whole = Walls("bwrap", (), network=True)
    monkeypatch.setattr(bubblewrap, "find", lambda: whole)
    monkeypatch.setattr(confine, "landlock_version", lambda: 1)
    assert supernode.walls_for("strict") is whole
    monkeypatch.setattr(confine, "landlock_version", lambda: 0)
    assert supernode.walls_for(True) is whole and mentions(caplog.text, "not stopped", "second wall")
    with rejected(DeploymentError, "confine", "strict", "second wall"):
        supernode.walls_for("strict")


def test_the_environment_keeps_no_secret() -> None:
    kept = {"OMP_NUM_THREADS": "1", "PATH": "/bin", "COROLLA_STATE_DIR": "/s", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    secret = {
        "AWS_SECRET_ACCESS_KEY": "x",
        "SSH_AUTH_SOCK": "/run/a",
        "COROLLA_TOKEN": "x",
        "FLWR_API_KEY": "x",
        "HOME": "/root",
    }
    safe = {"PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1"}
    assert confine.cleaned(kept | secret) == kept | safe


def test_the_environment_names_no_code_that_an_application_writes(tmp_path: Path) -> None:
    own, code, link = tmp_path / "own", tmp_path / "code", tmp_path / "link"
    for place in (own, code):
        place.mkdir()
    link.symlink_to(own)
    mixed = f":{own}:{code}::.:lib:{own}/lib:{link}/lib:{code}/../own:"
    given = {
        **dict.fromkeys(("PATH", "PYTHONPATH", "PYTHONHOME"), mixed),
        "LD_LIBRARY_PATH": mixed.replace(":", ";"),
        "LD_PRELOAD": f"libjemalloc.so.2 ./evil.so {own}/evil.so:{code}/good.so :",
    }
    others = dict.fromkeys(
        ("PYTHONPYCACHEPREFIX", "PYTHONUSERBASE", "PYTHONSTARTUP", "LD_AUDIT", "PYTHONEXECUTABLE"), str(code)
    )
    found = confine.cleaned(given | others, [own])
    names = {name for name in found if found[name] == str(code)}
    assert names == {"PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH"}
    assert mentions(found["LD_PRELOAD"], f"libjemalloc.so.2:{code}/good.so")
    assert not found.keys() & others.keys()
    # nothing is left of these
    without = {"PYTHONPATH": f":{own}:", "LD_PRELOAD": ""}
    assert not confine.cleaned(without, [own]).keys() & without.keys()


def test_no_file_of_an_application_runs_before_the_walls_inside_are_closed(
    tmp_path: Path, said: Callable[..., str]
) -> None:
    for name in ("deploy", "json", "sitecustomize", "usercustomize"):
        (tmp_path / f"{name}.py").write_text("import os; os.write(2, b'evil')")
    given = {**os.environ, "PYTHONPATH": f"{Path(confine.__file__).parent.parent}::.:{tmp_path}"}
    assert said([sys.executable, "-c", "import json; print(1)"], None, given) == "1\n"


ASKS = """
import ctypes, json, os, stat, sys
def tried(work):
    try:
        work()
    except OSError as error:
        return error.errno
def calls(*numbers):
    return [(libc.syscall(number, 10, 0, 0, -1, 0), ctypes.get_errno()) for number in numbers]
open("own", "w").close()
libc = ctypes.CDLL(None, use_errno=True)
files, numbers = json.loads(sys.argv[1])
found = {
    "files": [path for path in files if not tried(lambda: open(path, "rb").read(1))],
    "calls": calls(*numbers),
    "modes": [
        *(tried(lambda: os.chmod("own", mode)) for mode in (0o4755, 0o2755, 0o6777)),
        tried(lambda: os.fchmod(os.open("own", os.O_RDWR), 0o4755)),
        tried(lambda: os.chmod("own", 0o4755, dir_fd=os.open(".", os.O_RDONLY))),
        tried(lambda: os.open("new", os.O_CREAT | os.O_WRONLY, 0o4755)),
        tried(lambda: os.open(".", os.O_TMPFILE | os.O_WRONLY, 0o4755)),
        tried(lambda: os.mknod("made", 0o4755 | stat.S_IFREG)),
    ],
}
os.chmod("own", 0o755)
# openat2
found |= {"open": (libc.syscall(437, -100, b"own", 0, 0), ctypes.get_errno()), "mode": oct(os.stat("own").st_mode)}
json.dump(found, sys.stdout)
"""


@pytest.mark.skipif(not bubblewrap.has_call_filter(), reason="no calls are refused on this architecture")
def test_what_the_kernel_refuses_an_application(said: Callable[..., str]) -> None:
    """What it tells of keys and other processes, and files that run as the node's account.

    Its log, its measurements and its programs have no namespaces; on some machines every account may use them.
    """
    # syslog, perf_event_open, bpf
    numbers = {"x86_64": (103, 298, 321), "aarch64": (116, 241, 280)}[platform.machine()]
    asked = json.dumps([bubblewrap._OF_OTHERS, numbers])
    assert json.loads(said([sys.executable, "-P", "-c", ASKS, asked])) == {
        "files": [],
        "calls": [[-1, errno.ENOSYS]] * 3,
        "modes": [errno.EPERM] * 8,
        "open": [-1, errno.ENOSYS],
        "mode": "0o100755",
    }


def test_output_of_an_application_commands_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    evil = "\\x1b]0;title\\x07 \\x1b[92mINFO\\x1b[0m \\x9b6n \\rhidden \\u202e cut \\t caf\\xe9\\n"
    code = f"import os; [os.write(1, bytes([each])) for each in '{evil}'.encode()]; os.write(1, '{evil}'.encode())"
    inside = bubblewrap.Inside([sys.executable, "-I", "-S", "-c", code], {})
    assert inside.wait() == 0
    inside.output.join(30)
    first, second, rest = capfd.readouterr().err.split("\n")
    assert mentions(second, "]0;title INFO 6n", "cut café") and rest == ""
    # pieces that are cut anywhere
    assert first.isprintable() and first.endswith("caf\xe9")


def test_output_without_an_end_comes_no_faster_than_a_log_is_made_smaller(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import os\nwhile True: os.write(1, b'x' * 65536)"
    inside = bubblewrap.Inside([sys.executable, "-I", "-S", "-c", code], {})
    began, size = time.monotonic(), 0
    while size < bubblewrap._BYTES_PER_SECOND:
        size += len(capfd.readouterr().err)
        inside.output.join(0.05)
    inside.kill()
    inside.wait()
    assert time.monotonic() - began > 0.5


def start_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rules: Site, at_end: Callable[[int], object]
) -> tuple[list[dict[str, str]], threading.Event]:
    """Start a SuperNode whose process that starts applications ends at once.

    at_end: called at each end with the number of starts. Return their environments so far, a list that grows, and an
    event: no further one starts when it is set.
    """
    started, over = list[dict[str, str]](), threading.Event()

    class Ended:
        def kill(self) -> None:
            """It has ended."""

        def wait(self) -> int:
            at_end(len(started))
            return 0

    class Made:
        def start(
            self, confinement: Confinement, words: object, home: str, environment: dict[str, str], *_: Any
        ) -> Ended:
            started.append(environment)
            return Ended()

    def kept(start: Callable[[], unanswered.WaitedProcess], ended: Callable[[], None]) -> unanswered.Kept:
        def start_or_wait() -> unanswered.WaitedProcess:
            if over.is_set():
                # a thread of this kind ends with the process
                threading.Event().wait()
            return start()

        return unanswered.Kept(start_or_wait, ended)

    command, loop = map(
        importlib.import_module, ("flwr.supernode.cli.flower_supernode", "flwr.supernode.start_client_internal")
    )
    monkeypatch.setattr(supernode, "Kept", kept)
    for name in ("_init_connection", "subprocess", "time"):
        monkeypatch.setattr(loop, name, getattr(loop, name))
    for variable, name in (("COROLLA_STATE_DIR", "state"), ("COROLLA_DATA_DIR", "data"), ("FLWR_HOME", "flwr")):
        monkeypatch.setenv(variable, str(tmp_path / name))
    monkeypatch.setattr(unanswered, "_FIRST_WAIT", 0.01)
    monkeypatch.setattr(supernode, "walls_for", lambda rule: Made())
    monkeypatch.setattr(command, "start_client_internal", lambda **given: loop.subprocess.Popen(["flower-superexec"]))
    (tmp_path / "node" / "tmp").mkdir(parents=True)
    supernode.install(rules, Audit(tmp_path / "node"), tmp_path / "node")
    store = InMemoryObjectStore()
    factory = SimpleNamespace(
        objectstore_factory=SimpleNamespace(store=lambda: store), state=lambda: InMemoryNodeState(store)
    )
    command.start_client_internal(node_config={}, state_factory=factory, runtime_api_address="127.0.0.1:9")
    return started, over


def test_a_named_path_that_leads_elsewhere_is_not_opened_when_applications_start_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An application can replace what lies in a directory that it writes, and end the process that starts applications."""
    named, outside, left = tmp_path / "state" / "a" / "named", tmp_path / "outside", tmp_path / "node" / "tmp" / "flwr"
    for directory in (named, outside / "named"):
        directory.mkdir(parents=True)

    def replace(number: int) -> None:
        if number == 1:
            named.parent.rename(tmp_path / "state" / "b")
            named.parent.symlink_to(outside)
            left.mkdir()

    refused = threading.Event()
    monkeypatch.setattr(unanswered.log, "warning", lambda text, how: "(confine: " in how and refused.set())
    started, over = start_anew(tmp_path, monkeypatch, Site(confine=True, readable_paths=(str(named),)), replace)
    assert refused.wait(30) and len(started) == 1
    over.set()
    # an application may have left code there
    assert not left.exists()


def test_nothing_that_an_application_leaves_keeps_the_next_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again, deep = threading.Event(), tmp_path / "node" / "tmp" / "flwr"
    for _ in range(foreign_files.MOST_DEPTH + 2):
        deep /= "d"

    def leave(number: int) -> None:
        deep.mkdir(parents=True, exist_ok=True)
        if number == 2:
            over.set()
            again.set()

    started, over = start_anew(tmp_path, monkeypatch, Site(confine=True), leave)
    assert again.wait(30)
    homes = [Path(one["FLWR_HOME"]) for one in started]
    assert homes[0] != homes[1] and not homes[1].exists()
