"""Runs that wait for a site's approval, with `approval = "ask"` in `site.toml`; `corolla node approve` answers them.

A directory per site: `waiting/RUN.json` is the request, `decided/RUN.json` the answer. An answer holds for this
application with this config alone.
"""

from __future__ import annotations

import getpass
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from fl_app.errors import UserError
from fl_app.files import make_directory, publish_text
from fl_app.keys import Scalar

WAITING, DECIDED = "waiting", "decided"


@dataclass(frozen=True)
class Request:
    """A run that asks to be let in: its id, the sha256 of its code, its whole config."""

    run: str
    application: str
    config: Mapping[str, Scalar]

    @property
    def digest(self) -> str:
        """Sha256 of the request, which its answer names."""
        return hashlib.sha256(
            json.dumps([self.run, self.application, dict(self.config)], sort_keys=True).encode()
        ).hexdigest()


@dataclass(frozen=True)
class Answer:
    """A site's answer to a request, and the user who gave it."""

    digest: str
    approved: bool
    by: str


def ask(directory: Path, request: Request) -> None:
    """Let a run wait. Raises OSError."""
    path = directory / WAITING / f"{request.run}.json"
    make_directory(path.parent)
    if not path.exists():
        publish_text(path, json.dumps(asdict(request), indent=1))


def answer(directory: Path, request: Request) -> Answer | None:
    """Return the answer to a request; None if there is none, or only one about another application or config."""
    try:
        found = Answer(**json.loads((directory / DECIDED / f"{request.run}.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return found if found.digest == request.digest else None


def waiting(directory: Path) -> list[Request]:
    """List the runs that wait for an answer."""
    found = [
        Request(**json.loads(path.read_text(encoding="utf-8"))) for path in sorted((directory / WAITING).glob("*.json"))
    ]
    return [request for request in found if answer(directory, request) is None]


def decide(directory: Path, run: str, approved: bool) -> Request:
    """Answer a run that waits. Raises UserError if none of that id does."""
    requests = {request.run: request for request in waiting(directory)}
    if run not in requests:
        raise UserError(f"run {run}: does not wait for approval here; {', '.join(requests) or 'none'} does")
    path = directory / DECIDED / f"{run}.json"
    make_directory(path.parent)
    publish_text(path, json.dumps(asdict(Answer(requests[run].digest, approved, getpass.getuser()))))
    return requests[run]


def forget(directory: Path, run: str) -> None:
    """Take a run off the list: it was answered, or asks no longer."""
    (directory / WAITING / f"{run}.json").unlink(missing_ok=True)
