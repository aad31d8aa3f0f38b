"""How the rounds of every method run: sample, send, take in, personalize, record; repeat, resume, evaluate, collect."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp.strategy import Result

from fl_app import rng, wire
from fl_app.errors import UserError
from fl_app.layout import NOTHING, Model
from fl_app.server import checkpoint, client_arrays, progress_protocol
from fl_app.server import record as records
from fl_app.server.exchange import Exchange
from fl_app.server.record import Record
from fl_app.stopwatch import Stopwatch
from fl_app.wire import Download, Expected, WireError
from strategies.engine.attempt import Attempt, TooFewResults
from strategies.engine.plain import warn_of_damage
from strategies.engine.private import Private
from strategies.engine.screening import USUAL, Screening

log = logging.getLogger("corolla")

_FORGET_SECONDS = 60.0
_ATTEMPTS_PER_START = 100  # generations of client state tell apart attempts and restarts of the server


class Rounds(Private):
    """Whole-round control, which Flower's own loop does not give: retries, checkpoints, a record of every round as it ends."""

    # The run

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
        """Run all rounds, then evaluate all clients; every round is recorded when it ends. Ends after a round if asked to stop.

        The model, the number of rounds and the timeouts come from the run config; Flower's other arguments are not used.
        """
        self.summary()
        for line in self.what_leaks():
            log.info("%s", line)
        if not checkpoint.rounds(self.folder.path):
            self.save_checkpoint({})
        total, headline = self.config.num_server_rounds, self.measured[0]
        watch = Stopwatch()
        for round in range(self.round + 1, total + 1):
            watch.start_round("record")  # of the round before: its checkpoint and its metrics
            record = self.train_round(grid, round, watch)
            if self.config.evaluates_after(round):
                record["evaluation"] = self.evaluate_all(grid, round)
                watch.lap("evaluate")
            record["seconds"] = dict(watch.laps)
            stopping = round < total and self.folder.asked_to_stop()
            if stopping or round == total or round % self.config.checkpoint_every == 0:
                self.save_checkpoint(record)
            self.folder.append(record)
            log.info("%s", progress_protocol.round_line(record, total, headline.name, headline.ratio))
            if stopping:
                break
        return Result()

    def train_round(self, exchange: Exchange, round: int, watch: Stopwatch) -> Record:
        """Run one round: sample, send, take in replies as they come, personalize. Returns its metrics.

        With fewer usable replies than `min-results` the round is repeated, up to `round-retries` times, from the same
        models. Raises UserError after the last attempt.
        """
        spoilt: list[Attempt] = []
        without: frozenset[int] = frozenset()
        for retry in range(self.config.round_retries + 1):
            self.attempt = Attempt(
                round, self.folder.starts * _ATTEMPTS_PER_START + retry, earlier=[*spoilt], without=without
            )
            exchange.refresh()
            watch.lap("prepare")
            what = f"round {round}/{self.config.num_server_rounds}" + (f", attempt {retry + 1}" if retry else "")
            try:
                messages = self.configure_train(round, ArrayRecord(), ConfigRecord(), exchange)  # type: ignore[arg-type]
                replies = exchange.ask(what, messages, self.config.round_timeout, len(self.attempt.sent))
                self.aggregate_train(round, replies, watch)  # type: ignore[arg-type]
                left_out = exchange.roster.left_out
                return self.attempt.record(self.measured[0], self.reports) | (
                    {"left-out": left_out} if left_out else {}
                )
            except TooFewResults as error:
                self.attempt.spoilt_by, without = str(error), without | error.absent
                spoilt.append(self.attempt)
                log.error("round %d, attempt %d: %s", round, retry + 1, error)
        lines = [f"  {line}" for attempt in spoilt for line in attempt.told()][-5:]
        causes = "\n".join(lines if spoilt[-1].failures else [*lines, f"  {spoilt[-1].spoilt_by}"])
        blame = "".join(
            f"\nthe models came out of round {self.round}, where client {stray.client_id} was used though {stray}: "
            f"it is the likely cause, and max-update-norm = {USUAL:g} drops such uploads"
            for stray in self.strayed
        )
        raise UserError(f"round {round} failed in {len(spoilt)} attempts (round-retries)\n{causes}{blame}")

    def evaluate_all(self, exchange: Exchange, round: int) -> Record:
        """Evaluate every connected client's personalized model, without training."""
        exchange.refresh()
        messages = self.configure_evaluate(round, ArrayRecord(), ConfigRecord(), exchange)  # type: ignore[arg-type]
        replies = exchange.ask("evaluation", messages, self.config.round_timeout, len(exchange.client_ids))
        self.aggregate_evaluate(round, replies)
        sent = sum(self.attempt.sent.values())
        return records.evaluation_record(
            self.attempt.clients,
            self.config.num_clients,
            sent,
            self.attempt.failures,
            self.measured,
            self.config.unseen,
        )

    def collect(self, exchange: Exchange, round: int) -> dict[int, Model]:
        """Ask every client for its personal model (all tensors, as exported); those that fail are logged."""
        layout = self.exported_layout(self.full_layout)
        expected = Expected(layout.d, layout.b)
        messages = (self._message(exchange, i, "collect", "train", round) for i in exchange.client_ids)
        models: dict[int, Model] = {}
        for reply in exchange.ask("collecting models", messages, self.config.round_timeout, len(exchange.client_ids)):
            try:
                upload = wire.decode_upload(reply.usable(), expected)
                warn_of_damage(reply.client_id, records.known(upload.metrics), self.versions)
                models[reply.client_id] = upload.model
            except Exception as error:
                log.error(
                    "client %d: its personal model could not be collected: %s", reply.client_id, WireError(str(error))
                )
        return models

    def forget_state(self, exchange: Exchange) -> None:
        """Let the connected clients remove what they keep of a run that is finished; those that do not are logged."""
        download = Download("forget", self.round, self.attempt.generation, self.folder.experiment, NOTHING)
        content = (wire.encode_download(download) for _ in exchange.client_ids)
        messages = (
            exchange.message(i, c, "train", self.round) for i, c in zip(exchange.client_ids, content, strict=True)
        )
        seconds = min(_FORGET_SECONDS, self.config.round_timeout)
        for reply in exchange.ask("removing client state", messages, seconds, len(exchange.client_ids)):
            try:
                wire.decode_upload(reply.usable(), Expected(0, 0))
            except WireError as error:
                log.warning("client %d: its state of this run stays: %s", reply.client_id, error)

    # Checkpoints

    def save_checkpoint(self, record: Record) -> None:
        """Make everything the next round depends on durable, with the metrics line of the round it follows."""
        arrays = {"global.params": self.global_model.params, "global.buffers": self.global_model.buffers}
        for name, array in self.memory.items():
            if not isinstance(array, np.ndarray):
                got = type(array).__name__
                raise UserError(f"method {self.config.method}: memory[{name!r}] must be a NumPy array, got {got}")
            arrays[f"memory.{name}"] = array
        for client_id, own in self.personal.items():
            arrays |= {f"client.{client_id}.{name}": array for name, array in own.items()}
        meta = {
            "versions": {str(i): v for i, v in self.versions.items()},
            "screening": self.screening.saved(),
            "record": record,
        }
        checkpoint.save(self.folder.path, self.round, arrays, meta)
        for own in self.personal.values():
            client_arrays.release(own)
        self.kept_versions = checkpoint.versions_kept(self.folder.path)

    def restore(self, saved: checkpoint.Checkpoint) -> None:
        """Continue from a checkpoint."""
        arrays = saved.arrays  # emptied, so that nothing else holds what is put on disk
        self.global_model = Model(arrays.pop("global.params"), arrays.pop("global.buffers"))
        for name in list(arrays):
            whose, _, key = name.partition(".")
            if whose == "memory":
                self.memory[key] = arrays.pop(name)
            else:
                client_id, _, key = key.partition(".")
                self.personal.setdefault(int(client_id), {})[key] = arrays.pop(name)
        client_arrays.settle(
            self.personal, list(self.personal), self.config.server_memory_limit * 1e9, self.folder.path
        )
        self.versions = {int(i): v for i, v in saved.meta["versions"].items()}
        self.kept_versions = checkpoint.versions_kept(self.folder.path)
        self.screening = Screening.restored(saved.meta.get("screening", {}))
        self.round = saved.meta["round"]

    # Sampling

    def drawn(self, client_ids: list[int], round: int) -> list[int]:
        """Draw fraction-train of the clients, at least one, sorted."""
        count = self.config.drawn(len(client_ids))
        if count >= len(client_ids):
            return client_ids
        chosen = rng.generator(self.config.seed, "sampling", round).choice(client_ids, count, replace=False)
        return sorted(int(i) for i in chosen)
