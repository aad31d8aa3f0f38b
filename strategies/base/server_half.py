"""The server half of a method: what it remembers, the hooks it may override, and what it may call."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from fl_app import rng, trainable_tensors
from fl_app.config import RunConfig
from fl_app.errors import UserError
from fl_app.keys import Scalar, show
from fl_app.layout import Layout, Model
from fl_app.metrics import Reports
from fl_app.server.record import Record
from fl_app.server.run_folder import RunFolder
from fl_app.wire import Download, Expected, Upload
from strategies.aggregate import Stack
from strategies.base.uploads import Intake, Sums, Uploads
from strategies.robust import Averaging

log = logging.getLogger("corolla")
P = TypeVar("P")


@dataclass
class RoundState:
    """What a method may read and note of the round that is being run.

    round: its number, from 1. declared: what clients said about their data when they connected. expected: what an upload of
    the round must look like. uploads: what `personalize` works on, as long as it does. client_notes, round_notes: what the method
    adds to the round's record.
    """

    round: int = 0
    declared: dict[int, Mapping[str, Scalar]] = field(default_factory=dict)
    expected: Expected | None = None
    uploads: Uploads | None = None
    client_notes: dict[int, Record] = field(default_factory=dict)
    round_notes: Record = field(default_factory=dict)


class Cohorts(Protocol):
    """The clients of a private run that are summed up together (strategies/engine/cohorts.py)."""

    def keep_together(
        self, ids: NDArray[np.int64], labels: NDArray[np.int64], overlap: NDArray[np.float64]
    ) -> NDArray[np.int64]:
        """See ServerHalf.keep_together."""
        ...


class ServerHalf(ABC, Generic[P]):
    """The server half of a method: it writes `personalize`, and overrides what its paper changes.

    What a subclass remembers lies in three places, all of which are in checkpoints: global_model, what a client without anything
    of its own is sent; personal, arrays kept per client id (`keep_for`); memory, arrays of no client. layout: of the tensors that
    travel; full_layout: of the whole model. params: the method's parameters. round: the last round whose uploads were used.
    reports: the numbers that the method's client half reports.
    """

    params: P
    # Extra float arrays of uploads that `max-update-norm` screens too: their names, by the words of its messages.
    compared_extras: ClassVar[Mapping[str, str]] = {}
    # What the key `robust` may be besides "none"; RULES for a method whose means are by `averaging_of`.
    robust: ClassVar[frozenset[str]] = frozenset()
    # Multiplies the bound of `max-update-norm` for methods whose honest uploads lie farther apart; inf: no bound.
    spread: ClassVar[float] = 1.0

    def __init__(
        self, config: RunConfig, params: Any, layout: Layout, initial: Model, shared: frozenset[str], folder: RunFolder
    ) -> None:
        self.config, self.params, self.full_layout, self.shared, self.folder = config, params, layout, shared, folder
        self.layout = layout.subset(shared)
        self.global_model = layout.take(initial, shared)
        self.personal: dict[int, dict[str, NDArray[Any]]] = {}
        self.memory: dict[str, NDArray[Any]] = {}
        self.round = 0
        self.attempt = RoundState()
        self.reports = Reports()
        self.cohorts: Cohorts | None = None

    @classmethod
    def of_settings(cls, config: RunConfig) -> Self:
        """Return a half without models or state: enough for hooks that read `config` and `params` alone."""
        half = object.__new__(cls)
        half.config, half.params = config, config.params
        return half

    # From uploads to models

    @abstractmethod
    def personalize(self, round: int, uploads: Uploads) -> None:
        """Turn a round's uploads into the next models: set `global_model`, `personal` and `memory`."""

    def weights(self, uploads: Uploads) -> NDArray[np.float64]:
        """Return what every upload counts in means, float64 [N], positive, a number for each of `uploads.sizes`.

        It is asked in private rounds too, before anything is sent. There `uploads` has ids and sizes alone: what else a hook
        reads of them, or of the server half beside `config` and `params`, makes a private run refuse the method by name.
        """
        return uploads.sizes

    def averaging_of(self, uploads: Uploads) -> Averaging:
        """Return the mean over clients that the key `robust` asks for, with one choice for all arrays of floats in the uploads.

        It is to be asked for before anything is written into the stacks.
        """
        extras = [stack for stack in uploads.extras.values() if stack.dtype.kind == "f"]
        return Averaging(self.config.robust, self.config.robust_liars).of([uploads.W, uploads.B, *extras])

    @property
    def averaging(self) -> Averaging:
        """`averaging_of` all uploads that a plain round's `personalize` works on; elsewhere each mean chooses by its own rows."""
        uploads = self.attempt.uploads
        return (
            Averaging(self.config.robust, self.config.robust_liars) if uploads is None else self.averaging_of(uploads)
        )

    # From models to downloads

    def model_for(self, client_id: int) -> Model:
        """Return the model a client starts its next round from (the tensors that travel)."""
        return self.global_model

    def download_extras(self, client_id: int) -> Mapping[str, NDArray[Any]]:
        """Return the arrays a client is sent beside its model, by name; its half finds them in the context's `extras`."""
        return {}

    def download_for(self, client_id: int, round: int, task: str) -> Download:
        """Return what the method sends to a client. Raises UserError for a model that no client could take."""
        constants = self.full_layout.constants
        return Download(
            task=task,
            round=round,
            attempt=0,
            experiment=self.folder.experiment,
            model=_sendable(self.model_for(client_id), self.layout, self.config.method),
            extras=self.download_extras(client_id),
            method={trainable_tensors.HASH: constants} if constants else {},
        )

    # What is asked, and how it is checked

    def sample(self, client_ids: list[int], round: int) -> list[int]:
        """Choose the round's clients: fraction-train of those connected, at least one, sorted. A private run draws cohorts."""
        return self.drawn(client_ids, round)

    def drawn(self, client_ids: list[int], round: int) -> list[int]:
        """Draw fraction-train of the clients, at least one, sorted."""
        count = self.config.drawn(len(client_ids))
        if count >= len(client_ids):
            return client_ids
        chosen = rng.generator(self.config.seed, "sampling", round).choice(client_ids, count, replace=False)
        return sorted(int(i) for i in chosen)

    def expected(self) -> Expected:
        """Return what every upload of the round must look like: its tensors, mask, the method's extra arrays."""
        return Expected.of(self.layout)

    def expected_from(self, client_id: int) -> Expected:
        """Return what one client's upload must look like, where they differ; `complete` then makes it `expected`."""
        return self.attempt.expected or self.expected()

    def check(self, upload: Upload) -> None:
        """Check what of an upload only the method understands; raise WireError to drop it."""

    def complete(self, client_id: int, upload: Upload) -> Upload:
        """Return a checked upload as the round's stacks hold it."""
        return upload

    def compared(self, intake: Intake) -> Mapping[str, Stack]:
        """Return what of a round's uploads must not lie far apart (key `max-update-norm`): stacks [N, ...] by a plural name."""
        more = {what: intake.extras[name] for what, name in self.compared_extras.items() if name in intake.extras}
        return {"parameters": intake.W, "BatchNorm statistics": intake.B, **more}

    def compared_with(self, client_id: int) -> Mapping[str, NDArray[Any]]:
        """Return what a client was sent of what is `compared`, by the same names: the server's own moves do not count."""
        model = self.model_for(client_id)
        extras = self.download_extras(client_id) if self.compared_extras else {}
        own = {what: extras.get(name, model.params) for what, name in self.compared_extras.items()}
        return {"parameters": model.params, "BatchNorm statistics": model.buffers, **own}

    # Private rounds: of a method whose Method says `sums`

    def sum_groups(self, ids: list[int]) -> Mapping[int, list[int]]:
        """Return who is summed up with whom: disjoint groups of at least three that cover `ids`, by a number."""
        return {0: ids}

    def personalize_sums(self, round: int, sums: Sums) -> None:
        """Do as `personalize` does: by default with the mean as the only upload, which is nobody's."""
        one = Uploads([], sums.mean.params[None], sums.mean.buffers[None], np.ones(1), None, {}, [])
        self.personalize(round, one)

    def keep_together(
        self, ids: NDArray[np.int64], labels: NDArray[np.int64], overlap: NDArray[np.float64]
    ) -> NDArray[np.int64]:
        """Return a new grouping, int64 [N], changed so that no cohort splits into parts below three (cohorts.grouped).

        labels: int64 [N], a group by client id; overlap: float64 [n, n] of the clients `ids`, int64 [n].
        """
        assert self.cohorts is not None, "a run that is not private has no cohorts"
        return self.cohorts.keep_together(ids, labels, overlap)

    # What leaves the run

    def personal_model(self, client_id: int) -> Model | None:
        """Return what the server holds of a client's personal model, for the run folder; by default what the client is sent."""
        return self.model_for(client_id)

    def exported_global(self) -> Model:
        """Return the global model for the run folder."""
        return self.global_model

    def exported_layout(self, layout: Layout) -> Layout:
        """Return how models of a layout leave the run, in files and from clients (`LocalUpdate.export`): as they are, or, where the
        method wraps the user's network, as that network.
        """
        return layout

    def has_global_model(self) -> bool:
        """Tell whether `global_model` is a result of the method."""
        return self.layout.d > 0

    # What a method may call

    def keep_for(self, client_id: int, **arrays: NDArray[Any]) -> None:
        """Remember a client's arrays in `personal`; rows of this round's stacks may be given as they are."""
        self.personal[client_id] = arrays

    def last_personal(self, client_id: int) -> Model:
        """Return the model kept for a client as `params` and `buffers`; the global one if there is none."""
        mine = self.personal.get(client_id)
        return self.global_model if mine is None else Model(mine["params"], mine["buffers"])

    def note(self, client_id: int, name: str, value: object) -> None:
        """Add a value to the client's entry in this round's metrics."""
        self.attempt.client_notes.setdefault(client_id, {})[name] = value

    def note_round(self, name: str, value: object) -> None:
        """Add a value to this round's metrics."""
        self.attempt.round_notes[name] = value

    def summary(self) -> None:
        """Log what runs."""
        c = self.config
        log.info(
            "%s: %d clients, %d rounds, model %s with %d parameters (%d travel), %s",
            c.method,
            c.num_clients,
            c.num_server_rounds,
            c.model,
            self.full_layout.d,
            self.layout.d,
            ", ".join(f"{key.name}={show(value)}" for key, value in c.own_keys() if "." in key.name) or "no parameters",
        )


def _sendable(model: Model, layout: Layout, method: str) -> Model:
    """Return a method's model, or nothing. Raises UserError if a client could not take it: it is the method's mistake."""
    if not model.params.size and not model.buffers.size:
        return model
    for name, array, length in (("params", model.params, layout.d), ("buffers", model.buffers, layout.b)):
        if array.dtype != np.float32 or array.shape != (length,):
            got = f"{array.dtype} {list(array.shape)}"
            raise UserError(f"method {method}: the {name} of a model must be float32 [{length}], got {got}")
    return model
