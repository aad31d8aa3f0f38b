"""The steps of a run's rounds on the server, its evaluations, and its last messages to clients.

A round samples clients, sends, receives and checks, screens, personalizes and records. It is repeated if too few
uploads are usable. `PersonalizedStrategy.start` (strategies/base/strategy.py) is the loop over these steps. `PlainRounds`
lists those in which private rounds differ. A method's changes are in its server half (strategies/base).
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from functools import cached_property
from typing import Any

from numpy.typing import NDArray

from fl_app import stopping, tasks
from fl_app.errors import MethodFault, RoundFailed, counted, listed
from fl_app.keys import Scalar
from fl_app.layout import NO_TENSORS, NOTHING, Model
from fl_app.metrics import EPSILON, KEPT, VALIDATION, moments, of_training, undefined_note
from fl_app.server import checkpoint, client_arrays, disk, events, kept_uploads
from fl_app.server import record as records
from fl_app.server.arrivals import FAILED, THROWN_AWAY, USED, Clock, Replay, WorkEnd, clock_of, may_close
from fl_app.server.checkpoint import LATE
from fl_app.server.matrices import Between
from fl_app.server.record import Record
from fl_app.server.run_folder import ARRIVALS, RunFolder, name_of, read_metrics
from fl_app.sources import NODE
from fl_app.stopwatch import Stopwatch
from fl_app.transport import wire
from fl_app.transport.exchange import Exchange, Reply
from fl_app.transport.flower import Message
from fl_app.transport.wire import Download, Expected, WireError
from strategies.base.server_half import ServerHalf
from strategies.base.state import Sent, State
from strategies.engine import late
from strategies.engine.attempt import Questions, RoundAttempt, TooFewResults, cause_of, failure_lines
from strategies.engine.estimates import disk_estimate
from strategies.engine.late import PendingUpload
from strategies.engine.plain import PlainRounds

log = logging.getLogger("corolla")

_FORGET_SECONDS = 60.0
# key of a checkpoint: the second of simulated time
CLOCK = "clock"
# The number of a generation of client state is starts of the server times this, plus retries of the round.
_ATTEMPTS_PER_START = 100


class Rounds:
    """Control of whole rounds, which Flower's own loop lacks: retries, checkpoints, and a record of every round when it ends.

    versions: by client, the generation of its state that was accepted last. kept_versions: by client, the generations
    that durable checkpoints name. first: by client, scalars of its messages until it has kept a state of this run.
    spent: by client, the most epsilon that its records have spent so far. ended_early: why the run ends before its
    last round (`stop-when`); "" if it does not. clock: simulated time; None if uploads arrive when they come.
    working: by client, the work of earlier rounds that has not arrived. spoilt: attempts at the round that do not count.
    watched: what `stop-when` and the schedule `plateau` read, one record per round. best: with `keep-best`, the best round so
    far and its headline on validation data. recorded, between: the round's record, and the method's notes
    between clients. expected: number of clients that the round should have results of.
    asked_to_stop: whether the user ends the run after this round.
    """

    def __init__(self, server: ServerHalf[Any], exchange: Exchange, folder: RunFolder, protocol: PlainRounds) -> None:
        self.server, self.exchange, self.folder, self.protocol = server, exchange, folder, protocol
        self.config = server.config
        self.clock = clock_of(self.config, server.full_layout.d)
        self._began = 0.0
        self.working: dict[int, PendingUpload] = {}
        self.measured = tasks.measured(server.config)
        self.validation = server.config.validation_ratio > 0
        # the metrics that clients report after a round
        self.table = of_training(self.measured, self.validation)
        self.versions: dict[int, str] = {}
        self.kept_versions: dict[int, tuple[str, ...]] = {}
        self.spent: dict[int, float] = {}
        self.first: dict[int, dict[str, Scalar]] = {}
        self.client_files = checkpoint.client_files_of(folder.path)
        self.attempt = RoundAttempt(server.config)
        self.spoilt: list[RoundAttempt] = []
        self.watch, self.rule = Stopwatch(), stopping.rule_of(self.config)
        self.plateau = stopping.plateau_of(self.config)
        self.best: tuple[int | None, float | None] = None, None
        self.watched: list[Record] = []
        self.recorded: Record = {}
        self.expected = 0
        self.between: Mapping[str, Between] = {}
        self.ended_early, self.asked_to_stop = "", False

    @cached_property
    def disks(self) -> disk.Disks:
        """The disks that the run writes, and a round's needs."""
        return disk.Disks(self.folder.path, disk_estimate(self.server, self.protocol.expected()))

    # A run: PersonalizedStrategy.start is the loop over these steps

    def numbers(self) -> Iterator[int]:
        """Yield the numbers of the rounds that are left, until `stop-when` or the user ends the run."""
        self.server.summary()
        for line in self.protocol.announcements():
            log.info("%s", line)
        if not checkpoint.rounds(self.folder.path):
            self.save_checkpoint({})
        # a resumed run's earlier rounds count too
        for record in read_metrics(self.folder.path) if self.rule or self.plateau or self.config.keep_best else []:
            self.watched.append(self._watched(record))
            if record.get("evaluation", {}).get(KEPT):
                self.best = record["round"], record["evaluation"][self._judged_by]
        if self.rule is not None and self.watched:
            self.ended_early = self.rule.ended(self.watched)
        for round in range(self.server.state.round + 1, self.config.num_server_rounds + 1):
            if self.ended_early or self.asked_to_stop:
                break
            if self.plateau:
                drops = self.plateau.drops(self.watched)
                # methods ask the config for the round's rate
                self.server.config = dataclasses.replace(self.server.config, drops=drops)
                self.server.told = {**self.server.told, wire.DROPS: drops}
            yield round
        if self.ended_early:
            log.info("%s", self.ended_early)

    def attempts(self, round: int) -> Iterator[int]:
        """Yield the numbers of the attempts at a round, from 1, all from the same models.

        The caller stops at the one that counts. Raises RoundFailed after the last one, of `round-retries` + 1.
        """
        # The time since the last lap went into the previous round's checkpoint and metrics.
        self.watch.laps = {}
        self.watch.lap("record")
        self._began = time.monotonic()
        if self.clock:
            self.clock.begin(round)
        self.spoilt = []
        yield from range(1, self.config.round_retries + 2)
        lines = [f"  {line}" for line in failure_lines(self.spoilt)]
        if not self.spoilt[-1].failures:
            lines.append(f"  {self.spoilt[-1].spoilt_by}")
        came_out = f"the models came out of round {self.server.state.round}, where "
        lines += [came_out + who for who in self.protocol.suspects()]
        raise RoundFailed(f"round {round} failed in {len(self.spoilt)} attempts (round-retries)\n" + "\n".join(lines))

    def spoil(self, error: TooFewResults) -> None:
        """Note that the attempt does not count. Nothing has changed."""
        attempt = self.attempt
        attempt.spoilt_by, attempt.absent = str(error), error.absent
        self.exchange.abandon(attempt.pending.keys() - attempt.ended)
        for client_id in attempt.working:
            # the repetition counts the bytes of earlier rounds' uploads
            attempt.received.pop(client_id, None)
        self.spoilt.append(attempt)
        log.error("round %d, attempt %d: %s", attempt.round, len(self.spoilt), error)

    def close_round(self) -> bool:
        """Make the record of the round whose attempt counts. Return whether an evaluation follows."""
        self.recorded, self.between = self.record(), self.attempt.between
        # of those that are there, or of all if all should train
        every = self.config.num_clients - len(self.config.unseen | self.config.gone)
        self.expected = max(len(self.attempt.sent), every if self.config.fraction_train == 1 else 0)
        if self.rule or self.plateau:
            self.watched.append(self._watched(self.recorded))
        if self.rule is not None:
            self.ended_early = self.rule.ended(self.watched)
        return bool(self.ended_early) or self.config.evaluates_after(self.server.state.round)

    def close_evaluation(self) -> None:
        """Put the evaluation into the round's record."""
        evaluation = self.recorded["evaluation"] = records.evaluation_record(
            self.attempt.clients,
            self.config.num_clients,
            sum(self.attempt.sent.values()),
            self.attempt.failures,
            self.measured,
            self.config.unseen,
            self.validation,
            self.config.evaluate_global,
            self.attempt.hashes if self.config.is_confidential else None,
            self.config.gone,
        )
        for name, ids in evaluation.get("undefined", {}).items():
            whose = listed(list(map(self.attempt.called, ids)))
            told = f"client {whose}, which has none" if len(ids) == 1 else f"clients {whose}, which have none"
            log.warning("evaluation: the mean of %s leaves out %s", name, told)
        if self.config.keep_best:
            value, best = evaluation.get(self._judged_by), self.best[1]
            evaluation[KEPT] = value is not None and (best is None or self.measured[0].best([best, value]) != best)
            if evaluation[KEPT]:
                self.best = self.server.state.round, value
        self.watch.lap("evaluate")

    @property
    def _judged_by(self) -> str:
        """The figure of an evaluation by which `keep-best` judges."""
        return VALIDATION + self.measured[0].name

    def restore_best(self) -> None:
        """With `keep-best`, go back to the best round. Sites whose models stay there get them once more, and keep them."""
        best, _ = self.best
        if best is None or best == self.server.state.round:
            return
        log.info("keep-best: the models of round %d are kept", best)
        self.restore(checkpoint.load_latest(self.folder.path, best))
        if self.config.dataset == NODE:
            for reply in self.replies(
                self.messages(self.begin_evaluation(best, "sending the kept models"), "evaluate")
            ):
                self.receive_evaluation(reply)

    def write_round(self) -> None:
        """Write the round's record, and with it everything that the next round depends on."""
        round, record = self.server.state.round, self.recorded
        total, headline = self.config.num_server_rounds, self.measured[0]
        record["seconds"] = {"round": sum(self.watch.laps.values()), **self.watch.laps}
        is_last = bool(self.ended_early) or round == total
        self.asked_to_stop = not is_last and self.folder.asked_to_stop()
        if is_last or round % self.config.record_matrices == 0:
            self.folder.keep_matrices(round, [int(i) for i in record["clients"]], self.between)
        if self.config.keep_uploads and not is_last and not self.config.keeps_uploads_of(round):
            kept_uploads.remove(self.folder.path, round)
        if self.asked_to_stop or is_last or round == self.best[0] or round % self.config.checkpoint_every == 0:
            self.save_checkpoint(record)
        self.folder.append(record)
        known = self.exchange.registry.properties
        without = undefined_note(
            record["clients"], headline, moments(headline.name)[0], lambda i: name_of(known.get(int(i), {})) or i
        )
        events.tell(events.Round.of(record, total, headline.name, headline.ratio, without, self.expected))

    def _watched(self, record: Record) -> Record:
        """Return the values of a round's record that rules read. A long run's whole records are large."""
        names = [rule.record for rule in (self.rule, self.plateau) if rule]
        return {name: record.get(name) for name in ("round", *names)}

    # Its steps

    def begin(self, attempt: RoundAttempt) -> None:
        """Begin an attempt at a round, or a step that follows the round. The method sees the attempt too."""
        registry = self.exchange.registry
        # the registry's own dictionary: clients that introduce themselves later are in it too
        attempt.declared = registry.properties
        attempt.statements = registry.statements
        self.attempt = attempt
        self.server.begin(attempt)

    def begin_evaluation(self, round: int, name: str = "evaluation") -> list[int]:
        """Begin a step that asks every connected client about its models. Return the clients."""
        self.exchange.registry.refresh()
        self.begin(RoundAttempt(self.config, round, name=name, generation=self.attempt.generation))
        self.exchange.registry.query(self.exchange.registry.client_ids)
        ids = self.exchange.registry.client_ids
        self.attempt.sent = dict.fromkeys(ids, 0)
        return ids

    def replies(self, messages: Iterable[Message]) -> Iterator[Reply]:
        """Send the attempt's messages, and yield the replies as they come."""
        attempt = self.attempt
        return self.exchange.ask(
            attempt.name, messages, self.config.round_timeout, len(attempt.sent), attempt.may_close
        )

    def take_in(self, replies: Iterable[Reply]) -> None:
        """Take in the uploads of an attempt as they come."""
        for reply in replies:
            self.watch.lap("wait")
            self.receive(reply)
            # free its arrays before the next one is read
            del reply
            self.watch.lap("take-in")
        self.watch.lap("wait")

    def sample(self, round: int) -> list[int]:
        """Begin an attempt at a round: return the clients that it asks, and prepare for their uploads.

        A private round asks its questions first. Raises UserError if a disk has no room for the round.
        """
        self.disks.check()
        self.exchange.registry.refresh()
        earlier = [attempt for attempt in self.spoilt if attempt.round == round]
        without = frozenset().union(*(attempt.absent for attempt in earlier))
        name = f"round {round}/{self.config.num_server_rounds}" + (f", attempt {len(earlier) + 1}" if earlier else "")
        # every retry and every restart of the server makes client states of another generation
        generation = self.folder.starts * _ATTEMPTS_PER_START + len(earlier)
        attempt = RoundAttempt(self.config, round, name=name, generation=generation, earlier=earlier, without=without)
        self.begin(attempt)
        self.watch.lap("prepare")
        ids = self._drawn()
        if self.config.closes_early and not self.clock:
            attempt.may_close = self._may_close
        attempt.working = frozenset(self.working)
        attempt.held = sum(work.size for work in self.working.values())
        if self.config.private:
            attempt.states = {i: {wire.STATE_VERSION: self.versions.get(i, ""), **self._first(i)} for i in ids}
        attempt.buffer = self.protocol.open(attempt, sorted([*ids, *self.working]))
        attempt.sent = dict.fromkeys(ids, 0)
        if not self.clock:
            # of an attempt that did not count, or of a server that was restarted
            for work in self.working.values():
                if work.cause or work.upload is not None:
                    self._arrive(work)
        self._ask_questions(self.protocol.before(attempt))
        return ids

    def _ask_questions(self, questions: Iterable[Questions]) -> None:
        """Ask clients what a private round has to know. Answers that are missing or bad are dropped by name."""
        attempt = self.attempt
        facts = attempt.round, attempt.generation, self.folder.secret, NOTHING
        for task, asked in questions:
            contents = ((i, wire.encode_download(Download(task, *facts, method=said))) for i, said in asked.items())
            messages = (self.exchange.message(i, content, wire.QUERY, attempt.round) for i, content in contents)
            name = f"{attempt.name}, {task}"
            with closing(self.exchange.ask(name, messages, self.config.round_timeout, len(asked))) as replies:
                for reply in replies:
                    try:
                        if self.protocol.answer(attempt, reply.client_id, wire.decode_answer(reply.usable())):
                            break
                    except Exception as error:
                        attempt.fail(reply.client_id, f"round {attempt.round}, {task}", "dropped", error)

    def _may_close(self) -> bool:
        """Return whether a round in real time has its quorum, or enough answers at its deadline."""
        attempt, config = self.attempt, self.config
        is_due = 0 < config.round_deadline <= time.monotonic() - attempt.began
        ended = attempt.ended & attempt.sent.keys()
        answered = sum(i in attempt.buffer.metrics for i in ended)
        return may_close(answered, len(ended) - answered, len(attempt.sent), is_due, config)

    def _drawn(self) -> list[int]:
        """Return the clients that the protocol chooses of the connected ones that are not working.

        A client that is refused when it introduces itself is not connected. The choice is then made again without it.
        In simulated time a choice from too few clients waits for those that return within a day.
        """
        unseen, working, entered = self.config.unseen, self.working, self.clock.now if self.clock else 0.0
        while True:
            connected = [i for i in self.exchange.registry.client_ids if i not in unseen and i not in working]
            there = self.clock.waits_for(connected) if self.clock else connected
            self.attempt.connected = there
            try:
                ids = self.protocol.sample(self.attempt, there)
            except TooFewResults:
                if isinstance(self.clock, Clock) and self.clock.goes_on(connected, entered):
                    continue
                raise
            if self.exchange.registry.query(ids):
                self.attempt.began = time.monotonic()
                return ids

    def messages(self, ids: Iterable[int], task: str) -> Iterator[Message]:
        """Build clients' messages one at a time, as they are sent, and count their bytes."""
        attempt, shared = self.attempt, dict[str, Any]()
        kind = "evaluate" if task == "evaluate" else "train"
        for client_id in ids:
            sent = self.server.download(self.server.state, client_id, attempt)
            download = self.server.message_with(sent, attempt, task)
            scalars = self.protocol.scalars(attempt, client_id) if task == "train" else {}
            content = wire.encode_download(
                dataclasses.replace(
                    download,
                    attempt=attempt.generation,
                    state_version=self.versions.get(client_id, ""),
                    keep=self.kept_versions.get(client_id, ()),
                    method={
                        **download.method,
                        **self.server.told,
                        **self.exchange.registry.columns(client_id),
                        **self._first(client_id),
                        **scalars,
                    },
                ),
                shared,
            )
            attempt.sent[client_id] = attempt.sent.get(client_id, 0) + wire.payload_bytes(content)
            if task == "train":
                attempt.pending[client_id] = self._begun(client_id, sent)
            if task == "evaluate" and self.config.is_confidential:
                attempt.hashes[client_id] = wire.sent_hash(download)
            if client_id in self.server.state.clients:
                client_arrays.release(self.server.state.clients[client_id])
            yield self.exchange.message(client_id, content, kind, attempt.round)

    def _first(self, client_id: int) -> Mapping[str, Scalar]:
        """Return what only a client without a state of this run is sent."""
        return {} if self.versions.get(client_id) else self.first.get(client_id, {})

    def _begun(self, client_id: int, sent: Sent | None = None) -> PendingUpload:
        """Return the work that a client begins. It keeps what the client was sent only if the upload may be late."""
        attempt = self.attempt
        work = PendingUpload(client_id, attempt.round, wire.state_version(attempt.round, attempt.generation))
        if self.config.staleness and sent is not None:
            work.sent, work.form = sent, self.protocol.expected_from(client_id)
        return work

    def receive(self, reply: Reply) -> None:
        """Check a client's upload and take it in, or hold it until the clock lets it arrive.

        A bad one is dropped by name, and ends nothing.
        """
        attempt, client_id = self.attempt, reply.client_id
        if reply.late and client_id not in self.working:
            return
        work = self.working[client_id] if reply.late else attempt.pending.get(client_id) or self._begun(client_id)
        try:
            content = reply.usable()
            work.nbytes = wire.payload_bytes(content)
            late_form = self.config.staleness and work.round < attempt.round
            form = work.form if late_form else self.protocol.expected_from(client_id)
            upload = wire.decode_upload(content, form)
            metrics = records.check_upload(
                upload,
                self.server.reports,
                attempt.declared.get(client_id),
                work.version,
                self.table,
            )
            if 0 < attempt.round - work.round <= self.config.staleness:
                attempt.started_from[client_id] = work.sent
            upload = self.protocol.check(client_id, upload)
            if self.config.dp_epsilon:
                self._check_budget(client_id, float(metrics.get(EPSILON, 0.0)))
            work.upload, work.metrics = upload, metrics
            self._warn_of(client_id, metrics)
        except MethodFault:
            raise
        except Exception as error:
            more = error.more if isinstance(error, wire.OtherArrays) else ()
            work.upload, work.cause = None, cause_of(client_id, error) + self.server.undeclared(more)
        if not self.clock:
            self._arrive(work)
        elif work.upload is not None:
            before, limit = attempt.held, self.config.server_memory_limit * 1e9
            attempt.held += work.size
            work.upload = late.held(work.upload, before, limit, self.folder.path)

    def close(self, clock: Clock | Replay) -> None:
        """End the round in simulated time, and take in the uploads that have arrived by then, by client id.

        The other clients still work. A later round may use their uploads.
        """
        attempt = self.attempt
        for client_id, work in attempt.pending.items():
            samples = int(attempt.declared.get(client_id, {}).get("train-samples", 0))
            sizes = attempt.sent[client_id], work.nbytes
            end = clock.answer(client_id, attempt.round, len(attempt.earlier), samples, *sizes)
            work.arrives, work.cause = end.second, work.cause or end.cause
            if work.cause:
                work.upload = None
        clock.close(attempt.round, [WorkEnd(work.arrives, work.cause) for work in attempt.pending.values()])
        for client_id in attempt.buffer.ids:
            work = attempt.pending.get(client_id) or self.working[client_id]
            if work.arrives <= clock.now:
                self._arrive(work)

    def _arrive(self, work: PendingUpload) -> None:
        """Take the upload of a work that has ended into the round, or leave it out by name. Its age lowers its weight."""
        attempt, age, client_id = self.attempt, self.attempt.round - work.round, work.client_id
        attempt.received[client_id] = work.nbytes
        attempt.ended.add(client_id)
        fate, became = USED, "dropped"
        error: Exception | None = None
        if work.cause:
            fate, error = FAILED, WireError(work.cause)
        elif age and (why := self._too_late(work, age)):
            fate, became, error = THROWN_AWAY, "thrown away", WireError(why)
        else:
            try:
                upload = work.upload
                assert upload is not None, "a work without a cause has its upload"
                if age:
                    upload, attempt.buffer.factors[client_id] = late.discounted(self.server, attempt, work, upload, age)
                    attempt.client_notes.setdefault(client_id, {})["age"] = age
                else:
                    work.upload = None
                attempt.buffer.add(client_id, upload, work.metrics, work.nbytes)
            except MethodFault:
                raise
            except Exception as failed:
                error = failed
        if error is not None:
            attempt.buffer.skip(client_id)
            attempt.fail(client_id, f"round {attempt.round}", became, error)
        second = work.arrives - self.clock.began if self.clock else time.monotonic() - self._began
        attempt.arrivals.append({"client": client_id, "age": age, "second": second, "fate": fate})

    def _too_late(self, work: PendingUpload, age: int) -> str:
        """Return why the round cannot use an upload of this age, "" if it can."""
        if age > self.config.staleness:
            allowed = f"{self.config.staleness} allowed" if self.config.staleness else "none allowed"
            return f"its upload of round {work.round} is {counted(age, 'round')} late, {allowed} (staleness)"
        if age and work.form != self.protocol.expected_from(work.client_id):
            return f"its upload of round {work.round} is late, and the method's uploads have another form now"
        return ""

    def _check_budget(self, client_id: int, spent: float) -> None:
        """Note the most epsilon that a client's records have spent, by its reports. Raises WireError if it reported more before.

        The spent epsilon only grows. A smaller value means that the site has lost its notes, so that nothing limits the
        budget any more.
        """
        before = self.spent.get(client_id, 0.0)
        if spent < before * (1 - 1e-6):
            raise WireError(
                f"{EPSILON}: its records have spent {spent:.4g}, but {before:.4g} before: its site has lost its notes on them"
            )
        self.spent[client_id] = max(before, spent)

    def screen(self) -> Any:
        """Drop unusable uploads after all have arrived, and return the argument of `update`. Raises TooFewResults."""
        attempt = self.attempt
        if self.clock:
            self.close(self.clock)
        if self.config.closes_early:
            works = {**self.working, **attempt.pending}
            attempt.missed = {i: works[i] for i in attempt.buffer.ids if i not in attempt.ended}
            for client_id in attempt.missed:
                attempt.buffer.skip(client_id)
        self._ask_questions(self.protocol.after(attempt))
        return self.protocol.screen(attempt)

    def update(self, accepted: Any) -> None:
        """Let the method make the next state. The client states of this attempt become the current ones.

        Arrays beyond `server-memory-limit` go to the disk.
        """
        self.protocol.advance(self.attempt, accepted)
        limit, ids = self.config.server_memory_limit * 1e9, list(self.attempt.buffer.metrics)
        client_arrays.spill(self.server.state.clients, ids, limit, self.folder.path, self.client_files.moved)
        for client_id, reported in self.attempt.buffer.metrics.items():
            self.versions[client_id] = str(reported.get(wire.STATE_VERSION, ""))
        self.working, self.attempt.pending = self.attempt.missed, {}
        for work in self.working.values():
            if self.server.state.round + 1 - work.round > self.config.staleness:
                # no round can use it
                work.upload, work.sent = None, Sent(NOTHING, {})
        self.watch.lap("personalize")

    def record(self) -> Record:
        """Return the round's record."""
        record = self.attempt.record(self.table, self.server.reports, self.folder.figures)
        if left_out := self.exchange.registry.left_out:
            record["left-out"] = left_out
        if self.config.is_timed and self.clock:
            record[records.VIRTUAL] = records.short(self.clock.lasted)
        if self.config.closes_early:
            record["working"] = sorted(self.working)
        if self.config.records_arrivals:
            attempt = self.attempt
            there = {*attempt.connected, *attempt.working, *self.config.unseen}
            away = sorted(set(range(self.config.num_clients)) - there)
            seconds = self.clock.lasted if self.clock else time.monotonic() - self._began
            asked = sorted(attempt.sent)
            record[ARRIVALS] = {"asked": asked, "away": away, "seconds": seconds, "ends": attempt.arrivals}
        return record

    # Evaluation

    def receive_evaluation(self, reply: Reply) -> None:
        """Check a client's metrics and the hash of its model, and take them in."""
        attempt, client_id = self.attempt, reply.client_id
        try:
            loss, num_examples, metrics = wire.decode_evaluation(reply.usable(), hashed=not self.config.is_confidential)
            metrics = records.check_evaluation(
                metrics,
                num_examples,
                attempt.declared.get(client_id),
                self.measured,
                self.server.reports,
                self.validation,
                self.config.evaluate_global,
            )
            self._warn_of(client_id, metrics)
            row = {name: records.clean(value) for name, value in metrics.items()}
            attempt.clients[client_id] = {**row, "loss": records.clean(loss), "test-samples": num_examples}
        except Exception as error:
            attempt.fail(client_id, "evaluation", "failed", error)

    # After the last round

    def collect(self, round: int) -> dict[int, Model]:
        """Ask every client for its personal model (all tensors, as exported). Return the models by client id; failures
        are logged.
        """
        ids = self.begin_evaluation(round, "collecting models")
        expected = Expected.of(
            self.server.form_of_exports.layout(self.server, self.server.full_layout), dtype=wire.WHOLE
        )
        models: dict[int, Model] = {}
        for reply in self.replies(self.messages(ids, "collect")):
            try:
                upload = wire.decode_upload(reply.usable(), expected)
                self._warn_of(reply.client_id, records.known(upload.metrics))
                models[reply.client_id] = upload.model
            except Exception as error:
                who = self.attempt.called(reply.client_id)
                log.error("client %s: its personal model could not be collected: %s", who, WireError(str(error)))
        return models

    def forget(self) -> None:
        """Ask the connected clients to remove their state of a finished run. Failures are logged."""
        ids, round = self.exchange.registry.client_ids, self.server.state.round
        download = Download("forget", round, self.attempt.generation, self.folder.secret, NOTHING)
        messages = (self.exchange.message(i, wire.encode_download(download), "train", round) for i in ids)
        seconds = min(_FORGET_SECONDS, self.config.round_timeout)
        clipped: list[int] = []
        for reply in self.exchange.ask("removing client state", messages, seconds, len(ids)):
            try:
                if wire.decode_upload(reply.usable(), Expected.of(NO_TENSORS)).metrics.get(wire.CLIPPED) is True:
                    clipped.append(reply.client_id)
            except WireError as error:
                who = self.attempt.called(reply.client_id)
                log.warning("client %s: its state of this run stays: %s", who, error)
        if clipped:
            log.warning(
                "private-range: values of %s beyond %g were clipped in this run",
                f"clients {listed([str(i) for i in sorted(clipped)])}",
                self.config.private_range,
            )

    # Checkpoints

    def save_checkpoint(self, record: Record) -> None:
        """Make everything durable that the next round depends on, with the metrics line of the last round."""
        state = self.server.state
        arrays = {"global.params": state.model.params, "global.buffers": state.model.buffers}
        for name, array in state.memory.items():
            arrays[f"memory.{name}"] = array
        meta = {
            "versions": {str(i): v for i, v in self.versions.items() if v},
            "spent": {str(i): spent for i, spent in self.spent.items() if spent},
            "screening": self.protocol.saved(),
            **({"first": {str(i): scalars for i, scalars in self.first.items()}} if self.first else {}),
            "record": record,
        }
        if self.clock:
            meta[CLOCK] = self.clock.now
        if self.working:
            works = {client_id: work.saved() for client_id, work in self.working.items()}
            arrays |= {f"{LATE}.{i}.{name}": array for i, (own, _) in works.items() for name, array in own.items()}
            meta[LATE] = [facts for _, facts in works.values()]
        self.kept_versions = checkpoint.save(
            self.folder.path, state.round, arrays, meta, state.clients, self.client_files, self.best[0]
        )
        for own in state.clients.values():
            client_arrays.release(own)

    def restore(self, saved: checkpoint.Checkpoint) -> None:
        """Continue from a checkpoint. Its arrays are taken out of it, so that none stays in memory after it is put on the disk."""
        server, arrays = self.server, saved.arrays
        if self.clock:
            self.clock.now = saved.meta.get(CLOCK, 0.0)
        for facts in saved.meta.get(LATE, []):
            begins = f"{LATE}.{facts['client_id']}."
            own = {name.removeprefix(begins): arrays.pop(name) for name in list(arrays) if name.startswith(begins)}
            work = self.working[facts["client_id"]] = PendingUpload.restored(own, facts)
            if not self.clock:
                work.cause = "its reply was lost when the server restarted"
        model = Model(arrays.pop("global.params"), arrays.pop("global.buffers"))
        clients, memory = dict[int, dict[str, NDArray[Any]]](), dict[str, NDArray[Any]]()
        for name in list(arrays):
            whose, _, key = name.partition(".")
            if whose == "memory":
                memory[key] = arrays.pop(name)
            else:
                client_id, _, key = key.partition(".")
                clients.setdefault(int(client_id), {})[key] = arrays.pop(name)
        self.client_files.adopt(saved.meta.get(checkpoint.CLIENTS, []), clients)
        server.state = State(model, clients, memory, saved.meta["round"])
        limit = self.config.server_memory_limit * 1e9
        client_arrays.spill(clients, list(clients), limit, self.folder.path, self.client_files.moved)
        self.versions = {int(i): v for i, v in saved.meta["versions"].items()}
        self.first = {int(i): scalars for i, scalars in saved.meta.get("first", {}).items()}
        self.spent = {int(i): float(spent) for i, spent in saved.meta.get("spent", {}).items()}
        self.kept_versions = checkpoint.versions_kept(self.folder.path)
        self.protocol.restore(saved.meta.get("screening", {}))

    # Messages

    def _warn_of(self, client_id: int, metrics: Mapping[str, Scalar]) -> None:
        """Log the metrics that a client could not compute, and a damaged state: the client used an earlier generation
        in its place.
        """
        if failed := metrics.get(wire.METRIC_ERRORS):
            log.warning("client %s: metric %s", self.attempt.called(client_id), failed)
        if used := metrics.get(wire.STATE_USED):
            named = self.versions.get(client_id, "")
            who = self.attempt.called(client_id)
            log.warning("client %s: its state of %s is damaged, it continued from %s", who, named, wire.one_line(used))
