"""The server half of a method: its state, the hooks that it may override, and the functions that it may call."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from fl_app import debugging, rng, trainable_tensors
from fl_app.config import RunConfig
from fl_app.errors import MethodError, listed, plain
from fl_app.keys import Scalar, show
from fl_app.layout import Layout, Model
from fl_app.metrics import Reports
from fl_app.server import client_arrays
from fl_app.server.record import Record
from fl_app.server.run_folder import RunFolder
from fl_app.transport.wire import Download, Expected, Upload
from strategies.base import earlier, hooks
from strategies.base.declared import Exported, Holds, Late, Means, Outliers, Submodel
from strategies.base.earlier import EarlierHooks
from strategies.base.state import Sent, State, Sums, Uploads
from strategies.kernels import Averaging, Part, Stack


@dataclass
class Turn:
    """One round of a method's server half.

    - `config`: the run's.
    - `round`: the round's number, from 1.
    - `declared`: by client, the facts about its data that it sent when it connected or was first drawn (key
      `discover`).
    - `connected`: the clients that could be asked, sorted.
    - `expected`: the form that every upload of the round must have.
    - `uploads`: the uploads that `update` works on, while it runs.
    - `client_notes`, `round_notes`: values that the method adds to the round's record.
    - `started_from`: by client, what it was sent, if its upload is a late one that counts from there.
    - `downloaded`: returns what another client was sent.
    """

    config: RunConfig
    round: int = 0
    declared: Mapping[int, Mapping[str, Scalar]] = field(default_factory=dict)
    connected: list[int] = field(default_factory=list)
    expected: Expected | None = None
    uploads: Uploads | None = None
    client_notes: dict[int, Record] = field(default_factory=dict)
    round_notes: Record = field(default_factory=dict)
    started_from: dict[int, Sent] = field(default_factory=dict)
    downloaded: Callable[[int], Sent] | None = None

    def sent_to(self, client_id: int) -> Sent:
        """Return what a client's upload of this round counts from."""
        if (late := self.started_from.get(client_id)) is not None:
            return late
        assert self.downloaded is not None, "nothing has been sent"
        return self.downloaded(client_id)

    @property
    def average(self) -> Averaging:
        """The mean over clients that the key `robust` selects.

        Its choice of clients is the same for all float arrays in the round's uploads. Read it before you write into the
        stacks. In a private round each mean chooses by its own rows.
        """
        rule = Averaging(self.config.robust, self.config.byzantine_ratio)
        if self.uploads is None:
            return rule
        extras = [stack for stack in self.uploads.extras.values() if stack.dtype.kind == "f"]
        return rule.of([self.uploads.W, self.uploads.B, *extras])

    def note(self, client_id: int, name: str, value: object) -> None:
        """Add a value to the client's entry in this round's metrics: a number, a text, or a list, table or array of numbers."""
        self.client_notes.setdefault(client_id, {})[name] = hooks.noted(self, "note", name, value)

    def note_round(self, name: str, value: object) -> None:
        """Add a value to this round's metrics: a number, a text, or a list, table or array of numbers."""
        self.round_notes[name] = hooks.noted(self, "note_round", name, value)


log = logging.getLogger("corolla")
P = TypeVar("P")


class ServerHalf(EarlierHooks, Generic[P]):
    """The server half of a method. A subclass writes `update`, and overrides the hooks that its paper changes.

    Between rounds a subclass keeps nothing but `state`, which checkpoints hold. The engine sets it; `update` returns the next one.
    It may read:

    - `params`: the method's parameters.
    - `layout`: the tensors that travel. `full_layout`: the whole model.
    - `state`: the state after the last round with used uploads.
    - `reports`: the numbers that the method's client half reports.
    - `sender`: the class of the method's client half.
    - `submodel`, `form_of_exports`: what its Method declares as `submodel` and `exported`.
    - `told`: scalars that every download has besides the method's own.
    """

    params: P
    # The four values that a method declares (strategies/base/declared.py). A subclass that overrides `update`, `weights` or
    # `download` must declare `means` again, if uploads may still be added up, or the server optimizer may still move the model.
    means: ClassVar[Means] = Means()
    late: ClassVar[Late] = Late()
    outliers: ClassVar[Outliers] = Outliers()
    holds: Holds = Holds()

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Let the hooks that the class overrides check what they return."""
        super().__init_subclass__(**keywords)
        hooks.checked(cls, ServerHalf, hooks.SERVER)
        earlier.adapt(cls)

    def __init__(
        self, config: RunConfig, params: Any, layout: Layout, initial: Model, shared: frozenset[str], folder: RunFolder
    ) -> None:
        self.config, self.params, self.full_layout, self.shared, self.folder = config, params, layout, shared, folder
        self.layout = layout.subset(shared)
        self.state = State(layout.take(initial, shared))
        self.begin(Turn(config))
        self.sender: type = object
        self.submodel: Submodel | None = None
        self.form_of_exports = Exported()
        self.reports = Reports()
        self.told: Mapping[str, Scalar] = {}
        # of a private run: clients that are summed up together (strategies/engine/private.py)
        self.aggregation_groups: Any = None

    def begin(self, turn: Turn) -> None:
        """Begin a round: let it know what clients are sent."""
        self.attempt = turn
        turn.downloaded = lambda client_id: self.download(self.state, client_id, turn)

    @classmethod
    def of_settings(cls, config: RunConfig) -> Self:
        """Return a half without models or state. It is enough for hooks that read only `config` and `params`."""
        half = object.__new__(cls)
        half.config, half.params = config, config.params
        return half

    # From uploads to models

    def update(self, state: State, uploads: Uploads, turn: Turn) -> State:
        """Return the state after a round, made from the state before it and the round's uploads. Every method writes it.

        It changes neither `state` nor the half. It may change the uploads' stacks, and keep their rows.
        """
        raise NotImplementedError(f"{type(self).__name__} has no update()")

    def weights(self, uploads: Uploads) -> NDArray[np.float64]:
        """Return the weight of every upload in means, float64 [N], positive, one for each of `uploads.sizes`. Default: the sizes.

        Private rounds call it before anything is sent. `uploads` then has only ids and sizes. A private run refuses a
        method by name if this hook reads anything else of `uploads`, or anything but `config` and `params` of the
        server half.
        """
        return uploads.sizes

    # From models to downloads

    def download(self, state: State, client_id: int, turn: Turn) -> Sent:
        """Return what a client is sent in a round. Default: the state's model, and no arrays beside it.

        The client half finds the arrays in `ctx.extras`.
        """
        return Sent(state.model)

    def download_for(self, client_id: int, turn: Turn, task: str) -> Download:
        """Return the method's message to a client. Raises UserError for a model that no client could take."""
        return self.message_with(self.download(self.state, client_id, turn), turn, task)

    def message_with(self, sent: Sent, turn: Turn, task: str) -> Download:
        """Return the message that sends a client this. Raises UserError for a model that no client could take."""
        constants = self.full_layout.constants
        model = _sendable(sent.model, self.layout, self.config.method)
        part = None if self.submodel is None else self.submodel.sent_part(self.layout, sent.extras)
        return Download(
            task=task,
            round=turn.round,
            attempt=0,
            secret=self.folder.secret,
            model=model if part is None else part.take(model),
            extras=sent.extras,
            method={trainable_tensors.HASH: constants} if constants else {},
        )

    # Requests to clients, and checks of their uploads

    def sample_clients(self, state: State, client_ids: list[int], turn: Turn) -> list[int]:
        """Return the round's clients, sorted: `fraction-train` of the connected ones, at least one.

        A private run draws aggregation groups instead.
        """
        return self.drawn(client_ids, turn.round)

    def drawn(self, client_ids: list[int], round: int) -> list[int]:
        """Return `fraction-train` of the clients, drawn at random, at least one, sorted."""
        count = self.config.cohort_size(len(client_ids))
        if count >= len(client_ids):
            return client_ids
        chosen = rng.generator(self.config.seed, "sampling", round).choice(client_ids, count, replace=False)
        return sorted(int(i) for i in chosen)

    def form(self, state: State, turn: Turn) -> Expected:
        """Return the form that every upload of the round must have: its tensors, its mask, and the method's extra arrays."""
        return Expected.of(self.layout)

    def check(self, upload: Upload) -> None:
        """Check the parts of an upload that only the method understands. Raise WireError to drop the upload."""

    # Private rounds, for methods with `Method.sums`

    def sum_groups(self, ids: list[int]) -> Mapping[int, list[int]]:
        """Return the groups of clients to sum up, by number: disjoint, at least three clients each, together all of `ids`."""
        return {0: ids}

    def update_sums(self, state: State, sums: Sums, turn: Turn) -> State:
        """Return the state after a private round, as `update` does from uploads.

        Default: call `update` with the mean over all clients as the only upload. It has no client id.
        """
        one = Uploads([], sums.mean.params[None], sums.mean.buffers[None], np.ones(1), None, {}, [])
        return self.update(state, one, turn)

    def keep_together(
        self, ids: NDArray[np.int64], labels: NDArray[np.int64], overlap: NDArray[np.float64]
    ) -> NDArray[np.int64]:
        """Return changed labels, int64 [N], that split no aggregation group into parts of fewer than three (group_store.grouped).

        - `labels`: each client's group, int64 [N].
        - `overlap`: the similarities of the clients `ids`, float64 [n, n]. `ids`: int64 [n].
        """
        assert self.aggregation_groups is not None, "a run that is not private has no aggregation groups"
        kept: NDArray[np.int64] = self.aggregation_groups.keep_together(ids, labels, overlap)
        return kept

    # Models that leave the run

    def exported(self, client_id: int | None = None) -> Model | None:
        """Return a model for the run folder: a client's personal one, or without a client the global one.

        None: the method has no such model, or only the client can make it. Default: the model that the client is sent, and
        the state's model if tensors travel.
        """
        if client_id is not None:
            return self.download(self.state, client_id, Turn(self.config, self.state.round)).model
        return self.state.model if self.layout.d else None

    # Functions that a method may call

    def submodel_of(self, client_id: int, turn: Turn) -> Part | None:
        """Return the part of the travelling tensors that a client uploads in a round. None: all of them."""
        if self.submodel is None:
            return None
        return self.submodel.part(self.layout, self.download(self.state, client_id, turn).extras)

    def stack_like(self, stack: Stack) -> Stack:
        """Return an unfilled stack like one of the round's. It lies on the disk if that one is too large for memory."""
        return client_arrays.stack_like(stack, self.folder.path)

    def undeclared(self, arrays: Sequence[str]) -> str:
        """Return the end of an error: the user's line that sends these arrays, and the hook that must declare them; "" for none."""
        upload = inspect.unwrap(getattr(self.sender, "upload", self.undeclared))
        if not arrays or not debugging.is_users(upload.__code__.co_filename):
            return ""
        names = listed([plain(name) for name in arrays])
        return (
            f": upload() at {debugging.line_of(upload.__code__)} adds {names}, which form() of the server half must declare among "
            "its extras (docs/methods-howto.md)"
        )

    def summary(self) -> None:
        """Log the run's method, size and parameters."""
        c = self.config
        log.info(
            "%s: %d clients, %d rounds, model %s with %d parameters (%d travel), %s",
            c.method,
            c.num_clients,
            c.num_server_rounds,
            c.model,
            self.full_layout.d,
            self.layout.d,
            ", ".join(f"{key.name}={show(value)}" for key, value in c.own_keys() if "." in key.name)
            or "the method has no keys",
        )
        if names := [name for name in earlier.NAMES if getattr(type(self), name) is not getattr(EarlierHooks, name)]:
            log.warning(
                "method %s: %s: earlier names of hooks, for one release (docs/methods-howto.md)",
                c.method,
                listed(names),
            )


def _sendable(model: Model, layout: Layout, method: str) -> Model:
    """Return a method's model; one without any values is returned unchecked.

    Raises UserError if a client could not take it: it is the method's mistake.
    """
    if not isinstance(model, Model):
        raise hooks.fault(f"method {method}", "model_for()", "must return a Model", model)
    if not model.params.size and not model.buffers.size:
        return model
    for name, array, length in (("params", model.params, layout.d), ("buffers", model.buffers, layout.b)):
        if array.dtype != np.float32 or array.shape != (length,):
            got = f"{array.dtype} {list(array.shape)}"
            raise MethodError(
                key=f"method {method}", rule=f"the {name} of a model must be float32 [{length}], got {got}"
            )
    return model
