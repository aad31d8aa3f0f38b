"""Runs that wait for a site's approval, with `approval = "ask"` in `site.toml`. `corolla node approve` answers them.

Each site has a directory: `waiting/RUN.json` is the request, `decided/RUN.json` the answer. An answer holds only for
this application with this config.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from fl_app import foreign_files
from fl_app.errors import MALFORMED, DeploymentError, UserError, describe
from fl_app.files import make_directory, publish_text
from fl_app.keys import Scalar
from fl_app.toml import flatten, read_toml
from fl_app.transport.app_bundle import project_file

log = logging.getLogger("corolla")

WAITING, DECIDED = "waiting", "decided"


@dataclass(frozen=True)
class Request:
    """A run that asks for approval: its id, the sha256 of its code, its whole config, the account that submitted it.

    submitter: as the SuperLink names it, "" if it does not. No answer depends on it.
    """

    run: str
    application: str
    config: Mapping[str, Scalar]
    submitter: str = ""

    @property
    def telling(self) -> dict[str, Scalar]:
        """The run's name, its method, and the keys that have another value than this installation's default."""
        known = flatten(read_toml(project_file())["tool"]["flwr"]["app"]["config"])
        first = {name: self.config[name] for name in ("run-name", "method") if name in self.config}
        rest = {k: v for k, v in self.config.items() if (type(v), v) != (type(known.get(k)), known.get(k))}
        return first | rest

    @property
    def digest(self) -> str:
        """The sha256 of the request, which its answer names."""
        return hashlib.sha256(
            json.dumps([self.run, self.application, dict(self.config)], sort_keys=True).encode()
        ).hexdigest()


@dataclass(frozen=True)
class SiteAnswer:
    """A site's answer to a request. by: the user that gave it."""

    digest: str
    approved: bool
    by: str


def ask(directory: Path, request: Request) -> None:
    """Add a run to the waiting ones. Raises OSError."""
    path = directory / WAITING / f"{request.run}.json"
    make_directory(path.parent)
    if not path.exists():
        publish_text(path, json.dumps(asdict(request), indent=1))


def answer(directory: Path, request: Request) -> SiteAnswer | None:
    """Return the answer to a request, or None. An answer for another application or config does not count."""
    try:
        found = SiteAnswer(**json.loads(foreign_files.read(directory, f"{DECIDED}/{request.run}.json")))
    except (OSError, UserError, *MALFORMED):
        return None
    return found if found.digest == request.digest and found.approved in (True, False) else None


def waiting(directory: Path) -> list[Request]:
    """List the runs that wait for an answer. A file that is no request is named in the log and left out."""
    found = []
    for entry in foreign_files.entries(directory, WAITING):
        if entry.path.endswith(".json") and not entry.is_directory:
            try:
                request = _request(foreign_files.read(directory, entry.path))
            except (UserError, OSError, *MALFORMED) as error:
                log.warning("%s: is no request of a run (%s)", directory / entry.path, describe(error))
                continue
            # the answer is kept under the run's name
            if entry.path == f"{WAITING}/{request.run}.json":
                found.append(request)
    return [request for request in found if answer(directory, request) is None]


def _request(content: bytes) -> Request:
    """Return the request in a file. Raises one of MALFORMED."""
    request = Request(**json.loads(content))
    values = request.config.items()
    texts = all(isinstance(text, str) for text in (request.run, request.application, request.submitter))
    if not texts or not all(isinstance(name, str) and isinstance(value, Scalar) for name, value in values):
        raise ValueError("its fields have other types")
    return request


def decide(directory: Path, run: str, approved: bool) -> Request:
    """Answer a waiting run. Raises UserError if no run of this id waits."""
    requests = {request.run: request for request in waiting(directory)}
    if run not in requests:
        raise DeploymentError(
            key=f"run {run}", rule=f"does not wait for approval here; waiting: {', '.join(requests) or 'none'}"
        )
    path = directory / DECIDED / f"{run}.json"
    make_directory(path.parent)
    publish_text(path, json.dumps(asdict(SiteAnswer(requests[run].digest, approved, getpass.getuser()))))
    return requests[run]


def forget(directory: Path, run: str) -> None:
    """Take a run off the waiting list, because it was answered or has withdrawn."""
    (directory / WAITING / f"{run}.json").unlink(missing_ok=True)
