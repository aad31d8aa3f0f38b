"""Trackers: MLflow, Weights & Biases and TensorBoard follow a run (key `track`), and the user's own callbacks do.

A separate process (`follow.py`) feeds each tracker from the run folder as it grows. So no tracker can slow a run down,
change its result, or end it. A tracker that is down causes a warning. At the end of a run, each piece that a tracker
gets has a time limit. All this holds for a callback, too.

A simulation's server is in a network of its own, which cannot reach a tracker's server. So the command that started the
simulation starts the followers, when it reads the log. Everywhere else the server starts them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import fl_app
from fl_app import plugins
from fl_app.config.rules import split_names
from fl_app.errors import UserError, listed, plain
from fl_app.keys import Scalar
from fl_app.server.events import LOG_MARK, Note, Started, Warned, encode, read

FOLLOWER = "corolla.tracking.follow"
# what a callback may define; each is called if it is there
HOOKS = ("on_run_start", "on_round_end", "on_run_end")
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
    """Return the trackers and the callbacks that a flat run config names, each once."""
    return (*dict.fromkeys(split_names(str(config.get("track", "")))), *plugins.callbacks(config))


def require(config: Mapping[str, Scalar], *, here: bool = True) -> None:
    """Raise UserError naming every tracker without its package, every one that cannot work here, and every bad callback.

    here: whether the followers will run where this is called.
    """
    problems = []
    for name in wanted(config):
        if plugins.is_reference(name):
            # elsewhere it is no business of this process, which would import the user's file
            problems += _misfits(name) if here else []
            continue
        found = importlib.util.find_spec(name)
        # a directory of that name is no package
        if found is None or found.origin is None:
            problems.append(
                f"track: the package {name} is not installed where the server runs; pip install 'corolla[{name}]', or leave {name} "
                "out of track"
            )
        elif here and (why := _why_not(name, frozenset(os.environ.items()))):
            problems.append(f"track: {name} cannot work where the server runs: {why}; or leave {name} out of track")
    if problems:
        raise UserError("\n".join(problems))


@functools.cache
def _why_not(name: str, environment: frozenset[tuple[str, str]]) -> str:
    """Return why a tracker cannot work in an environment, such as a missing account; "" if it can, or if it does not say."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        run = subprocess.run(
            _follower(name), env=_environment(), stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS
        )
        for line in run.stdout.splitlines():
            with contextlib.suppress(ValueError, AttributeError):
                if why := json.loads(line).get("error"):
                    return plain(str(why))
    return ""


def _follower(*words: str) -> list[str]:
    return [sys.executable, "-P", "-m", FOLLOWER, *words]


def _environment() -> dict[str, str]:
    """Return the environment of a follower's process."""
    app = str(Path(fl_app.__file__).resolve().parent.parent)
    places = [app, *map(str, plugins.directories()), os.environ.get("PYTHONPATH")]
    return {**_ENVIRONMENT, **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}


def _misfits(reference: str) -> list[str]:
    """Return what is wrong with a callback."""
    own = plugins.load("callbacks", reference)
    unknown = [name for name in dir(own) if name.startswith("on_") and name not in HOOKS]
    if unknown or not any(callable(getattr(own, name, None)) for name in HOOKS):
        has = f"; it has {listed(unknown)}" if unknown else ""
        return [f"callbacks {reference}: must define some of {', '.join(HOOKS)}{has}"]
    if isinstance(own, type):
        try:
            inspect.signature(own).bind()
        except TypeError as error:
            return [f"callbacks {reference}: is made without arguments: {error}"]
    return []


class Follower:
    """The process that feeds one tracker from a run folder.

    after: the last round that the tracker already has. say: called from another thread with what a callback prints, and
    once with a warning if the tracker misses part of the run.
    """

    def __init__(self, name: str, run: Path, after: int, say: Callable[[Note], None]) -> None:
        self._name, self._say, self._warned = name, say, False
        self._process = subprocess.Popen(
            _follower(name, str(run), str(after), str(SECONDS)),
            env=_environment(),
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
                sign = json.loads(line)
                if printed := sign.get("printed"):
                    self._say(Note(message=f"{self._name}: {plain(printed)}"))
                if why := sign.get("error"):
                    self._warn_once(str(why))
        if self._process.wait():
            self._warn_once(
                f"it took longer than {SECONDS:g} s" if self._process.returncode < 0 else "its process ended"
            )
        self._signs.put(False)

    def _warn_once(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            key = "callbacks" if plugins.is_reference(self._name) else "track"
            self._say(Warned(message=plain(f"warning: {key}: {self._name} misses part of this run: {why}")))

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
def following(names: Iterable[str], run: Path, after: int, say: Callable[[Note], None]) -> Iterator[None]:
    """Let trackers follow a run within the block. run: its folder. after: the last round they have.

    say: see Follower.
    """
    followers = [Follower(name, run, after, say) for name in names]
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

    Trackers follow the run from the line that says that it has started.
    """
    names = wanted(config)
    followers: list[Follower] = []

    def say(note: Note) -> None:
        on_line(LOG_MARK + encode(note))

    def take(line: str) -> None:
        found = read(line) if names and not followers else None
        if isinstance(found, Started):
            followers.extend(Follower(name, Path(found.folder), found.round, say) for name in names)
        on_line(line)

    try:
        yield take
    finally:
        finish(followers)
