"""Processes of a cluster on this machine: started detached, found by pid and start time, ended with their children.

A cluster's directory holds, for each process, NAME.json (its record) and NAME.log. A later process with the same pid
has another start time, and is left alone. Children carry the cluster's token in their environment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import stat
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from fl_app.errors import MALFORMED, DeploymentError
from fl_app.files import publish_text
from fl_app.processes import LAUNCH, end_processes, flower_environment, processes_with, start_mark
from fl_app.site_directory import user_state

NODE_ID = "COROLLA_NODE_ID_FILE"
"""The variable that names a SuperNode's file of its node id."""


@dataclass(frozen=True)
class Record:
    """A started process. Its pid and start mark identify it while the machine runs.

    token: of the `up` that started it.
    """

    name: str
    token: str
    pid: int
    started: str
    health: str
    ca: str


def state_home() -> Path:
    """Return $COROLLA_STATE_HOME, or corolla's directory in the user's state directory."""
    if home := os.environ.get("COROLLA_STATE_HOME"):
        return Path(home).expanduser().resolve()
    return user_state()


def cluster_directory(name: str) -> Path:
    """Return the directory of a cluster on this machine."""
    return state_home() / "clusters" / name


def alive(record: Record) -> bool:
    """Return whether exactly this process is still running."""
    return start_mark(record.pid) == record.started


def start(
    directory: Path,
    token: str,
    name: str,
    command: list[str],
    environment: Mapping[str, str],
    health: str = "",
    ca: str = "",
) -> Record:
    """Start a process in its own session, its log in the directory. Raises UserError if one of this name runs."""
    if (old := read_record(directory, name)) and alive(old):
        raise DeploymentError(f"{name} is already running here (pid {old.pid})")
    path = directory / f"{name}.log"
    env = flower_environment(directory / "flwr") | dict(environment)
    env |= {LAUNCH: f"{token}/{name}", LOG_FILE: str(path), NODE_ID: str(node_id_file(directory, name))}
    path.unlink(missing_ok=True)
    node_id_file(directory, name).unlink(missing_ok=True)
    # appended, so that a log that is emptied while it is open goes on at its start
    with path.open("ab") as log:
        try:
            process = subprocess.Popen(
                command,
                env=env,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        except OSError as error:
            raise DeploymentError(key=name, rule=f"cannot start {command[0]}: {error.strerror}") from None
    # a zombie (ended at once) has no mark; its record then matches no process
    record = Record(name, token, process.pid, start_mark(process.pid) or "ended", health, ca)
    publish_text(_record_path(directory, name), json.dumps(dataclasses.asdict(record)))
    return record


def read_record(directory: Path, name: str) -> Record | None:
    """Return a process's record, or None, also for a file that is no record. `stop` finds its process by the token."""
    try:
        return Record(**json.loads(_record_path(directory, name).read_text(encoding="utf-8")))
    except (FileNotFoundError, *MALFORMED):
        return None


def records(directory: Path) -> list[Record]:
    """Return all records in a cluster's directory."""
    # names with a dot are unfinished files
    names = [path.stem for path in sorted(directory.glob("*.json")) if not path.name.startswith(".")]
    found = (read_record(directory, name) for name in names if name != "cluster")
    return [record for record in found if record]


def stop(directory: Path, token: str, name: str, seconds: float = 20) -> bool:
    """End a process that `token` started, then its children. Return whether all ended.

    The process gets SIGTERM, and SIGKILL after `seconds`. The record and the node id are removed when all have ended; the log
    stays.
    """
    record = read_record(directory, name)
    if record is not None and record.token != token:
        return True
    main: list[psutil.Process] = []
    children: list[psutil.Process] = []
    if record is not None and alive(record):
        with contextlib.suppress(psutil.Error):
            main = [psutil.Process(record.pid)]
            children = main[0].children(recursive=True)
    end_processes(main, seconds)
    end_processes(children, 5)
    # a child may have started another process meanwhile
    for _ in range(3):
        left = processes_with(f"{LAUNCH}={token}/{name}")
        if not left:
            break
        end_processes(left, 5)
    ended = (record is None or not alive(record)) and not processes_with(f"{LAUNCH}={token}/{name}")
    if ended:
        _record_path(directory, name).unlink(missing_ok=True)
        node_id_file(directory, name).unlink(missing_ok=True)
    return ended


def log_end(directory: Path, name: str, lines: int) -> str:
    """Return the last lines of a process's log, at most 200 kB."""
    try:
        with (directory / f"{name}.log").open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 200_000))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def node_id_file(directory: Path, name: str) -> Path:
    """Return the file in which a SuperNode notes its node id when it has reached its SuperLink."""
    return directory / f"{name}.node-id"


def _record_path(directory: Path, name: str) -> Path:
    return directory / f"{name}.json"


# A log that does not fill the disk: the process that writes it moves its lines to FILE.1 ------------------------------


MOST_BYTES = 10 << 20
"""Size at which the lines move. FILE.1 is replaced, so both files hold at most about twice as much."""
LOG_FILE = "COROLLA_LOG_FILE"
_SECONDS = 5.0


def keep_small() -> None:
    """Keep the file small that $COROLLA_LOG_FILE names, if this process's errors go there. No effect otherwise."""
    path = os.environ.pop(LOG_FILE, "")
    if path and _is_stderr(Path(path)):
        threading.Thread(target=_watch, args=(Path(path),), name="log-size", daemon=True).start()


def rotate(path: Path, most: int = MOST_BYTES) -> bool:
    """Move a log's lines to FILE.1 if it has more bytes. Return whether it did.

    The file itself stays, because processes have it open for appending. Lines of the moment between may be lost.
    """
    if path.stat().st_size <= most:
        return False
    with path.open("r+b") as log, open(f"{path}.1", "wb", opener=_private) as older:
        shutil.copyfileobj(log, older)
        log.truncate(0)
    return True


def _watch(path: Path) -> None:
    while True:
        with contextlib.suppress(OSError):
            rotate(path)
        time.sleep(_SECONDS)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _is_stderr(path: Path) -> bool:
    with contextlib.suppress(OSError):
        mine = os.fstat(2)
        return stat.S_ISREG(mine.st_mode) and os.path.samestat(mine, path.stat())
    return False
