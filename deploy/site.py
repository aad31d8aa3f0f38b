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

import math
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.inventory import Form
from fl_app.config import RunConfig
from fl_app.config.rules import with_implied
from fl_app.errors import DeploymentError
from fl_app.keys import KeySpec, Scalar, affects, key, nearest, specs
from fl_app.paths import path_keys, path_of
from fl_app.toml import read_toml
from fl_app.transport.outgoing import DETAILED

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
        "`true`: applications read `readable-paths`, the node's `data-path` and the installation, write their own directories, "
        "and connect to their SuperNode; nothing else. By bubblewrap, or without it by Landlock alone (Linux 5.13, TCP 6.7), "
        "which stops less. `strict`: only by bubblewrap",
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
        Form("an absolute path", lambda v: isinstance(v, str) and v.startswith("/")),
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
        raw["bounds"] = _dotted(raw["bounds"])
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
