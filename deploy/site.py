"""A site's rules for the runs that it takes part in: `site.toml`, which no run can override.

```toml
applications = ["9f2c..."]          # sha256 of the applications that may run here
methods = ["fedcac", "fedobp"]
min-samples = 50
max-upload = 20_000_000             # bytes
max-evaluations = 500               # of private runs and runs with dp-epsilon, together
readable-paths = ["/data/xray"]
confine = true                      # applications reach nothing else
site-dir = "/srv/corolla/notes"     # notes of this site that no run may undo
approval = "ask"                    # each run waits for `corolla node approve RUN`
tell = "reasons"                    # errors leave as codes; their text stays here

[bounds]
local-epochs = {max = 10}
device = {one-of = ["cpu"]}
```

An absent rule allows everything. docs/deployment.md lists every key, docs/security.md states the protection that each
one gives.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import logging
import math
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deploy.inventory import Form
from fl_app import foreign_files
from fl_app.config import RunConfig
from fl_app.config.earlier_keys import current
from fl_app.config.rules import with_implied
from fl_app.errors import MALFORMED, DeploymentError, UserError, describe
from fl_app.files import lock, make_directory, publish_text
from fl_app.keys import KeySpec, Scalar, affects, key, nearest, specs
from fl_app.paths import path_keys, path_of
from fl_app.toml import flatten, read_toml
from fl_app.transport.app_bundle import project_file
from fl_app.transport.outgoing import DETAILED, OPEN, modes_of
from fl_app.weight_files import INITIAL_WEIGHTS

ASK, STRICT = "ask", "strict"


def _texts(words: str, pattern: str) -> Form:
    return Form(
        words, lambda v: isinstance(v, list) and all(isinstance(x, str) and re.fullmatch(pattern, x) for x in v)
    )


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_bound(value: Any) -> bool:
    if not isinstance(value, dict) or not value or set(value) - {"min", "max", "one-of"}:
        return False
    numbers = [value[name] for name in ("min", "max") if name in value]
    return all(map(_is_number, numbers)) and isinstance(value.get("one-of", []), list)


_COUNT = Form("an integer >= 1", lambda v: type(v) is int and v >= 1)
_PATH = Form("an absolute path", lambda v: isinstance(v, str) and v.startswith("/"))
_BOUNDS = Form(
    "a table of run-config keys with {min = ...}, {max = ...} or {one-of = [...]}",
    lambda v: isinstance(v, dict) and all(map(_is_bound, v.values())),
)


def _is_data(value: Any) -> bool:
    """Return whether a value is a table `[data]`."""
    if not isinstance(value, dict) or set(value) - {"separator", "decimal", "rename", "scale", "fill", "exclude"}:
        return False
    exclude = value.get("exclude", [])
    if not isinstance(exclude, list) or not all(isinstance(name, str) and name for name in exclude):
        return False
    signs = [value[name] for name in ("separator", "decimal") if name in value]
    tables = {name: value.get(name, {}) for name in ("rename", "scale", "fill")}
    if not all(isinstance(sign, str) and sign for sign in signs) or not all(
        isinstance(t, dict) for t in tables.values()
    ):
        return False
    return (
        all(isinstance(name, str) and name for name in tables["rename"].values())
        and all(_is_number(factor) and factor != 0 for factor in tables["scale"].values())
        and all(isinstance(filled, str) or _is_number(filled) for filled in tables["fill"].values())
    )


_DATA = Form(
    'a table with separator, decimal, rename = {OWN = "NAME"}, scale = {NAME = FACTOR}, fill = {NAME = VALUE} and '
    'exclude = ["NAME"]',
    _is_data,
)


@dataclass(frozen=True)
class Site:
    """The rules of one site, from the file `source`. None: everything is allowed."""

    applications: tuple[str, ...] | None = key(
        None,
        "Applications that may run here, by the sha256 of their code (`corolla node application` prints it)",
        _texts("a list of sha256 values, 64 hexadecimal digits each", "[0-9a-f]{64}"),
    )
    methods: tuple[str, ...] | None = key(None, "Methods that may run here", _texts("a list of methods", ".+"))
    min_samples: int | None = key(
        None, "Least number of training samples of this site in a run; with fewer the run is refused", _COUNT
    )
    max_upload: int | None = key(None, "Largest size of a reply in bytes; a larger one is not sent", _COUNT)
    readable_paths: tuple[str, ...] | None = key(
        None,
        "Directories and files that a run's `dataset`, `partition`, `data-dir`, `state-dir` and `initial-weights` may name; "
        "`[]`: none",
        _texts("a list of absolute paths", "/.*"),
    )
    confine: bool | str | None = key(
        None,
        "`true`: applications read `readable-paths`, `initial-weights`, the node's `data-path` and the installation, write their "
        "own directories, and connect to their SuperNode; nothing else. By bubblewrap, or without it by Landlock alone (Linux "
        "5.13, TCP 6.7), which stops less. `strict`: only by bubblewrap",
        Form("true, false or strict", lambda v: isinstance(v, bool) or v == STRICT),
    )
    approval: str | None = key(
        None,
        "`ask`: each run waits for `corolla node approve RUN`; `none`: no run waits",
        Form("ask or none", lambda v: v in (ASK, "none")),
    )
    bounds: Mapping[str, Mapping[str, Any]] = key(
        {},
        "Smallest, largest or only allowed values of run-config keys: `local-epochs = {max = 10}`. A key that takes the place of "
        "one of these, as `local-steps` does, needs a bound of its own, and so do other numbers of epochs",
        _BOUNDS,
    )
    source: str = ""
    site_dir: str | None = key(
        None,
        "Directory of this site's notes of privacy budgets and private rounds, and of its own model of each run "
        "(`corolla node export`). `$COROLLA_SITE_DIR` takes precedence",
        _PATH,
    )
    max_evaluations: int | None = key(
        None,
        "Most evaluations that this site answers in all its private runs and runs with `dp-epsilon` together: each such run is "
        "one, and each message to train or to evaluate, unless `report-accuracy = false`. All SuperNodes of a machine "
        "account count together",
        _COUNT,
    )
    tell: str | None = key(
        None,
        "Form in which this site's errors leave. `reasons`: a code, a key and a rule; `details`: the text, too, but never in "
        "private runs and runs with `dp-epsilon`",
        Form("reasons or details", lambda v: v in ("reasons", DETAILED)),
    )
    data: Mapping[str, Any] = key(
        {},
        "How this site's own table differs from the run's: `separator`, `decimal`, `rename`, `scale`, `fill`, `exclude`. "
        "`corolla data show --site site.toml` checks it",
        _DATA,
    )
    initial_weights: str | None = key(
        None,
        "This site's own copy of a run's `initial-weights`, a file or a folder, in place of the path that the run names",
        _PATH,
    )


def find(given: str = "") -> Path | None:
    """Return the site's file: the given one, else $COROLLA_SITE, else corolla/site.toml in the user's configuration.

    A given directory holds site.toml. Return None only if none is named and it is certain that the last does not exist:
    a node whose rules cannot be seen must not start without them. Raises UserError.
    """
    if given or os.environ.get("COROLLA_SITE"):
        named = Path(given or os.environ["COROLLA_SITE"]).expanduser()
        return named / "site.toml" if os.path.isdir(named) else named
    usual = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "corolla" / "site.toml"
    try:
        usual.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DeploymentError(key=usual, rule=f"its rules cannot be seen: {error.strerror}") from None
    return usual


def read_site(path: Path) -> Site:
    """Read site.toml. Raises UserError with all problems, also if users other than its owner may write it."""
    raw = read_toml(path)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o022:
        raise DeploymentError(key=path, rule=f"others may change it (mode {mode:o}); `chmod go-w {path}`")
    if isinstance(raw.get("bounds"), dict):
        raw["bounds"] = current(_dotted(raw["bounds"]))
    problems: list[str] = []
    known, values = {spec.name: spec for spec in specs(Site)}, dict[str, Any]()
    for name, value in raw.items():
        if (spec := known.get(name)) is None:
            problems.append(f"{name}: unknown key{nearest(name, known) or '; there are ' + ', '.join(known)}")
        elif spec.rule and not spec.rule.admits(value):
            problems.append(f"{name}: must be {spec.rule}, got {value!r}")
        else:
            values[spec.field] = tuple(value) if isinstance(value, list) else value
    if problems:
        raise DeploymentError(f"{path}:\n" + "\n".join(f"  {problem}" for problem in problems))
    return Site(**values, source=str(path))


def _dotted(bounds: Mapping[str, Any]) -> dict[str, Any]:
    """Rename a method's keys to those of a run's config: [bounds.fedcac] tau becomes fedcac.tau."""
    out: dict[str, Any] = {}
    for name, value in bounds.items():
        table = isinstance(value, dict) and value and all(isinstance(bound, dict) for bound in value.values())
        out |= {f"{name}.{key}": bound for key, bound in value.items()} if table else {name: value}
    return out


# Judging --------------------------------------------------------------------------------------------------------------


def refusal(site: Site, application: str, config: Mapping[str, Scalar]) -> str:
    """Return the rule that excludes a run, and the reason, or "".

    application: sha256 of its code. config: the run's flat config, as the application will read it.
    """
    if why := unknown(site, application):
        return why
    config = with_implied(config)
    declared = {spec.name: spec for spec in specs(RunConfig)}
    method = str(config.get("method", declared["method"].default))
    if site.methods is not None and method not in site.methods:
        return f"methods: {method} is not among {', '.join(site.methods) or 'those allowed here (none)'}"
    for name, bound in site.bounds.items():
        if affects(name, method) and (why := _beyond(name, bound, config, declared)):
            return why
    for spec in declared.values():
        value = config.get(spec.name, spec.default)
        if spec.instead_of in site.bounds and spec.name not in site.bounds and not spec.is_off(value):
            return f"bounds: {spec.name} takes the place of {spec.instead_of}, which has a bound here, got {value}"
    if site.confine and config.get("state-dir"):
        return f"confine: state-dir is this site's to choose, got {config['state-dir']}"
    return _unreadable(site, config) if site.readable_paths is not None else ""


def unknown(site: Site, application: str) -> str:
    """Return the rule that excludes an application by its sha256, before anything in it is read, or ""."""
    if site.applications is not None and application not in site.applications:
        return f"applications: {application} is not among those allowed here"
    return ""


def _beyond(name: str, bound: Mapping[str, Any], config: Mapping[str, Scalar], declared: Mapping[str, KeySpec]) -> str:
    """Return how a run's value breaks a bound, or "". An absent key has its default, or breaks the bound."""
    if name not in config and name not in declared:
        return f"bounds: {name} is not in the run's config"
    value = config[name] if name in config else declared[name].default
    if "one-of" in bound and not any(
        value == one and isinstance(value, bool) == isinstance(one, bool) for one in bound["one-of"]
    ):
        return f"bounds: {name} must be one of {', '.join(map(str, bound['one-of']))}, got {value}"
    numbers = {word: bound[word] for word in ("min", "max") if word in bound}
    if numbers and not _is_number(value):
        return f"bounds: {name} must be a number, got {value}"
    if "min" in numbers and value < numbers["min"]:
        return f"bounds: {name} must be at least {numbers['min']}, got {value}"
    if "max" in numbers and value > numbers["max"]:
        return f"bounds: {name} must be at most {numbers['max']}, got {value}"
    return ""


def _unreadable(site: Site, config: Mapping[str, Scalar]) -> str:
    """Return the first key that names a path outside of `readable-paths`, with the rule, or "".

    The answer depends on nothing on this machine's disk: a path that does not lie below an allowed one by its name is
    refused before anything is looked up.
    """
    allowed = [place for path in site.readable_paths or () for place in (Path(path), Path(path).resolve())]
    for name, spec in path_keys().items():
        if name == INITIAL_WEIGHTS and site.initial_weights:
            # applications read the site's own instead
            continue
        text = path_of(name, config.get(name))
        if text and spec.path and spec.path.at_site and not _lies_in(text, allowed):
            return f"readable-paths: {name} names a path that no run may name here"
    return ""


def _lies_in(text: str, allowed: Sequence[Path]) -> bool:
    path = Path(os.path.normpath(text))
    # ~ is no absolute path: the answer would show which accounts there are
    if not Path(text).is_absolute() or not any(path.is_relative_to(place) for place in allowed):
        return False
    try:
        # symbolic links and .. must not lead outside
        resolved = Path(text).resolve()
        return any(resolved.is_relative_to(place) for place in allowed)
    except (OSError, RuntimeError, ValueError):
        return False


# Evaluations that were answered in confidential runs: `max-evaluations` -----------------------------------------------

# The server chooses the model of an evaluation. Enough questions tell a site's test labels, whatever the run's configuration
# is. A run itself is a question too: whether the site's data suit it. Runs and SuperNodes can name the same rows by many
# paths. So all SuperNodes of a machine account have one count, over all runs and clusters, beside their audits, where no
# confined application can change it.


EVALUATIONS = "evaluations"
# Messages without a model.
_WITHOUT_FIGURES = ("query", "get_properties", "get_parameters")


def evaluations_in(sites: Path) -> Path:
    """Return the directory with the count of a machine account. sites: the directory of all sites."""
    return sites / "of-all"


def hides(config: Mapping[str, Scalar]) -> bool:
    """Return whether a run is confidential."""
    return modes_of(config) != OPEN


def counts(kind: str, config: Mapping[str, Scalar]) -> bool:
    """Return whether the reply to a message has figures of a confidential run. kind: the message's type."""
    return kind not in _WITHOUT_FIGURES and hides(config) and bool(config.get("report-accuracy", True))


def claim(directory: Path, most: int) -> str:
    """Count an evaluation before it is answered. Return the reason to refuse it, or "".

    directory: `evaluations_in`. most: the site's limit. Raises UserError if the count cannot be read or written, or is
    no count: then nothing is answered.
    """
    path = directory / EVALUATIONS
    try:
        make_directory(path.parent)
        with lock(path.with_suffix(".lock"), wait=True):
            text = path.read_text(encoding="ascii") if path.exists() else "0\n"
            # int() reads "-9", "1_0" and "٣" too
            if not re.fullmatch(r"[0-9]{1,18}\n", text):
                raise ValueError(text)
            answered = int(text)
            if answered >= most:
                return f"max-evaluations: this site answers {most}, and has answered them"
            publish_text(path, f"{answered + 1}\n")
    except (OSError, ValueError):
        raise DeploymentError(
            key="max-evaluations", rule="this site cannot count its evaluations, so it answers none"
        ) from None
    return ""


# Runs that wait for `corolla node approve`: `approval = "ask"` --------------------------------------------------------

# Each site has a directory: `waiting/RUN.json` is the request, `decided/RUN.json` the answer. An answer holds only for this
# application with this config.


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
                request = _request_in(foreign_files.read(directory, entry.path))
            except (UserError, OSError, *MALFORMED) as error:
                log.warning("%s: is no request of a run (%s)", directory / entry.path, describe(error))
                continue
            # the answer is kept under the run's name
            if entry.path == f"{WAITING}/{request.run}.json":
                found.append(request)
    return [request for request in found if answer(directory, request) is None]


def _request_in(content: bytes) -> Request:
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
