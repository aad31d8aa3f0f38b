"""Plain rounds: the server sees every client's model, leaves outliers out by name, and hands the others to the method."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from fl_app.config import RunConfig
from fl_app.keys import Scalar
from fl_app.server import client_arrays
from fl_app.wire import Expected, Upload
from strategies.base.server_half import ServerHalf
from strategies.base.uploads import Intake, Uploads
from strategies.engine.attempt import Attempt, TooFewResults
from strategies.engine.screening import USUAL, Outlier, Screening
from strategies.robust import capped

log = logging.getLogger("corolla")


class PlainRounds:
    """What is special about rounds in which single models arrive (RoundProtocol in strategies/engine/rounds.py)."""

    def __init__(self, server: ServerHalf[Any]) -> None:
        self.server, self.config = server, server.config
        self.screening = Screening()
        # Uploads of the last round that were used though they lay far from the others.
        self.outliers: list[Outlier] = []

    def announcements(self) -> list[str]:
        """Say what differential privacy covers, where the run has any."""
        return privacy_budget(self.config)

    def sample(self, attempt: Attempt, connected: list[int]) -> list[int]:
        """Let the method choose."""
        return self.server.sample(connected, attempt.round)

    def expected(self) -> Expected:
        """What the method says."""
        return self.server.expected()

    def open(self, attempt: Attempt, ids: list[int]) -> Intake:
        """Allocate the round's stacks."""
        attempt.expected = self.expected()
        return Intake.of(ids, attempt.expected)

    def scalars(self, attempt: Attempt, client_id: int) -> Mapping[str, Scalar]:
        """Nothing is said beside the model."""
        return {}

    def expected_from(self, client_id: int) -> Expected:
        """What the method says of this client."""
        return self.server.expected_from(client_id)

    def check(self, client_id: int, upload: Upload) -> Upload:
        """Let the method check what it alone understands."""
        self.server.check(upload)
        return self.server.complete(client_id, upload)

    def screen(self, attempt: Attempt) -> Uploads:
        """Leave out outliers by name. Raises TooFewResults with less than `min-results`, and has changed nothing then."""
        intake = attempt.intake
        outliers = self._outliers(attempt, intake)
        require_results(intake, self.config.min_results, 1)
        self.outliers = [outlier for outlier in outliers if outlier.client_id in intake.metrics]
        refused = [outlier.client_id for outlier in outliers if outlier.client_id not in intake.metrics]
        self.screening.accept(attempt.round, intake.metrics, refused)
        uploads = intake.uploads()
        if self.config.max_size_weight:
            uploads = dataclasses.replace(uploads, sizes=capped(uploads.sizes, self.config.max_size_weight))
        intake.forget_stacks()
        return uploads

    def personalize(self, round: int, accepted: Any) -> None:
        """Let the method make the next models; what is beyond `server-memory-limit` goes to the disk."""
        server = self.server
        server.attempt.uploads = accepted
        server.personalize(round, accepted)
        # the method alone says how long the stacks are kept
        server.attempt.uploads = None
        client_arrays.settle(server.personal, accepted.ids, self.config.server_memory_limit * 1e9, server.folder.path)

    def suspects(self) -> list[str]:
        """Name the outliers of the last round that were used: they may be why no client can train on."""
        return [
            f"client {outlier.client_id} was used though {outlier}: it is the likely cause, and "
            f"max-update-norm = {USUAL:g} drops such uploads"
            for outlier in self.outliers
        ]

    def saved(self) -> Mapping[str, Any]:
        """Return what a checkpoint holds of the screening."""
        return self.screening.saved()

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over what `saved` returned, from a checkpoint; {} if it holds nothing."""
        self.screening = Screening.restored(saved)

    def _outliers(self, attempt: Attempt, intake: Intake) -> list[Outlier]:
        """Return what lies far from the others, and leave it out by name, unless nothing is refused."""
        spread = self.server.spread
        if math.isinf(spread):
            return []
        limit = self.config.max_update_norm * spread
        stacks = self.server.compared(intake)
        outliers = self.screening.measure(attempt.round, intake, stacks, limit or USUAL * spread, self._sent)
        for outlier in outliers:
            if limit:
                intake.reject(outlier.client_id)
                attempt.fail(outlier.client_id, f"round {attempt.round}", "dropped", outlier.refusal())
            else:
                attempt.far.append({"client": outlier.client_id, "cause": str(outlier)})
                log.warning(
                    "round %d: client %d is used (max-update-norm is 0), but %s",
                    attempt.round,
                    outlier.client_id,
                    outlier,
                )
        return outliers

    def _sent(self, client_id: int) -> Mapping[str, NDArray[Any]]:
        """Return what a client was sent of what is compared; it is read again where it is kept on disk."""
        sent = self.server.compared_with(client_id)
        client_arrays.release(self.server.personal.get(client_id, {}))
        return sent


def require_results(intake: Intake, min_results: float, least: int) -> None:
    """Raise TooFewResults unless such a part of the uploads can be used, and at least so many."""
    needed = max(least, math.ceil(min_results * len(intake.ids)))
    if len(intake.metrics) < needed:
        raise TooFewResults(f"{len(intake.metrics)} of {len(intake.ids)} uploads usable, {needed} needed")


def privacy_budget(config: RunConfig) -> list[str]:
    """Say what `dp-epsilon` covers, and what not; nothing where it is 0."""
    if not config.dp_epsilon:
        return []
    return [
        f"dp-epsilon: training records are covered within ({config.dp_epsilon:g}, {config.dp_delta:g}) over all rounds; test "
        "records, and how many there are of both, are not (docs/privacy.md)"
    ]
