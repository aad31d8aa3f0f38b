"""One warm process for all nodes of a machine: who shares it, what ends with whom."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from deploy import cluster, commands, confine, detached, inventory, superexec, supernode
from deploy.confine import Confinement
from deploy.inventory import OWN, SHARED, read_inventory
from fl_app import forking, machine
from fl_app.errors import DeploymentError
from fl_app.forking import Link
from fl_app.processes import LAUNCH
from tests.conftest import wait_for
from tests.facts import mentions, rejected

# a warm process whose children wait for a word
COMMAND = [
    sys.executable,
    "-c",
    "import sys; from deploy import superexec; from fl_app import forking\n"
    "with superexec.leaving_its_starter(int(sys.argv[1])) as (listener, secret):\n"
    "    forking.serve_all(listener, lambda asker: asker.recv(1), secret)\n",
]


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test a warm process of its own. The directory's path is too long for a socket's."""
    monkeypatch.setenv("COROLLA_STATE_HOME", str(tmp_path / ("long" * 30)))
    monkeypatch.setenv(LAUNCH, "a-launch")


def connected() -> Link:
    link = superexec.shared_link(COMMAND)
    assert link is not None
    return link


def forked(link: Link) -> tuple[psutil.Process, psutil.Process, socket.socket]:
    """Fork a child. Return it, its warm process, and the socket to it."""
    pid, own = link.fork(2, followed=False)
    child = psutil.Process(pid)
    warm = child.parent()
    assert warm is not None
    return child, warm, own


def ended(*found: psutil.Process) -> Any:
    """Wait until they have ended, whether or not their parent looks after those that have."""

    def runs(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return False

    return wait_for(lambda: not any(map(runs, found)), 20)


def test_nodes_share_a_process_whose_children_end_with_their_node() -> None:
    first, second = connected(), connected()
    (one, warm, own), (other, same, theirs) = forked(first), forked(second)
    assert warm.pid == same.pid and LAUNCH not in warm.environ()
    # it survives the node that started it
    assert warm.ppid() != os.getpid() and psutil.Process() not in warm.parents()
    first.close()
    assert ended(one) and other.is_running() and other.status() != psutil.STATUS_ZOMBIE
    third = connected()
    last, same, more = forked(third)
    assert same.pid == warm.pid
    second.close()
    third.close()
    assert ended(other, last, warm)
    for link in (own, theirs, more):
        link.close()


def test_one_process_is_started_for_all_that_come_at_once() -> None:
    with ThreadPoolExecutor(16) as pool:
        links = list(pool.map(lambda _: connected(), range(16)))
    found = [forked(link) for link in links]
    assert len({warm.pid for _, warm, _ in found}) == 1
    for link in links:
        link.close()
    assert ended(*(child for child, _, _ in found), found[0][1])


def test_another_takes_the_place_of_a_killed_one() -> None:
    link = connected()
    child, warm, _ = forked(link)
    warm.kill()
    assert ended(child, warm)
    with pytest.raises(ConnectionError):
        link.fork(2)
    link.close()
    with pytest.raises(ConnectionError):
        link.fork(2)
    later = connected()
    assert forked(later)[1].pid != warm.pid
    later.close()


@pytest.mark.parametrize(
    ("variable", "same"),
    [
        ("CUDA_VISIBLE_DEVICES", False),
        ("COROLLA_SITE_DIR", True),
    ],
)
def test_nodes_share_if_their_processes_start_alike(variable: str, same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    first = connected()
    monkeypatch.setenv(variable, "7")
    second = connected()
    assert (forked(first)[1].pid == forked(second)[1].pid) is same
    for link in (first, second):
        link.close()


def test_what_a_process_reads_at_its_start_names_it() -> None:
    read = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "FLWR_HOME", "INVOCATION_ID", "NPY_DISABLE_CPU_FEATURES")
    assert len({superexec.name_of({name: "7"}) for name in read}) == len(read)
    for name in ("SSH_CONNECTION", "COROLLA_SITE_DIR"):
        assert superexec.name_of({name: "7"}) == superexec.name_of({})


def test_other_cores_and_other_software_have_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [superexec.name_of({})]
    with monkeypatch.context() as patched:
        patched.setattr(os, "sched_getaffinity", lambda pid: {977}, raising=False)
        names.append(superexec.name_of({}))
    with monkeypatch.context() as patched:
        patched.setattr(machine, "versions", lambda: {"torch": "9.9"})
        names.append(superexec.name_of({}))
    mask = os.umask(0o027)
    names.append(superexec.name_of({}))
    os.umask(mask)
    assert len(set(names)) == (4 if sys.platform == "linux" else 3)


def test_a_childs_own_processes_end_with_its_node(tmp_path: Path) -> None:
    starting = "import subprocess, time; print(subprocess.Popen(['sleep', '1000']).pid, flush=True)"
    link = superexec.shared_link(
        [*COMMAND[:2], COMMAND[2].replace("asker.recv(1)", f"[exec({starting!r}), asker.recv(1)]")]
    )
    assert link is not None
    with (tmp_path / "out").open("wb") as output:
        pid, own = link.fork(output.fileno(), followed=False)
    wait_for(lambda: (tmp_path / "out").read_text().endswith("\n"), 30)
    grandchild = psutil.Process(int((tmp_path / "out").read_text()))
    link.close()
    assert ended(grandchild)
    own.close()


def test_a_fork_that_fails_is_an_error_of_one_message() -> None:
    # the second fork of the process fails: its first one detaches it
    failing = (
        "import os\n"
        "real, tries = os.fork, []\n"
        "def fork():\n"
        "    tries.append(1)\n"
        "    if len(tries) == 2: raise BlockingIOError(11, 'no process is left')\n"
        "    return real()\n"
        "os.fork = fork\n"
    )
    link = superexec.shared_link([*COMMAND[:2], failing + COMMAND[2]])
    assert link is not None
    with pytest.raises(BlockingIOError):
        link.fork(2)
    child, warm, _ = forked(link)
    link.close()
    assert ended(child, warm)


def test_a_process_without_askers_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forking, "_FIRST_SECONDS", 0.1)
    monkeypatch.setattr(forking, "_prepare", lambda: None)
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        listener.listen()
        forking.serve_all(listener, lambda asker: None, b"secret")


def test_a_process_whose_starter_was_killed_ends() -> None:
    done = subprocess.run([*COMMAND, "0"], input=b"half", capture_output=True)
    assert done.returncode == 1 and b"has ended" in done.stderr


def test_a_node_that_cannot_share_is_told_why(caplog: pytest.LogCaptureFixture) -> None:
    assert superexec.shared_link([sys.executable, "-c", "import sys; sys.exit(3)"]) is None
    assert mentions(caplog.text, "cannot be used", "3; see")
    assert mentions(caplog.text, "node")


# a process that knows the socket, and asks for a child with a guessed secret
TRIES = """
import os, socket, sys
from fl_app.forking import Link
from pathlib import Path
where = Path(sys.argv[1])
os.chdir(where)
try:
    secret = next(where.glob("*.secret")).read_bytes()
except (OSError, StopIteration):
    secret = b"0" * 32
control = socket.socket(socket.AF_UNIX)
control.connect(sys.argv[2])
control.sendall(secret)
try:
    Link(control).fork(2, followed=False)
except OSError:
    print("refused")
else:
    print("forked")
"""


@pytest.mark.skipif(not confine.landlock_version(), reason="this kernel has no Landlock")
def test_a_confined_application_cannot_fork_an_unconfined_one() -> None:
    link, where = connected(), superexec.shared_directory()
    (found,) = [path for path in where.iterdir() if path.is_socket()]
    free = [sys.executable, "-c", TRIES, str(where), found.name]
    # with no more rights than a node's applications have; the last one may go to the directory, and knows the name
    rules = Confinement((*confine.installation(), str(Path.cwd())), (), ())
    supernode.refuse_secrets([*confine.installation(), "/dev", where / "elsewhere"], (where,))
    for place in (where, where.parent):
        with rejected(DeploymentError, "confine", f"applications would read {where}", f"which lies in {place}"):
            supernode.refuse_secrets(["/data", place], (where,))
    confined = confine.confined_command(rules, free)
    answers = [subprocess.run(words, capture_output=True, text=True).stdout for words in (free, confined)]
    assert answers == ["forked\n", "refused\n"]
    child, warm, _ = forked(link)
    link.close()
    assert ended(child, warm)


def test_who_sends_no_secret_is_refused() -> None:
    link, where = connected(), superexec.shared_directory()
    _, warm, _ = forked(link)
    (found,) = [path for path in where.iterdir() if path.is_socket()]
    with superexec._short(where) as short:
        for sent in (b"", b"short", b"0" * 32):
            with socket.socket(socket.AF_UNIX) as control:
                control.connect(f"{short}/{found.name}")
                control.sendall(sent)
                with pytest.raises(OSError):
                    Link(control).fork(2)
    # with many that send nothing, the oldest is closed
    with contextlib.ExitStack() as stack, superexec._short(where) as short:
        for _ in range(forking._MOST_SILENT + 1):
            control = stack.enter_context(socket.socket(socket.AF_UNIX))
            control.connect(f"{short}/{found.name}")
    # others are still served
    assert forked(link)[1].pid == warm.pid
    assert [oct(path.stat().st_mode)[-2:] for path in (where, *where.glob("*.secret"))] == ["00", "00"]
    link.close()
    assert ended(warm)


def test_the_key_warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cluster.yaml"
    found = {}
    for given in (None, False, True, "shared"):
        path.write_text(yaml.safe_dump({"hosts": [{"host": "local", "warm": given}]}))
        (node,) = read_inventory(path).supernodes
        words = commands.supernode(read_inventory(path), node, commands.HostPlaces("/d", "/s", (9000,)), 0).command
        found[given] = words[words.index("--warm") + 1] if "--warm" in words else ""
    assert found == {None: "", False: "", True: OWN, "shared": SHARED}
    path.write_text("hosts: [{host: local, warm: own}]")
    with rejected(DeploymentError, "", "hosts[0].warm", "must be true", "false or shared", "got 'own'"):
        read_inventory(path)


def test_the_record_of_an_older_cluster_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COROLLA_STATE_HOME", str(tmp_path))
    path = tmp_path / "cluster.yaml"
    path.write_text("hosts: [{host: local, supernodes: 3, warm: shared}]")
    cluster.save_new(cluster.Cluster(read_inventory(path), "token", "config", "now"))
    assert [node.warm for node in cluster.load("cluster").inventory.supernodes] == [SHARED] * 3
    record = detached.cluster_directory("cluster") / "cluster.json"
    old = json.loads(record.read_text())
    for node, warm in zip(old["inventory"]["supernodes"], (True, False, None), strict=True):
        node["warm"] = warm
    del old["inventory"]["supernodes"][2]["warm"]
    record.write_text(json.dumps(old))
    assert [node.warm for node in cluster.load("cluster").inventory.supernodes] == [OWN, "", ""]
    assert inventory.warm_process(True) == OWN
