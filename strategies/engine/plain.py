"""What goes out to clients and what comes in: Flower's configure and aggregate hooks, for training and for evaluation."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from fl_app import tasks, trainable_tensors, wire
from fl_app.config import RunConfig
from fl_app.errors import UserError
from fl_app.keys import Scalar
from fl_app.layout import Layout, Model
from fl_app.metrics import Reports
from fl_app.server import client_arrays
from fl_app.server import record as records
from fl_app.server.exchange import Exchange, Reply
from fl_app.server.run_folder import RunFolder
from fl_app.stopwatch import Stopwatch
from fl_app.wire import Download
from strategies.base.uploads import Intake
from strategies.engine.attempt import Attempt, TooFewResults
from strategies.engine.said import Said
from strategies.engine.screening import USUAL, Screening, Stray
from strategies.robust import capped

log = logging.getLogger("corolla")


class Messages(Said, Strategy):
    """A Flower Strategy that sends every client one message per round, and takes in each reply by itself."""

    spread: ClassVar[float] = (
        1.0  # how many times as far apart as others' a method's honest uploads lie; inf: no bound on them
    )

    def __init__(
        self, config: RunConfig, params: Any, layout: Layout, initial: Model, shared: frozenset[str], folder: RunFolder
    ) -> None:
        self.config, self.params, self.full_layout, self.shared, self.folder = config, params, layout, shared, folder
        self.measured = tasks.measured(config)
        self.layout = layout.subset(shared)
        self._told: dict[str, Scalar] = {trainable_tensors.HASH: layout.constants} if layout.constants else {}
        self.global_model = layout.take(initial, shared)
        self.personal: dict[int, dict[str, NDArray[Any]]] = {}
        self.memory: dict[str, NDArray[Any]] = {}
        self.versions: dict[int, str] = {}  # generation of client state accepted last
        self.kept_versions: dict[int, tuple[str, ...]] = {}  # generations that durable checkpoints name
        self.round = 0
        self.attempt = Attempt()
        self.reports = Reports()  # of the method's own client half
        self.screening = Screening()
        self.strayed: list[Stray] = []  # uploads of the last round that were used though they lay far from the others

    # Messages out

    def download_for(self, client_id: int, round: int, task: str) -> Download:
        """Everything one client is sent."""
        return Download(
            task=task,
            round=round,
            attempt=self.attempt.generation,
            experiment=self.folder.experiment,
            model=_sendable(self.model_for(client_id), self.layout, self.config.method),
            state_version=self.versions.get(client_id, ""),
            keep=self.kept_versions.get(client_id, ()),
            extras=self.download_extras(client_id),
            method=self.told(client_id, task),
        )

    def told(self, client_id: int, task: str) -> dict[str, Scalar]:
        """Return the scalars a client is sent beside its model."""
        return self._told

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample clients by id and build their messages one at a time, as they are sent."""
        exchange: Exchange = grid  # type: ignore[assignment]
        self.attempt.declared = dict(exchange.roster.properties)
        ids = self.participants(sorted(set(exchange.client_ids) - self.config.unseen), server_round)
        self.attempt.intake = self.room_for(ids)
        self.attempt.sent = dict.fromkeys(ids, 0)
        return (self._message(exchange, i, "train", "train", server_round) for i in ids)

    def participants(self, connected: list[int], round: int) -> list[int]:
        """Choose whom an attempt asks."""
        return self.sample(connected, round)

    def room_for(self, ids: list[int]) -> Intake:
        """Return room for the uploads of an attempt's clients."""
        return Intake.of(ids, self.expected())

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Address every connected client."""
        exchange: Exchange = grid  # type: ignore[assignment]
        self.attempt = Attempt(server_round, self.attempt.generation, declared=dict(exchange.roster.properties))
        return (self._message(exchange, i, "evaluate", "evaluate", server_round) for i in exchange.client_ids)

    def _message(self, exchange: Exchange, client_id: int, task: str, kind: str, round: int) -> Message:
        """Build a client's message and note its bytes."""
        download = self.download_for(client_id, round, task)
        self.attempt.sent[client_id] = self.attempt.sent.get(client_id, 0) + download.nbytes
        message = exchange.message(client_id, wire.encode_download(download), kind, round)
        client_arrays.release(self.personal.get(client_id, {}))
        return message

    # Replies in

    def aggregate_train(  # type: ignore[override]
        self, server_round: int, replies: Iterator[Reply], watch: Stopwatch | None = None
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check and take in replies as they arrive, drop bad ones by name, then personalize.

        Raises TooFewResults if fewer uploads than `min-results` could be used; nothing has changed then.
        """
        watch = watch or Stopwatch()
        intake = self.attempt.intake
        assert intake is not None
        version = wire.state_version(server_round, self.attempt.generation)
        for reply in replies:
            watch.lap("wait")
            try:
                upload = wire.decode_upload(reply.usable(), self.expected_from(reply.client_id))
                declared = self.attempt.declared.get(reply.client_id)
                metrics = records.check_upload(upload, self.reports, declared, version, self.measured[0])
                self.check(upload)
                intake.accept(reply.client_id, self.complete(reply.client_id, upload), metrics, upload.nbytes)
                warn_of_damage(reply.client_id, metrics, self.versions)
            except Exception as error:  # one client's reply, whatever it is, ends nothing
                self.attempt.fail(reply, f"round {server_round}", "dropped", error)
            watch.lap("take-in")
        watch.lap("wait")
        self.use(server_round, intake)
        for client_id, reported in intake.metrics.items():
            self.versions[client_id] = str(reported.get(wire.STATE_VERSION, ""))
        watch.lap("personalize")
        return None, None

    def use(self, round: int, intake: Intake) -> None:
        """Personalize with what came in. Raises TooFewResults, and has changed nothing then."""
        strayed = self._screen(round, intake)
        require(intake, self.config.min_results, 1)
        self.strayed = [stray for stray in strayed if stray.client_id in intake.metrics]
        refused = [stray.client_id for stray in strayed if stray.client_id not in intake.metrics]
        self.screening.accept(round, intake.metrics, refused)
        uploads = intake.uploads()
        if self.config.max_size_weight:
            uploads = dataclasses.replace(uploads, sizes=capped(uploads.sizes, self.config.max_size_weight))
        intake.forget_stacks()
        self.round = round
        self.personalize(round, uploads)
        client_arrays.settle(self.personal, uploads.ids, self.config.server_memory_limit * 1e9, self.folder.path)

    def _screen(self, round: int, intake: Intake) -> list[Stray]:
        """Return what lies far from the others, and leave it out by name, unless nothing is refused."""
        if math.isinf(self.spread):
            return []
        limit = self.config.max_update_norm * self.spread
        strayed = self.screening.strays(round, intake, self.compared(intake), limit or USUAL * self.spread, self._sent)
        for stray in strayed:
            if limit:
                intake.reject(stray.client_id)
                self.attempt.fail(Reply(stray.client_id, None), f"round {round}", "dropped", stray.refusal())
            else:
                log.warning("round %d: client %d is used (max-update-norm is 0), but %s", round, stray.client_id, stray)
        return strayed

    def _sent(self, client_id: int) -> Mapping[str, NDArray[Any]]:
        """What a client was sent of what is compared; read again where it is kept on disk."""
        sent = self.compared_with(client_id)
        client_arrays.release(self.personal.get(client_id, {}))
        return sent

    def aggregate_evaluate(self, server_round: int, replies: Iterator[Reply]) -> MetricRecord | None:  # type: ignore[override]
        """Collect metrics and hashes per client."""
        for reply in replies:
            try:
                loss, num_examples, metrics = wire.decode_evaluation(reply.usable())
                declared = self.attempt.declared.get(reply.client_id)
                metrics = records.check_evaluation(metrics, num_examples, declared, self.measured, self.reports)
                warn_of_damage(reply.client_id, metrics, self.versions)
                row = {name: records.clean(value) for name, value in metrics.items()}
                self.attempt.clients[reply.client_id] = {
                    **row,
                    "loss": records.clean(loss),
                    "test-samples": num_examples,
                }
            except Exception as error:
                self.attempt.fail(reply, "evaluation", "failed", error)
        return None


def _sendable(model: Model, layout: Layout, method: str) -> Model:
    """Return a method's model, or nothing. Raises UserError if a client could not take it: it is the method's mistake."""
    if not model.nbytes:
        return model
    for name, array, length in (("params", model.params, layout.d), ("buffers", model.buffers, layout.b)):
        if array.dtype != np.float32 or array.shape != (length,):
            got = f"{array.dtype} {list(array.shape)}"
            raise UserError(f"method {method}: the {name} of a model must be float32 [{length}], got {got}")
    return model


def require(intake: Intake, min_results: float, least: int) -> None:
    """Raise TooFewResults unless such a part of the uploads can be used, and at least so many."""
    needed = max(least, math.ceil(min_results * len(intake.ids)))
    if len(intake.metrics) < needed:
        raise TooFewResults(f"{len(intake.metrics)} of {len(intake.ids)} uploads usable, {needed} needed")


def warn_of_damage(client_id: int, metrics: Mapping[str, Scalar], versions: Mapping[int, str]) -> None:
    """Log it if a client's state was damaged. versions: of the states that the server named."""
    if used := metrics.get(wire.STATE_USED):
        named = versions.get(client_id, "")
        log.warning("client %d: its state of %s is damaged, it went on from %s", client_id, named, wire.one_line(used))
