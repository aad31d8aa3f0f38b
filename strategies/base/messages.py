"""What goes out to clients and what comes in: Flower's configure and aggregate hooks, for training and for evaluation."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from fl_app import wire
from fl_app.config import RunConfig
from fl_app.errors import UserError
from fl_app.keys import Scalar
from fl_app.layout import Layout, Model
from fl_app.server import kept
from fl_app.server import record as records
from fl_app.server.exchange import Exchange, Reply
from fl_app.server.run_folder import RunFolder
from fl_app.stopwatch import Stopwatch
from fl_app.wire import Download, Expected, Upload, WireError
from strategies.base.attempt import Attempt, TooFewResults
from strategies.base.uploads import Intake, Uploads

log = logging.getLogger("corolla")


class Messages(Strategy, ABC):
    """A Flower Strategy that sends every client one message per round, and takes in each reply by itself."""

    def __init__(
        self, config: RunConfig, params: Any, layout: Layout, initial: Model, shared: frozenset[str], folder: RunFolder
    ) -> None:
        self.config, self.params, self.full_layout, self.shared, self.folder = config, params, layout, shared, folder
        self.layout = layout.subset(shared)
        self.global_model = layout.take(initial, shared)
        self.personal: dict[int, dict[str, NDArray[Any]]] = {}
        self.memory: dict[str, NDArray[Any]] = {}
        self.versions: dict[int, str] = {}  # generation of client state accepted last
        self.kept_versions: dict[int, str] = {}  # generation a durable checkpoint may need
        self.round = 0
        self.attempt = Attempt()

    # What the method says

    @abstractmethod
    def personalize(self, round: int, uploads: Uploads) -> None:
        """See PersonalizedStrategy."""

    @abstractmethod
    def model_for(self, client_id: int) -> Model:
        """See PersonalizedStrategy."""

    @abstractmethod
    def download_extras(self, client_id: int) -> Mapping[str, NDArray[Any]]:
        """See PersonalizedStrategy."""

    @abstractmethod
    def expected(self) -> Expected:
        """See PersonalizedStrategy."""

    @abstractmethod
    def check(self, upload: Upload) -> None:
        """See PersonalizedStrategy."""

    @abstractmethod
    def exported_layout(self, layout: Layout) -> Layout:
        """See PersonalizedStrategy."""

    @abstractmethod
    def sample(self, client_ids: list[int], round: int) -> list[int]:
        """See PersonalizedStrategy."""

    # Messages out

    def download_for(self, client_id: int, round: int, task: str) -> Download:
        """Everything one client is sent."""
        return Download(
            task=task,
            round=round,
            attempt=self.attempt.generation,
            experiment=self.folder.experiment,
            model=self._sendable(self.model_for(client_id)),
            state_version=self.versions.get(client_id, ""),
            keep_from=self.kept_versions.get(client_id, ""),
            extras=self.download_extras(client_id),
        )

    def _sendable(self, model: Model) -> Model:
        """Return a method's model. Raises UserError if a client could not take it: it is the method's mistake."""
        for name, array, length in (("params", model.params, self.layout.d), ("buffers", model.buffers, self.layout.b)):
            if array.dtype != np.float32 or array.shape != (length,):
                got = f"{array.dtype} {list(array.shape)}"
                raise UserError(f"method {self.config.method}: the {name} of a model must be float32 [{length}], got {got}")
        return model

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample clients by id and build their messages one at a time, as they are sent."""
        exchange: Exchange = grid  # type: ignore[assignment]
        ids = self.sample(exchange.client_ids, server_round)
        self.attempt.intake = Intake.of(ids, self.expected())
        self.attempt.sent = dict.fromkeys(ids, 0)
        return (self._message(exchange, i, "train", "train", server_round) for i in ids)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Address every connected client."""
        exchange: Exchange = grid  # type: ignore[assignment]
        self.attempt = Attempt(server_round, self.attempt.generation)
        return (self._message(exchange, i, "evaluate", "evaluate", server_round) for i in exchange.client_ids)

    def _message(self, exchange: Exchange, client_id: int, task: str, kind: str, round: int) -> Message:
        """Build a client's message and note its bytes."""
        download = self.download_for(client_id, round, task)
        self.attempt.sent[client_id] = self.attempt.sent.get(client_id, 0) + download.nbytes
        message = exchange.message(client_id, wire.encode_download(download), kind, round)
        kept.release(self.personal.get(client_id, {}))
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
        for reply in replies:
            watch.lap("wait")
            try:
                upload = wire.decode_upload(reply.usable(), intake.expected)
                metrics = records.check_upload(upload)
                self.check(upload)
                intake.accept(reply.client_id, upload, metrics)
                self._warn_of_damage(reply.client_id, metrics)
            except WireError as error:
                self.attempt.fail(reply, f"round {server_round}", "dropped", error)
            watch.lap("take-in")
        watch.lap("wait")
        needed = max(1, math.ceil(self.config.min_results * len(intake.ids)))
        if len(intake.metrics) < needed:
            raise TooFewResults(f"{len(intake.metrics)} of {len(intake.ids)} uploads usable, {needed} needed")
        uploads = intake.uploads()
        intake.forget_stacks()
        self.round = server_round
        self.personalize(server_round, uploads)
        kept.settle(self.personal, uploads.ids, self.config.server_memory_limit * 1e9, self.folder.path)
        for client_id, reported in intake.metrics.items():
            self.versions[client_id] = str(reported.get("state-version", ""))
        watch.lap("personalize")
        return None, None

    def aggregate_evaluate(self, server_round: int, replies: Iterator[Reply]) -> MetricRecord | None:  # type: ignore[override]
        """Collect accuracies and hashes per client."""
        for reply in replies:
            try:
                loss, num_examples, metrics = wire.decode_evaluation(reply.usable())
                records.check_evaluation(metrics)
                self._warn_of_damage(reply.client_id, metrics)
                row = {name: records.clean(value) for name, value in metrics.items()}
                self.attempt.clients[reply.client_id] = {**row, "loss": records.clean(loss), "test-samples": num_examples}
            except WireError as error:
                self.attempt.fail(reply, "evaluation", "failed", error)
        return None

    def _warn_of_damage(self, client_id: int, metrics: Mapping[str, Scalar]) -> None:
        if used := metrics.get(wire.STATE_USED):
            named = self.versions.get(client_id, "")
            log.warning("client %d: its state of %s is damaged, it went on from %s", client_id, named, wire.one_line(used))
