"""Declared keys: one declaration holds a key's default, sentence, range and kind.

A dataclass declares its keys as fields, `tau: float = key(0.5, "Share of ...", RATIO)`, and `specs` lists them. A key's
name is the field's in kebab case. A method's keys are in its table, `fedcac.tau`. Every question about keys is a filter
on these declarations: keys that make two runs different experiments, that may change on resume, that count rounds, that
define a partition.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, get_args, get_origin, get_type_hints

from fl_app.errors import UserError, listed

Scalar = bool | int | float | str
Value = TypeVar("Value")

About = Literal["data", "training", "running", "place"]
"""The kind of a key.

`data`: the samples and their division over clients. `training`: everything else that may change a result or its record.
`running`: the way a run is executed, never its result. `place`: paths and names. Two runs are the same experiment if
their keys of kind `data` and `training` are equal.
"""


class Allowed(Protocol):
    """A condition on values. Its text is printed in documentation and errors."""

    def admits(self, value: Any) -> bool:
        """Return whether a value satisfies the condition."""


@dataclass(frozen=True)
class Rule:
    """An interval that a number must lie in."""

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    def admits(self, value: float) -> bool:
        """Return whether `value` lies in the interval; NaN and infinities never do."""
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return above and below and not math.isinf(value)

    def __str__(self) -> str:
        """Return the interval as documentation and errors print it."""
        if self.high == math.inf:
            return "any" if self.low == -math.inf else f"{'>' if self.low_open else '>='} {self.low:g}"
        return f"in {'(' if self.low_open else '['}{self.low:g}, {self.high:g}{')' if self.high_open else ']'}"


POSITIVE = Rule(low=0, low_open=True)
NOT_NEGATIVE = Rule(low=0)
AT_LEAST_ONE = Rule(low=1)
RATIO = Rule(low=0, high=1)
POSITIVE_RATIO = Rule(low=0, high=1, low_open=True)
BELOW_ONE = Rule(low=0, high=1, high_open=True)


@dataclass(frozen=True)
class File:
    """A property of keys whose value names a file or a directory.

    after_word: the path comes after a word and a colon, as in `file:/path`. at_site: clients open it, so that a site's
    rules decide about it; otherwise the server alone does.
    """

    after_word: bool = False
    at_site: bool = True


def key(
    default: Any,
    doc: str,
    rule: Allowed | None = None,
    about: About = "training",
    counts_rounds: bool = False,
    *,
    partitions: tuple[str, ...] = (),
    extends: bool = False,
    headline: bool = False,
    compared: bool = True,
    checked: bool = False,
    schedule_dependent: bool = False,
    begins_after: bool = False,
    path: File | None = None,
    trains_on: Callable[[Any, int, int], int] | None = None,
    instead_of: str = "",
    spans_run: bool = False,
) -> Any:
    """Declare one key: its default, its sentence in the documentation, its range and its properties.

    - `about`: see About.
    - `counts_rounds`: its value counts rounds, and shrinks with the run's number of rounds under `--scale small`.
    - `partitions`: the partitions, and the data sets, that use it to divide samples.
    - `extends`: a resumed run may change it, although this changes the result.
    - `headline`: a report names it first.
    - `compared`: papers state it, so a difference from a paper's value matters.
    - `checked`: some errors in it show only when something is opened or built.
    - `schedule_dependent`: its effect in a round depends on the run's number of rounds, unless it is off
      (`KeySpec.is_off`). `spans_run` is its earlier name, for one release.
    - `begins_after`: a phase begins after this round.
    - `path`: how its value names a file; a key without it names none.
    - `trains_on`: for a key that leaves out some of a client's samples. It takes the value, a number of training samples
      and the batch size, and returns how many samples are trained on.
    - `instead_of`: the key whose place it takes, unless it is off.
    """
    declared = dict(
        default=default,
        doc=doc,
        rule=rule,
        about=about,
        counts_rounds=counts_rounds,
        partitions=partitions,
        extends=extends,
        headline=headline,
        compared=compared,
        checked=checked,
        schedule_dependent=schedule_dependent or spans_run,
        begins_after=begins_after,
        path=path,
        trains_on=trains_on,
        instead_of=instead_of,
    )
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata={"key": declared})
    return dataclasses.field(default=default, metadata={"key": declared})


@dataclass(frozen=True)
class KeySpec:
    """A key as declared: name in kebab case with its table, type, allowed choices, and `key`'s arguments."""

    name: str
    field: str
    type: type
    choices: tuple[str, ...]
    default: Any
    doc: str
    rule: Allowed | None
    about: About
    counts_rounds: bool
    partitions: tuple[str, ...]
    extends: bool
    headline: bool
    compared: bool
    checked: bool
    schedule_dependent: bool
    begins_after: bool
    path: File | None
    trains_on: Callable[[Any, int, int], int] | None
    instead_of: str

    @property
    def range(self) -> str:
        """The allowed values, in words."""
        if self.choices:
            return ", ".join(f"`{c}`" for c in self.choices)
        return str(self.rule) if self.rule else ("`true`, `false`" if self.type is bool else "any")

    @property
    def tells_runs_apart(self) -> bool:
        """Whether two runs with different values are different experiments."""
        return self.about in ("data", "training")

    def divides(self, divisions: frozenset[str]) -> bool:
        """Return whether it affects runs with these `known_names.divisions`: `partitions` is empty or contains one."""
        return not self.partitions or not divisions.isdisjoint(self.partitions)

    @property
    def may_change_on_resume(self) -> bool:
        """Whether a resumed run may have another value."""
        return self.extends or not self.tells_runs_apart

    def is_off(self, value: Scalar) -> bool:
        """Return whether a value turns the key's effect off: 0, empty, false, a default word, or the first of its choices."""
        return (
            value == self.choices[0]
            if self.choices
            else not value or (isinstance(value, str) and value == self.default)
        )

    def read(self, value: Scalar, problems: list[UserError]) -> Scalar:
        """Return a value in the key's type. If it is not allowed, add its error to `problems` and return the default."""
        default: Scalar = self.default
        if isinstance(value, int) and abs(value) >= 2**63:
            rule = "an integer must have at most 63 bits"
            text = f"{self.name}: {rule}, got one of {value.bit_length()}"
            problems.append(UserError(text, key=self.name, rule=rule, value=value))
            return default
        if self.type is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if type(value) is not self.type:
            want = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}[self.type]
            problems.append(UserError(key=self.name, rule=f"expected {want}", value=value))
        elif self.choices and value not in self.choices:
            problems.append(
                UserError(
                    key=self.name,
                    rule=f"must be one of {', '.join(self.choices)}",
                    value=value,
                    hint=nearest(str(value), self.choices),
                )
            )
        elif self.rule and isinstance(value, (int, float)) and not self.rule.admits(value):
            finite = " and finite" * math.isinf(value)
            problems.append(UserError(key=self.name, rule=f"must be {self.rule}{finite}", value=value))
        else:
            return value
        return default


def specs(cls: type, table: str = "") -> list[KeySpec]:
    """Return the keys that a dataclass declares, in order. Fields that are no keys are left out."""
    return list(_specs(cls, table))


# cached: reading the declarations takes most of the time of parsing a config
@functools.lru_cache(maxsize=256)
def _specs(cls: type, table: str) -> tuple[KeySpec, ...]:
    hints, out = get_type_hints(cls), []
    for f in dataclasses.fields(cls):
        if "key" not in f.metadata:
            continue
        hint = hints[f.name]
        choices = tuple(get_args(hint)) if get_origin(hint) is Literal else ()
        name = (f"{table}." if table else "") + f.name.replace("_", "-")
        out.append(KeySpec(name, f.name, str if choices else hint, choices, **f.metadata["key"]))
    return tuple(out)


def recorded(table: Mapping[str, Scalar]) -> type:
    """Return a dataclass with the keys of a method's table that a run has recorded."""
    fields = [(name.replace("-", "_"), type(value), key(value, "As recorded.")) for name, value in table.items()]
    return dataclasses.make_dataclass("Recorded", fields, frozen=True)


@dataclass(frozen=True)
class NoParams:
    """Parameters of methods that have none."""


# Flat keys ------------------------------------------------------------------------------------------------------------


def table_of(method: str) -> str:
    """Return the name of a method's table: the method's name, or the module's for a user's own `module:NAME`."""
    return method.partition(":")[0].rpartition(".")[2]


def affects(name: str, method: str) -> bool:
    """Return whether a key affects a method's runs: it is in no table, or in the method's own."""
    table = name.rpartition(".")[0]
    return not table or table == table_of(method)


def own(flat: Mapping[str, Value], method: str) -> dict[str, Value]:
    """Return a flat config without the keys of other methods' tables."""
    return {name: value for name, value in flat.items() if affects(name, method)}


def without_others(flat: Mapping[str, Value], methods: Iterable[str]) -> dict[str, Value]:
    """Return a flat config without the tables of the user's own methods among `methods`, except this run's method.

    Only runs of a user's own method know its keys.
    """
    tables = {table_of(name) for name in methods if ":" in name} - {table_of(str(flat.get("method", "")))}
    return {name: value for name, value in flat.items() if name.rpartition(".")[0] not in tables}


def show(value: Scalar) -> str:
    """Return a value as a user writes it; 1 and 1.0 are both `1`."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


# by key, what other tools call it
_ELSEWHERE = {
    "learning-rate": ("lr", "local-lr", "local-learning-rate", "eta"),
    "learning-rate-decay": ("lr-decay", "learning-rate-decay-gamma", "ldg", "gamma"),
    "server-learning-rate": ("server-lr", "global-lr"),
    "num-server-rounds": (
        "rounds",
        "global-rounds",
        "global-epochs",
        "global-epoch",
        "communication-rounds",
        "comm-round",
        "gr",
        "t",
    ),
    "num-clients": ("clients", "num-supernodes", "n-clients", "client-num", "nc", "k"),
    "fraction-train": (
        "join-ratio",
        "fraction-fit",
        "client-fraction",
        "participation",
        "participation-rate",
        "frac",
        "jr",
        "c",
    ),
    "local-epochs": ("epochs", "local-epoch", "ls", "e"),
    "local-steps": (
        "steps",
        "local-iterations",
        "local-iters",
        "local-updates",
        "batches-per-round",
        "num-local-steps",
        "tau",
    ),
    "schedule": ("lr-scheduler", "scheduler", "lr-schedule"),
    "batch-size": ("bs", "batch", "local-bs", "lbs", "b"),
    "weight-decay": ("wd", "l2"),
    "method": ("algorithm", "algo", "strategy", "aggregator"),
    "device": ("gpu", "cuda", "use-cuda", "device-id", "dev", "did", "gpus"),
    "dataset": ("data", "dataset-name"),
    "model": ("network", "arch", "m"),
    "seed": ("seeds", "random-seed", "rs"),
    "partition": ("split", "niid", "non-iid", "distribution"),
    "evaluate-every": ("eval-gap", "eval-every", "test-interval", "test-gap", "eg"),
    "dirichlet-alpha": ("alpha", "dir-alpha", "beta-dirichlet"),
    "output-dir": ("out", "save-dir", "log-dir", "results-dir", "save-folder-name", "sfn"),
    "run-name": ("name", "experiment-name", "goal", "go"),
    "track": ("tracker", "logger", "report-to"),
}
# by word of a key, what other tools call it
_WORDS_ELSEWHERE = {
    "dirichlet": ("dir", "lda", "niid", "noniid", "non-iid"),
    "pathological": ("pat", "shards", "label-skew"),
    "iid": ("homo", "uniform", "random"),
    "cuda": ("gpu", "gpus"),
}


def _elsewhere(word: str, keys: Sequence[str]) -> list[str]:
    """Return which of the keys other tools call so, or have all parts of a word: rounds is in num-server-rounds."""
    word = word.lower().replace("_", "-")
    called = [key for key in keys if word in _ELSEWHERE.get(key, ())]
    return called or [key for key in keys if set(word.split("-")) <= set(key.split("-"))][:3]


def suggestion(name: str, known: Iterable[str], tables: Iterable[str], table: str) -> str:
    """Return the end of an error about an unknown key.

    It names a close key; without one, the keys of the same table and the methods that have a key of this name. known:
    all keys; tables: of all methods; table: of the run's own method.
    """
    of, dot, word = name.rpartition(".")
    by_table: dict[str, list[str]] = {of: [] for of in tables}
    for key in known:
        by_table.setdefault(key.rpartition(".")[0], []).append(key.rpartition(".")[2])
    if not dot and word and (keys := by_table.get(word)):
        return f"; it is the table of {listed([f'{word}.{key}' for key in keys])}"
    if not dot and word in by_table.get(table, ()):
        return f"; did you mean {table}.{word}?"
    if not dot and (meant := _elsewhere(word, by_table[""])):
        return f"; did you mean {' or '.join(meant)}?"
    if of not in by_table:
        return nearest(name, [f"{of}.{key}" for of, keys in by_table.items() if of for key in keys])
    if close := nearest(word, by_table[of]):
        return close.replace("mean ", f"mean {of}{dot}", 1)
    others = [of for of, keys in by_table.items() if of and word in keys]
    has = (f"; method {of} has " + (listed([f"{of}.{key}" for key in by_table[of]]) or "no parameters")) if of else ""
    return has + (f"; {word} is a key of {', '.join(others)}" if others else "")


def closest(word: str, known: Iterable[str]) -> str:
    """Return the known word closest to an unknown one; "" if none is close. Case does not matter.

    The only known word that begins with the unknown one is the closest.
    """
    by_letters = {w.lower(): w for w in reversed(list(known))}
    longer = [w for w in by_letters if len(word) > 1 and w.startswith(word.lower())]
    if len(longer) == 1:
        # acc is accuracy, though auc has more of its letters
        return by_letters[longer[0]]
    # AUC is auc, and Bern is bern
    close = difflib.get_close_matches(word.lower(), by_letters, n=1)
    return by_letters[close[0]] if close else ""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown word: the known word that is called so elsewhere, or is closest, or ""."""
    words = list(known)
    called = [own for own in words if word.lower().replace("_", "-") in _WORDS_ELSEWHERE.get(own, ())]
    close = called[0] if called else closest(word, words)
    return f"; did you mean {close}?" if close else ""
