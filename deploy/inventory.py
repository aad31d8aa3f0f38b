"""The inventory, CLUSTER.yaml: the SuperLink's host, the hosts that run SuperNodes, their GPUs and data.

```yaml
superlink: {host: local, fleet-address: server.example.org}
hosts:
  - {host: local, gpus: [0, 1]}                                # two SuperNodes, partition-id 0 and 1
  - {host: user@node2, python: /opt/corolla/.venv/bin/python, gpus: [0], data-path: /site}
```

It is parsed once into frozen dataclasses, and all problems are reported together. docs/deployment.md lists every key.
"""

from __future__ import annotations

import ipaddress
import re
import reprlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

from fl_app.errors import DeploymentError
from fl_app.keys import key, nearest, specs

Entry = TypeVar("Entry")

LOCAL, JOINS = "local", "joins"
# whose warm process a node's applications are forked from: its own, or one that nodes of the machine share
OWN, SHARED = "own", "shared"
_LONGEST_SHOWN = 300
_HOST_WORD = r"[A-Za-z0-9_][\w.+:%-]*(@[A-Za-z0-9][\w.:%-]*)?"
_DNS_NAME = r"[A-Za-z0-9]([\w-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([\w-]*[A-Za-z0-9])?)*\.?"


@dataclass(frozen=True)
class Form:
    """A rule for a value of YAML or TOML, beyond those of a run's config: a description, and a test."""

    words: str
    admits: Callable[[Any], bool]

    def __str__(self) -> str:
        """Return the description."""
        return self.words


def _text(words: str, pattern: str) -> Form:
    return Form(words, lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None)


def _integer(low: int, high: int) -> Form:
    return Form(f"an integer in [{low}, {high}]", lambda value: type(value) is int and low <= value <= high)


def _is_address(text: Any) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        # a string of digits and dots that is no IP address is a typing error, not a name
        return isinstance(text, str) and bool(re.fullmatch(_DNS_NAME, text)) and not re.fullmatch(r"[\d.]+", text)
    return isinstance(text, str)


def _are_gpus(value: Any) -> bool:
    def is_gpu(one: Any) -> bool:
        """Return whether a value is a number, or one of CUDA's names."""
        named = isinstance(one, str) and re.fullmatch(r"(GPU|MIG)-[\w/-]+", one) is not None
        return named or (type(one) is int and one >= 0)

    if value is None:
        return True
    return isinstance(value, list) and all(map(is_gpu, value)) and len(set(map(str, value))) == len(value)


def _are_variables(value: Any) -> bool:
    def is_pair(name: Any, text: Any) -> bool:
        """Return whether a shell takes the pair for a variable: names stand without quotes in rendered scripts."""
        if not isinstance(name, str) or not isinstance(text, str):
            return False
        return bool(re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name)) and "\0" not in text

    return isinstance(value, dict) and all(is_pair(*pair) for pair in value.items())


_NAME = _text("letters, digits, - and _", r"[A-Za-z0-9][\w-]*")
_TEXT = _text("a path without quotes, backslashes or control characters", r"""[^"'\\\x00-\x1f]+""")
_HOST = _text("local, HOST or USER@HOST as ssh takes it", _HOST_WORD)
_PATH = _text("an absolute path without quotes, backslashes or control characters", r"""(/[^"'\\\x00-\x1f]*)?""")
_ADDRESS = Form(
    "an IP address or a DNS name without a port", lambda v: isinstance(v, str) and _is_address(v.strip("[]"))
)
_ADDRESSES = Form("a list of IP addresses or DNS names", lambda v: isinstance(v, list) and all(map(_is_address, v)))
_WARM = Form("true, false or shared", lambda v: v is None or isinstance(v, bool) or v == SHARED)
_FLAG = Form("true or false", lambda v: v is None or isinstance(v, bool))
_VARIABLES = Form(
    "a mapping of names to strings, with letters, digits and _ in a name and no NUL anywhere", _are_variables
)
_GPUS = Form("a list of GPU numbers, each once", _are_gpus)
_ENTRIES = Form("a list of entries such as {host: local, supernodes: 2}", lambda v: isinstance(v, list) and len(v) > 0)
_PYTHON = "Corolla's Python there; only for a remote host"


@dataclass(frozen=True)
class SuperLink:
    """The SuperLink: its host, the address that SuperNodes connect to, its ports."""

    host: str = key(LOCAL, "`local`, or `USER@HOST` as ssh takes it", _HOST)
    python: str = key("", _PYTHON, _PATH)
    fleet_address: str = key("127.0.0.1", "the address that SuperNodes connect to: a name or an IP address", _ADDRESS)
    fleet_port: int = key(
        9092, "its port; the SuperLink listens on all interfaces unless the address is loopback", _integer(1, 65535)
    )
    control_port: int = key(8000, "where runs are submitted, on loopback", _integer(1, 65535))
    database: str = key("", "file in which the SuperLink stores its nodes and runs", _PATH)
    names: tuple[str, ...] = key((), "more names and addresses for its certificate", _ADDRESSES)
    environment: Mapping[str, str] = key({}, "more environment variables", _VARIABLES)


@dataclass(frozen=True)
class _Host:
    """An entry of `hosts`: the SuperNodes of one machine. supernodes 0 means one per GPU, or one without GPUs."""

    host: str = key(LOCAL, "as above, or `joins`: a client that its own site starts (`corolla node join`)", _HOST)
    python: str = key("", _PYTHON, _PATH)
    supernodes: int = key(0, "number of SuperNodes; they share the GPUs in turn", _integer(1, 10_000))
    gpus: tuple[str | int, ...] | None = key(None, "GPU numbers, one SuperNode each; `[]` hides all GPUs", _GPUS)
    data_path: str = key("", "this node's own data", _PATH)
    threads: int = key(1, "`OMP_NUM_THREADS`, `MKL_NUM_THREADS`", _integer(1, 4096))
    site: str = key("", "the node's `site.toml`, if it is not in its usual place", _PATH)
    warm: bool | str | None = key(
        None,
        "`true`: applications are forked from a process that has imported PyTorch; `shared`: nodes of the machine share one",
        _WARM,
    )
    environment: Mapping[str, str] = key({}, "more environment variables, such as `COROLLA_DATA_DIR`", _VARIABLES)


@dataclass(frozen=True)
class _File:
    """The file itself."""

    name: str = key("", "the cluster, and its connection in Flower's config (`--superlink NAME`)", _NAME)
    superlink: Mapping[str, Any] = key({}, "")
    hosts: tuple[Any, ...] = key((), "", _ENTRIES)
    keys: str = key("", "directory of the keys, relative to the file", _TEXT)
    tls: bool | None = key(None, "`true`: TLS and authentication also on loopback", _FLAG)
    insecure: bool | None = key(None, "`true` (or `--insecure`): neither TLS nor authentication, on any address", _FLAG)


@dataclass(frozen=True)
class SuperNode:
    """One SuperNode; client_id is its partition-id.

    gpu: None leaves CUDA_VISIBLE_DEVICES alone, "" hides all GPUs. warm: whose warm process forks applications, OWN or
    SHARED; "" means none.
    """

    client_id: int
    host: str
    python: str
    gpu: str | None = None
    data_path: str = ""
    threads: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    site: str = ""
    warm: str = ""

    @property
    def name(self) -> str:
        """The name of its process, log and key files."""
        return f"supernode-{self.client_id}"


@dataclass(frozen=True)
class Inventory:
    """A whole cluster.

    secure: TLS and SuperNode authentication are on. joined: clients with SuperNodes that their own sites start.
    """

    name: str
    superlink: SuperLink
    supernodes: tuple[SuperNode, ...]
    keys: str
    secure: bool
    joined: tuple[int, ...] = ()

    @property
    def num_clients(self) -> int:
        """The number of clients in the cluster, including those that join."""
        return len(self.supernodes) + len(self.joined)

    @property
    def hosts(self) -> dict[str, str]:
        """Every host that runs a process, with its Python, in order."""
        found = {self.superlink.host: self.superlink.python}
        return found | {node.host: node.python for node in self.supernodes if node.host not in found}


def warm_process(warm: bool | str | None) -> str:
    """Return OWN, SHARED or "" for a value of the key `warm`."""
    return OWN if warm is True else warm or ""


def is_loopback(address: str) -> bool:
    """Return whether an address or name can be reached only from its own machine."""
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return address.lower() == "localhost"


def read_inventory(path: Path, insecure: bool = False) -> Inventory:
    """Read CLUSTER.yaml. insecure: as if the file had `insecure: true`. Raises UserError with all problems."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DeploymentError(key=path, rule=error.strerror) from None
    except RecursionError:
        raise DeploymentError(key=path, rule="not valid YAML: nested too deeply") from None
    # ValueError: not UTF-8, or a malformed date or number
    except (yaml.YAMLError, ValueError) as error:
        raise DeploymentError(key=path, rule=f"not valid YAML: {error}") from None
    if isinstance(raw, dict) and insecure:
        raw = {**raw, "insecure": True}
    return parse(raw, default_name=path.stem, directory=path.resolve().parent)


def parse(raw: Any, default_name: str, directory: Path) -> Inventory:
    """Check a loaded inventory. directory: the base of a relative `keys`. Raises UserError with all problems."""
    problems: list[str] = []
    top = _parse_mapping(
        "", {"name": default_name, "hosts": None, **raw} if isinstance(raw, dict) else raw, _File, problems
    )
    if top.name in ("default", LOCAL):
        problems.append(f"name: must not be {top.name!r}, Flower's config file uses it; give the cluster a `name`")
    superlink = _superlink(top.superlink, problems)
    supernodes, joined = _supernodes(top.hosts, problems)
    if top.tls and top.insecure:
        problems.append("tls, insecure: true for both; choose one (--insecure counts as insecure: true)")
    elif top.tls is False and top.insecure is None and not is_loopback(superlink.fleet_address):
        problems.append(
            f"tls: false with fleet-address {superlink.fleet_address}; write `insecure: true` if this is intended"
        )
    _check_together(superlink, supernodes, problems)
    secure = bool(top.tls) or (not top.insecure and not is_loopback(superlink.fleet_address))
    if joined and not secure:
        problems.append("hosts: sites that join need TLS and keys: set `tls: true`, or remove `insecure`")
    if problems:
        raise DeploymentError("invalid cluster:\n" + "\n".join(f"  {p}" for p in problems))
    keys = Path(top.keys or f"{top.name}-keys").expanduser()
    return Inventory(top.name, superlink, supernodes, str((directory / keys).resolve()), secure, joined)


def _parse_mapping(label: str, raw: Any, cls: type[Entry], problems: list[str]) -> Entry:
    """Read one mapping of the inventory as a dataclass of keys. A wrong value is noted, and replaced by its default."""
    known = {spec.name: spec for spec in specs(cls)}
    if not isinstance(raw, dict):
        problems.append(f"{label or 'the file'}: must be a mapping with the keys {', '.join(known)}, got {_shown(raw)}")
        raw = {}
    prefix, values = f"{label}." if label else "", {}
    for name in raw:
        if name not in known:
            problems.append(
                f"{prefix}{name}: unknown key{nearest(str(name), known) or '; there are ' + ', '.join(known)}"
            )
    for name, spec in ((name, spec) for name, spec in known.items() if name in raw):
        if spec.rule and not spec.rule.admits(raw[name]):
            problems.append(f"{prefix}{name}: must be {spec.rule}, got {_shown(raw[name])}")
        else:
            values[spec.field] = tuple(raw[name]) if isinstance(raw[name], list) else raw[name]
    return cls(**values)


def _shown(value: Any) -> str:
    """Return a value for an error message, shortened if it is long, deep, or huge through YAML's aliases."""
    words = reprlib.Repr()
    words.maxlevel, words.maxstring = 3, _LONGEST_SHOWN
    try:
        text = words.repr(value)
        return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
    # an integer with thousands of digits
    except ValueError:
        return f"a very long {type(value).__name__}"


def _superlink(raw: Any, problems: list[str]) -> SuperLink:
    entry = _parse_mapping("superlink", raw, SuperLink, problems)
    address = entry.fleet_address.strip("[]")
    if address in ("0.0.0.0", "::"):
        problems.append(f"superlink.fleet-address: must be the address SuperNodes connect to, got {address!r}")
    if entry.fleet_port == entry.control_port:
        problems.append(f"superlink.control-port: must differ from fleet-port, got {entry.fleet_port} for both")
    return replace(entry, python=_python("superlink", entry, problems), fleet_address=address)


def _supernodes(raw: tuple[Any, ...], problems: list[str]) -> tuple[tuple[SuperNode, ...], tuple[int, ...]]:
    """Number the clients over all entries, in order: one per GPU unless `supernodes` is given.

    Returns the SuperNodes, and the ids of clients that join.
    """
    nodes: list[SuperNode] = []
    joined: list[int] = []
    for index, item in enumerate(raw):
        label = f"hosts[{index}]"
        entry = _parse_mapping(label, item, _Host, problems)
        if isinstance(item, dict) and "host" not in item:
            problems.append(f"{label}.host: missing; local or user@host")
        if entry.host == JOINS:
            if more := [name for name in item if name not in ("host", "supernodes")]:
                problems.append(f"{label}.{more[0]}: the site that joins decides it; leave it out")
            joined += range(len(nodes) + len(joined), len(nodes) + len(joined) + (entry.supernodes or 1))
            continue
        gpus = None if entry.gpus is None else tuple(map(str, entry.gpus))
        count = entry.supernodes or len(gpus or ()) or 1
        if entry.data_path and count > 1:
            problems.append(
                f"{label}.data-path: {count} SuperNodes would train on the same data; write one entry for each, "
                f"got {entry.data_path!r}"
            )
        python = _python(label, entry, problems)
        for k in range(count):
            if gpus is None:
                gpu = None
            else:
                gpu = gpus[k % len(gpus)] if gpus else ""
            client_id = len(nodes) + len(joined)
            nodes.append(
                SuperNode(
                    client_id,
                    entry.host,
                    python,
                    gpu,
                    entry.data_path,
                    entry.threads,
                    entry.environment,
                    entry.site,
                    warm_process(entry.warm),
                )
            )
    return tuple(nodes), tuple(joined)


def _python(label: str, entry: SuperLink | _Host, problems: list[str]) -> str:
    """Return the Python of an entry's host: this machine's own for `local`, else the path that the entry must give."""
    if entry.host == LOCAL and entry.python:
        problems.append(
            f"{label}.python: must be absent for host local, which uses the Python corolla runs on, got {entry.python!r}"
        )
    elif entry.host != LOCAL and not entry.python:
        problems.append(f"{label}.python: missing; the absolute path of Corolla's Python on {entry.host}")
    return sys.executable if entry.host == LOCAL else entry.python


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
