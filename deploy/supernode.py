"""Flower's SuperNode behind a site's gate: `python -m deploy.supernode --name SITE [--site site.toml] -- OPTIONS`.

OPTIONS are flower-supernode's. The gate wraps the connection that Flower's loop opens. If a Flower version lacks the
place for it, the SuperNode does not start.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import itertools
import logging
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from flwr.app import Message
from flwr.proto.message_pb2 import ObjectTree

from deploy import bubblewrap, certificates, confine, detached, patches, sample_counting, site, superexec
from deploy.audit import FILE, Audit
from deploy.confine import Confinement
from deploy.detached import NODE_ID, state_home
from deploy.gate import Connection, Gate, NodeConfig
from deploy.inventory import OWN, SHARED
from deploy.patches import Pace
from deploy.site import Site
from deploy.unanswered import Answering, Arriving, Kept, WaitedProcess
from fl_app import foreign_files, log_format, model_card, weight_files
from fl_app.config import RunConfig
from fl_app.data import site_columns
from fl_app.data.prepared import DOWNLOADS, PREPARED, data_root
from fl_app.data.site_columns import SiteColumns
from fl_app.errors import DeploymentError, UserError
from fl_app.exit_codes import ending_on_bad_input
from fl_app.files import make_directory, publish_text
from fl_app.privacy import secure_random
from fl_app.privacy.keyring import PEERS
from fl_app.site_directory import VARIABLE, site_directory, user_state
from fl_app.transport.identity import fingerprint
from fl_app.transport.outgoing import TELL
from fl_app.transport.wire import NODE_NAME, PRIVATE_KEYS

log = logging.getLogger("corolla")

Receive = Callable[[], tuple[Message, ObjectTree] | None]

_COMMAND = "flwr.supernode.cli.flower_supernode"
# option of flower-superexec: the process with which it ends
_PARENT = "--parent-pid"
_HOME = "flwr"
OF_APPLICATIONS = ("tmp", "state", "flwr")
"""Directories in a site's own that its applications may write. No part of a site's name is one."""
# least seconds between two polls for a message
_SHORTEST = 0.1


def sites_directory() -> Path:
    """Return the directory with the keys, audits and approvals of the sites on this machine."""
    return state_home() / "sites"


def sites_in(directory: Path) -> list[str]:
    """Return the names of the sites with an audit below a directory. What applications may write there is not looked at."""
    found, rest = [], [""]
    while rest:
        above = rest.pop()
        entries = foreign_files.entries(directory, above)
        found += [above for entry in entries if above and entry.path == f"{above}/{FILE}" and not entry.is_directory]
        below = [entry.path for entry in entries if entry.is_directory]
        rest += [path for path in below if path.rpartition("/")[2] not in OF_APPLICATIONS]
    return sorted(found)


def main() -> None:
    """Start a SuperNode behind its gate."""
    parser = argparse.ArgumentParser(prog="deploy.supernode")
    parser.add_argument("--name", required=True)
    parser.add_argument("--site")
    parser.add_argument(
        "--warm",
        nargs="?",
        choices=(OWN, SHARED),
        const=OWN,
        default="",
        help="fork applications from a process that has imported PyTorch: the node's own, or a shared one",
    )
    parser.add_argument("--log-format", default="", help="text or json; otherwise as $COROLLA_LOG_FORMAT says")
    parser.add_argument("flower", nargs="*")
    given = parser.parse_args()
    with ending_on_bad_input():
        log_format.choose(given.log_format)
        if given.site == "":
            raise DeploymentError(
                key="--site", rule="must name the site's rules, got an empty text; leave the option out to have none"
            )
        run(given.name, given.site or "", given.flower, given.warm)


def run(name: str, rules: str, options: list[str], warm: str = "") -> None:
    """Become a SuperNode with these options of flower-supernode.

    warm: fork applications from a warm process, OWN or SHARED; or empty. Raises UserError before it starts.
    """
    # an application starts for every message: without compiled files it would be compiled each time
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # first the import, which gives Flower's logger its handler
    importlib.import_module(_COMMAND)
    log_format.configure("supernode", node=name)
    detached.keep_small()
    path = site.find(rules)
    found = use_rules(path)
    if found.initial_weights:
        weight_files.refuse_missing(Path(found.initial_weights), f"{path}: {weight_files.INITIAL_WEIGHTS}")
    os.environ[TELL] = found.tell or ""
    directory = sites_directory() / name
    check_places(directory)
    audit = Audit(directory)
    command = install(found, audit, directory, warm, key_in(options))
    keys = [fingerprint_of(key) for key in key_in(options)]
    audit.append("start", site=found.source, rules=path.read_text(encoding="utf-8") if path else "", key="".join(keys))
    certificates.watch(certificates.named_by(options))
    sys.argv = ["flower-supernode", *options]
    command()


def use_rules(path: Path | None) -> Site:
    """Return a site's rules, and let this process and those that it starts use the site's own directory.

    path: the file of rules, or None if there is none. Raises UserError.
    """
    found = site.read_site(path) if path else Site()
    if found.data:
        os.environ[site_columns.VARIABLE] = SiteColumns.of(found.data).text
    if found.initial_weights:
        os.environ[weight_files.VARIABLE] = found.initial_weights
    if found.site_dir:
        # applications inherit the variable
        os.environ.setdefault(VARIABLE, found.site_dir)
    return found


def check_places(directory: Path) -> None:
    """Raise UserError if the site's own directory also contains other files of this machine.

    directory: of the site's keys and audit.
    """
    kept = site_directory()
    places = {
        "the site's keys": directory,
        "client state": Path(os.environ.get("COROLLA_STATE_DIR") or user_state()),
        "prepared data": data_root(RunConfig()),
    }
    for what, place in places.items():
        if place.expanduser().resolve().is_relative_to(kept.resolve()):
            raise DeploymentError(
                key="site-dir",
                rule=f"{kept} must hold nothing else, but {what} would be in {place}; name a separate "
                f"directory, for example {kept / 'notes'} (in site.toml, or ${VARIABLE})",
            )


def key_in(options: Sequence[str]) -> tuple[Path, ...]:
    """Return the node's private key, which options of flower-supernode name, or nothing."""
    return tuple(certificates.paths_in(options, "--auth-supernode-private-key"))


def fingerprint_of(private: Path) -> str:
    """Return the fingerprint of a private key's public half, "" if it cannot be read."""
    try:
        public = serialization.load_ssh_private_key(private.read_bytes(), None).public_key()
    # Flower refuses it with its own words
    except Exception:
        return ""
    return fingerprint(public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH))


def install(rules: Site, audit: Audit, directory: Path, warm: str = "", keys: Sequence[Path] = ()) -> Any:
    """Put the gate at the place where Flower's SuperNode opens its connection. Return the function that starts it.

    warm: as for `run`. keys: files that no confined application may read. Raises UserError.
    """
    command: Any = importlib.import_module(_COMMAND)
    loop: Any = importlib.import_module("flwr.supernode.start_client_internal")
    try:
        start, connect, server = command.start_client_internal, loop._init_connection, command.uvicorn
    except AttributeError as error:
        raise DeploymentError(
            f"this Flower has no place for a site's gate ({error}): the SuperNode is not started"
        ) from None
    walls = walls_for(rules.confine) if rules.confine else None
    writable = writable_directories(directory, rules.source) if rules.confine else {}
    if warm == SHARED and rules.confine:
        log.warning(
            "warm: this node is confined, and has a warm process of its own, because its rules hold for all of it"
        )
    arriving = Arriving(rules.max_upload)
    # no application gets it
    noted = os.environ.pop(NODE_ID, "")
    pace = Pace(_SHORTEST)
    patches.keep_heartbeats()
    patches.register_in_one_step()
    patches.allow_slow_starts(patches.IN_MEMORY)

    def start_behind_gate(**given: Any) -> None:
        config = given["node_config"]
        client_id, num_clients = (config.get(name, -1) for name in ("partition-id", "num-partitions"))
        node = NodeConfig(
            int(client_id), int(num_clients), str(config.get("data-path", "")), str(config.get(NODE_NAME, ""))
        )
        confinement: Confinement | None = None
        if rules.confine:
            refuse_secrets(
                [
                    *confine.installation(),
                    "/dev",
                    *data_files(),
                    *readable(rules, node.data_path),
                    *writable.values(),
                ],
                (superexec.shared_directory(), directory, *keys),
            )
            confinement = confinement_of(
                rules, node, writable.values(), given["runtime_api_address"], str(config.get(PRIVATE_KEYS, ""))
            )
            confinement.refuse_led_out()
            # applications could replace what lies in a directory of theirs, and end the process that starts them
            targets = confinement.targets()

        def confined(walled: Confinement, words: Sequence[str], files: Sequence[int] = ()) -> bubblewrap.Inside:
            if walled.targets() != targets:
                raise OSError("confine: a named path leads elsewhere than when this node started")
            environment = own_variables(writable)
            if walls is None:
                return bubblewrap.Inside(confine.confined_command(walled, words), environment, files)
            return walls.start(walled, words, environment["TMPDIR"], environment, files)

        def counter(words: Sequence[str], file: int) -> sample_counting.CountingProcess:
            if confinement is None:
                return sample_counting.Unconfined(words, file)
            return confined(dataclasses.replace(confinement, ports=()), words, [file])

        store = given["state_factory"].objectstore_factory.store()
        counted = site.evaluations_in(sites_directory())
        counter_of_samples = functools.partial(sample_counting.count, start=counter)
        gate = Gate(rules, audit, directory, node, store, counted, count=counter_of_samples, arriving=arriving)
        state = given["state_factory"].state()
        arriving.bound(state)
        answering = Answering(state, gate.waiting, lambda reply: loop._insert_message(reply, state, store), gate.admits)
        gate.working, gate.known = answering.working, state.get_run

        @contextlib.contextmanager
        def connect_behind_gate(**how: Any) -> Iterator[tuple[Any, ...]]:
            with connect(**how) as connection:
                bare = Connection(*connection)
                if noted:
                    publish_text(Path(noted), str(bare.node_id))
                guarded = gate.around(dataclasses.replace(bare, receive=patches.patient(bare.receive, None)))
                guarded = dataclasses.replace(guarded, receive=noticing(guarded.receive, pace))
                yield tuple(getattr(guarded, name) for name in Connection.__dataclass_fields__)

        def start_inside(words: Sequence[str]) -> WaitedProcess:
            words = superexec_command(words, warm if warm != SHARED or not rules.confine else OWN)
            if confinement is None:
                return subprocess.Popen(words)
            # what earlier applications left there is not for the next ones, which get another home
            try:
                foreign_files.remove(writable["TMPDIR"], _HOME)
            except (UserError, OSError) as error:
                log.warning("confine: what applications have left could not be removed: %s", error)
            return confined(confinement, words if walls is None else of_parent(words, bubblewrap.FIRST))

        def start_superexec(words: Sequence[str]) -> None:
            answering.end_superexec = Kept(functools.partial(start_inside, words), answering.give_up).end

        loop._init_connection = connect_behind_gate
        # Flower starts its SuperExec with it, and SuperExec starts applications
        loop.subprocess = types.SimpleNamespace(Popen=start_superexec)
        if warm:
            # no effect on a version that sleeps in another way
            loop.time = pace
        start(**given)

    command.start_client_internal = start_behind_gate
    command.uvicorn = types.SimpleNamespace(Config=arriving.config(server.Config), Server=server.Server)
    return command.flower_supernode


def walls_for(rule: bool | str) -> bubblewrap.Walls | None:
    """Return bubblewrap's walls, or None where Landlock alone confines applications. Log the ways that stay open.

    rule: the site's `confine`. Raises UserError if the kernel has neither, or less than `strict` demands.
    """
    walls = bubblewrap.find()
    left = confine.OPEN if walls is None else walls.open
    if rule == site.STRICT and left:
        raise DeploymentError(key="confine", rule=f"strict: {bubblewrap.why_not() or left[0]}")
    if walls is None:
        if not confine.landlock_version():
            raise DeploymentError(key="confine", rule=f"{bubblewrap.why_not()}, and {confine.NONE}")
        log.warning("confine: %s. Landlock alone confines applications, and does not stop:", bubblewrap.why_not())
    for way in left:
        log.warning("confine: not stopped: %s", way)
    return walls


def of_parent(words: Sequence[str], pid: int) -> list[str]:
    """Return Flower's command, changed so that its process ends with another parent. pid: the parent's."""
    words = list(words)
    if _PARENT in words:
        words[words.index(_PARENT) + 1] = str(pid)
    return words


def superexec_command(words: Sequence[str], warm: str = "") -> list[str]:
    """Return the command of Flower's SuperExec, changed so that deploy/superexec.py runs it.

    warm: as for `run`. Raises OSError if it is another command, which would start code that nobody has compared.
    """
    command, *options = words
    if Path(command).name != "flower-superexec":
        raise OSError(f"this Flower starts applications with {command}, not with flower-superexec")
    warmly = {OWN: [superexec.WARM], SHARED: [superexec.SHARED]}.get(warm, [])
    return [sys.executable, "-P", "-m", "deploy.superexec", *warmly, *options]


def noticing(receive: Receive, pace: Pace) -> Receive:
    """Return a `receive` that also notes each message in the pace."""

    def receive_and_notice() -> tuple[Message, ObjectTree] | None:
        if (received := receive()) is not None:
            pace.work()
        return received

    return receive_and_notice


def writable_directories(directory: Path, rules: str) -> dict[str, Path]:
    """Make the directories that confined applications may write. Return them by their environment variables.

    Raises UserError if one contains a path that they must not change: the site's own directory, its file of rules, this
    process's home of Flower, or the installation.
    """
    from flwr.supercore.utils import get_flwr_home

    places = {
        "TMPDIR": directory / "tmp",
        "COROLLA_STATE_DIR": Path(os.environ.get("COROLLA_STATE_DIR") or directory / "state"),
        VARIABLE: site_directory(),
    }
    for name, place in places.items():
        make_directory(place)
        for kept in (directory, Path(rules), get_flwr_home(), *map(Path, confine.installation())):
            if kept.resolve().is_relative_to(place.resolve()):
                raise DeploymentError(
                    key="confine",
                    rule=f"{name}: applications would write {place}, which contains {kept}; choose another",
                )
    return places


def own_variables(writable: Mapping[str, Path]) -> dict[str, str]:
    """Return the environment variables of confined applications, with a home of Flower's that is theirs and new.

    Code and settings in this process's own home are also read by processes without walls. writable: the directories that
    they may write, by their variables.
    """
    home = writable["TMPDIR"] / _HOME / secure_random.secret(8).hex()
    names = {name: str(place) for name, place in writable.items()}
    names |= {"COROLLA_DATA_DIR": str(data_root(RunConfig())), "FLWR_HOME": str(home)}
    names[PREPARED] = str(writable["TMPDIR"] / "prepared")
    return confine.cleaned(os.environ, writable.values()) | names


def data_files() -> list[str]:
    """Return the files and directories of the data directory that others have put there, for applications to read."""
    root = data_root(RunConfig())
    make_directory(root / DOWNLOADS)
    return [str(root / DOWNLOADS), *map(str, root.glob("*.npz"))]


def readable(rules: Site, data_path: str = "") -> list[str]:
    """Return the files and directories of the site that its applications read: those of its rules, and its own data."""
    found = [*(rules.readable_paths or ()), *([data_path] if data_path else [])]
    if rules.initial_weights:
        weights = Path(rules.initial_weights)
        # shards may be links that lead elsewhere, or lie beside their index
        found += map(str, (weights, model_card.beside(weights), *weight_files.files_of(weights)))
    return found


def refuse_secrets(places: Iterable[str | Path], secrets: Iterable[Path]) -> None:
    """Raise UserError if one of the places that confined applications read contains one of the secrets.

    These are the secrets of shared warm processes, the site's own directory with its audit and approvals, and keys.
    """
    for place, kept in itertools.product(places, [path.resolve() for path in secrets]):
        if kept.is_relative_to(Path(place).resolve()):
            raise DeploymentError(
                key="confine", rule=f"applications would read {kept}, which lies in {place}; choose another directory"
            )


def confinement_of(
    rules: Site, node: NodeConfig, writable: Iterable[Path], runtime: str, private_key: str = ""
) -> Confinement:
    """Return the confinement of applications.

    runtime: the SuperNode's address for them. private_key: the path of the node's key for private runs.
    """
    read = [*confine.installation(), *data_files(), *readable(rules, node.data_path)]
    if private_key:
        keys = (Path(private_key), Path(private_key).with_name(PEERS))
        read += [str(path) for path in keys if path.is_file()]
    return Confinement(tuple(read), tuple(map(str, writable)), (int(runtime.rpartition(":")[2]),))


if __name__ == "__main__":
    main()
