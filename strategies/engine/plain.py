"""Plain rounds: the server sees every client's model, drops far uploads by name, and hands the others to the method."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from fl_app.config import RunConfig
from fl_app.files import explain_full_disk
from fl_app.keys import Scalar
from fl_app.layout import Model
from fl_app.server import client_arrays, kept_uploads
from fl_app.transport.wire import Expected, Upload
from strategies.base import hooks
from strategies.base.server_half import ServerHalf, Turn
from strategies.base.state import State, UploadBuffer, Uploads
from strategies.engine import steps
from strategies.engine.attempt import Numbers, Questions, RoundAttempt, TooFewResults
from strategies.engine.screening import OutlierStep, Screening
from strategies.engine.streaming import RunningMean, streams, why_kept


class PlainRounds:
    """The steps of rounds in which single models arrive. Private rounds (private.py) differ in these: the buffer, and what is
    asked beside it.

    turn: the round whose uploads are collected. warns: whether far uploads are named also if none is dropped.
    """

    def __init__(self, server: ServerHalf[Any], warns: bool = True) -> None:
        self.server, self.config = server, server.config
        self.turn = Turn(server.config)
        self._moves = steps.after(server.config)
        self.outliers, self.steps = OutlierStep(server, warns), steps.before(self.config)

    @cached_property
    def _streams(self) -> bool:
        return streams(type(self.server))

    def announcements(self) -> list[str]:
        """Return log lines: the records that differential privacy covers, and why a streaming method's uploads are kept."""
        lines = privacy_budget(self.config)
        if self._streams and (why := why_kept(self.config, self.expected())):
            lines.append(f"a round's uploads are kept as a stack, a row for each client: {why}")
        return lines

    def sample(self, attempt: RoundAttempt, connected: list[int]) -> list[int]:
        """Return the clients that an attempt asks, sorted. Raises TooFewResults if there can be none."""
        return self.server.sample_clients(self.server.state, connected, attempt)

    def expected(self) -> Expected:
        """Return the form that an upload must have as it travels."""
        return self.server.form(self.server.state, self.turn)

    def open(self, attempt: RoundAttempt, ids: list[int]) -> UploadBuffer:
        """Allocate the round's stacks, or sums if these are enough."""
        self.turn = attempt
        attempt.expected = self.expected()
        if not self._streams or why_kept(self.config, attempt.expected):
            return UploadBuffer.of(
                ids, attempt.expected, self.config.server_memory_limit * 1e9, self.server.folder.path
            )
        return RunningMean.started(ids, attempt.expected, self.server, attempt, self.outliers.references(attempt))

    def before(self, attempt: RoundAttempt) -> Iterator[Questions]:
        """Yield the questions that precede an attempt's messages. When it goes on, the clients have answered."""
        return iter(())

    def after(self, attempt: RoundAttempt) -> Iterator[Questions]:
        """Yield the questions that follow once all uploads have come. Raises TooFewResults."""
        return iter(())

    def answer(self, attempt: RoundAttempt, client_id: int, entries: Numbers) -> bool:
        """Take a client's answer to a question. Return whether no more are needed. Raises WireError to drop it."""
        return True

    def scalars(self, attempt: RoundAttempt, client_id: int) -> Mapping[str, Scalar]:
        """Return the scalars that a client is sent beside the model it trains."""
        return {}

    def expected_from(self, client_id: int) -> Expected:
        """Return the form of one client's upload: that of the part that it holds."""
        form, part = self.turn.expected or self.expected(), self.server.submodel_of(client_id, self.turn)
        if part is None:
            return form
        return dataclasses.replace(form, d=part.d, b=part.b, variances=part.among(form.variances))

    def check(self, client_id: int, upload: Upload) -> Upload:
        """Let the method check an upload, and return it in the form of the round's stacks.

        Elements outside a client's submodel count as unchanged: they get the values that the client was sent.
        """
        self.server.check(upload)
        part = self.server.submodel_of(client_id, self.turn)
        if part is None:
            return upload
        return dataclasses.replace(upload, model=part.put(self.turn.sent_to(client_id).model, upload.model))

    def screen(self, attempt: RoundAttempt) -> Uploads:
        """Drop far uploads by name and return the others. Raises TooFewResults below `min-results`, and has changed
        nothing then.
        """
        buffer = attempt.buffer
        found = self.outliers(attempt, buffer)
        require_results(attempt, self.config.min_results, 1)
        self.outliers.accept(attempt, found)
        uploads = buffer.result()
        self._keep(attempt.round, uploads)
        for step in self.steps:
            uploads = step(uploads, buffer)
        return uploads

    def update(self, attempt: RoundAttempt, accepted: Any) -> State:
        """Let the method make the next state."""
        attempt.uploads = accepted
        state = self.server.update(self.server.state, accepted, attempt)
        # from here on only the method holds the stacks
        attempt.uploads = None
        return state

    def advance(self, attempt: RoundAttempt, accepted: Any) -> None:
        """Let the method make its next state and the steps after it change that. The server half has it from then on."""
        before = self.server.state
        after = hooks.checked_state(self.config.method, self.update(attempt, accepted))
        for step in self._moves:
            after = step(before, after)
        self.server.state = dataclasses.replace(after, round=attempt.round)

    def suspects(self) -> list[str]:
        """Return a line for each far upload of the last round that was used: it may be why no client can train."""
        return self.outliers.suspects(self.turn)

    def saved(self) -> Mapping[str, Any]:
        """Return the state of the screening for a checkpoint."""
        return self.outliers.screening.saved()

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the state that `saved` returned, from a checkpoint. {}: there is none."""
        self.outliers.screening = Screening.restored(saved)

    def _keep(self, round: int, uploads: Uploads) -> None:
        """Write the round's uploads into the run folder, if the run keeps them.

        With `stop-when` any round may be the last. The file of a round that is not kept is removed when it is known.
        """
        config, folder = self.config, self.server.folder
        if config.keeps_uploads_of(round) or (config.keep_uploads and config.stop_when):
            stacks = uploads.W, uploads.B, uploads.bits
            with explain_full_disk("output-dir", folder.path):
                kept_uploads.save(
                    folder.path, round, self.server.layout, uploads.ids, uploads.sizes, stacks, self._model_sent
                )

    def _model_sent(self, client_id: int) -> Model:
        """Return the model that a client was sent."""
        model = self.turn.sent_to(client_id).model
        client_arrays.release(self.server.state.clients.get(client_id, {}))
        return model


def require_results(attempt: RoundAttempt, min_results: float, least: int) -> None:
    """Raise TooFewResults unless at least a part `min_results` of the clients that were asked sent a usable upload, and at
    least `least` of them. Late uploads of earlier rounds do not count.
    """
    asked = [i for i in attempt.buffer.ids if i not in attempt.working]
    needed, usable = max(least, math.ceil(min_results * len(asked))), sum(i in attempt.buffer.metrics for i in asked)
    if usable < needed:
        raise TooFewResults(f"{usable} of {len(asked)} uploads usable, {needed} needed")


def privacy_budget(config: RunConfig) -> list[str]:
    """Return a line on the records that `dp-epsilon` covers, and on those that it does not; none if the key is 0.

    It has both notions of neighbouring data. Replacing a record is removing one and adding another (group privacy).
    """
    if not config.dp_epsilon:
        return []
    epsilon, delta = config.dp_epsilon, config.dp_delta
    # e^epsilon overflows from 710 on
    replaced = min(1.0, delta * (1 + math.exp(min(epsilon, 700.0))))
    uncovered = "test and validation" if config.validation_ratio else "test"
    return [
        f"dp-epsilon: over all rounds, adding or removing a training record is covered within ({epsilon:g}, {delta:g}), "
        f"replacing one within ({2 * epsilon:g}, {replaced:.3g}); "
        f"{uncovered} records and all numbers of records are not (docs/privacy.md)"
    ]
