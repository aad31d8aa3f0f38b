"""The inventory, CLUSTER.yaml: where the SuperLink runs, which hosts run SuperNodes, on which GPUs and data.

```yaml
superlink: {host: local, fleet-address: server.example.org}
hosts:
  - {host: local, gpus: [0, 1]}                                # two SuperNodes, partition-id 0 and 1
  - {host: user@node2, python: /opt/corolla/.venv/bin/python, gpus: [0], data-path: /site}
```

Parsed once into frozen dataclasses; all problems are reported together. docs/deployment.md lists every key.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fl_app.errors import UserError

LOCAL = "local"
_TOP = ("name", "superlink", "hosts", "keys", "tls", "insecure")
_SUPERLINK = ("host", "python", "fleet-address", "fleet-port", "control-port", "database", "names", "environment")
_HOST = ("host", "python", "supernodes", "gpus", "data-path", "threads", "environment")
_HOST_WORD = r"[A-Za-z0-9_][\w.+:%-]*(@[A-Za-z0-9][\w.:%-]*)?"
_DNS_NAME = r"[A-Za-z0-9]([\w-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([\w-]*[A-Za-z0-9])?)*\.?"


@dataclass(frozen=True)
class SuperLink:
    """The SuperLink: where it runs, the address SuperNodes connect to, its ports."""

    host: str = LOCAL
    python: str = ""
    fleet_address: str = "127.0.0.1"
    fleet_port: int = 9092
    control_port: int = 8000
    database: str = ""
    names: tuple[str, ...] = ()  # further names and addresses in its certificate
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SuperNode:
    """One SuperNode; client_id is its partition-id. gpu None leaves CUDA_VISIBLE_DEVICES alone, "" hides all GPUs."""

    client_id: int
    host: str
    python: str
    gpu: str | None = None
    data_path: str = ""
    threads: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of its process, log and key files."""
        return f"supernode-{self.client_id}"


@dataclass(frozen=True)
class Inventory:
    """A whole cluster. `secure`: TLS and SuperNode authentication are on."""

    name: str
    superlink: SuperLink
    supernodes: tuple[SuperNode, ...]
    keys: str
    secure: bool

    @property
    def hosts(self) -> dict[str, str]:
        """Every host that runs something, with its Python, in order."""
        found = {self.superlink.host: self.superlink.python}
        return found | {node.host: node.python for node in self.supernodes if node.host not in found}


def is_loopback(address: str) -> bool:
    """Tell whether an address or name can only be reached from its own machine."""
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return address.lower() == "localhost"


def read(path: Path, insecure: bool = False) -> Inventory:
    """Read CLUSTER.yaml. insecure: as if it said `insecure: true`. Raises UserError with all problems."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid YAML: {error}") from None
    if isinstance(raw, dict) and insecure:
        raw = {**raw, "insecure": True}
    return parse(raw, default_name=path.stem, directory=path.resolve().parent)


def parse(raw: Any, default_name: str, directory: Path) -> Inventory:
    """Check a loaded inventory. directory: what a relative `keys` is relative to. Raises UserError with all problems."""
    problems: list[str] = []
    top = _Entry("", raw, _TOP, problems)
    name = top.text("name", default_name, r"[A-Za-z0-9][\w-]*", "letters, digits, - and _")
    if name in ("default", LOCAL):
        problems.append(f"name: must not be {name!r}, Flower's config file uses it; give the cluster a `name`")
    superlink = _superlink(top.value.get("superlink", {}), problems)
    supernodes = _supernodes(top.value.get("hosts"), problems)
    tls, insecure = top.flag("tls"), top.flag("insecure")
    if tls and insecure:
        problems.append("tls, insecure: true for both; choose one (--insecure counts as insecure: true)")
    elif tls is False and insecure is None and not is_loopback(superlink.fleet_address):
        problems.append(f"tls: false with fleet-address {superlink.fleet_address}; say `insecure: true` if you mean it")
    keys = top.text("keys", f"{name}-keys")
    _check_together(superlink, supernodes, problems)
    if problems:
        raise UserError("invalid cluster:\n" + "\n".join(f"  {p}" for p in problems))
    secure = bool(tls) or (not insecure and not is_loopback(superlink.fleet_address))
    return Inventory(name, superlink, supernodes, str((directory / Path(keys).expanduser()).resolve()), secure)


def _superlink(raw: Any, problems: list[str]) -> SuperLink:
    entry = _Entry("superlink", raw, _SUPERLINK, problems)
    host, python = entry.host()
    names = entry.texts("names")
    for name in names:
        if not _is_address(name):
            problems.append(f"superlink.names: must be IP addresses or DNS names, got {name!r}")
    address = entry.text("fleet-address", "127.0.0.1").strip("[]")
    if not _is_address(address):
        problems.append(f"superlink.fleet-address: must be an IP address or a DNS name without a port, got {address!r}")
    elif address in ("0.0.0.0", "::"):
        problems.append(f"superlink.fleet-address: must be the address SuperNodes connect to, got {address!r}")
    fleet_port, control_port = entry.number("fleet-port", 9092, 1, 65535), entry.number("control-port", 8000, 1, 65535)
    if fleet_port == control_port:
        problems.append(f"superlink.control-port: must differ from fleet-port, got {control_port} for both")
    return SuperLink(
        host, python, address, fleet_port, control_port, entry.path("database"), names, entry.variables("environment")
    )


def _supernodes(raw: Any, problems: list[str]) -> tuple[SuperNode, ...]:
    """Number the SuperNodes over all entries, in order: one per GPU unless `supernodes` is given."""
    if not isinstance(raw, list) or not raw:
        problems.append(f"hosts: must be a list of entries such as {{host: local, supernodes: 2}}, got {raw!r}")
        return ()
    nodes: list[SuperNode] = []
    for index, item in enumerate(raw):
        entry = _Entry(f"hosts[{index}]", item, _HOST, problems)
        if "host" not in entry.value:
            problems.append(f"hosts[{index}].host: missing; local or user@host")
        host, python = entry.host()
        gpus = entry.gpus()
        count = entry.number("supernodes", len(gpus or ()) or 1, 1, 10_000)
        data_path, threads = entry.path("data-path"), entry.number("threads", 1, 1, 4096)
        if data_path and count > 1:
            problems.append(
                f"hosts[{index}].data-path: {count} SuperNodes would train on the same data; write one entry for each, "
                f"got {data_path!r}"
            )
        environment = entry.variables("environment")
        for k in range(count):
            gpu = None if gpus is None else gpus[k % len(gpus)] if gpus else ""
            nodes.append(SuperNode(len(nodes), host, python, gpu, data_path, threads, environment))
    return tuple(nodes)


def _check_together(superlink: SuperLink, nodes: tuple[SuperNode, ...], problems: list[str]) -> None:
    elsewhere = sorted({node.host for node in nodes if node.host != superlink.host})
    if elsewhere and is_loopback(superlink.fleet_address):
        problems.append(
            f"superlink.fleet-address: must be an address that {', '.join(elsewhere)} can reach, "
            f"got {superlink.fleet_address!r}"
        )
    pythons: dict[str, str] = {superlink.host: superlink.python}
    for node in nodes:
        known = pythons.setdefault(node.host, node.python)
        if known != node.python:
            problems.append(f"hosts: {node.host} has two different `python`s, {known!r} and {node.python!r}")


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        # what looks like four numbers but is no IP address is a typing error, not a name
        return bool(re.fullmatch(_DNS_NAME, text)) and not re.fullmatch(r"[\d.]+", text)
    return True


class _Entry:
    """One mapping of the inventory; every reader notes a problem and returns the default when the value is wrong."""

    def __init__(self, label: str, value: Any, known: tuple[str, ...], problems: list[str]) -> None:
        self.label, self.problems = label, problems
        if not isinstance(value, dict):
            problems.append(f"{label or 'the file'}: must be a mapping with the keys {', '.join(known)}, got {value!r}")
            value = {}
        self.value: dict[Any, Any] = value
        for key in value:
            if key not in known:
                close = difflib.get_close_matches(str(key), known, n=1)
                hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
                problems.append(f"{self._name(str(key))}: unknown key; {hint}")

    def _name(self, key: str) -> str:
        return f"{self.label}.{key}" if self.label else key

    def _complain(self, key: str, rule: str) -> None:
        self.problems.append(f"{self._name(key)}: must be {rule}, got {self.value[key]!r}")

    def text(self, key: str, default: str, pattern: str = r".+", rule: str = "a string") -> str:
        value = self.value.get(key, default)
        if isinstance(value, str) and re.fullmatch(pattern, value):
            return value
        self.value.setdefault(key, value)
        self._complain(key, rule)
        return default

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.value.get(key, [])
        if isinstance(value, list) and all(isinstance(v, str) for v in value):
            return tuple(value)
        self._complain(key, "a list of strings")
        return ()

    def path(self, key: str) -> str:
        value = self.value.get(key, "")
        if value == "" or (isinstance(value, str) and value.startswith("/") and not re.search(r"""["'\\\n]""", value)):
            return str(value)
        self._complain(key, "an absolute path without quotes or backslashes")
        return ""

    def number(self, key: str, default: int, low: int, high: int) -> int:
        value = self.value.get(key, default)
        if type(value) is int and low <= value <= high:
            return value
        self._complain(key, f"an integer in [{low}, {high}]")
        return default

    def flag(self, key: str) -> bool | None:
        value = self.value.get(key)
        if value is None or isinstance(value, bool):
            return value
        self._complain(key, "true or false")
        return None

    def variables(self, key: str) -> dict[str, str]:
        value = self.value.get(key, {})
        if isinstance(value, dict) and all(isinstance(k, str) and isinstance(v, str) for k, v in value.items()):
            return dict(value)
        self._complain(key, "a mapping of names to strings")
        return {}

    def gpus(self) -> tuple[str, ...] | None:
        """GPU numbers (or CUDA's GPU-…/MIG-… names) as strings; None if the key is not there."""
        value = self.value.get("gpus")
        if value is None:
            return None
        rule = "a list of GPU numbers, each once"
        if not isinstance(value, list) or len({str(v) for v in value}) != len(value):
            self._complain("gpus", rule)
            return None
        numbers = [type(v) is int and v >= 0 for v in value]
        names = [isinstance(v, str) and re.fullmatch(r"(GPU|MIG)-[\w/-]+", v) is not None for v in value]
        if not all(a or b for a, b in zip(numbers, names, strict=True)):
            self._complain("gpus", rule)
            return None
        return tuple(str(v) for v in value)

    def host(self) -> tuple[str, str]:
        """Return (host, python): this machine's own Python for `local`, a required absolute path elsewhere."""
        host = self.text("host", LOCAL, _HOST_WORD, "local, HOST or USER@HOST as ssh takes it")
        python = self.path("python")
        if host == LOCAL:
            if python:
                self._complain("python", "absent for host local, which uses the Python corolla runs on")
            return host, sys.executable
        if not python:
            self.problems.append(f"{self._name('python')}: missing; the absolute path of Corolla's Python on {host}")
        return host, python
