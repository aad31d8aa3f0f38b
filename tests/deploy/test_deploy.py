"""The cluster launcher without processes: inventory and command lines."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import commands, connection, inventory, lifecycle, node
from deploy.cluster import Cluster, load, record_path, save_new
from deploy.commands import HostPlaces
from deploy.inventory import Inventory
from deploy.lifecycle import key_files
from fl_app import files
from fl_app.errors import DeploymentError, UserError
from fl_app.keys import specs
from tests.facts import each_mentions, rejected

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
        ("[" * 5000 + "]" * 5000, "not valid YAML: nested too deeply"),
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
