"""One run on the server: its rounds from beginning to end, then evaluation, and what is done with clients after the last round.

A round: sample, send, receive and check, screen, personalize, record. It is repeated where too few uploads can be used. What
differs between plain and private rounds is in `RoundProtocol`; what a method changes is in its server half (strategies/base).
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from flwr.app import Message

from fl_app import tasks, wire
from fl_app.errors import UserError, listed
from fl_app.keys import Scalar
from fl_app.layout import NO_TENSORS, NOTHING, Model
from fl_app.metrics import EPSILON
from fl_app.server import checkpoint, client_arrays, progress_protocol
from fl_app.server import record as records
from fl_app.server.exchange import Exchange, Reply
from fl_app.server.record import Record
from fl_app.server.run_folder import RunFolder
from fl_app.wire import Download, Expected, Upload, WireError
from strategies.base.server_half import ServerHalf
from strategies.base.uploads import Intake
from strategies.engine.attempt import Attempt, TooFewResults

log = logging.getLogger("corolla")

_FORGET_SECONDS = 60.0
# Generations of client state tell apart attempts and restarts of the server.
_ATTEMPTS_PER_START = 100


class RoundProtocol(Protocol):
    """What plain rounds (plain.py) and private ones (private.py) do each in their way."""

    def announcements(self) -> list[str]:
        """Return what is said before the first round about what the server learns."""
        ...

    def sample(self, attempt: Attempt, connected: list[int]) -> list[int]:
        """Choose whom an attempt asks, sorted. Raises TooFewResults if that can be nobody."""
        ...

    def expected(self) -> Expected:
        """Return what an upload must look like as it travels."""
        ...

    def open(self, attempt: Attempt, ids: list[int]) -> Intake:
        """Return what the uploads of an attempt's clients are decoded into."""
        ...

    def scalars(self, attempt: Attempt, client_id: int) -> Mapping[str, Scalar]:
        """Return what a client is told beside the model it trains."""
        ...

    def expected_from(self, client_id: int) -> Expected:
        """Return what one client's upload must look like as it travels."""
        ...

    def check(self, client_id: int, upload: Upload) -> Upload:
        """Return a decoded upload as it is taken in. Raises WireError to drop it."""
        ...

    def screen(self, attempt: Attempt) -> Any:
        """Return what all uploads together give `personalize`. Raises TooFewResults, and has changed nothing then."""
        ...

    def personalize(self, round: int, accepted: Any) -> None:
        """Let the method make its next models."""
        ...

    def suspects(self) -> list[str]:
        """Say which uploads of the last round may be why no client can train on its models."""
        ...

    def saved(self) -> Mapping[str, Any]:
        """Return what it remembers, as JSON can hold it."""
        ...

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over what `saved` returned, from a checkpoint; {} if it holds nothing."""
        ...


class Rounds:
    """Whole-round control, which Flower's own loop does not give: retries, checkpoints, a record of every round as it ends.

    versions: by client, the generation of its state that was accepted last. kept_versions: generations that durable checkpoints
    name. spent: by client, the most epsilon that its records have spent so far.
    """

    def __init__(self, server: ServerHalf[Any], exchange: Exchange, folder: RunFolder, protocol: RoundProtocol) -> None:
        self.server, self.exchange, self.folder, self.protocol = server, exchange, folder, protocol
        self.config = server.config
        self.measured = tasks.measured(server.config)
        self.versions: dict[int, str] = {}
        self.kept_versions: dict[int, tuple[str, ...]] = {}
        self.spent: dict[int, float] = {}
        self.attempt = Attempt()

    # A run

    def run(self) -> None:
        """Run all rounds, then evaluate all clients; every round is recorded when it ends. Ends after a round if asked to stop."""
        self.server.summary()
        for line in self.protocol.announcements():
            log.info("%s", line)
        if not checkpoint.rounds(self.folder.path):
            self.save_checkpoint({})
        total, headline = self.config.num_server_rounds, self.measured[0]
        watch = Stopwatch()
        for round in range(self.server.round + 1, total + 1):
            # The time since the last lap belongs to the round before: its checkpoint and its metrics.
            watch.start_round("record")
            record = self.train(round, watch)
            if self.config.evaluates_after(round):
                record["evaluation"] = self.evaluate(round)
                watch.lap("evaluate")
            record["seconds"] = dict(watch.laps)
            stopping = round < total and self.folder.asked_to_stop()
            if stopping or round == total or round % self.config.checkpoint_every == 0:
                self.save_checkpoint(record)
            self.folder.append(record)
            log.info("%s", progress_protocol.round_line(record, total, headline.name, headline.ratio))
            if stopping:
                break

    # A round, and its repetitions

    def train(self, round: int, watch: Stopwatch) -> Record:
        """Run one round, and return its record.

        With fewer usable replies than `min-results` the round is repeated, up to `round-retries` times, from the same
        models. Raises UserError after the last attempt.
        """
        spoilt: list[Attempt] = []
        without: frozenset[int] = frozenset()
        for retry in range(self.config.round_retries + 1):
            attempt = Attempt(round, generation=self.generation(retry), earlier=[*spoilt], without=without)
            try:
                return self.train_once(attempt, watch)
            except TooFewResults as error:
                attempt.spoilt_by, without = str(error), without | error.absent
                spoilt.append(attempt)
                log.error("round %d, attempt %d: %s", round, retry + 1, error)
        raise UserError(self._why_it_failed(round, spoilt))

    def train_once(self, attempt: Attempt, watch: Stopwatch) -> Record:
        """Make one attempt at a round. Raises TooFewResults if it does not count; then nothing has changed."""
        self.exchange.refresh()
        self.begin(attempt)
        watch.lap("prepare")

        ids = self.sample()
        for reply in self.exchange.ask(self._name(), self.messages(ids, "train"), self.config.round_timeout, len(ids)):
            watch.lap("wait")
            self.receive(reply)
            watch.lap("take-in")
        watch.lap("wait")
        self.personalize(self.screen())
        watch.lap("personalize")
        return self.record()

    # Its steps

    def generation(self, retry: int = 0) -> int:
        """Number the client states that an attempt makes: another one after every retry and every restart."""
        return self.folder.starts * _ATTEMPTS_PER_START + retry

    def begin(self, attempt: Attempt) -> None:
        """Begin an attempt at a round, or what follows the round; the method sees it too."""
        attempt.declared = dict(self.exchange.roster.properties)
        self.attempt = self.server.attempt = attempt

    def sample(self) -> list[int]:
        """Choose whom the attempt asks, and prepare for their uploads."""
        attempt = self.attempt
        connected = sorted(set(self.exchange.client_ids) - self.config.unseen)
        ids = self.protocol.sample(attempt, connected)
        attempt.intake = self.protocol.open(attempt, ids)
        attempt.sent = dict.fromkeys(ids, 0)
        return ids

    def messages(self, ids: Iterable[int], task: str) -> Iterator[Message]:
        """Build clients' messages one at a time, as they are sent, and count their bytes."""
        attempt = self.attempt
        kind = "evaluate" if task == "evaluate" else "train"
        for client_id in ids:
            download = self.server.download_for(client_id, attempt.round, task)
            scalars = self.protocol.scalars(attempt, client_id) if task == "train" else {}
            content = wire.encode_download(
                dataclasses.replace(
                    download,
                    attempt=attempt.generation,
                    state_version=self.versions.get(client_id, ""),
                    keep=self.kept_versions.get(client_id, ()),
                    method={**download.method, **scalars},
                )
            )
            attempt.sent[client_id] = attempt.sent.get(client_id, 0) + wire.payload_bytes(content)
            if client_id in self.server.personal:
                client_arrays.release(self.server.personal[client_id])
            yield self.exchange.message(client_id, content, kind, attempt.round)

    def receive(self, reply: Reply) -> None:
        """Check a client's upload and take it in; a bad one is dropped by name, and ends nothing."""
        attempt, client_id = self.attempt, reply.client_id
        try:
            content = reply.usable()
            nbytes = attempt.received[client_id] = wire.payload_bytes(content)
            upload = wire.decode_upload(content, self.protocol.expected_from(client_id))
            metrics = records.check_upload(
                upload,
                self.server.reports,
                attempt.declared.get(client_id),
                wire.state_version(attempt.round, attempt.generation),
                self.measured[0],
            )
            spent = self._checked_budget(client_id, metrics)
            upload = self.protocol.check(client_id, upload)
            attempt.intake.accept(client_id, upload, metrics, nbytes)
            self.spent[client_id] = spent
            self._warn_of(client_id, metrics)
        except Exception as error:
            attempt.fail(client_id, f"round {attempt.round}", "dropped", error)

    def _checked_budget(self, client_id: int, metrics: Mapping[str, Scalar]) -> float:
        """Return the epsilon that a client says its records have spent. Raises WireError if it was more before.

        What is spent only grows: less means that the site's notes are lost, and then nobody keeps the records' budget.
        """
        before, spent = self.spent.get(client_id, 0.0), float(metrics.get(EPSILON, 0.0))
        if self.config.dp_epsilon and spent < before * (1 - 1e-6):
            raise WireError(
                f"{EPSILON}: its records have spent {spent:.4g}, and {before:.4g} before: its site's notes of them are lost"
            )
        return max(before, spent)

    def screen(self) -> Any:
        """Leave out what cannot be used, now that all uploads are there. Raises TooFewResults."""
        return self.protocol.screen(self.attempt)

    def personalize(self, accepted: Any) -> None:
        """Let the method make the next models; the states that clients made of these are the current ones."""
        self.server.round = self.attempt.round
        self.protocol.personalize(self.attempt.round, accepted)
        for client_id, reported in self.attempt.intake.metrics.items():
            self.versions[client_id] = str(reported.get(wire.STATE_VERSION, ""))

    def record(self) -> Record:
        """Return the round's record."""
        record = self.attempt.record(self.measured[0], self.server.reports)
        left_out = self.exchange.roster.left_out
        return record | {"left-out": left_out} if left_out else record

    # Evaluation

    def evaluate(self, round: int) -> Record:
        """Evaluate every connected client's personalized model, without training."""
        self.exchange.refresh()
        self.begin(Attempt(round, generation=self.attempt.generation))
        ids = self.exchange.client_ids
        messages = self.messages(ids, "evaluate")
        for reply in self.exchange.ask("evaluation", messages, self.config.round_timeout, len(ids)):
            self.receive_evaluation(reply)
        record = records.evaluation_record(
            self.attempt.clients,
            self.config.num_clients,
            sum(self.attempt.sent.values()),
            self.attempt.failures,
            self.measured,
            self.config.unseen,
        )
        for name, ids in record.get("undefined", {}).items():
            log.warning(
                "evaluation: the mean of %s leaves out clients %s, which have none", name, listed(list(map(str, ids)))
            )
        return record

    def receive_evaluation(self, reply: Reply) -> None:
        """Check a client's metrics and the hash of its model, and take them in."""
        attempt, client_id = self.attempt, reply.client_id
        try:
            loss, num_examples, metrics = wire.decode_evaluation(reply.usable())
            metrics = records.check_evaluation(
                metrics, num_examples, attempt.declared.get(client_id), self.measured, self.server.reports
            )
            self._warn_of(client_id, metrics)
            row = {name: records.clean(value) for name, value in metrics.items()}
            attempt.clients[client_id] = {**row, "loss": records.clean(loss), "test-samples": num_examples}
        except Exception as error:
            attempt.fail(client_id, "evaluation", "failed", error)

    # After the last round

    def collect(self, round: int) -> dict[int, Model]:
        """Ask every client for its personal model (all tensors, as exported); those that fail are logged."""
        self.begin(Attempt(round, generation=self.attempt.generation))
        ids = self.exchange.client_ids
        expected = Expected.of(self.server.exported_layout(self.server.full_layout), dtype=wire.WHOLE)
        models: dict[int, Model] = {}
        messages = self.messages(ids, "collect")
        for reply in self.exchange.ask("collecting models", messages, self.config.round_timeout, len(ids)):
            try:
                upload = wire.decode_upload(reply.usable(), expected)
                self._warn_of(reply.client_id, records.known(upload.metrics))
                models[reply.client_id] = upload.model
            except Exception as error:
                log.error(
                    "client %d: its personal model could not be collected: %s", reply.client_id, WireError(str(error))
                )
        return models

    def forget(self) -> None:
        """Let the connected clients remove what they keep of a run that is finished; those that do not are logged."""
        ids, round = self.exchange.client_ids, self.server.round
        download = Download("forget", round, self.attempt.generation, self.folder.experiment, NOTHING)
        messages = (self.exchange.message(i, wire.encode_download(download), "train", round) for i in ids)
        seconds = min(_FORGET_SECONDS, self.config.round_timeout)
        for reply in self.exchange.ask("removing client state", messages, seconds, len(ids)):
            try:
                wire.decode_upload(reply.usable(), Expected.of(NO_TENSORS))
            except WireError as error:
                log.warning("client %d: its state of this run stays: %s", reply.client_id, error)

    # Checkpoints

    def save_checkpoint(self, record: Record) -> None:
        """Make everything the next round depends on durable, with the metrics line of the round it follows."""
        server = self.server
        arrays = {"global.params": server.global_model.params, "global.buffers": server.global_model.buffers}
        for name, array in server.memory.items():
            if not isinstance(array, np.ndarray):
                got = type(array).__name__
                raise UserError(f"method {self.config.method}: memory[{name!r}] must be a NumPy array, got {got}")
            arrays[f"memory.{name}"] = array
        for client_id, own in server.personal.items():
            arrays |= {f"client.{client_id}.{name}": array for name, array in own.items()}
        meta = {
            "versions": {str(i): v for i, v in self.versions.items()},
            "spent": {str(i): spent for i, spent in self.spent.items() if spent},
            "screening": self.protocol.saved(),
            "record": record,
        }
        checkpoint.save(self.folder.path, server.round, arrays, meta)
        for own in server.personal.values():
            client_arrays.release(own)
        self.kept_versions = checkpoint.versions_kept(self.folder.path)

    def restore(self, saved: checkpoint.Checkpoint) -> None:
        """Continue from a checkpoint, whose arrays are taken out of it, so that nothing else holds what is put on disk."""
        server, arrays = self.server, saved.arrays
        server.global_model = Model(arrays.pop("global.params"), arrays.pop("global.buffers"))
        for name in list(arrays):
            whose, _, key = name.partition(".")
            if whose == "memory":
                server.memory[key] = arrays.pop(name)
            else:
                client_id, _, key = key.partition(".")
                server.personal.setdefault(int(client_id), {})[key] = arrays.pop(name)
        limit = self.config.server_memory_limit * 1e9
        client_arrays.settle(server.personal, list(server.personal), limit, self.folder.path)
        self.versions = {int(i): v for i, v in saved.meta["versions"].items()}
        self.spent = {int(i): float(spent) for i, spent in saved.meta.get("spent", {}).items()}
        self.kept_versions = checkpoint.versions_kept(self.folder.path)
        self.protocol.restore(saved.meta.get("screening", {}))
        server.round = saved.meta["round"]

    # What is said

    def _name(self) -> str:
        """Name the attempt where its progress is shown."""
        name, repeated = f"round {self.attempt.round}/{self.config.num_server_rounds}", len(self.attempt.earlier)
        return f"{name}, attempt {repeated + 1}" if repeated else name

    def _why_it_failed(self, round: int, spoilt: list[Attempt]) -> str:
        lines = [f"  {line}" for attempt in spoilt for line in attempt.failure_lines()][-5:]
        if not spoilt[-1].failures:
            lines.append(f"  {spoilt[-1].spoilt_by}")
        lines += [f"the models came out of round {self.server.round}, where {who}" for who in self.protocol.suspects()]
        return f"round {round} failed in {len(spoilt)} attempts (round-retries)\n" + "\n".join(lines)

    def _warn_of(self, client_id: int, metrics: Mapping[str, Scalar]) -> None:
        """Log which metrics a client could not have, and if its state was damaged: it went on from an earlier generation."""
        if failed := metrics.get(wire.METRIC_ERRORS):
            log.warning("client %d: metric %s", client_id, failed)
        if used := metrics.get(wire.STATE_USED):
            named = self.versions.get(client_id, "")
            log.warning(
                "client %d: its state of %s is damaged, it went on from %s", client_id, named, wire.one_line(used)
            )


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
