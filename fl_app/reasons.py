"""Reasons: the closed set of words by which a site explains a refusal to a server.

A site's errors name values, rows and paths of its own data. A server could read a column by them. So a site sends a
reason: a code, a key of the run and a rule, each from a list in this file. The full text stays in the site's own log.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

from fl_app.config import RunConfig
from fl_app.errors import Diverged, UserError
from fl_app.keys import specs

CODES = {
    "data": "its data cannot be used as the run asks",
    "configuration": "it cannot read the run's configuration",
    "capability": "its machine cannot do what the run asks",
    "deployment": "its node lacks what the run needs",
    "protocol": "it does not answer this message",
    "method": "the method cannot be computed on its data",
    "diverged": "training diverged",
    "budget": "its privacy budget does not allow it",
    "failed": "its code raised an exception",
    "refused": "refused by its site",
}
"""A reason's code, and the words that a server shows for it."""

RULES = {
    # of site.toml
    "applications": "applications",
    "methods": "methods",
    "bounds": "bounds",
    "min-samples": "min-samples",
    "max-upload": "max-upload",
    "readable-paths": "readable-paths",
    "confine": "confine",
    "approval": "approval",
    "max-evaluations": "max-evaluations",
    # of a site's gate
    "application": "the application cannot be read",
    "audit": "the audit cannot be written",
    "reply": "the reply has another form",
    # of a client
    "readable": "must be readable, as the run describes it",
    "declared": "must be declared in the run's configuration",
    "available": "must be available",
    "installed": "needs a package that is not installed",
    "memory": "must fit into memory",
    "finite": "must stay finite",
    "affordable": "must leave the records within their budget",
    "per-record": "must give a gradient per record",
    "same-model": "must be the server's model",
    "keys": "needs the site's keys",
    "hidden": "an answer must hide the single client",
    "sealed": "the sketches' key must be sealed for the site",
    "once": "an attempt is answered once",
    "in-range": "values must fit the range of a private run",
    "own-files": "must name a file of the application",
    "outside": "must lie outside the site's own directory",
    "state": "the client's state must be whole",
    "writable": "must be writable",
}
"""A reason's rule, and its words. The first ones are site.toml's."""

WHERE = "the site's own log has the details"
_STAGE = "corolla_stage"
_FORM = re.compile(r"([a-z]+)/([a-z0-9_.-]{0,80})/([a-z-]*)", re.ASCII)


class Reason(NamedTuple):
    """A code of CODES, a key of the run or "", a rule of RULES or ""."""

    code: str
    key: str = ""
    rule: str = ""

    def __str__(self) -> str:
        """Return the reason as it travels: CODE/KEY/RULE."""
        return "/".join(self)

    @property
    def sentence(self) -> str:
        """The reason in words, with the place of the details."""
        about = ": ".join(filter(None, (self.key, RULES.get(self.rule, ""))))
        return f"{CODES[self.code]}{f' ({about})' if about else ''}; {WHERE}"


@functools.cache
def run_keys() -> frozenset[str]:
    """Return the names of a run's keys, without those of methods."""
    return frozenset(spec.name for spec in specs(RunConfig))


def admitted(code: str, key: str = "", rule: str = "", also: Collection[str] = ()) -> Reason:
    """Return a reason whose parts are in this file's lists. A part that is in none is left out.

    also: further keys, which the server has sent.
    """
    known = key in run_keys() or key in also
    return Reason(code if code in CODES else "failed", key if known else "", rule if rule in RULES else "")


def read(text: object) -> Reason | None:
    """Return the reason that a text is; None for any other text."""
    if not (found := _FORM.fullmatch(str(text))):
        return None
    reason = Reason(*found.groups())
    return reason if reason.code in CODES and (not reason.rule or reason.rule in RULES) else None


def of(error: BaseException) -> Reason:
    """Return the reason for an exception: what it declares, else its stage's, else that code raised it."""
    if isinstance(error, Diverged):
        return Reason("diverged", "", "finite")
    stage = getattr(error, _STAGE, None)
    if isinstance(stage, Reason) and stage.code == "data":
        # which rule broke would depend on the data
        return stage
    # torch's exception, by its name: torch may not be imported
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return Reason("capability", "", "memory")
    if isinstance(error, UserError) and error.code:
        return admitted(error.code, error.key, error.rule)
    return stage if isinstance(stage, Reason) else Reason("failed")


@contextlib.contextmanager
def stage(code: str, key: str = "", rule: str = "") -> Iterator[None]:
    """Give exceptions inside this reason, unless an inner stage did. An error's own code still counts before it."""
    try:
        yield
    except Exception as error:
        if not hasattr(error, _STAGE):
            setattr(error, _STAGE, admitted(code, key, rule))
        raise
