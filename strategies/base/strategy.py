"""The server half of a method: a Flower Strategy whose rounds are run by rounds.py; here is what a method writes and may call."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

from numpy.typing import NDArray

from fl_app.layout import Layout, Model
from fl_app.wire import Expected, Upload
from strategies.aggregate import Stack
from strategies.base.uploads import Intake, Uploads
from strategies.engine.rounds import Rounds
from strategies.robust import Averaging

log = logging.getLogger("corolla")
P = TypeVar("P")


class PersonalizedStrategy(Rounds, Generic[P]):
    """The server half of a method: it writes `personalize`, and overrides what its paper changes.

    What a subclass remembers lies in three places, all of which are in checkpoints: global_model, what a client without anything
    of its own is sent; personal, arrays kept per client id (`keep_for`); memory, arrays of no client. layout: of the tensors that
    travel; full_layout: of the whole model. params: the method's parameters.
    """

    params: P
    compared_extras: ClassVar[
        Mapping[str, str]
    ] = {}  # float arrays of uploads that must not lie far apart: in words, their names
    robust: ClassVar[frozenset[str]] = (
        frozenset()
    )  # what the key `robust` may be beside none: `RULES` if means are by `averaging`

    @property
    def averaging(self) -> Averaging:
        """The mean over clients that the key `robust` asks for."""
        return Averaging(self.config.robust, self.config.robust_liars)

    @abstractmethod
    def personalize(self, round: int, uploads: Uploads) -> None:
        """Turn a round's uploads into the next models: set `global_model`, `personal` and `memory`."""

    def model_for(self, client_id: int) -> Model:
        """Return the model a client starts its next round from (the tensors that travel)."""
        return self.global_model

    def download_extras(self, client_id: int) -> Mapping[str, NDArray[Any]]:
        """Arrays a client is sent beside its model, by name; its half finds them in the context's `extras`."""
        return {}

    def expected(self) -> Expected:
        """What every upload of the round must look like: lengths, mask, the method's extra arrays."""
        return Expected(self.layout.d, self.layout.b)

    def expected_from(self, client_id: int) -> Expected:
        """What one client's upload must look like, where they differ; `complete` then makes it `expected`."""
        return self.expected() if self.attempt.intake is None else self.attempt.intake.expected

    def complete(self, client_id: int, upload: Upload) -> Upload:
        """Return a checked upload as the round's stacks hold it."""
        return upload

    def check(self, upload: Upload) -> None:
        """Check what of an upload only the method understands; raise WireError to drop it."""

    def compared(self, intake: Intake) -> Mapping[str, Stack]:
        """What of a round's uploads must not lie far apart (key `max-update-norm`): stacks [N, ...] by a name in the plural."""
        more = {what: intake.extras[name] for what, name in self.compared_extras.items() if name in intake.extras}
        return {"parameters": intake.W, "BatchNorm statistics": intake.B, **more}

    def compared_with(self, client_id: int) -> Mapping[str, NDArray[Any]]:
        """What a client was sent of what is `compared`, by the same names: what the server made of it is not held against it."""
        model, extras = self.model_for(client_id), self.download_extras(client_id) if self.compared_extras else {}
        own = {what: extras.get(name, model.params) for what, name in self.compared_extras.items()}
        return {"parameters": model.params, "BatchNorm statistics": model.buffers, **own}

    def sample(self, client_ids: list[int], round: int) -> list[int]:
        """Choose the round's clients: fraction-train of those connected, at least one, sorted. A private run draws companies."""
        return self.drawn(client_ids, round)

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
            ", ".join(f"{key.name}={value}" for key, value in c.own_keys() if "." in key.name) or "no parameters",
        )
