"""The server half of a method: its state, the hooks that it may override, and the functions that it may call."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from fl_app import rng, trainable_tensors
from fl_app.config import RunConfig
from fl_app.errors import UserError, listed
from fl_app.keys import Scalar, show
from fl_app.layout import Layout, Model
from fl_app.metrics import Reports
from fl_app.server import client_arrays
from fl_app.server.run_folder import RunFolder
from fl_app.wire import Download, Expected, Upload
from strategies.base import hooks
from strategies.base.earlier import EarlierHooks
from strategies.base.state import Sent, State
from strategies.base.turn import Turn
from strategies.base.uploads import Sums, UploadBuffer, Uploads
from strategies.kernels.aggregate import Stack
from strategies.kernels.parts import Part

log = logging.getLogger("corolla")
P = TypeVar("P")
LATE, AGE, MOVED = "late", "age", "moved"
"""Uses of a late upload that a method may refuse (`ServerHalf.not_late`)."""


class Cohorts(Protocol):
    """The cohorts of a private run: clients that are summed up together (strategies/engine/cohorts.py)."""

    def keep_together(
        self, ids: NDArray[np.int64], labels: NDArray[np.int64], overlap: NDArray[np.float64]
    ) -> NDArray[np.int64]:
        """See ServerHalf.keep_together."""
        ...


class ServerHalf(EarlierHooks, Generic[P]):
    """The server half of a method. A subclass writes `update`, and overrides the hooks that its paper changes.

    Between rounds a subclass keeps nothing but `state`, which checkpoints hold. The engine sets it; `update` returns the next one.
    It may read:

    - `params`: the method's parameters.
    - `layout`: the tensors that travel. `full_layout`: the whole model.
    - `state`: the state after the last round with used uploads.
    - `reports`: the numbers that the method's client half reports.
    - `told`: scalars that every download has besides the method's own.
    """

    params: P
    # Extra float arrays of uploads that `max-update-norm` screens too: a plural name for messages -> the array's name.
    compared_extras: ClassVar[Mapping[str, str]] = {}
    # Values of the key `robust` besides "none". RULES for a method that takes its means from `Turn.average`.
    robust: ClassVar[frozenset[str]] = frozenset()
    # True declares two facts. `update` needs only means of W and B with `weights`, by `turn.average.mean` or
    # `weighted_mean`. An upload's weight does not depend on other uploads. Uploads are then added up as they come, and no stack is
    # kept. A subclass that overrides `update`, `weights`, `compared` or `summed` must declare it again.
    streams: ClassVar[bool] = False
    # Why late uploads (key `staleness`) cannot be used: LATE for none at all, AGE if an upload's age cannot lower its weight
    # (`staleness-decay` below 1), MOVED for `staleness-rule = fedbuff`.
    not_late: ClassVar[Mapping[str, str]] = {}
    # Whether `update` works on the differences between uploads and the models of `download`. Late uploads then come as if they had
    # started from these: their own difference is added.
    reads_moves: ClassVar[bool] = False
    # True declares that `update` sets the state's model's parameters to a mean of the uploads, and that clients are sent
    # that model. The key `server-optimizer` may then move it (strategies/engine/steps). A subclass that overrides
    # `update` or `download` must declare it again.
    averages: ClassVar[bool] = False
    # True declares that the server keeps a model for every client between rounds, for the estimates of a run's memory and disk.
    keeps_models: ClassVar[bool] = False
    # True declares that a client is sent only the part of its model that it holds (`held_by`). Its client half must say the
    # same (`LocalUpdate.held`).
    sends_parts: ClassVar[bool] = False
    # Factor on the bound of `max-update-norm`, for methods with honest uploads that lie farther apart. inf: no bound.
    spread: ClassVar[float] = 1.0
    # For the estimate of a run's memory: stacks [N, d] that `update` makes beside the uploads, and those of them that are kept
    # until the next round.
    made_stacks: int = 0
    kept_stacks: int = 0

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Let the hooks that the class overrides check what they return."""
        super().__init_subclass__(**keywords)
        hooks.checked(cls, ServerHalf, hooks.SERVER)

    def __init__(
        self, config: RunConfig, params: Any, layout: Layout, initial: Model, shared: frozenset[str], folder: RunFolder
    ) -> None:
        self.config, self.params, self.full_layout, self.shared, self.folder = config, params, layout, shared, folder
        self.layout = layout.subset(shared)
        self.state = State(layout.take(initial, shared))
        self.attempt: Turn
        self.begin(Turn(config))
        self.reports = Reports()
        self.told: Mapping[str, Scalar] = {}
        self.cohorts: Cohorts | None = None

    def begin(self, turn: Turn) -> None:
        """Begin a round. The hooks are asked in it until the next one begins."""
        self.attempt = turn
        turn.downloaded = lambda client_id: self.downloaded(client_id, turn)

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

    def summed(self, upload: Upload) -> Mapping[str, NDArray[np.float64]]:
        """Return further arrays of an upload to add up over clients, float64 [...] by name. The sums are in `Uploads.summed`.

        Called only if uploads are not kept (`streams`).
        """
        return {}

    # From models to downloads

    def download(self, state: State, client_id: int, turn: Turn) -> Sent:
        """Return what a client is sent in a round. Default: the state's model, and no arrays beside it.

        The client half finds the arrays in `ctx.extras`.
        """
        return Sent(state.model)

    def memory_bytes(self) -> int:
        """Return the bytes of `memory` in a later round, for the estimates of a run's memory and disk. Default: 0, unknown."""
        return 0

    def download_for(self, client_id: int, turn: Turn, task: str) -> Download:
        """Return the method's message to a client. Raises UserError for a model that no client could take."""
        constants, sent = self.full_layout.constants, self.downloaded(client_id, turn)
        model = _sendable(sent.model, self.layout, self.config.method)
        part = self.held_by(client_id) if self.sends_parts else None
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

        A private run draws cohorts instead.
        """
        return self.drawn(client_ids, turn.round)

    def drawn(self, client_ids: list[int], round: int) -> list[int]:
        """Return `fraction-train` of the clients, drawn at random, at least one, sorted."""
        count = self.config.drawn(len(client_ids))
        if count >= len(client_ids):
            return client_ids
        chosen = rng.generator(self.config.seed, "sampling", round).choice(client_ids, count, replace=False)
        return sorted(int(i) for i in chosen)

    def form(self, state: State, turn: Turn) -> Expected:
        """Return the form that every upload of the round must have: its tensors, its mask, and the method's extra arrays."""
        return Expected.of(self.layout)

    def held_by(self, client_id: int) -> Part | None:
        """Return the part of the travelling tensors that a client holds, trains and uploads. None: all of them."""
        return None

    def check(self, upload: Upload) -> None:
        """Check the parts of an upload that only the method understands. Raise WireError to drop the upload."""

    def compared(self, buffer: UploadBuffer) -> Mapping[str, Stack]:
        """Return the stacks in which uploads must not lie far apart (key `max-update-norm`), [N, ...] by a plural name."""
        more = {what: buffer.extras[name] for what, name in self.compared_extras.items() if name in buffer.extras}
        return {"parameters": buffer.W, "BatchNorm statistics": buffer.B, **more}

    def compared_with(self, client_id: int) -> Mapping[str, NDArray[Any]]:
        """Return the values that a client was sent for the stacks of `compared`, by the same names.

        Distances are also taken from these values, so that the server's own moves do not count.
        """
        sent = self.attempt.sent_to(client_id)
        model = sent.model
        own = {what: sent.extras.get(name, model.params) for what, name in self.compared_extras.items()}
        return {"parameters": model.params, "BatchNorm statistics": model.buffers, **own}

    # Private rounds, for methods with `Method.sums`

    def sum_groups(self, ids: list[int]) -> Mapping[int, list[int]]:
        """Return the groups of clients to sum up, by number: disjoint, at least three clients each, together all of `ids`."""
        return {0: ids}

    def update_sums(self, state: State, sums: Sums, turn: Turn) -> State:
        """Return the state after a private round, as `update` does from uploads.

        Default: call `update` with the mean over all clients as the only upload. It has no client id.
        """
        one = Uploads([], sums.mean.params[None], sums.mean.buffers[None], np.ones(1), None, {}, [])
        return self.updated(one, turn)

    def keep_together(
        self, ids: NDArray[np.int64], labels: NDArray[np.int64], overlap: NDArray[np.float64]
    ) -> NDArray[np.int64]:
        """Return a changed grouping, int64 [N], that splits no cohort into parts of fewer than three clients (cohorts.grouped).

        - `labels`: each client's group, int64 [N].
        - `overlap`: the similarities of the clients `ids`, float64 [n, n]. `ids`: int64 [n].
        """
        assert self.cohorts is not None, "a run that is not private has no cohorts"
        return self.cohorts.keep_together(ids, labels, overlap)

    # Models that leave the run

    def exported(self, client_id: int | None = None) -> Model | None:
        """Return a model for the run folder: a client's personal one, or without a client the global one.

        None: the method has no such model, or only the client can make it. Default: the model that the client is sent, and
        the state's model if tensors travel.
        """
        if client_id is not None:
            return self.downloaded(client_id, self.attempt).model
        return self.state.model if self.layout.d else None

    def held_models(self) -> Sequence[Model]:
        """Return models of which each client uses one unchanged, as exported. The run folder has each client's. Default: none."""
        return ()

    def exported_layout(self, layout: Layout) -> Layout:
        """Return the layout of models that leave the run, in files and from clients (`LocalUpdate.export`). Default: unchanged.

        A method that wraps the user's network returns that network's layout.
        """
        return layout

    # Functions that a method may call

    def stack_like(self, stack: Stack) -> Stack:
        """Return an unfilled stack like one of the round's. It lies on the disk if that one is too large for memory."""
        return client_arrays.stack_like(stack, self.folder.path)

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
        if names := self.earlier_hooks():
            log.warning(
                "method %s: %s: earlier names of hooks, for one release (docs/methods-howto.md)",
                c.method,
                listed(names),
            )


def declares(half: type[ServerHalf[Any]], name: str, hooks: Iterable[str]) -> bool:
    """Return whether the class that sets the attribute `name` comes after every override of these hooks, or is one of them."""

    def owner(attribute: str) -> type:
        return next(each for each in half.__mro__ if attribute in vars(each))

    return all(issubclass(owner(name), owner(hook)) for hook in hooks)


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
            raise UserError(f"method {method}: the {name} of a model must be float32 [{length}], got {got}")
    return model
