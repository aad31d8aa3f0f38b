"""What every method is made of: a Strategy subclass on the server, a LocalUpdate on the client, one file for both.

A method writes `personalize`, and overrides what its paper changes. The round itself, sampling, checks, failures, metrics
and the evaluation of all clients live here.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import NDArray

from fl_app import rng, wire
from fl_app.config import RunConfig, Scalar
from fl_app.errors import UserError
from fl_app.layout import Layout, Model, Vector
from fl_app.server import checkpoint
from fl_app.server.exchange import Exchange, Reply
from fl_app.server.kept import release, to_disk
from fl_app.server.log_lines import round_line
from fl_app.server.run_folder import RunFolder
from fl_app.wire import Download, Expected, Upload, WireError

log = logging.getLogger("corolla")
P = TypeVar("P")
Record = dict[str, Any]

_ATTEMPTS_PER_START = 100  # generations of client state tell apart attempts and restarts of the server

# Client half ----------------------------------------------------------------------------------------------------------


class ClientState(Protocol):
    """What a client remembers between its rounds, on its own disk: named arrays."""

    arrays: MutableMapping[str, NDArray[Any]]


class Trainer(Protocol):
    """Local training and evaluation on this client's data and device (client_app/trainer.py)."""

    def train(
        self,
        start: Model,
        *,
        epochs: int | None = None,
        purpose: str = "train",
        proximal: tuple[float, Vector] | None = None,
        frozen: frozenset[str] = frozenset(),
    ) -> Model:
        """Run SGD from `start`; `proximal` (mu, center) adds mu/2 ||w - center||^2; `frozen` tensors stay as they are."""
        ...

    def train_envelope(
        self,
        start: Model,
        *,
        weight: float,
        inner_steps: int,
        inner_learning_rate: float,
        epochs: int | None = None,
        purpose: str = "train",
    ) -> tuple[Model, Model]:
        """Descend on the Moreau envelope of the loss, min over theta of f(theta) + weight/2 ||theta - w||^2, from w = start.

        Returns (w, theta); per batch theta takes `inner_steps` gradient steps, then w one towards it.
        """
        ...

    def evaluate(self, model: Model) -> tuple[float, float]:
        """Return (loss, accuracy) on the test data, NaN where there is none."""
        ...

    def loss_gradient(self, model: Model) -> Vector:
        """Return the gradient of the mean training loss at `model`, float32 [d]."""
        ...


@dataclass(frozen=True)
class RunContext(Generic[P]):
    """What a client half is given besides models and state. initial: the run's model for parts that never travel."""

    config: RunConfig
    params: P
    round: int
    client_id: int
    layout: Layout
    shared: frozenset[str]
    initial: Callable[[], Model]
    trainer: Trainer
    num_samples: int
    extras: Mapping[str, NDArray[Any]]

    def rng(self, purpose: str) -> np.random.Generator:
        """Generator for (seed, round, client id, purpose)."""
        return rng.generator(self.config.seed, purpose, self.round, self.client_id)

    @property
    def local(self) -> frozenset[str]:
        """Names of the tensors that stay on the client."""
        return self.layout.names - self.shared


class LocalUpdate(Generic[P]):
    """The client half of FedAvg, and of every method that only keeps some tensors local. Stateless; see RunContext."""

    def merge(self, received: Model, state: ClientState, ctx: RunContext[P]) -> Model:
        """Return the model training starts from: received tensors, and the client's own where they do not travel."""
        if not ctx.local:
            return received
        own = ctx.initial()
        if "local.params" in state.arrays:
            kept = Model(state.arrays["local.params"], state.arrays["local.buffers"])
            own = ctx.layout.put(own, kept, ctx.local)
        return ctx.layout.put(own, received, ctx.shared)

    def train(self, start: Model, state: ClientState, ctx: RunContext[P]) -> Model:
        """Train locally, leave in `state` what the method keeps, and return the model to upload."""
        after = ctx.trainer.train(start)
        self.keep_local(after, state, ctx)
        return after

    def keep_local(self, after: Model, state: ClientState, ctx: RunContext[P]) -> None:
        """Store the tensors that do not travel."""
        if ctx.local:
            kept = ctx.layout.take(after, ctx.local)
            state.arrays["local.params"], state.arrays["local.buffers"] = kept.params, kept.buffers

    def personal(self, model: Model, state: ClientState, ctx: RunContext[P]) -> Model:
        """Return the model the client would use: what is evaluated, given the merged or the trained one.

        That is the second model of a method that keeps one (`keep_personal`), as soon as the client has it.
        """
        if "personal.params" in state.arrays:
            return Model(state.arrays["personal.params"], state.arrays["personal.buffers"])
        return model

    def keep_personal(self, model: Model, state: ClientState) -> None:
        """Store the client's second model, all tensors of it: from now on its personal one."""
        state.arrays["personal.params"], state.arrays["personal.buffers"] = model.params, model.buffers

    def upload(self, before: Model, after: Model, state: ClientState, ctx: RunContext[P]) -> Upload:
        """Return what the server gets: the tensors that travel, and the method's extras."""
        return Upload(ctx.layout.take(after, ctx.shared), num_examples=ctx.num_samples)


# Server half ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Uploads:
    """A round's accepted uploads as stacks, rows sorted by client id.

    W: float32 [N, d]; B: float32 [N, b]; sizes: float64 [N], training samples; bits: uint8 [N, ceil(d/8)] if the method sends
    masks; extras: arrays by name, [N, ...]; metrics: per client. The stacks are the method's, to work in and to keep.
    """

    ids: list[int]
    W: NDArray[np.float32]
    B: NDArray[np.float32]
    sizes: NDArray[np.float64]
    bits: NDArray[np.uint8] | None
    extras: dict[str, NDArray[Any]]
    metrics: list[Mapping[str, Scalar]]


@dataclass
class _Intake:
    """Stacks that replies are decoded into, row by sampled client."""

    ids: list[int]
    expected: Expected
    W: NDArray[np.float32]
    B: NDArray[np.float32]
    bits: NDArray[np.uint8] | None
    extras: dict[str, NDArray[Any]]
    sizes: NDArray[np.float64]
    metrics: dict[int, Mapping[str, Scalar]] = field(default_factory=dict)
    upload_bytes: dict[int, int] = field(default_factory=dict)

    def accept(self, client_id: int, upload: Upload, metrics: Mapping[str, Scalar]) -> None:
        row = self.ids.index(client_id)
        self.W[row], self.B[row] = upload.model.params, upload.model.buffers
        self.sizes[row] = upload.num_examples
        if self.bits is not None and upload.mask is not None:
            self.bits[row] = upload.mask
        for name, array in upload.extras.items():  # arrays of size 0 do not travel
            self.extras[name][row] = array
        self.metrics[client_id], self.upload_bytes[client_id] = metrics, upload.nbytes

    def uploads(self) -> Uploads:
        """What came in; the rows of those who sent nothing usable are closed up."""
        ids = [i for i in self.ids if i in self.metrics]
        bits = None if self.bits is None else self._rows(self.bits)
        extras = {name: self._rows(stack) for name, stack in self.extras.items()}
        return Uploads(
            ids, self._rows(self.W), self._rows(self.B), self.sizes[[i in self.metrics for i in self.ids]], bits, extras,
            [self.metrics[i] for i in ids],
        )  # fmt: skip

    def _rows(self, stack: NDArray[Any]) -> NDArray[Any]:
        used = [row for row, i in enumerate(self.ids) if i in self.metrics]
        for to, row in enumerate(used):
            if to != row:
                stack[to] = stack[row]
        return stack[: len(used)]


class PersonalizedStrategy(Strategy, Generic[P], ABC):
    """A Flower Strategy that keeps whole-round control: sampling by client id, one message per client and round.

    layout: the tensors that travel. global_model: what a client without anything of its own is sent. personal: arrays kept
    per client id. Both survive in checkpoints; anything a subclass must remember belongs there.
    """

    sends_mask: bool = False

    def __init__(
        self, config: RunConfig, params: P, layout: Layout, initial: Model, shared: frozenset[str], folder: RunFolder
    ) -> None:
        self.config, self.params, self.full_layout, self.shared, self.folder = config, params, layout, shared, folder
        self.layout = layout.subset(shared)
        self.global_model = layout.take(initial, shared)
        self.personal: dict[int, dict[str, NDArray[Any]]] = {}
        self.versions: dict[int, str] = {}  # generation of client state accepted last
        self.kept_versions: dict[int, str] = {}  # generation a durable checkpoint may need
        self.round = 0
        self._client_notes: dict[int, Record] = {}
        self._round_notes: Record = {}
        self._intake: _Intake | None = None
        self._attempt = 0
        self._evaluation: Record = {}
        self._wasted_bytes = 0  # downloads of attempts that did not count
        self._record: Record = {}

    # What a method writes

    @abstractmethod
    def personalize(self, round: int, uploads: Uploads) -> None:
        """Turn a round's uploads into the next models: set `global_model` and `personal`."""

    def model_for(self, client_id: int) -> Model:
        """Return the model a client starts its next round from (the tensors that travel)."""
        return self.global_model

    def has_global_model(self) -> bool:
        """Tell whether `global_model` is a result of the method."""
        return self.layout.d > 0

    def num_selected(self) -> int:
        """Ones that every mask must have; -1: any number."""
        return -1

    def expected_extras(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of the method's extra arrays."""
        return {}

    def check(self, upload: Upload) -> None:
        """Check what of an upload only the method understands; raise WireError to drop it."""

    def keep(self, client_id: int, **arrays: NDArray[Any]) -> None:
        """Remember a client's arrays in `personal`; rows of this round's stacks may be given as they are."""
        self.personal[client_id] = arrays

    def _settle(self, ids: list[int]) -> None:
        """Hold at most `server-memory-limit` of kept arrays in memory, the rest on disk, and no stack but the round's.

        A row that is kept holds its whole stack: rows of clients that were not in this round (`ids`) are copied out of theirs.
        """
        budget, used = self.config.server_memory_limit * 1e9, 0
        for client_id, kept in sorted(self.personal.items()):
            used += sum(a.nbytes for a in kept.values())
            if used > budget > 0 and not any(isinstance(a, np.memmap) for a in kept.values()):
                self.personal[client_id] = to_disk(kept, self.folder.path)
        for client_id, kept in self.personal.items():
            if client_id not in ids or used > budget > 0:
                self.personal[client_id] = {
                    name: a if a.base is None or isinstance(a, np.memmap) else a.copy() for name, a in kept.items()
                }

    def note(self, client_id: int, name: str, value: object) -> None:
        """Add a value to the client's entry in this round's metrics."""
        self._client_notes.setdefault(client_id, {})[name] = value

    def note_round(self, name: str, value: object) -> None:
        """Add a value to this round's metrics."""
        self._round_notes[name] = value

    # The round

    def summary(self) -> None:
        """Log what runs."""
        c = self.config
        log.info(
            "%s: %d clients, %d rounds, model %s with %d parameters (%d travel), %s",
            c.method, c.num_clients, c.num_server_rounds, c.model, self.full_layout.d, self.layout.d,
            ", ".join(f"{k}={v}" for k, v in c.resolved.items() if k.startswith(f"{c.method}.")) or "no parameters",
        )

    def start(  # type: ignore[override]
        self,
        grid: Exchange,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run all rounds, then evaluate all clients; every round is recorded when it ends.

        The model, the number of rounds and the timeouts come from the run config; Flower's other arguments are not used.
        """
        self.summary()
        if not checkpoint.rounds(self.folder.path):
            self.save_checkpoint({})
        total = self.config.num_server_rounds
        watch = Stopwatch()
        for round in range(self.round + 1, total + 1):
            watch.start_round("record")  # of the round before: its checkpoint and its metrics
            record = self.train_round(grid, round, watch)
            if round == total or (self.config.evaluate_every and round % self.config.evaluate_every == 0):
                record["evaluation"] = self.evaluate_all(grid, round)
                watch.lap("evaluate")
            record["seconds"] = dict(watch.laps)
            if round == total or round % self.config.checkpoint_every == 0:
                self.save_checkpoint(record)
            self.folder.append(record)
            log.info("%s", round_line(record, total))
        return Result()

    def train_round(self, exchange: Exchange, round: int, watch: Stopwatch) -> Record:
        """Run one round: sample, send, take in replies as they come, personalize. Returns its metrics.

        With fewer usable replies than `min-results` the round is repeated, up to `round-retries` times, from the same
        models. Raises UserError after the last attempt.
        """
        failures: list[Record] = []
        self._wasted_bytes = 0
        for retry in range(self.config.round_retries + 1):
            self._client_notes, self._round_notes = {}, {}
            self._attempt = self.folder.starts * _ATTEMPTS_PER_START + retry
            exchange.refresh()
            watch.lap("prepare")
            messages = self.configure_train(round, ArrayRecord(), ConfigRecord(), exchange)  # type: ignore[arg-type]
            what = f"round {round}/{self.config.num_server_rounds}" + (f", attempt {retry + 1}" if retry else "")
            try:
                replies = exchange.ask(what, messages, self.config.round_timeout, len(self._record["clients"]))
                self.aggregate_train(round, replies, watch)  # type: ignore[arg-type]
                break
            except TooFewResults as error:
                failures += [{**failure, "attempt": retry + 1} for failure in error.failures]
                self._wasted_bytes += sum(sent["download-bytes"] for sent in self._record["clients"].values())
                log.error("round %d, attempt %d: %s", round, retry + 1, error)
        else:
            causes = "\n".join(f"  client {f['client']}: {f['cause']}" for f in failures[-5:])
            raise UserError(f"round {round} failed in {self.config.round_retries + 1} attempts (round-retries)\n{causes}")
        record = self._record
        record["failures"] = failures + record["failures"]
        return record

    # Checkpoints

    def save_checkpoint(self, record: Record) -> None:
        """Make everything the next round depends on durable, with the metrics line of the round it follows."""
        arrays = {"global.params": self.global_model.params, "global.buffers": self.global_model.buffers}
        for client_id, kept in self.personal.items():
            arrays |= {f"client.{client_id}.{name}": array for name, array in kept.items()}
        meta = {"versions": {str(i): v for i, v in self.versions.items()}, "record": record}
        checkpoint.save(self.folder.path, self.round, arrays, meta)
        for kept in self.personal.values():
            release(kept)
        self.kept_versions = checkpoint.versions_kept(self.folder.path)

    def restore(self, saved: checkpoint.Checkpoint) -> None:
        """Continue from a checkpoint."""
        arrays = saved.arrays  # emptied, so that nothing else holds what is put on disk
        self.global_model = Model(arrays.pop("global.params"), arrays.pop("global.buffers"))
        for name in list(arrays):
            _, client_id, key = name.split(".", 2)
            self.personal.setdefault(int(client_id), {})[key] = arrays.pop(name)
        self._settle(list(self.personal))
        self.versions = {int(i): v for i, v in saved.meta["versions"].items()}
        self.kept_versions = checkpoint.versions_kept(self.folder.path)
        self.round = saved.meta["round"]

    def sample(self, client_ids: list[int], round: int) -> list[int]:
        """Choose the round's clients: fraction-train of those connected, at least one, sorted."""
        count = max(1, round_half_up(self.config.fraction_train * len(client_ids)))
        if count == len(client_ids):
            return client_ids
        chosen = rng.generator(self.config.seed, "sampling", round).choice(client_ids, count, replace=False)
        return sorted(int(i) for i in chosen)

    def download_for(self, client_id: int, round: int, task: str) -> Download:
        """Everything one client is sent."""
        return Download(
            task=task,
            round=round,
            attempt=self._attempt,
            experiment=self.folder.experiment,
            model=self.model_for(client_id),
            state_version=self.versions.get(client_id, ""),
            keep_from=self.kept_versions.get(client_id, ""),
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample clients by id and build their messages one at a time, as they are sent."""
        exchange: Exchange = grid  # type: ignore[assignment]
        ids = self.sample(exchange.client_ids, server_round)
        n, expected = len(ids), self.expected()
        bits = np.empty((n, -(-self.layout.d // 8)), np.uint8) if self.sends_mask else None
        extras = {name: np.empty((n, *shape), dtype) for name, (dtype, shape) in expected.extras.items()}
        W, B = np.empty((n, self.layout.d), np.float32), np.empty((n, self.layout.b), np.float32)
        self._intake = _Intake(ids, expected, W, B, bits, extras, np.zeros(n))
        self._record = {"round": server_round, "clients": {i: {} for i in ids}}
        return (self._message(exchange, i, "train", "train", server_round, self._record["clients"][i]) for i in ids)

    def _message(self, exchange: Exchange, client_id: int, task: str, kind: str, round: int, record: Record) -> Message:
        """Build a client's message and note its bytes in `record`."""
        download = self.download_for(client_id, round, task)
        record["download-bytes"] = record.get("download-bytes", 0) + download.nbytes
        message = exchange.message(client_id, wire.encode_download(download), kind, round)
        release(self.personal.get(client_id, {}))
        return message

    def expected(self) -> Expected:
        """What every upload of a round must look like."""
        mask = self.layout.d if self.sends_mask else 0
        return Expected(self.layout.d, self.layout.b, mask, self.num_selected(), self.expected_extras())

    def aggregate_train(  # type: ignore[override]
        self, server_round: int, replies: Iterator[Reply], watch: Stopwatch | None = None
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check and take in replies as they arrive, drop bad ones by name, then personalize.

        Raises TooFewResults if fewer uploads than `min-results` could be used; nothing has changed then.
        """
        watch = watch or Stopwatch()
        failures: list[Record] = []
        for reply in replies:
            watch.lap("wait")
            try:
                self._take_in(reply)
            except WireError as error:
                failures.append({"client": reply.client_id, "cause": str(error)})
                log.error("round %d: client %d dropped: %s", server_round, reply.client_id, error)
            watch.lap("take-in")
        watch.lap("wait")
        intake, self._intake = self._intake, None
        assert intake is not None
        needed = max(1, math.ceil(self.config.min_results * len(intake.ids)))
        if len(intake.metrics) < needed:
            raise TooFewResults(f"{len(intake.metrics)} of {len(intake.ids)} uploads usable, {needed} needed", failures)
        uploads = intake.uploads()
        self.round = server_round
        self.personalize(server_round, uploads)
        self._settle(uploads.ids)
        for client_id, metrics in intake.metrics.items():
            self.versions[client_id] = str(metrics.get("state-version", ""))
        watch.lap("personalize")
        self._record = self._round_record(server_round, intake, failures)
        return None, None

    def _take_in(self, reply: Reply) -> None:
        assert self._intake is not None
        if reply.content is None:
            raise WireError(reply.cause)
        upload = wire.decode_upload(reply.content, self._intake.expected)
        metrics = dict(upload.metrics)
        for name in ("accuracy-before", "accuracy-after"):
            wire.number(metrics, name, 0, 1)
        for name in ("loss", "loss-before", "loss-after"):
            wire.number(metrics, name, 0)
        if type(metrics.get("test-samples")) is not int or not 0 <= int(metrics["test-samples"]) < 2**53:
            raise WireError(f"test-samples must be an integer >= 0, got {metrics.get('test-samples')!r}")
        if upload.num_examples < 1:
            raise WireError(f"num_examples must be at least 1, got {upload.num_examples}")
        self.check(upload)
        self._intake.accept(reply.client_id, upload, metrics)
        self._warn_of_damage(reply.client_id, metrics)

    def _warn_of_damage(self, client_id: int, metrics: Mapping[str, Scalar]) -> None:
        if used := metrics.get(wire.STATE_USED):
            named = self.versions.get(client_id, "")
            log.warning("client %d: its state of %s is damaged, it went on from %s", client_id, named, wire.one_line(used))

    def _round_record(self, round: int, intake: _Intake, failures: list[Record]) -> Record:
        clients: dict[str, Record] = {}
        for client_id, sent in self._record["clients"].items():
            if client_id not in intake.metrics:
                continue
            metrics = dict(intake.metrics[client_id])
            metrics.pop("state-version", None)
            seconds = {k.removeprefix("seconds-"): clean(metrics.pop(k)) for k in list(metrics) if k.startswith("seconds-")}
            clients[str(client_id)] = {
                **{name: clean(value) for name, value in metrics.items()},
                "train-samples": int(intake.sizes[intake.ids.index(client_id)]),
                "upload-bytes": intake.upload_bytes[client_id],
                **sent,
                "seconds": seconds,
                **self._client_notes.get(client_id, {}),
            }
        rows = list(clients.values())
        record: Record = {"round": round}
        for name in ("accuracy-before", "accuracy-after"):
            record[name], record[f"{name}-pooled"] = mean_and_pooled(rows, name)
        for name in ("loss", "loss-before", "loss-after"):
            record[name] = mean_and_pooled(rows, name)[0]
        record["upload-bytes"] = sum(row["upload-bytes"] for row in rows)
        sent_bytes = sum(sent["download-bytes"] for sent in self._record["clients"].values())
        record["download-bytes"] = sent_bytes + self._wasted_bytes
        return {**record, **self._round_notes, "failures": failures, "clients": clients}

    # Evaluation of all clients

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Address every connected client."""
        exchange: Exchange = grid  # type: ignore[assignment]
        self._evaluation = {}
        return (
            self._message(exchange, i, "evaluate", "evaluate", server_round, self._evaluation) for i in exchange.client_ids
        )

    def aggregate_evaluate(self, server_round: int, replies: Iterator[Reply]) -> MetricRecord | None:  # type: ignore[override]
        """Collect accuracies and hashes per client into the evaluation record."""
        clients: dict[str, Record] = {}
        failures: list[Record] = []
        for reply in replies:
            try:
                if reply.content is None:
                    raise WireError(reply.cause)
                loss, num_examples, metrics = wire.decode_evaluation(reply.content)
                for name in metrics:
                    if name.startswith("accuracy"):
                        wire.number(metrics, name, 0, 1)
                self._warn_of_damage(reply.client_id, metrics)
                clients[str(reply.client_id)] = {
                    **{k: clean(v) for k, v in metrics.items()}, "loss": clean(loss), "test-samples": num_examples,
                }
            except WireError as error:
                failures.append({"client": reply.client_id, "cause": str(error)})
                log.error("evaluation: client %d failed: %s", reply.client_id, error)
        clients = dict(sorted(clients.items(), key=lambda item: int(item[0])))
        absent = sorted(set(range(self.config.num_clients)) - {int(i) for i in clients})
        evaluation: Record = {"failures": failures, "absent": absent, "clients": clients}
        for name in ("accuracy", "accuracy-finetuned", "loss"):
            mean, pooled = mean_and_pooled(list(clients.values()), name)
            evaluation |= {name: mean, f"{name}-pooled": pooled}
        evaluation["digest"] = None if absent else digest(str(row["sha256"]) for row in clients.values())
        self._evaluation |= evaluation
        return None

    def evaluate_all(self, exchange: Exchange, round: int) -> Record:
        """Evaluate every connected client's personalized model, without training."""
        exchange.refresh()
        messages = self.configure_evaluate(round, ArrayRecord(), ConfigRecord(), exchange)  # type: ignore[arg-type]
        replies = exchange.ask("evaluation", messages, self.config.round_timeout, len(exchange.client_ids))
        self.aggregate_evaluate(round, replies)
        return self._evaluation

    def collect(self, exchange: Exchange, round: int) -> dict[int, Model]:
        """Ask every client for its personal model (all tensors); those that fail are logged."""
        expected = Expected(self.full_layout.d, self.full_layout.b)
        messages = (self._message(exchange, i, "collect", "train", round, {}) for i in exchange.client_ids)
        models: dict[int, Model] = {}
        for reply in exchange.ask("collecting models", messages, self.config.round_timeout, len(exchange.client_ids)):
            try:
                if reply.content is None:
                    raise WireError(reply.cause)
                upload = wire.decode_upload(reply.content, expected)
                self._warn_of_damage(reply.client_id, upload.metrics)
                models[reply.client_id] = upload.model
            except WireError as error:
                log.error("client %d: its personal model could not be collected: %s", reply.client_id, error)
        return models


class TooFewResults(Exception):
    """A round that does not count."""

    def __init__(self, message: str, failures: list[Record]) -> None:
        super().__init__(message)
        self.failures = failures


class Stopwatch:
    """Seconds by phase, without gaps between rounds; `round` is their sum."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.laps: dict[str, float] = {"round": 0.0}

    def start_round(self, phase: str) -> None:
        """Begin a round with the time since the last lap, spent in `phase`."""
        self.laps = {"round": 0.0}
        self.lap(phase)

    def lap(self, phase: str) -> None:
        """Add the time since the last lap to a phase."""
        now = time.perf_counter()
        self.laps[phase] = self.laps.get(phase, 0.0) + now - self._last
        self.laps["round"] += now - self._last
        self._last = now


def round_half_up(value: float) -> int:
    """Round to the nearest integer, halves up."""
    return math.floor(value + 0.5)


def clean(value: object) -> object:
    """Return None for NaN and infinities, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def mean_and_pooled(rows: list[Record], name: str) -> tuple[float | None, float | None]:
    """Unweighted and test-sample-weighted mean of a metric over the clients that have it; None if none has."""
    pairs = [(row[name], row.get("test-samples", 0)) for row in rows if row.get(name) is not None]
    if not pairs:
        return None, None
    values, weights = np.array([p[0] for p in pairs], np.float64), np.array([p[1] for p in pairs], np.float64)
    pooled = float(values @ weights / weights.sum()) if weights.sum() > 0 else None
    return float(values.mean()), pooled


def digest(hashes: Iterable[str]) -> str:
    """Sha256 over the clients' 32-byte hashes, in client order (hex in, hex out)."""
    return hashlib.sha256(b"".join(bytes.fromhex(h) for h in hashes)).hexdigest()


@dataclass(frozen=True)
class Method(Generic[P]):
    """A registered method. shared(layout, params): names of the tensors that travel."""

    name: str
    params: type[P]
    strategy: type[PersonalizedStrategy[P]]
    local_update: type[LocalUpdate[P]]
    shared: Callable[[Layout, P], frozenset[str]]


def everything(layout: Layout, params: object) -> frozenset[str]:
    """All tensors travel."""
    return layout.names


class HasStatistics(Protocol):
    """Parameters of a method with the key `batchnorm-statistics`."""

    @property
    def batchnorm_statistics(self) -> str:
        """What becomes of BatchNorm's running statistics."""
        ...


def everything_but_local_statistics(layout: Layout, params: HasStatistics) -> frozenset[str]:
    """All tensors travel, but for BatchNorm statistics where these are `local`."""
    if params.batchnorm_statistics == "local":
        return layout.names - {slot.name for slot in layout.buffers}
    return layout.names
