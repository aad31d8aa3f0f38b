"""The run configuration: frozen, typed, parsed once, with all problems reported together.

Keys are Flower's run config: flat, kebab-case, with values of type bool, int, float or str. There are no lists and no
null; "" or 0 mean "not set" where a key's sentence states it. A method's parameters are in its own table, `fedcac.tau`.
One declaration per key (fl_app/keys.py) serves the parser, docs/config.md, `corolla methods` and the defaults in
pyproject.toml. A test keeps the four equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fl_app import rng
from fl_app.config.earlier_keys import current
from fl_app.config.experiment import ExperimentKeys
from fl_app.config.rules import (
    DAY,
    check_client,
    check_together,
    check_words,
    complain,
    refuse_files,
    upload_interval,
    with_implied,
)
from fl_app.errors import UserError
from fl_app.keys import (
    AT_LEAST_ONE,
    BELOW_ONE,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_RATIO,
    RATIO,
    File,
    KeySpec,
    NoParams,
    Rule,
    Scalar,
    affects,
    key,
    recorded,
    specs,
    suggestion,
    table_of,
)
from fl_app.known_names import PLATEAU, STEP, Average, divisions
from fl_app.plugins import is_reference
from fl_app.sources import NODE, source_of

# Above this, the fixed-point numbers of a million clients are coarse.
LARGEST_PRIVATE_RANGE = 2.0**20


NO_KEYS = {"tensorboard": '; TensorBoard is a tracker: track = "tensorboard"'}
"""Names that users may try although there is no such key, with the end of the error that names the right key."""


def ids_in(without: object) -> frozenset[int]:
    """Return the ids in a value of the key `without`."""
    return frozenset(int(word) for word in str(without).split(",") if word.isdecimal())


def share_of(count: int, share: float) -> int:
    """Return share * count, rounded with halves up, at least 1."""
    return max(1, math.floor(share * count + 0.5))


@dataclass(frozen=True)
class RunConfig(ExperimentKeys):
    """Everything that defines a run. docs/config.md describes every key."""

    # privacy
    private: bool = key(
        False,
        "The server receives sums of at least three clients' models, and pairwise overlaps of masks, but no single "
        "client's model or mask ([what this hides, and the methods](privacy.md)). `report-class-counts` is off.",
        compared=False,
        checked=True,
    )
    private_sketch: int = key(
        0,
        "Bits of a mask's sketch in a private run; 0: one per parameter, and overlaps are exact.",
        NOT_NEGATIVE,
        compared=False,
    )
    private_range: float = key(
        8.0,
        "Largest absolute weight that a client can send in a private run; BatchNorm statistics may be 64 times "
        "larger. Larger values are clipped.",
        Rule(low=0, high=LARGEST_PRIVATE_RANGE, low_open=True),
        compared=False,
    )
    private_regroup: int = key(
        5,
        "Rounds for which a private run keeps its clusters of clients.",
        AT_LEAST_ONE,
        compared=False,
        counts_rounds=True,
    )
    private_left_out: Literal["client", "group"] = key(
        "group",
        "Clients left out of a private run's sums when a client is away: an aggregation group with this client, of "
        "at least three, or this client alone ([what each hides](privacy.md#aggregation-groups)).",
        compared=False,
    )
    report_accuracy: bool = key(
        True,
        "Clients send the server their losses and metrics. `false`: they send neither.",
        compared=False,
    )
    dp_epsilon: float = key(
        0.0,
        "Differential privacy of each site's training records, over all rounds together: only noisy steps read the records "
        "([what this means](privacy.md#records)). `report-class-counts` is off. 0: none.",
        NOT_NEGATIVE,
        compared=False,
        checked=True,
        schedule_dependent=True,
    )
    dp_delta: float = key(
        1e-5,
        "Probability that `dp-epsilon` does not hold. It must be below 1 / n for a site's n training samples.",
        Rule(0, 1, True, True),
        compared=False,
    )
    dp_clip: float = key(
        1.0,
        "Norm to which each training record's gradient is clipped. The noise is proportional to it.",
        Rule(low=1e-6),
        compared=False,
    )
    report_class_counts: bool = key(
        True,
        "Clients send the server their numbers of training samples per class, for `clients.json` and the report. This reveals "
        "their label distributions.",
        compared=False,
    )
    # time
    quorum: float = key(
        1.0,
        "The round [closes](time.md) when this fraction of its clients has answered, without those that failed. The others are "
        "late.",
        POSITIVE_RATIO,
        compared=False,
    )
    round_deadline: float = key(
        0.0,
        "Seconds after which a round closes without its `quorum`, if at least `min-results` of its clients have answered. 0: none.",
        NOT_NEGATIVE,
        compared=False,
    )
    staleness: int = key(
        0,
        "A late upload is used by the round in which it arrives, if that is at most this many rounds after its own. 0: it is "
        "thrown away by name.",
        NOT_NEGATIVE,
        compared=False,
    )
    staleness_decay: float = key(
        1.0, "Factor on a late upload's weight for each round of its age.", POSITIVE_RATIO, compared=False
    )
    staleness_rule: Literal["decay", "fedbuff"] = key(
        "decay",
        "Use of a late upload ([each](time.md#late-uploads)).",
        compared=False,
    )
    speeds: str = key(
        "none",
        "Clients' speeds in simulated time: `none`, `lognormal:SIGMA` (drawn by `seed`), or `file:speeds.csv` "
        "([columns](time.md#speeds)).",
        compared=False,
        path=File(after_word=True, at_site=False),
    )
    availability: float = key(
        1.0,
        "Part of each simulated day in which a client is there; when its day begins is drawn by `seed`. It needs `speeds`.",
        POSITIVE_RATIO,
        compared=False,
    )
    day_length: float = key(DAY, "Seconds of a simulated day. It needs `speeds`.", POSITIVE, compared=False)
    drop_rate: float = key(
        0.0,
        "Probability that a client fails while it works on a round of a simulation. It needs `speeds`.",
        BELOW_ONE,
        compared=False,
    )
    replay: str = key(
        "",
        "Run folder whose arrivals are repeated in a simulation; set by `corolla run --replay`.",
        compared=False,
        path=File(at_site=False),
    )

    # local training
    local_epochs: int = key(5, "Local epochs E.", AT_LEAST_ONE, headline=True)
    local_steps: int = key(
        0,
        "Batches per round and client, in place of `local-epochs`. Fine-tuning and phases that a method counts in "
        "epochs stay in epochs. 0: `local-epochs`.",
        NOT_NEGATIVE,
        headline=True,
        trains_on=lambda steps, n, size: min(n, steps * size) if steps else n,
        instead_of="local-epochs",
    )
    batch_size: int = key(20, "Batch size of local training.", AT_LEAST_ONE, headline=True)
    drop_last: bool = key(
        False,
        "Skip the last batch of an epoch if it is incomplete, unless it is the only one.",
        trains_on=lambda drop, n, size: n - n % size if drop and n > size else n,
    )
    drop_single: bool = key(
        False,
        "Skip the last batch of an epoch if it is a single sample, unless it is the only one. If off, models with "
        "BatchNorm add it to the batch before.",
        trains_on=lambda drop, n, size: n - 1 if drop and n % size == 1 < size < n else n,
    )
    optimizer: Literal["sgd", "adam", "adamw"] = key(
        "sgd",
        "`adam`, `adamw`: those of torch.optim with betas 0.9 and 0.999; their moments start at zero in every round.",
        headline=True,
    )
    learning_rate: float = key(0.1, "Learning rate.", POSITIVE, headline=True)
    learning_rate_decay: float = key(
        1.0, "Factor on the learning rate after every round, or at the rounds of `schedule`.", POSITIVE_RATIO
    )
    schedule: str = key(
        "constant",
        "When the learning rate falls: `constant`, `cosine`, `step:K` or `plateau:K` ([each](tasks.md#optimizer)).",
        schedule_dependent=True,
        checked=True,
    )
    momentum: float = key(0.0, "SGD momentum; it starts at zero in every round.", BELOW_ONE)
    weight_decay: float = key(0.0, "Weight decay; decoupled from the gradient with `adamw`.", NOT_NEGATIVE)
    clip_norm: float = key(
        0.0,
        "Largest Euclidean norm of a step's gradient. Larger gradients are scaled down to it. 0: no limit.",
        NOT_NEGATIVE,
    )
    precision: Literal["float32", "tf32", "bfloat16", "float16"] = key(
        "float32",
        "`tf32`: a GPU multiplies with 10 mantissa bits instead of 23. `bfloat16`, `float16`: forward and backward "
        "passes in mixed precision (autocast). Weights stay float32.",
    )
    device: str = key(
        "auto", "`auto` (a GPU if there is one), `cpu`, `cuda` or `cuda:k`.", compared=False, checked=True
    )
    client_threads: int = key(
        1, "Threads of one client's training. The results' bits depend on it.", Rule(low=1, high=256), compared=False
    )
    # server
    evaluate_every: int = key(
        0, "Rounds between evaluations of all clients. 0: only after the last round.", NOT_NEGATIVE, compared=False
    )
    min_available_clients: int = key(
        0,
        "Clients that must be connected before a round starts; 0: `num-clients`.",
        NOT_NEGATIVE,
        compared=False,
        extends=True,
    )
    without: str = key(
        "",
        "Ids of clients that are gone for good, with commas; set by `corolla run --without`.",
        compared=False,
        extends=True,
    )
    available_timeout: float = key(
        120.0, "Seconds to wait for `min-available-clients` before the run fails.", POSITIVE, about="running"
    )
    discover: Literal["auto", "all", "sampled"] = key(
        "auto",
        "When the server asks clients for their properties. `all`: before the first round. `sampled`: when a client "
        "is first sampled or evaluated. `auto`: `sampled` above 1000 clients where that is possible, else `all`.",
        about="running",
    )
    round_timeout: float = key(3600.0, "Seconds to wait for the replies of a round.", POSITIVE, about="running")
    min_results: float = key(
        0.5, "Part of a round's clients (at least one) that must upload for the round to count.", RATIO, compared=False
    )
    round_retries: int = key(
        1,
        "Number of repetitions of a round with fewer usable uploads than `min-results`, before the run fails.",
        Rule(low=0, high=99),
        about="running",
    )
    max_update_norm: float = key(
        0.0,
        "Drops, by name, an upload beyond this multiple of the [usual distance](security.md#byzantine-clients). 0: uploads beyond "
        "3 times the usual distance are used, counted and named.",
        NOT_NEGATIVE,
    )
    max_size_weight: float = key(
        0.0,
        "Limit of a client's weight (its training samples) in means, as a multiple of the median client's weight. 0: "
        "no limit. In a private run the server is told numbers of samples only for this limit.",
        NOT_NEGATIVE,
        compared=False,
    )
    robust: Average = key(
        "none",
        "Replacement for means over clients on the server, which a few lying clients cannot dominate. Every client counts once.",
        compared=False,
    )
    byzantine_ratio: float = key(
        0.3,
        "Part of the clients that are assumed to be Byzantine, for the [rules that count them](security.md#byzantine-clients); at "
        "least one client of three or more.",
        Rule(low=0, high=0.5, high_open=True),
        compared=False,
    )
    server_optimizer: Literal["none", "momentum", "adagrad", "adam", "yogi"] = key(
        "none",
        "The server's own step from the sent global model towards the clients' mean "
        "([its equations](methods/index.md#the-servers-optimizer)). `none`: the mean itself.",
    )
    server_learning_rate: float = key(
        0.0, "Learning rate of `server-optimizer` (eta). 0: 1 for `momentum`, 0.01 for the others.", NOT_NEGATIVE
    )
    server_beta1: float = key(0.9, "Momentum of `server-optimizer` (beta1). The paper's `adagrad` has 0.", BELOW_ONE)
    server_beta2: float = key(
        0.99, "Part of the second moment that stays, for `server-optimizer = adam` and `yogi` (beta2).", BELOW_ONE
    )
    server_tau: float = key(
        1e-3,
        "Number added to the root of the second moment in `server-optimizer` (tau).",
        POSITIVE,
    )
    server_memory_limit: float = key(
        2.0,
        "Gigabytes of memory for the server's per-client arrays between rounds, and for a round's uploads. Larger "
        "amounts go to memory-mapped files in the run folder. 0: no limit.",
        NOT_NEGATIVE,
        about="running",
    )
    checkpoint_every: int = key(
        5, "Rounds between checkpoints; there is always one after the last.", AT_LEAST_ONE, about="running"
    )
    record_matrices: int = key(
        1,
        "Rounds between records of numbers between clients (overlaps, attention) in `matrices/round-<t>.npz`; there is always "
        "one after the last round. With more than 100 clients the default is 10. A matrix of more than 4 million numbers is not "
        "recorded.",
        AT_LEAST_ONE,
        about="running",
    )
    keep_uploads: str = key(
        "",
        "Keeps uploaded models on the server's disk: `every 10` keeps those of rounds 1, 10, 20, ... and of the last "
        "round, for [pictures](results-guide.md#uploads). Empty: none. Private runs cannot keep uploads.",
        about="running",
        checked=True,
    )
    stop_when: str = key(
        "",
        "Ends the run early: `validation-accuracy: 10 rounds without better`, or `... without better by 0.01`. It can watch any "
        "metric and `validation-loss` of the round's clients before they train, and their training `loss`.",
        checked=True,
    )
    keep_best: bool = key(
        False,
        "Keep the models of the [round that was best on validation data](experiments.md#validation-data-and-early-stopping), in "
        "place of the last round's. It needs `evaluate-every` and `validation-ratio`.",
    )
    finetune_epochs: int = key(
        0,
        "Local epochs of fine-tuning in evaluations: every client is also measured after its personal model trained "
        "for these epochs. 0: none.",
        NOT_NEGATIVE,
        compared=False,
    )
    finetune_learning_rate: float = key(
        0.0,
        "Learning rate of `finetune-epochs`, the same after every round. 0: `learning-rate`, without `learning-rate-decay` and "
        "`schedule`.",
        NOT_NEGATIVE,
        compared=False,
    )
    evaluate_global: bool = key(
        False,
        "Evaluations of all clients also measure the global model, on the same data: `<metric>-global`. For "
        "[methods](methods/index.md#the-global-model) with a global model beside the personal ones.",
        compared=False,
    )
    # files
    run_name: str = key("", "Name of the run's folder. Empty: time, method and data set.", about="place")
    output_dir: str = key(
        "runs", "Directory of run folders; made absolute by `corolla run`.", about="place", path=File(at_site=False)
    )
    state_dir: str = key(
        "",
        "Directory of client state on each client. Empty: `$COROLLA_STATE_DIR`, or the user's state directory.",
        about="place",
        path=File(),
    )
    keep_state: bool = key(
        False,
        "Keep the clients' state when the run is finished, so that more rounds can follow. A method without client state needs "
        "none.",
        about="running",
    )
    overwrite: bool = key(
        False,
        "If a run of this `run-name` exists, remove it just before the new one starts. Only run folders are removed.",
        about="place",
    )
    resume: str = key(
        "", "Run folder to continue; set by `corolla run --resume`.", about="place", path=File(at_site=False)
    )
    from_run: str = key(
        "",
        "Run folder that a new run goes on from; set by `corolla run --from` ([rules](models.md#the-next-month)).",
        compared=False,
        path=File(at_site=False),
    )
    strict: bool = key(
        False,
        "Refuse to resume a run with other code, or other versions of Flower, NumPy or PyTorch; set by `corolla run "
        "--strict`.",
        about="place",
    )
    collect_personal_models: bool = key(
        False,
        "Upload every client's personal model at the end. If off, parts that never travel stay on the clients.",
        about="running",
    )
    track: str = key(
        "",
        "Any of `mlflow`, `wandb`, `tensorboard`, separated by commas; [how](experiments.md#trackers).",
        about="running",
        checked=True,
    )
    callbacks: str = key(
        "",
        "Classes of your own, `module:Class`, separated by commas, that get every round's record; [how](experiments.md#callbacks).",
        about="running",
        checked=True,
    )
    # the chosen method's parameters; all keys' values in this run; all keys' defaults
    params: Any = field(default=NoParams())
    resolved: Mapping[str, Scalar] = field(default_factory=dict)
    # how often the schedule `plateau` has lowered the learning rate; the server counts and tells it
    drops: int = 0
    defaults: Mapping[str, Scalar] = field(default_factory=dict)

    def rate_factor(self, round: int) -> float:
        """Return the factor of `learning-rate-decay` and `schedule` on the learning rate in a round, counted from 1."""
        if self.patience:
            return self.learning_rate_decay**self.drops
        angle = math.pi * (round - 1) / self.num_server_rounds if self.schedule == "cosine" else 0.0
        every = int(self.schedule.removeprefix(STEP)) if self.schedule.startswith(STEP) else 1
        factor: float = self.learning_rate_decay ** ((round - 1) // every) * ((1 + math.cos(angle)) / 2)
        return factor

    @property
    def patience(self) -> int:
        """Rounds without a lower loss after which the schedule `plateau` lowers the learning rate; 0 with another schedule."""
        return int(self.schedule.removeprefix(PLATEAU)) if self.schedule.startswith(PLATEAU) else 0

    @property
    def closes_early(self) -> bool:
        """Whether a round may close before all of its clients have answered."""
        return self.quorum < 1 or self.round_deadline > 0

    @property
    def records_arrivals(self) -> bool:
        """Whether the run writes who answered when."""
        return (self.closes_early or self.is_timed) and not self.replay

    @property
    def is_timed(self) -> bool:
        """Whether the run has simulated time."""
        return self.speeds != "none"

    @property
    def tuning_rate(self) -> float:
        """Learning rate of `finetune-epochs`."""
        return self.finetune_learning_rate or self.learning_rate

    def evaluates_after(self, round: int) -> bool:
        """Return whether all clients are evaluated after a round: the last one, and every `evaluate-every`-th."""
        return round == self.num_server_rounds or (self.evaluate_every > 0 and round % self.evaluate_every == 0)

    def keeps_uploads_of(self, round: int) -> bool:
        """Return whether the uploads of a round are kept (`keep-uploads`), if the run ends with its planned last round."""
        every = upload_interval(self.keep_uploads)
        return every > 0 and (round in (1, self.num_server_rounds) or round % every == 0)

    @property
    def divisions(self) -> frozenset[str]:
        """The words for its division of data (`known_names.divisions`). Data at the sites are not divided."""
        partition = "" if self.dataset == NODE else self.partition
        return divisions(partition, self.dataset, self.test_samples)

    @property
    def is_confidential(self) -> bool:
        """Whether clients tell the server nothing about their data or models that the run can do without."""
        return self.private or self.dp_epsilon > 0

    @property
    def normalizes_by_site(self) -> bool:
        """Whether the mean and standard deviation of its own data scale each client's inputs (`normalize-over`)."""
        if self.normalize_over == "auto":
            return self.is_confidential
        return self.normalize_over == "site"

    @property
    def normalizes_by_initial(self) -> bool:
        """Whether the mean and standard deviation of the model in `initial-weights` scale inputs (`normalize-over`)."""
        return self.normalize_over == "initial"

    @property
    def unseen(self) -> frozenset[int]:
        """The clients that never train (`holdout-clients`): none if it is 0, else at least one, never all."""
        count = min(share_of(self.num_clients, self.holdout_clients), self.num_clients - 1)
        if not self.holdout_clients or count < 1:
            return frozenset()
        drawn = rng.generator(self.seed, "holdout").choice(self.num_clients, count, replace=False)
        return frozenset(int(i) for i in drawn)

    @property
    def gone(self) -> frozenset[int]:
        """The clients that are gone for good (`without`): no round waits for them, and no mean is of them."""
        return ids_in(self.without)

    @property
    def num_training(self) -> int:
        """Number of clients that train."""
        return self.num_clients - len(self.unseen)

    def spanning_keys(self) -> list[tuple[KeySpec, Scalar]]:
        """Return (key, value) of keys in use that depend on the number of rounds: a resumed run must not change it."""
        return [
            (key, value)
            for key, value in self.own_keys()
            if key.schedule_dependent and not key.is_off(value) and not str(value).startswith((STEP, PLATEAU))
        ]

    def cohort_size(self, able: int) -> int:
        """Return the number of clients, or aggregation groups, of `able` ones that train in a round (`fraction-train`)."""
        return share_of(able, self.fraction_train)

    def own_keys(self) -> Iterator[tuple[KeySpec, Scalar]]:
        """Yield (key, value) of the keys that affect this run: first those of all runs, then the method's."""
        for owner, table in ((self, ""), (self.params, table_of(self.method))):
            yield from ((spec, getattr(owner, spec.field)) for spec in specs(type(owner), table))


def parse(raw: Mapping[str, Scalar], methods: Mapping[str, type]) -> RunConfig:
    """Return the RunConfig of a flat run config.

    raw: keys as in docs/config.md. A missing key gets its default, or the value that other keys imply. methods:
    parameter dataclass per method name. A user's own method is imported here; its keys are known only in its own runs.
    Raises UserError naming every problem at once (key, value, rule).
    """
    return _parse(with_implied(raw), methods, check_client)


def _parse(
    raw: Mapping[str, Scalar],
    methods: Mapping[str, type],
    *checks: Callable[[Mapping[str, Any], list[UserError]], None],
) -> RunConfig:
    """Return the RunConfig of a flat run config. checks: further rules for combinations of keys."""
    refuse_files(raw)
    problems: list[UserError] = []
    known = {spec.name: spec for spec in specs(RunConfig)}
    method = str(raw.get("method", known["method"].default))
    outside = [method] if is_reference(method) and method in methods else []
    for name in [*methods, *outside]:
        known |= {spec.name: spec for spec in specs(methods[name], table_of(name))}
    tables = [table_of(name) for name in (*methods, *outside)]
    for name in raw:
        if name not in known:
            hint = NO_KEYS.get(name) or suggestion(name, known, tables, table_of(method))
            problems.append(UserError(key=name, rule="unknown key", hint=hint))
    values = {name: spec.read(raw[name], problems) if name in raw else spec.default for name, spec in known.items()}
    check_words(values, methods, problems)
    if not problems:
        for check in (check_together, *checks):
            check(values, problems)
    complain(problems)
    if values["normalize"] == "auto" and source_of(str(values["dataset"])).images:
        # runs on images record `unit` in every version of Corolla, so they are one experiment
        values["normalize"] = "unit"
    top = {s.field: values[s.name] for s in specs(RunConfig)}
    cls = methods[method]
    params = cls(**{s.field: values[s.name] for s in specs(cls, table_of(method))})
    defaults = {name: spec.default for name, spec in known.items()}
    config = RunConfig(**top, params=params, resolved=values, defaults=defaults)  # type: ignore[arg-type]
    # of a method with rules that a single key's range cannot express
    complain([*params.problems(config)] if hasattr(params, "problems") else [])
    return config


def parse_recorded(saved: Mapping[str, Scalar], methods: Mapping[str, type]) -> RunConfig:
    """Return the RunConfig that a run folder has recorded. It needs no code of a user's own method."""
    saved = current(saved)
    method = str(saved.get("method"))
    if is_reference(method):
        table = {key.rpartition(".")[2]: value for key, value in saved.items() if "." in key and affects(key, method)}
        methods = {**methods, method: recorded(table)}
    # no check_client: runs of earlier versions could combine `client` with other partitions
    return _parse(saved, methods)
