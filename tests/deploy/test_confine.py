"""What the kernel keeps a confined process from, on this machine's own kernel."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from deploy import confine, supernode
from deploy.confine import Confinement
from deploy.gate import NodeConfig
from deploy.site import Site
from fl_app import data
from fl_app.config import RunConfig
from fl_app.errors import DeploymentError, UserError
from tests.facts import rejected

pytestmark = pytest.mark.skipif(not confine.landlock_version(), reason="this kernel has no Landlock")

TRIES = """
import json, os, socket, subprocess, sys
def tried(work):
    try:
        work()
    except PermissionError:
        return "denied"
    except OSError as error:
        return type(error).__name__
    return "done"
root, pid, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
print(json.dumps({
    "read": tried(lambda: open(f"{root}/read/file").read()), "write there": tried(lambda: open(f"{root}/read/new", "w")),
    "write": tried(lambda: open(f"{root}/write/new", "w")), "key": tried(lambda: open(f"{root}/node.key").read()),
    "replace": tried(lambda: os.rename(f"{root}/write/new", f"{root}/site.toml")), "list": tried(lambda: os.listdir(root)),
    "memory": tried(lambda: open(f"/proc/{pid}/mem", "rb").read(1)),
    "own threads' names": tried(lambda: open(f"/proc/self/task/{os.getpid()}/comm", "w").write("named")),
    "another's": tried(lambda: open(f"/proc/{pid}/task/{pid}/comm", "w").write("named")),
    "port": tried(lambda: socket.create_connection(("127.0.0.1", port))),
    "other port": tried(lambda: socket.create_connection(("127.0.0.1", port + 1 if port < 65535 else port - 1))),
    "child": subprocess.run([sys.executable, "-c", f"open('{root}/node.key')"], stderr=subprocess.DEVNULL).returncode,
}))
"""


def test_a_confined_process_reaches_what_was_named_and_nothing_else(tmp_path: Path) -> None:
    for name in ("read", "write"):
        (tmp_path / name).mkdir()
    for name in ("read/file", "node.key", "site.toml"):
        (tmp_path / name).write_text("x")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = int(listening.getsockname()[1])
        rules = Confinement((*confine.installation(), str(tmp_path / "read")), (str(tmp_path / "write"),), (port,))
        command = confine.confined_command(
            rules, [sys.executable, "-P", "-c", TRIES, str(tmp_path), str(os.getpid()), str(port)]
        )
        done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    found = json.loads(done.stdout)
    other = found.pop("other port")
    assert other == "denied" or confine.landlock_version() < 4
    assert found == {
        "read": "done",
        "write there": "denied",
        "write": "done",
        "key": "denied",
        "replace": "denied",
        "list": "denied",
        "memory": "denied",
        "own threads' names": "done",
        "another's": "denied",
        "port": "done",
        "child": 1,
    }, done.stderr


def test_a_sites_own_files_lie_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flwr"))
    monkeypatch.setenv("COROLLA_DATA_DIR", str(tmp_path / "prepared"))
    monkeypatch.delenv("COROLLA_STATE_DIR", raising=False)
    site, rules = tmp_path / "sites" / "a", Site(readable_paths=("/data",), confine=True)
    places = supernode.writable_directories(site, "/etc/site.toml")
    assert places == {
        "TMPDIR": site / "tmp",
        "COROLLA_STATE_DIR": site / "state",
        "COROLLA_SITE_DIR": tmp_path / "site",
    }
    found = supernode.confinement_of(rules, NodeConfig(0, 2, "/own"), places.values(), "127.0.0.1:7777")
    assert (
        set(found.write) == set(map(str, places.values()))
        and {"/data", "/own"} <= set(found.read)
        and found.ports == (7777,)
    )
    # not the home of Flower that processes without walls read
    homes = [Path(supernode.own_variables(places)["FLWR_HOME"]) for _ in range(2)]
    assert homes[0] != homes[1] and {home.parent for home in homes} == {site / "tmp" / "flwr"}
    kept = {"node.key": site, "flwr": tmp_path / "flwr", "python": Path(sys.prefix)}
    for variable in ("COROLLA_STATE_DIR", "COROLLA_SITE_DIR"):
        for place in kept.values():
            with monkeypatch.context() as patch, pytest.raises(UserError) as refused:
                patch.setenv(variable, str(place))
                supernode.writable_directories(site, "/etc/site.toml")
            assert str(refused.value).startswith(f"confine: {variable}: ") and str(place) in str(refused.value)
    with rejected(DeploymentError, "confine", "which contains", "state/site.toml"):
        supernode.writable_directories(site, str(site / "state" / "site.toml"))


@pytest.mark.parametrize("readable", ["lab", "state", "state/sites"])
def test_a_node_does_not_start_whose_applications_would_read_its_keys_or_audit(tmp_path: Path, readable: str) -> None:
    directory, key = tmp_path / "state" / "sites" / "a", tmp_path / "lab" / "keys" / "supernode-0.key"
    own = [directory / "tmp", tmp_path / "data", *confine.installation()]
    secrets = (directory, *supernode.key_in(["--insecure", "--auth-supernode-private-key", str(key)]))
    supernode.refuse_secrets(own, secrets)
    with rejected(DeploymentError, "confine", "applications would read", "which lies in"):
        supernode.refuse_secrets([*own, tmp_path / readable], secrets)
    assert supernode.key_in(["--insecure"]) == ()


def test_a_sites_own_weights_are_read_with_all_that_they_lead_to(tmp_path: Path) -> None:
    folder, blob = tmp_path / "snapshot", tmp_path / "blobs" / "ab12"
    for directory in (folder, blob.parent):
        directory.mkdir()
    blob.write_text("x")
    (folder / "model.safetensors").symlink_to(blob)
    (tmp_path / "other").write_text("x")
    read = supernode.readable(Site(initial_weights=str(folder)))
    tries = "import sys\nfor path in sys.argv[1:]:\n  try: print(open(path).read())\n  except OSError: print('denied')"
    rules = Confinement((*confine.installation(), *read), (), ())
    asked = [str(folder / "model.safetensors"), str(tmp_path / "other")]
    command = confine.confined_command(rules, [sys.executable, "-P", "-c", tries, *asked])
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    assert done.stdout.split() == ["x", "denied"], done.stderr
    # an index stands for its folder, and a file has its card beside it
    index = folder / "model.safetensors.index.json"
    index.touch()
    assert {str(index), str(folder / "model.safetensors")} <= set(supernode.readable(Site(initial_weights=str(index))))
    given = Site(readable_paths=("/a",), initial_weights="/w.pt")
    assert set(supernode.readable(given, "/own")) == {"/a", "/own", "/w.pt", "/w.pt.json"}


def test_what_a_confined_node_prepares_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of the account read its data directory without walls."""
    monkeypatch.setenv("COROLLA_DATA_DIR", str(tmp_path / "data"))
    before = data.prepare("digits", tmp_path / "data").directory
    (tmp_path / "data" / "organamnist.npz").touch()
    places = supernode.writable_directories(tmp_path / "sites" / "a", "/etc/site.toml")
    found = supernode.confinement_of(Site(confine=True), NodeConfig(0, 2), places.values(), "127.0.0.1:7777")
    assert {str(tmp_path / "data" / name) for name in ("downloads", "organamnist.npz")} <= set(found.read)
    for name, value in supernode.own_variables(places).items():
        monkeypatch.setenv(name, value)
    # as an application does
    data.open_client(RunConfig(num_clients=2), 0)
    own = places["TMPDIR"] / "prepared"
    assert {path.name for path in own.iterdir()} == {"datasets", "partitions"}
    assert {path.name for path in (tmp_path / "data").iterdir()} == {"datasets", "downloads", "organamnist.npz"}
    assert any(own.is_relative_to(place) for place in found.write)
    reaches = [*found.read, *found.write]
    assert not any(before.is_relative_to(place) for place in reaches)


@pytest.mark.parametrize("link", ["", "state", "state/a"])
def test_no_path_leads_out_of_a_directory_that_applications_write(tmp_path: Path, link: str) -> None:
    """An application of an earlier start could have made the link."""
    state, outside = tmp_path / "state", tmp_path / "outside"
    for directory in (state, outside / "a" / "named"):
        directory.mkdir(parents=True)
    if link == "state":
        # the site's own: nobody behind the walls could make it
        state.rmdir()
        state.symlink_to(outside)
    elif link:
        (tmp_path / link).symlink_to(outside / "a")
    named = str(state / "a" / "named")
    for rules in (Confinement((named,), (str(state),), ()), Confinement((), (named, str(state)), ())):
        if link == "state/a":
            with pytest.raises(UserError) as refused:
                rules.refuse_led_out()
            assert named in str(refused.value) and str(outside / "a" / "named") in str(refused.value)
        else:
            rules.refuse_led_out()


def test_another_system_has_no_landlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")

    class NoCalls:
        def syscall(self, *_: object) -> int:
            raise AssertionError

    monkeypatch.setattr(confine, "_libc", NoCalls)
    assert confine.landlock_version() == 0
    with pytest.raises(UserError, match="has no Landlock"):
        confine.confine_process(Confinement((), (), ()))
