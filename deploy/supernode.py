"""Flower's SuperNode behind a site's gate: `python -m deploy.supernode --name SITE [--site site.toml] -- OPTIONS`.

OPTIONS are flower-supernode's. The gate is put around the connection that Flower's loop opens; where Flower no longer has the
places this is done at, nothing is started.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import subprocess
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from deploy import confine, site
from deploy.audit import Audit
from deploy.confine import Confinement
from deploy.gate import Connection, Gate, Node
from deploy.processes import state_home
from deploy.site import Site
from fl_app.config import RunConfig
from fl_app.data.prepared import data_root
from fl_app.errors import UserError
from fl_app.files import make_directory
from fl_app.privacy.keyring import PEERS
from fl_app.site import VARIABLE, site_directory, user_state
from fl_app.wire import PRIVATE_KEYS


def sites_directory() -> Path:
    """Return the directory of the keys, audits and approvals of the sites on this machine."""
    return state_home() / "sites"


def main() -> None:
    """Start a SuperNode behind its gate."""
    parser = argparse.ArgumentParser(prog="deploy.supernode")
    parser.add_argument("--name", required=True)
    parser.add_argument("--site", default="")
    parser.add_argument("flower", nargs="*")
    given = parser.parse_args()
    try:
        run(given.name, given.site, given.flower)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def run(name: str, rules: str, options: list[str]) -> None:
    """Become a SuperNode with these options of flower-supernode. Raises UserError before it starts."""
    configure_logging()
    path = site.find(rules)
    found = site.read_site(path) if path else Site()
    if found.site_dir:
        # applications inherit it
        os.environ.setdefault(VARIABLE, found.site_dir)
    directory = sites_directory() / name
    check_places(directory)
    audit = Audit(directory)
    command = install(found, audit, directory)
    audit.append("start", site=found.source, rules=path.read_text(encoding="utf-8") if path else "")
    sys.argv = ["flower-supernode", *options]
    command()


def check_places(directory: Path) -> None:
    """Raise UserError if this machine keeps something else in the site's own directory. directory: of the site's keys and audit."""
    kept = site_directory()
    places = {
        "the site's keys": directory,
        "client state": Path(os.environ.get("COROLLA_STATE_DIR") or user_state()),
        "prepared data": data_root(RunConfig()),
    }
    for what, place in places.items():
        if place.expanduser().resolve().is_relative_to(kept.resolve()):
            raise UserError(
                f"site-dir: {kept} must hold nothing else, and {what} would lie in {place}; name one of its own, such as "
                f"{kept / 'notes'} (in site.toml, or ${VARIABLE})"
            )


def configure_logging() -> None:
    """Log the gate's messages beside Flower's."""
    log = logging.getLogger("corolla")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("corolla: %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


def install(rules: Site, audit: Audit, directory: Path) -> Any:
    """Put the gate where Flower's SuperNode opens its connection, and return the function that starts it."""
    command: Any = importlib.import_module("flwr.supernode.cli.flower_supernode")
    loop: Any = importlib.import_module("flwr.supernode.start_client_internal")
    try:
        start, connect = command.start_client_internal, loop._init_connection
    except AttributeError as error:
        raise UserError(f"this Flower has no place for a site's gate ({error}): the SuperNode is not started") from None
    if rules.confine and not confine.landlock_version():
        raise UserError("confine: this kernel has no Landlock (Linux 5.13 and later, if it is not switched off)")
    writable = writable_directories(directory, rules.source) if rules.confine else {}

    def start_behind_gate(**given: Any) -> None:
        config = given["node_config"]
        client_id, num_clients = (config.get(name, -1) for name in ("partition-id", "num-partitions"))
        node = Node(int(client_id), int(num_clients), str(config.get("data-path", "")))
        gate = Gate(rules, audit, directory, node, given["state_factory"].objectstore_factory.store())

        @contextlib.contextmanager
        def connect_behind_gate(**how: Any) -> Iterator[tuple[Any, ...]]:
            with connect(**how) as connection:
                guarded = gate.around(Connection(*connection))
                yield tuple(getattr(guarded, name) for name in Connection.__dataclass_fields__)

        def start_confined(words: Sequence[str]) -> subprocess.Popen[bytes]:
            confinement = confinement_of(
                rules, node, writable.values(), given["runtime_api_address"], str(config.get(PRIVATE_KEYS, ""))
            )
            environment = os.environ | {name: str(place) for name, place in writable.items()}
            return subprocess.Popen(confine.confined_command(confinement, words), env=environment)

        loop._init_connection = connect_behind_gate
        if rules.confine:
            # Flower starts what starts applications with it
            loop.subprocess = types.SimpleNamespace(Popen=start_confined)
        start(**given)

    command.start_client_internal = start_behind_gate
    return command.flower_supernode


def writable_directories(directory: Path, rules: str) -> dict[str, Path]:
    """Make the directories that confined applications may write, and return them by the variables that name them.

    Raises UserError if what they must not change lies in one of them: the site's own directory, its file of rules.
    """
    from flwr.supercore.utils import get_flwr_home

    places = {
        "TMPDIR": directory / "tmp",
        "COROLLA_STATE_DIR": Path(os.environ.get("COROLLA_STATE_DIR") or directory / "state"),
        VARIABLE: site_directory(),
        "COROLLA_DATA_DIR": data_root(RunConfig()),
        "FLWR_HOME": get_flwr_home(),
    }
    for name, place in places.items():
        make_directory(place)
        for kept in (directory, Path(rules)):
            if kept.resolve().is_relative_to(place.resolve()):
                raise UserError(
                    f"confine: {name}: applications would write {place}, in which {kept} lies; choose another"
                )
    return places


def confinement_of(
    rules: Site, node: Node, writable: Iterable[Path], runtime: str, private_key: str = ""
) -> Confinement:
    """Return the confinement of applications.

    runtime: the SuperNode's address for them. private_key: the node's for private runs.
    """
    read = [*confine.installation(), *(rules.readable_paths or ())]
    if node.data_path:
        read.append(node.data_path)
    if private_key:
        keys = (Path(private_key), Path(private_key).with_name(PEERS))
        read += [str(path) for path in keys if path.is_file()]
    return Confinement(tuple(read), tuple(map(str, writable)), (int(runtime.rpartition(":")[2]),))


if __name__ == "__main__":
    main()
