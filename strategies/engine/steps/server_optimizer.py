"""The server's optimizer moves the global model towards the mean that the method has set (key `server-optimizer`)."""

from __future__ import annotations

from typing import Any

from fl_app.config import RunConfig
from fl_app.layout import Model
from strategies.base.declared import CHANGE_MODEL, declares_means
from strategies.base.server_half import ServerHalf
from strategies.base.state import State, StepAfter
from strategies.kernels import afo

# the beginning of the names of its moments in `memory`
_NAMES = "server-optimizer."


def fits(half: type[ServerHalf[Any]]) -> bool:
    """Return whether a method declares `Means.sets_model`, and no later override may set another model."""
    # FedAvg[Params] is FedAvg
    whole = getattr(half, "__origin__", half)
    return half.means.sets_model and declares_means(whole, *CHANGE_MODEL)


def step(config: RunConfig) -> StepAfter | None:
    """Return the step; None without the key."""
    c = config
    if c.server_optimizer == "none":
        return None
    rate = c.server_learning_rate or (afo.MOMENTUM if c.server_optimizer == "momentum" else afo.ADAPTIVE)

    def move(before: State, after: State) -> State:
        """Move the global model from the sent one. The moments are in `memory`. Statistics stay the mean's."""
        params, moments = afo.server_step(
            before.model.params,
            after.model.params,
            {name: before.memory[_NAMES + name] for name in ("m", "v") if _NAMES + name in before.memory},
            kind=c.server_optimizer,
            learning_rate=rate,
            beta1=c.server_beta1,
            beta2=c.server_beta2,
            tau=c.server_tau,
        )
        kept = {_NAMES + name: moment for name, moment in moments.items()}
        return after.next(Model(params, after.model.buffers), memory=kept)

    return move
