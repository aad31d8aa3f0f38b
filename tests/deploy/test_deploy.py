"""The cluster launcher without processes: inventory, command lines, what hosts have in common, its table in Flower's config."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import cluster, commands, connection, inventory, lifecycle, node
from deploy.cluster import Cluster, load, record_path, save_new
from deploy.commands import HostPlaces
from deploy.inventory import Inventory
from deploy.lifecycle import check_clocks, key_files
from fl_app import files
from fl_app.errors import DeploymentError, UserError
from fl_app.keys import specs
from tests.disks import full_disk
from tests.facts import each_mentions, mentions, rejected

LAB = """
superlink: {host: local, fleet-address: lab.example.org}
hosts:
  - {host: local, supernodes: 3, gpus: [0, 1]}
  - {host: user@node2, python: /opt/corolla/.venv/bin/python, gpus: [4], data-path: /site a, threads: 4}
  - {host: user@node2, python: /opt/corolla/.venv/bin/python, gpus: []}
  - {host: local}
"""


def parsed(text: str = LAB, **top: Any) -> Inventory:
    raw = {**yaml.safe_load(text), **top}
    return inventory.parse(raw, "lab", Path("/etc/lab"))


def problems(text: str, **top: Any) -> list[str]:
    with pytest.raises(UserError) as error:
        parsed(text, **top)
    return [line.strip() for line in str(error.value).splitlines()[1:]]


# Inventory ------------------------------------------------------------------------------------------------------------


def test_supernodes_are_numbered_in_order_over_all_entries() -> None:
    nodes = parsed().supernodes
    assert [(n.client_id, n.host, n.gpu) for n in nodes] == [
        (0, "local", "0"),
        (1, "local", "1"),
        (2, "local", "0"),  # round robin over two GPUs
        (3, "user@node2", "4"),
        (4, "user@node2", ""),  # [] hides all GPUs
        # not given: as the machine is
        (5, "local", None),
    ]
    assert nodes[3].data_path == "/site a" and nodes[3].threads == 4
    assert parsed().hosts == {"local": sys.executable, "user@node2": "/opt/corolla/.venv/bin/python"}


def test_one_supernode_for_each_gpu_unless_told() -> None:
    assert len(parsed("hosts: [{host: local, gpus: [0, 1, 2]}]").supernodes) == 3
    assert len(parsed("hosts: [{host: local, gpus: [0, 1, 2], supernodes: 1}]").supernodes) == 1
    assert [n.gpu for n in parsed("hosts: [{host: local, gpus: [GPU-1a2b, MIG-3c]}]").supernodes] == [
        "GPU-1a2b",
        "MIG-3c",
    ]


@pytest.mark.parametrize(
    "address, tls, insecure, secure",
    [
        ("127.0.0.1", None, None, False),
        ("localhost", None, None, False),
        ("::1", None, None, False),
        ("127.8.9.1", None, None, False),
        ("127.0.0.1", True, None, True),
        ("10.0.0.1", None, None, True),
        ("lab.example.org", None, None, True),
        ("10.0.0.1", None, True, False),
        ("fd00::2", None, None, True),
        ("10.0.0.1", False, True, False),
        ("10.0.0.1", None, False, True),
    ],
)
def test_everything_but_loopback_is_secure_unless_insecure_is_asked_for(
    address: str, tls: bool | None, insecure: bool | None, secure: bool
) -> None:
    superlink = {"fleet-address": address}
    assert parsed("hosts: [{host: local}]", superlink=superlink, tls=tls, insecure=insecure).secure is secure


def test_insecure_option_counts_as_the_key(tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text("superlink: {fleet-address: 10.0.0.1}\nhosts: [{host: local}]\n")
    assert inventory.read_inventory(path).secure and not inventory.read_inventory(path, insecure=True).secure
    assert inventory.read_inventory(path).keys == str(tmp_path / "lab-keys")


def test_all_problems_are_reported_together() -> None:
    found = problems(
        "superlink: {fleet-adress: x, control-port: 70000}\n"
        "hosts:\n"
        "  - {host: local, gpu: [0], threads: 0}\n"
        "  - {supernodes: 2.5}\n"
        "  - {host: '-oProxyCommand=x', python: /p}\n"
        "  - {host: user@node2}\n"
        "  - {host: local, gpus: [0, 0], python: /usr/bin/python3}\n"
        "  - {host: local, gpus: [0, 1], data-path: /site}\n"
        "  - 7\n",
        colour="red",
    )
    for expected in (
        "colour: unknown key; there are name, superlink",
        "superlink.fleet-adress: unknown key; did you mean fleet-address?",
        "superlink.control-port: must be an integer in [1, 65535], got 70000",
        "hosts[0].gpu: unknown key; did you mean gpus?",
        "hosts[0].threads: must be an integer in [1, 4096], got 0",
        "hosts[1].host: missing",
        "hosts[1].supernodes: must be an integer in [1, 10000], got 2.5",
        "hosts[2].host: must be local, HOST or USER@HOST as ssh takes it, got '-oProxyCommand=x'",
        "hosts[3].python: missing; the absolute path of Corolla's Python on user@node2",
        "hosts[4].gpus: must be a list of GPU numbers, each once, got [0, 0]",
        "hosts[4].python: must be absent for host local",
        "hosts[5].data-path: 2 SuperNodes would train on the same data",
        "hosts[6]: must be a mapping with the keys host, python",
    ):
        assert any(line.startswith(expected) for line in found), f"{expected}\nnot in\n" + "\n".join(found)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("hosts: []", "hosts: must be a list of entries"),
        ("superlink: {}", "hosts: must be a list of entries"),
        ("hosts: [{host: node2, python: /p}]", "superlink.fleet-address: must be an address that node2 can reach"),
        ("hosts: [{host: local}]\ntls: true\ninsecure: true", "tls, insecure: true for both"),
        ("hosts: [{host: local}]\nname: default", "name: must not be 'default'"),
        ("hosts: [{host: local}]\nname: a b", "name: must be letters, digits, - and _, got 'a b'"),
        ("hosts: [{host: local}]\ntls: sure", "tls: must be true or false, got 'sure'"),
        (
            "hosts: [{host: local}]\nsuperlink: {fleet-address: 10.0.0}",
            "superlink.fleet-address: must be an IP address",
        ),
        ("hosts: [{host: local}]\nsuperlink: {fleet-address: 0.0.0.0}", "superlink.fleet-address: must be the address"),
        (
            "hosts: [{host: local}]\nsuperlink: {fleet-address: 'a:9092'}",
            "superlink.fleet-address: must be an IP address",
        ),
        (
            "hosts: [{host: local}]\nsuperlink: {fleet-port: 8000}",
            "superlink.control-port: must differ from fleet-port",
        ),
        ("hosts: [{host: local}]\nsuperlink: {database: x.db}", "superlink.database: must be an absolute path"),
        ("hosts: [{host: local, data-path: '/a\"b'}]", "hosts[0].data-path: must be an absolute path without quotes"),
        ("hosts: [{host: local, environment: {A: 1}}]", "hosts[0].environment: must be a mapping of names to strings"),
        ("hosts: [{host: local}]\nsuperlink: {fleet-address: 10.0.0.1}\ntls: false", "tls: false with fleet-address"),
    ],
)
def test_what_is_wrong_is_named(text: str, expected: str) -> None:
    assert any(line.startswith(expected) for line in problems(text)), problems(text)


def test_a_host_has_one_python() -> None:
    text = "superlink: {fleet-address: h}\nhosts: [{host: n, python: /a}, {host: n, python: /b}]"
    assert each_mentions(problems(text), ("hosts", "n has two", "`python`s", "'/a' and '/b'"))


def test_the_documentation_lists_every_key() -> None:
    text = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text()
    for prefix, cls in (("", inventory._File), ("superlink.", inventory.SuperLink), ("hosts[].", inventory._Host)):
        for spec in specs(cls):
            as_above = prefix == "hosts[]." and spec.name in ("host", "python")
            assert not spec.doc or as_above or f"| `{prefix}{spec.name}` | {spec.doc} |" in text, spec


def test_files_that_are_no_inventory(tmp_path: Path) -> None:
    for content, expected in (
        ("a: [", "not valid YAML"),
        ("- 1", "the file: must be a mapping"),
        ("", "must be a mapping"),
    ):
        (tmp_path / "x.yaml").write_text(content)
        with pytest.raises(UserError, match=expected):
            inventory.read_inventory(tmp_path / "x.yaml")
    with pytest.raises(UserError, match="No such file"):
        inventory.read_inventory(tmp_path / "none.yaml")


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 10)}]\n" for k in range(1, 12)
)


@pytest.mark.parametrize(
    "text, expected",
    [
        (
            "hosts: [{host: local, environment: {'A=B': x}}]",
            "hosts[0].environment: must be a mapping of names to strings",
        ),
        ("hosts: [{host: local, environment: {'': x}}]", "hosts[0].environment: must be"),
        ('hosts: [{host: local, environment: {"A\\0": x}}]', "hosts[0].environment: must be"),
        ('hosts: [{host: local, environment: {A: "x\\0y"}}]', "hosts[0].environment: must be"),
        ('hosts: [{host: local, data-path: "/a\\0b"}]', "hosts[0].data-path: must be an absolute path"),
        ('hosts: [{host: local}]\nkeys: "a\\0b"', "keys: must be a path without quotes"),
        ('hosts: [{host: local}]\nsuperlink: {database: "/a\\0b"}', "superlink.database: must be"),
        ("[" * 2000 + "]" * 2000, "not valid YAML: nested too deeply"),
        ("hosts:\n" + "".join(" " * k + "- \n" for k in range(1, 3000)), ""),
        ("hosts: [{host: local}]\nname: &a [*a]", "name: must be letters"),
        (f"{BOMB}name: *a11\nhosts: [{{host: local}}]", "name: must be letters"),
        ("hosts: [{host: local, threads: " + "9" * 5000 + "}]", "not valid YAML"),
        (
            "hosts: [{host: local, threads: 0x" + "9" * 5000 + "}]",
            "hosts[0].threads: must be an integer in [1, 4096], got a very",
        ),
        ("hosts: [{host: local}]\nname: 2024-13-45", "not valid YAML"),
        ("hosts: [{host: local}]\nname: \0", "not valid YAML"),
        *(
            (
                f"hosts: [{{host: '{host}', python: /p}}]\nsuperlink: {{fleet-address: h}}",
                "hosts[0].host: must be local, HOST",
            )
            for host in (
                "-oProxyCommand=id",
                "u@-oProxyCommand=id",
                "a b",
                "$(id)",
                "`id`",
                "a;id",
                "a\\nb",
                "--",
                "ssh://h",
            )
        ),
        *(
            (f"hosts: [{{host: local, environment: {{'{name}': x}}}}]", "hosts[0].environment: must be a mapping")
            for name in ("A;id;B", "$(id)", "A B", "A-B", "1A", "Ä")
        ),
        ("hosts: [{host: local}]\nname: 'a]\nx = 1'", "name: must be letters"),
        ("hosts: [{host: local}]\nname: -x", "name: must be letters"),
        *(
            (f"hosts: [{{host: local}}]\nkeys: '{keys}'", "keys: must be a path without quotes")
            for keys in ('a"b', "a\\nb", "a''b")
        ),
        ("hosts: [{host: local}]\nname: !!python/object/apply:os.system [id]", "not valid YAML"),
        ("hosts: [{host: local, python: '/a\\nb'}]", "hosts[0].python: must be an absolute path"),
        ("hosts: [{host: local}]\nsuperlink: {fleet-address: '-x'}", "superlink.fleet-address: must be an IP address"),
    ],
)
def test_hostile_files_are_refused_in_a_few_words(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        inventory.read_inventory(path)
    assert expected in str(error.value) and len(str(error.value)) < 5000


# Command lines --------------------------------------------------------------------------------------------------------

PLACE = HostPlaces("/state/lab", "/venv/bin", tuple(range(5001, 5020)))


def test_superlink_command_with_tls() -> None:
    process = commands.superlink(parsed(), PLACE)
    assert process.command == (
        sys.executable,
        "-P",
        "-m",
        "deploy.superlink",
        "--fleet",
        "0.0.0.0:9092",
        "--",
        "--ssl-ca-certfile",
        "/state/lab/keys/ca.crt",
        "--ssl-certfile",
        "/state/lab/keys/server.crt",
        "--ssl-keyfile",
        "/state/lab/keys/server.key",
        "--enable-supernode-auth",
        "--host",
        "127.0.0.1",
        "--port",
        "8000",
    )
    assert process.health == "https://127.0.0.1:8000/health" and process.ca == "/state/lab/keys/ca.crt"


def test_superlink_listens_on_loopback_alone_when_that_is_its_address() -> None:
    for address, bound in (("127.0.0.1", "127.0.0.1:9092"), ("localhost", "127.0.0.1:9092"), ("::1", "[::1]:9092")):
        link = {"fleet-address": address, "database": "/var/lab.db"}
        command = commands.superlink(parsed("hosts: [{host: local}]", superlink=link), PLACE).command
        assert command[command.index("--fleet") + 1] == bound
        assert "--insecure" in command and "--enable-supernode-auth" not in command
        assert command[-2:] == ("--database", "/var/lab.db")
    ipv6 = commands.superlink(parsed("hosts: [{host: local}]", superlink={"fleet-address": "fd00::2"}), PLACE).command
    assert "[::]:9092" in ipv6


def test_supernode_command_gpu_threads_and_data() -> None:
    lab = parsed()
    process = commands.supernode(lab, lab.supernodes[3], PLACE, 0)
    assert each_mentions(
        process.command,
        ("/opt/corolla/.venv/bin/python",),
        ("-P",),
        ("-m",),
        ("deploy.supernode",),
        ("--name",),
        ("lab/supernode-3",),
        ("--",),
        ("--root-certificates",),
        ("/state/lab/keys/ca.crt",),
        ("--auth-supernode-private-key",),
        ("/state/lab/keys/supernode-3.key",),
        ("--superlink",),
        ("lab.example.org:9092",),
        ("--host",),
        ("127.0.0.1",),
        ("--port",),
        ("5001",),
        ("--node-config",),
        ('partition-id=3 num-partitions=6 data-path="/site a"', 'private-keys="/state/lab/keys/supernode-3.x25519"'),
    )
    assert process.health == "http://127.0.0.1:5001/health"
    assert process.environment == {
        "OMP_NUM_THREADS": "4",
        "MKL_NUM_THREADS": "4",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "4",
    }


def test_a_nodes_own_rules_are_named() -> None:
    lab = parsed("hosts: [{host: local, site: /etc/corolla/site.toml}]")
    command = commands.supernode(lab, lab.supernodes[0], PLACE, 0).command
    assert (
        command[command.index("--site") + 1] == "/etc/corolla/site.toml" and "--site" in command[: command.index("--")]
    )


def test_node_config_is_read_by_flower_as_meant() -> None:
    from flwr.common.config import parse_config_args

    lab = parsed()
    config = commands.supernode(lab, lab.supernodes[3], PLACE, 0).command[-1]
    keys = "/state/lab/keys/supernode-3.x25519"
    assert parse_config_args([config]) == {
        "partition-id": 3,
        "num-partitions": 6,
        "data-path": "/site a",
        "private-keys": keys,
    }


@pytest.mark.parametrize("path", ['/a "b" c', r"/a\b", "/it's", """/it's "a\\b" x=1""", "/Zürich 😀", "/a\tb\x7f.toml"])
def test_any_path_of_a_site_reaches_flower_unchanged(path: str) -> None:
    from flwr.common.config import parse_config_args

    config = commands.node_config(3, 6, path, "/keys/own")
    want = {"partition-id": 3, "num-partitions": 6, "data-path": path, "private-keys": "/keys/own"}
    assert parse_config_args([config]) == want


def test_supernodes_without_gpus_and_their_own_environment() -> None:
    lab = parsed("hosts: [{host: local, environment: {COROLLA_DATA_DIR: /d}}, {host: local, gpus: []}]")
    first, second = (commands.supernode(lab, node, PLACE, k) for k, node in enumerate(lab.supernodes))
    assert "CUDA_VISIBLE_DEVICES" not in first.environment and first.environment["COROLLA_DATA_DIR"] == "/d"
    assert second.environment["CUDA_VISIBLE_DEVICES"] == ""
    used = [word for process in (first, second) for word in process.command if word.startswith("50")]
    assert len(set(used)) == len(used)
    assert commands.num_ports(lab, "local") == 2


def test_tunnel_to_a_remote_superlink() -> None:
    link = {"host": "user@server", "python": "/p", "fleet-address": "server"}
    lab = parsed("hosts: [{host: local}]", superlink=link)
    command = commands.tunnel(lab, "/k/ca.crt").command
    assert command[0] == "ssh" and command[-2:] == ("--", "user@server") and "BatchMode=yes" in command
    assert "127.0.0.1:8000:127.0.0.1:8000" in command


def test_a_host_gets_its_own_keys_and_nothing_else(tmp_path: Path) -> None:
    from deploy import certificates

    lab = parsed(keys=str(tmp_path / "keys"))
    certificates.make(lab)
    assert sorted(key_files(lab, "user@node2")) == [
        "ca.crt",
        "peers.txt",
        "supernode-3.key",
        "supernode-3.x25519",
        "supernode-4.key",
        "supernode-4.x25519",
    ]
    local = {"ca.crt", "server.crt", "server.key", "peers.txt"}
    local |= {f"supernode-{k}.{end}" for k in (0, 1, 2, 5) for end in ("key", "x25519")}
    assert set(key_files(lab, "local")) == local


def test_a_record_is_read_back_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COROLLA_STATE_HOME", str(tmp_path))
    cluster = Cluster(parsed(), "t0ken", "/home/u/.flwr/config.toml", "2026-01-01 00:00:00")
    save_new(cluster)
    assert load("lab") == cluster
    assert record_path("lab").stat().st_mode & 0o777 == 0o600
    with rejected(DeploymentError, "", "already up", "since 2026-01-01 00:00:00", "`corolla cluster", "lab` ends"):
        save_new(cluster)
    with rejected(DeploymentError, "", "cluster other is", "not up"):
        load("other")


@pytest.mark.parametrize("left", ["", '{"inventory": {"na', "\udcff", "[" * 10**5, "[]", "{}", "null"])
def test_half_a_record_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str) -> None:
    monkeypatch.setenv("COROLLA_STATE_HOME", str(tmp_path))
    record_path("lab").parent.mkdir(parents=True)
    record_path("lab").write_bytes(left.encode(errors="surrogateescape"))
    with rejected(DeploymentError, "", "cluster lab", "not up", "cluster.json", "record"):
        load("lab")
    cluster = Cluster(parsed(), "t0ken", "config.toml", "now")
    save_new(cluster)
    assert load("lab") == cluster


def test_a_full_disk_leaves_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COROLLA_STATE_HOME", str(tmp_path))
    cluster = Cluster(parsed(), "t0ken", "config.toml", "now")
    with monkeypatch.context() as full:
        full.setattr(files, "sync", no_space)
        with rejected(UserError, "cluster lab", "cannot write under", "No space left"):
            save_new(cluster)
        prepare = {"action": "prepare", "paths": [], "free": [], "files": {"ca.crt": "x"}, "ports": 0}
        with rejected(UserError, "cluster lab", "cannot write under", "No space left"):
            node.handle(prepare | {"cluster": "lab", "token": "t0ken"})
    save_new(cluster)
    assert load("lab") == cluster


def test_a_late_down_leaves_the_next_cluster_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COROLLA_STATE_HOME", str(tmp_path / "state"))
    config = tmp_path / "config.toml"
    lab = parsed("hosts: [{host: local, supernodes: 2}]")
    first, second = (Cluster(lab, token, str(config), "now") for token in ("one", "two"))
    keys = record_path("lab").parent / "keys"

    def start(cluster: Cluster) -> None:
        save_new(cluster)
        connection.add(config, "lab", cluster.connection)
        keys.mkdir()

    start(first)
    assert lifecycle.down(first) == []
    assert not record_path("lab").exists() and not keys.exists() and "[superlink.lab]" not in config.read_text()
    start(second)
    # began before the first one had ended
    assert lifecycle.down(first) == []
    assert load("lab") == second and keys.exists() and "[superlink.lab]" in config.read_text()
    assert lifecycle.down(second) == [] and not keys.exists()


def no_space(path: Path) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# What hosts must have in common: versions, and clocks -----------------------------------------------------------------


def found(flwr: str = "1.39.0", torch: str = "2.11.0") -> dict[str, str]:
    return {"corolla": "0.1.0", "flwr": flwr, "torch": torch}


def test_hosts_have_the_same_versions(capsys: pytest.CaptureFixture[str]) -> None:
    lifecycle.compare_versions({"local": found(), "node2": found(torch="2.12.0")}, print)
    assert mentions(capsys.readouterr().out, "note", "torch is 2.12.0", "node2 and 2.11.0", "local")
    with rejected(DeploymentError, "", "flwr is 1.39.1", "node2 and 1.39.0", "local", "install the same", "version"):
        lifecycle.compare_versions({"local": found(), "node2": found("1.39.1")}, print)


@pytest.mark.parametrize("flwr", ["1.43.0", "1.43.0.dev20261026", "2.0.0"])
def test_a_newer_flower_is_refused_by_name(flwr: str) -> None:
    with rejected(DeploymentError, "local", f"flwr {flwr} is newer", "1.42", "anyone that reaches", "every node"):
        lifecycle.compare_versions({"local": found(flwr), "node2": found(flwr)}, print)


def test_the_newest_flower_that_may_be_installed_is_the_newest_that_is_started() -> None:
    project = Path(lifecycle.__file__).parent.parent / "pyproject.toml"
    major, minor = lifecycle.NEWEST
    assert f'"flwr[simulation]>=1.39,<{major}.{minor + 1}"' in project.read_text()


@pytest.mark.parametrize(
    ("off", "words"), [(5.5, "5.5 s ahead of"), (400, "400.0 s ahead of"), (-306, "306.0 s behind")]
)
def test_a_clock_whose_supernodes_would_be_refused(off: float, words: str) -> None:
    rule = "SuperLink's host \\(local\\)\n.* 5 s ahead or 305 s behind"
    with pytest.raises(DeploymentError, match=f"^node2: .* {words} .*{rule}"):
        lifecycle.compare_clocks({"local": 10.0, "node2": 10.0 + off, "node3": 11.0}, "local", authenticated=True)
    assert len(lifecycle.compare_clocks({"local": 10.0, "node2": 10.0 + off}, "local", authenticated=False)) == 1


def test_small_differences_are_said_or_nothing() -> None:
    assert lifecycle.compare_clocks({"local": 0.0, "a": 1.9, "b": -1.9}, "local", authenticated=True) == []
    (note,) = lifecycle.compare_clocks({"local": 0.0, "a": -60.0}, "local", authenticated=True)
    assert mentions(note, "note", "clock is 60.0", "SuperLink's host (local)")


def test_a_real_answer_holds_the_other_sides_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another host is another process behind a command named ssh; this host's clock is set back."""
    (tmp_path / "ssh").write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nexec sh -c "$3"\n')
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("COROLLA_STATE_HOME", str(tmp_path / "state"))
    raw = {
        "superlink": {"fleet-address": "10.0.0.1"},
        "hosts": [{"host": "local"}, {"host": "node2", "python": sys.executable}],
    }
    lab = Cluster(inventory.parse(raw, "lab", tmp_path), "token", "", "now")
    assert abs(lab.ask("node2", "clock")["clock"] - time.time()) < 1
    said: list[str] = []
    check_clocks(lab, ["node2"], said.append)
    assert said == []
    monkeypatch.setattr(node, "now", lambda: time.time() - 30)
    with pytest.raises(UserError, match=r"node2: its clock is (29\.|30\.)\d s ahead"):
        check_clocks(lab, ["node2"], said.append)
    assert cluster.ask("local", "", {"action": "clock", "cluster": "lab", "token": ""})["clock"] < time.time() - 29


def test_little_space_under_the_database_is_noted_and_none_is_refused() -> None:
    assert lifecycle.note_on_space("local", "/x/lab.db", None) == "" == lifecycle.note_on_space("a", "/x", 2e9)
    noted = lifecycle.note_on_space("local", "/x/lab.db", 300e6)
    assert mentions(noted, "note", "local", "superlink.database", "/x/lab.db", "300 MB are free")
    with rejected(DeploymentError, "", "local", "superlink.database", "/x/lab.db", "3.2 MB are free", "database needs"):
        lifecycle.note_on_space("local", "/x/lab.db", 3.2e6)


def test_a_host_tells_the_space_under_the_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COROLLA_STATE_HOME", str(tmp_path / "state"))
    request = {"action": "prepare", "cluster": "lab", "token": "t", "paths": [], "free": [], "files": {}, "ports": 0}
    assert node.handle(request | {"database": ""})["free"] is None
    with full_disk(tmp_path, free=1 << 20) as there:
        assert node.handle(request | {"database": str(there / "lab.db")})["free"] == 1 << 20


# The cluster launcher's table in Flower's config file -----------------------------------------------------------------

TABLE = {"address": "127.0.0.1:8000", "root-certificates": '/keys "x"/ca.crt'}
MINE = """# my own notes
[superlink]
default = "local"   # keep

[superlink.local]
address = ":local:"
options.num-supernodes = 10

[other]
list = [1,
  2]"""


@pytest.mark.parametrize("text", [MINE, MINE + "\n", MINE + "\n\n# the end\n", ""])
def test_add_and_remove_leave_the_rest_as_it_was(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    path.chmod(0o600)
    connection.add(path, "lab", TABLE)
    after = tomllib.loads(path.read_text())
    assert after["superlink"]["lab"] == TABLE and path.read_text().startswith(text)
    assert path.stat().st_mode & 0o777 == 0o600
    connection.remove(path, "lab", TABLE)
    assert path.read_text().rstrip("\n") == text.rstrip("\n")


def test_tables_after_ours_survive(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(MINE)
    connection.add(path, "lab", TABLE)
    connection.add(path, "lab2", TABLE)
    with path.open("a") as file:
        file.write("# about mine\n[superlink.mine]\naddress = 'x'\n")
    connection.remove(path, "lab", TABLE)
    assert set(tomllib.loads(path.read_text())["superlink"]) == {"default", "local", "lab2", "mine"}
    assert "# about mine" in path.read_text()


def test_remove_after_flower_rewrote_the_file(tmp_path: Path) -> None:
    import tomli_w

    path = tmp_path / "config.toml"
    path.write_text(MINE)
    connection.add(path, "lab", TABLE)
    path.write_text(tomli_w.dumps(tomllib.loads(path.read_text())))
    connection.remove(path, "lab", TABLE)
    assert tomllib.loads(path.read_text()) == tomllib.loads(MINE)


def test_another_connection_of_that_name_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[superlink.lab]\naddress = "elsewhere:1"\n')
    with rejected(DeploymentError, "", "connection named 'lab'", "already"):
        connection.add(path, "lab", TABLE)
    connection.remove(path, "lab", TABLE)
    assert "elsewhere" in path.read_text()


def test_files_that_cannot_take_a_table_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    for text in ('superlink = { default = "x" }\n', "broken = [\n"):
        path.write_text(text)
        with pytest.raises(UserError):
            connection.add(path, "lab", TABLE)
        assert path.read_text() == text


def test_without_a_file_flowers_own_defaults_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "new" / "config.toml"
    connection.add(path, "lab", TABLE)
    assert {"default", "local", "lab"} <= set(tomllib.loads(path.read_text())["superlink"])


def test_clusters_that_start_and_end_at_once_all_have_their_tables(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(MINE)
    for name in ("old-0", "old-1"):
        connection.add(path, name, TABLE)
    edits = [(connection.add, f"new-{k}") for k in range(6)] + [(connection.remove, f"old-{k}") for k in range(2)]
    threads = [threading.Thread(target=edit, args=(path, name, TABLE)) for edit, name in edits]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    links = tomllib.loads(path.read_text())["superlink"]
    assert set(links) == {"default", "local", *(f"new-{k}" for k in range(6))}


@pytest.mark.parametrize("name", ["keys 😀", "keys\u2028", 'a"b\\c', "tab\t"])
def test_any_path_can_be_in_a_table(tmp_path: Path, name: str) -> None:
    path, table = tmp_path / "config.toml", {"address": "127.0.0.1:8000", "root-certificates": f"/{name}/ca.crt"}
    connection.add(path, "lab", table)
    assert tomllib.loads(path.read_text(encoding="utf-8"))["superlink"]["lab"] == table
    connection.remove(path, "lab", table)
    assert "lab" not in tomllib.loads(path.read_text(encoding="utf-8"))["superlink"]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with rejected(DeploymentError, "config.toml", "cannot be changed"):
        connection.add(tmp_path / "file" / "config.toml", "lab", TABLE)


def test_a_path_that_is_no_text_is_named(tmp_path: Path) -> None:
    with rejected(DeploymentError, "config.toml", "cannot be changed", "'utf-8' codec can't", "encode"):
        connection.add(tmp_path / "config.toml", "lab", TABLE | {"root-certificates": "/caf\udce9/ca.crt"})
    assert not (tmp_path / "config.toml").exists()
