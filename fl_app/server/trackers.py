"""Trackers: MLflow, Weights & Biases and TensorBoard follow a run (key `track`).

A separate process (`follow.py`) feeds each tracker from the run folder as it grows. So no tracker can slow a run down,
change its result, or end it. A tracker that is down causes a warning. At the end of a run, each piece that a tracker
gets has a time limit.

A simulation's server is in a network of its own, which cannot reach a tracker's server. So the command that started the
simulation starts the followers, when it reads the log. Everywhere else the server starts them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import fl_app
from fl_app.config.rules import split_names
from fl_app.errors import UserError, plain
from fl_app.keys import Scalar
from fl_app.server import progress_protocol
from fl_app.server.progress_protocol import LOG_MARK, Folder, Resumed

FOLLOWER = "corolla.tracking.follow"
# Seconds that a tracker may take for each piece once the run has ended.
SECONDS = 30.0
# Further seconds before a follower that does not end is killed.
_MORE = 5.0


# Set unless the user has set them: MLflow would retry for minutes, and both packages report to their makers.
_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "4",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
}


def wanted(config: Mapping[str, Scalar]) -> tuple[str, ...]:
    """Return the trackers that a flat run config names, each once."""
    return tuple(dict.fromkeys(split_names(str(config.get("track", "")))))


def require(config: Mapping[str, Scalar]) -> None:
    """Raise UserError naming every package that a run's trackers need and that is not installed here."""
    problems = []
    for name in wanted(config):
        found = importlib.util.find_spec(name)
        # a directory of that name is no package
        if found is None or found.origin is None:
            problems.append(
                f"track: the package {name} is not installed where the server runs; pip install 'corolla[{name}]', or leave {name} "
                "out of track"
            )
    if problems:
        raise UserError("\n".join(problems))


class Follower:
    """The process that feeds one tracker from a run folder.

    after: the last round that the tracker already has. warn: called from another thread, once, if the tracker misses
    part of the run.
    """

    def __init__(self, name: str, run: Path, after: int, warn: Callable[[str], None]) -> None:
        self._name, self._warn, self._warned = name, warn, False
        app = str(Path(fl_app.__file__).resolve().parent.parent)
        paths = os.pathsep.join(filter(None, [app, os.environ.get("PYTHONPATH")]))
        environment = {**_ENVIRONMENT, **os.environ, "PYTHONPATH": paths}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", FOLLOWER, str(run), name, str(after), str(SECONDS)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        # True for a sign of life, False for the end
        self._signs: queue.Queue[bool] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._signs.put(True)
            with contextlib.suppress(ValueError, AttributeError):
                if why := json.loads(line).get("error"):
                    self._warn_once(str(why))
        if self._process.wait():
            self._warn_once(
                f"it took longer than {SECONDS:g} s" if self._process.returncode < 0 else "its process ended"
            )
        self._signs.put(False)

    def _warn_once(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(plain(f"warning: track: {self._name} misses part of this run: {why}"))

    def let_go(self) -> None:
        """Signal that the run has ended. The process finishes the rest."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def wait(self) -> None:
        """Wait until the process has ended. Kill it if it gives no sign of life for its time limit."""
        try:
            while self._signs.get(timeout=SECONDS + _MORE):
                pass
        except queue.Empty:
            self._warn_once(f"it took longer than {SECONDS:g} s")
        finally:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def following(names: Iterable[str], run: Path, after: int, warn: Callable[[str], None]) -> Iterator[None]:
    """Let trackers follow a run within the block. run: its folder. after: the last round they have.

    warn: see Follower.
    """
    followers = [Follower(name, run, after, warn) for name in names]
    try:
        yield
    finally:
        finish(followers)


def finish(followers: Iterable[Follower]) -> None:
    """Wait until trackers have everything, or their time is over."""
    several = list(followers)
    for follower in several:
        follower.let_go()
    for follower in several:
        follower.wait()


@contextlib.contextmanager
def following_log(config: Mapping[str, Scalar], on_line: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """Yield a function that takes a run's log lines and passes them on to `on_line`.

    Trackers follow the run from the line that names its folder. For a resumed run, they start at the line that names
    its round.
    """
    names = wanted(config)
    followers: list[Follower] = []
    folder: list[Path] = []

    def warn(text: str) -> None:
        on_line(f"{LOG_MARK}{text}")

    def start(after: int) -> None:
        if not followers:
            followers.extend([Follower(name, folder[0], after, warn) for name in names])

    def take(line: str) -> None:
        own = progress_protocol.own_text(line) if names else None
        found = progress_protocol.read_line(own) if own is not None else None
        if isinstance(found, Folder):
            folder[:] = [found.path]
            # A resumed run's tracker still has the rounds after the checkpoint: it starts when Resumed says where.
            if not config.get("resume"):
                start(0)
        elif isinstance(found, Resumed) and folder:
            start(found.round)
        on_line(line)

    try:
        yield take
    finally:
        finish(followers)
