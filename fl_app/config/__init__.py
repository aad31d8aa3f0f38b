"""The run configuration: frozen, typed, parsed once, every problem reported together.

Keys are Flower's run config: flat, kebab-case, values bool, int, float or str (no lists, no null: "" and 0 stand for "not
set", each key says so). A method's parameters live in its own table, `fedcac.tau`. One declaration per key (fl_app/keys.py)
serves the parser, docs/config.md, `corolla methods` and the defaults in pyproject.toml; a test keeps the four equal.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from fl_app import rng
from fl_app.config.experiment import ExperimentKeys
from fl_app.config.privacy import PrivacyKeys
from fl_app.config.rules import check_together, check_words, complain, refuse_files
from fl_app.keys import (
    AT_LEAST_ONE,
    BELOW_ONE,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_RATIO,
    RATIO,
    KeySpec,
    NoParams,
    Rule,
    Scalar,
    bears_on,
    key,
    meant,
    recorded,
    specs,
    table_of,
)
from fl_app.plugins import is_reference


@runtime_checkable
class Checked(Protocol):
    """Parameters of a method with rules that one key's range cannot say."""

    def problems(self, config: RunConfig) -> Iterable[str]:
        """Say what is wrong with the values together, one line each: key, rule, value."""
        ...


NO_KEYS = {"tensorboard": '; TensorBoard is a tracker: track = "tensorboard"'}
"""What stands in no config though one may look for it, and the end of the error that says what does."""


def scheduled(schedule: str, decay: float, round: int, rounds: int) -> float:
    """Return the factor on a learning rate in a round, from 1, of so many."""
    angle = math.pi * (round - 1) / rounds if schedule == "cosine" else 0.0
    return decay ** (round - 1) * ((1 + math.cos(angle)) / 2)


def share_of(count: int, share: float) -> int:
    """Return a share of so many, halves rounded up, at least 1."""
    return max(1, math.floor(share * count + 0.5))


@dataclass(frozen=True)
class RunConfig(PrivacyKeys, ExperimentKeys):
    """Everything a run is defined by. See docs/config.md for every key."""

    # local training
    local_epochs: int = key(5, "Local epochs E.", AT_LEAST_ONE, headline=True)
    batch_size: int = key(20, "Batch size of local training.", AT_LEAST_ONE, headline=True)
    drop_last: bool = key(False, "Leave the last batch of an epoch out if it is incomplete, unless it is the only one.")
    drop_single: bool = key(
        False,
        "Leave the last batch of an epoch out if it is a single sample, unless it is the only one. A model with BatchNorm, "
        "which cannot normalise one, has it join the batch before otherwise.",
    )
    optimizer: Literal["sgd", "adamw"] = key(
        "sgd",
        "`adamw`: betas 0.9 and 0.999, as torch.optim.AdamW; its moments start at zero in every round. A method's own plain "
        "gradient steps stay that.",
        headline=True,
    )
    learning_rate: float = key(0.1, "Learning rate.", POSITIVE, headline=True)
    learning_rate_decay: float = key(1.0, "Factor on the learning rate after every round.", POSITIVE_RATIO)
    schedule: Literal["constant", "cosine"] = key(
        "constant",
        "`cosine`: times (1 + cos(pi (t - 1) / T)) / 2 in round t of T, beside `learning-rate-decay`.",
        spans_run=True,
    )
    momentum: float = key(0.0, "SGD momentum; it starts at zero in every round.", BELOW_ONE)
    weight_decay: float = key(0.0, "Weight decay; decoupled from the gradient with `adamw`.", NOT_NEGATIVE)
    clip_norm: float = key(
        0.0,
        "Largest Euclidean norm of the gradient a step is taken with; larger ones are scaled down to it. 0: any.",
        NOT_NEGATIVE,
    )
    precision: Literal["float32", "bfloat16"] = key(
        "float32", "`bfloat16`: forward and backward passes in mixed precision (autocast); weights stay float32."
    )
    device: str = key(
        "auto", "`auto` (a GPU if there is one), `cpu`, `cuda` or `cuda:k`.", compared=False, checked=True
    )
    client_threads: int = key(
        1, "Threads of one client's training; the results' bits depend on it.", Rule(low=1, high=256), compared=False
    )
    # server
    evaluate_every: int = key(
        0, "Evaluate all clients every so many rounds; 0: only after the last.", NOT_NEGATIVE, compared=False
    )
    min_available_clients: int = key(
        0, "Clients that must be connected before a round starts; 0: `num-clients`.", NOT_NEGATIVE, compared=False
    )
    available_timeout: float = key(
        120.0, "Seconds to wait for `min-available-clients` before the run fails.", POSITIVE, about="running"
    )
    round_timeout: float = key(3600.0, "Seconds to wait for the replies of a round.", POSITIVE, about="running")
    min_results: float = key(
        0.5, "Part of a round's clients whose uploads it needs to count (at least one).", RATIO, compared=False
    )
    round_retries: int = key(
        1,
        "How often a round with fewer usable uploads than `min-results` is repeated before the run fails.",
        Rule(low=0, high=99),
        about="running",
    )
    max_update_norm: float = key(
        0.0,
        "Uploads that lie farther from the median of all uploads (per parameter), and from what was sent, than so many times "
        "what is usual are dropped by name; 0: none is, those beyond three times are counted and named.",
        NOT_NEGATIVE,
    )
    max_size_weight: float = key(
        0.0,
        "Weight of a client's training samples in means, at most so many times the median client's; 0: no limit.",
        NOT_NEGATIVE,
        compared=False,
    )
    robust: Literal["none", "median", "trimmed-mean", "krum", "geometric-median"] = key(
        "none",
        "What replaces means over clients on the server, so that a few that lie cannot carry them away; every client then "
        "counts once.",
        compared=False,
    )
    robust_liars: float = key(
        0.3,
        "Part of the clients that may lie, for `robust = trimmed-mean` and `krum`; at least one of three.",
        Rule(low=0, high=0.5, high_open=True),
        compared=False,
    )
    server_memory_limit: float = key(
        2.0,
        "Gigabytes of per-client arrays the server keeps in memory between rounds; what is beyond lies in memory-mapped "
        "files in the run folder. 0: no limit.",
        NOT_NEGATIVE,
        about="running",
    )
    checkpoint_every: int = key(
        5, "Rounds between checkpoints; there is always one after the last.", AT_LEAST_ONE, about="running"
    )
    finetune_epochs: int = key(
        0,
        "Evaluations also measure every client after so many local epochs from its personal model; not kept.",
        NOT_NEGATIVE,
        compared=False,
    )
    finetune_learning_rate: float = key(
        0.0,
        "Learning rate of `finetune-epochs`, the same after every round; 0: `learning-rate`, which neither "
        "`learning-rate-decay` nor `schedule` lowers here.",
        NOT_NEGATIVE,
        compared=False,
    )
    # files
    run_name: str = key("", "Name of the run's folder. Empty: time, method and data set.", about="place")
    output_dir: str = key("runs", "Directory of run folders; made absolute by `corolla run`.", about="place")
    state_dir: str = key(
        "",
        "Directory of client state on each client. Empty: `$COROLLA_STATE_DIR`, or the user's state directory.",
        about="place",
    )
    keep_state: bool = key(
        False,
        "Keep what clients keep between rounds when the run is finished: only then can it be continued with more rounds "
        "(methods without client state always can).",
        about="running",
    )
    resume: str = key("", "Run folder to continue; set by `corolla run --resume`.", about="place")
    collect_personal_models: bool = key(
        False,
        "Upload every client's personal model at the end; off, parts that never travel stay on the clients.",
        about="running",
    )
    track: str = key(
        "",
        "Any of `mlflow`, `wandb`, `tensorboard`, with commas; [how](experiments.md#trackers).",
        about="running",
        checked=True,
    )
    # the chosen method's parameters, and all keys as resolved and as defaulted
    params: Any = dataclasses.field(default=NoParams())
    resolved: Mapping[str, Scalar] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Scalar] = dataclasses.field(default_factory=dict)

    def rate_factor(self, round: int) -> float:
        """What `learning-rate-decay` and `schedule` make of a learning rate in a round, from 1."""
        return scheduled(self.schedule, self.learning_rate_decay, round, self.num_server_rounds)

    @property
    def tuning_rate(self) -> float:
        """Learning rate of `finetune-epochs`."""
        return self.finetune_learning_rate or self.learning_rate

    def evaluates_after(self, round: int) -> bool:
        """Tell whether all clients are evaluated after a round: the last one, and every `evaluate-every`-th."""
        return round == self.num_server_rounds or (self.evaluate_every > 0 and round % self.evaluate_every == 0)

    @property
    def unseen(self) -> frozenset[int]:
        """The clients that never train (`holdout-clients`): at least one if any, and not all."""
        count = min(share_of(self.num_clients, self.holdout_clients), self.num_clients - 1)
        if not self.holdout_clients or count < 1:
            return frozenset()
        drawn = rng.generator(self.seed, "holdout").choice(self.num_clients, count, replace=False)
        return frozenset(int(i) for i in drawn)

    @property
    def num_training(self) -> int:
        """How many clients train."""
        return self.num_clients - len(self.unseen)

    def spanning_keys(self) -> list[tuple[KeySpec, Scalar]]:
        """Return the keys, with their values, that make this run another one if its number of rounds changes after its start."""
        return [(key, value) for key, value in self.own_keys() if key.spans_run and not key.is_off(value)]

    def drawn(self, able: int) -> int:
        """Return how many of some clients, or companies of clients, train in a round (`fraction-train`)."""
        return share_of(able, self.fraction_train)

    def own_keys(self) -> Iterator[tuple[KeySpec, Scalar]]:
        """Yield the keys that bear on this run, with their values: those of all runs, then the method's."""
        for owner, table in ((self, ""), (self.params, table_of(self.method))):
            yield from ((spec, getattr(owner, spec.field)) for spec in specs(type(owner), table))


def parse(raw: Mapping[str, Scalar], methods: Mapping[str, type]) -> RunConfig:
    """Parse a flat run config into a RunConfig.

    raw: keys as in docs/config.md; missing ones take their default. methods: parameter dataclass per method name; a user's own
    method is imported here, and its keys are known in its own runs alone.
    Raises UserError naming every problem at once (key, value, rule).
    """
    refuse_files(raw)
    problems: list[str] = []
    known = {spec.name: spec for spec in specs(RunConfig)}
    method = str(raw.get("method", known["method"].default))
    outside = [method] if is_reference(method) and method in methods else []
    for name in [*methods, *outside]:
        known |= {spec.name: spec for spec in specs(methods[name], table_of(name))}
    tables = [table_of(name) for name in (*methods, *outside)]
    for name in raw:
        if name not in known:
            problems.append(f"{name}: unknown key{NO_KEYS.get(name) or meant(name, known, tables, table_of(method))}")
    values = {name: spec.read(raw[name], problems) if name in raw else spec.default for name, spec in known.items()}
    check_words(values, methods, problems)
    if not problems:
        check_together(values, problems)
    complain(problems)
    top = {s.field: values[s.name] for s in specs(RunConfig)}
    cls = methods[method]
    params = cls(**{s.field: values[s.name] for s in specs(cls, table_of(method))})
    defaults = {name: spec.default for name, spec in known.items()}
    config = RunConfig(**top, params=params, resolved=values, defaults=defaults)  # type: ignore[arg-type]
    complain([*params.problems(config)] if isinstance(params, Checked) else [])
    return config


def parse_recorded(saved: Mapping[str, Scalar], methods: Mapping[str, type]) -> RunConfig:
    """Parse what a run folder has recorded. Of a user's own method it says all that matters: its code is not needed."""
    method = str(saved.get("method"))
    if is_reference(method):
        table = {key.rpartition(".")[2]: value for key, value in saved.items() if "." in key and bears_on(key, method)}
        methods = {**methods, method: recorded(table)}
    return parse(saved, methods)
