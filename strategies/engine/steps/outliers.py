"""Outlier screening: far uploads of a round are named, and dropped before the method sees them (key `max-update-norm`)."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from fl_app.server import client_arrays
from fl_app.server.run_folder import called
from strategies.base.server_half import ServerHalf
from strategies.base.turn import Turn
from strategies.base.uploads import UploadBuffer
from strategies.engine.attempt import RoundAttempt
from strategies.engine.screening import USUAL, Outlier, Reference, Screening, compared, reference
from strategies.engine.streaming import RunningMean

log = logging.getLogger("corolla")


class OutlierStep:
    """The screening of a run's rounds.

    - `screening`: the distances of the run's uploads so far, which a checkpoint has.
    - `used`: far uploads of the last round that were used.
    """

    def __init__(self, server: ServerHalf[Any]) -> None:
        self.server, self.screening = server, Screening()
        self.used: list[Outlier] = []

    def references(self, turn: Turn) -> Reference | None:
        """Return what a round's uploads are compared with, by client; None if they are not compared.

        Values on the disk are read again when needed.
        """
        if math.isinf(self.server.outliers.tolerance):
            return None

        def of(client_id: int) -> Mapping[str, NDArray[Any]]:
            values = reference(self.server.outliers, turn.sent_to(client_id))
            client_arrays.release(self.server.state.clients.get(client_id, {}))
            return values

        return of

    def __call__(self, attempt: RoundAttempt, buffer: UploadBuffer) -> list[Outlier]:
        """Return the far uploads. They are dropped by name if `max-update-norm` is set, else noted and logged."""
        sent = self.references(attempt)
        if sent is None:
            return []
        tolerance = self.server.outliers.tolerance
        limit, usual = self.server.config.max_update_norm * tolerance, USUAL * tolerance
        if isinstance(buffer, RunningMean):
            found = self.screening.measure_moves(attempt.round, buffer, buffer.moved, buffer.lengths, usual)
        else:
            stacks = compared(self.server, buffer, sent)
            found = self.screening.measure(attempt.round, buffer, stacks, limit or usual, sent)
        for outlier in found:
            who = outlier.client_id
            if limit:
                buffer.reject(who)
                attempt.fail(who, f"round {attempt.round}", "dropped", outlier.refusal())
            else:
                attempt.outliers.append({"client": who, "cause": str(outlier)})
                cause = "round %d: client %s is used (max-update-norm is 0), but %s"
                log.warning(cause, attempt.round, attempt.called(who), outlier)
        return found

    def accept(self, attempt: RoundAttempt, found: list[Outlier]) -> None:
        """Remember a round that counts: its used uploads, and its far ones."""
        known = attempt.buffer.metrics
        self.used = [outlier for outlier in found if outlier.client_id in known]
        refused = [outlier.client_id for outlier in found if outlier.client_id not in known]
        self.screening.accept(attempt.round, known, refused)

    def suspects(self, turn: Turn) -> list[str]:
        """Return a line for each far upload of the last round that was used: it may be why no client can train."""
        return [
            f"client {called(outlier.client_id, turn.declared)} was used though {outlier}: it is the likely cause, and "
            f"max-update-norm = {USUAL:g} drops such uploads"
            for outlier in self.used
        ]
