"""FedDWA: each client is sent a mixture of the models nearest to its guidance, the model that it would train next.

Liu, Wu, Wang, Sun, Li, Liu: "FedDWA: Personalized Federated Learning with Dynamic Weight Adjustment", IJCAI 2023.

Client: it trains E epochs from the model it is sent; the result is w_i. Then it trains E more from w_i; the result is
the guidance g_i. It uploads both and continues with neither.

Server: over the round's clients j, p_ij is proportional to 1/(||g_i - w_j||^2 + 1e-12). The k largest are kept, and
rows sum to 1. Client i is sent sum_j p_ij w_j next. There is no global model.

Deviations:

- The guidance is E more epochs, as in the authors' code, which calls this one step. The paper's is a gradient step.
- `guidance = extrapolated` is 2 w_i minus the model that the client was sent, the authors' commented variant. The
  server knows both, so no second vector travels.
- Distances are float64 and never divided by 0. The authors' are float32, and equal models divide by 0.
- In a tie the client itself comes first, then the lower id.
- A client is evaluated with the model it is sent, and with the model it trained from that. The authors test the mixture
  through an alias.
- Under partial participation distances are among the round's clients. The others keep their last mixture. A client that
  never took part has the initial model.
- Statistics are mixed with the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from strategies import feddac
from strategies.base import (
    AT_LEAST_ONE,
    ClientState,
    Expected,
    Holds,
    Late,
    LocalUpdate,
    Matrix,
    Method,
    Model,
    Outliers,
    Overview,
    PersonalizedStrategy,
    RoundContext,
    Sent,
    State,
    Turn,
    Upload,
    Uploads,
    all_tensors,
    key,
    models_by_client,
)
from strategies.kernels import aggregate

GUIDANCE = "guidance"  # up, float32 [d]
# random stream of the second training's batches
STREAM = "feddwa.guidance"


@dataclass(frozen=True)
class FedDWAParams:
    """Parameters of FedDWA, table `feddwa`."""

    neighbours: int = key(5, "Clients mixed into each client's next model, itself included (k).", AT_LEAST_ONE)
    guidance: Literal["trained", "extrapolated"] = key(
        "trained",
        "Estimate of a client's next model: E more epochs, uploaded as a second vector, or its last update applied "
        "once more.",
    )


def neighbour_weights(guidance: aggregate.Stack, models: aggregate.Stack, k: int) -> NDArray[np.float64]:
    """Return the weights p of all clients in each client's next model, float64 [N, N]; rows sum to 1.

    guidance, models: [N, d]. At most k (cut to N) weights per row are not 0. In a tie the client itself comes first,
    then the lower position. Raises ValueError if k is below 1.
    """
    distances = aggregate.squared_distances(np.asarray(models), np.asarray(guidance))
    return feddac.neighbour_weights(distances, k, own_distance=True)


class FedDWA(PersonalizedStrategy[FedDWAParams]):
    """Server half. Kept per client: the mixture it is sent, `params` and `buffers`."""

    late = Late(aged="an upload's weights follow from its distances to the others")
    outliers = Outliers(extras={"guidance models": GUIDANCE})

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # the stack: the guidance models, unless clients send them
        self.holds = Holds(models=True, made=int(self.params.guidance != "trained"))

    def form(self, state: State, turn: Turn) -> Expected:
        """Return the form of an upload: the model and, if it is trained, the guidance."""
        extras = {GUIDANCE: ("<f4", (self.layout.d,))} if self.params.guidance == "trained" else {}
        return replace(super().form(state, turn), extras=extras)

    def update(self, state: State, uploads: Uploads, turn: Turn) -> State:
        """Mix the round's models for each of its clients."""
        guidance = uploads.extras.get(GUIDANCE)
        if guidance is None:
            guidance = self.stack_like(uploads.W)
            for row, w, i in zip(guidance, uploads.W, uploads.ids, strict=True):
                np.subtract(2 * w, turn.sent_to(i).model.params, out=row)
        weights = neighbour_weights(guidance, uploads.W, self.params.neighbours)
        params = aggregate.mix(uploads.W, weights, out=uploads.W)
        buffers = aggregate.mix(uploads.B, weights)
        for i, client_id in enumerate(uploads.ids):
            near = {str(uploads.ids[j]): float(np.round(weights[i, j], 6)) for j in np.flatnonzero(weights[i])}
            turn.note(client_id, "neighbours", near)
        return state.next(clients=models_by_client(uploads.ids, params, buffers))

    def download(self, state: State, client_id: int, turn: Turn) -> Sent:
        """Return the client's last mixture, or the initial model if it has none."""
        return Sent(state.model_of(client_id))

    def exported(self, client_id: int | None = None) -> Model | None:
        """Return the model that a client is sent. There is no global one."""
        return None if client_id is None else super().exported(client_id)


class FedDWAUpdate(LocalUpdate[FedDWAParams]):
    """Client half: plain training, then a second training for the guidance."""

    def upload(self, before: Model, after: Model, state: ClientState, ctx: RoundContext[FedDWAParams]) -> Upload:
        """Send the model and, if it is trained, the guidance."""
        plain = super().upload(before, after, state, ctx)
        if ctx.params.guidance != "trained":
            return plain
        guidance = ctx.layout.take(ctx.trainer.train(after, purpose=STREAM), ctx.shared)
        return replace(plain, extras={GUIDANCE: guidance.params})


FIGURES = (
    Matrix(
        "neighbours",
        "Weights of the clients in each other's models",
        "weight of the column's client",
        "The weight of each client's model (columns) in the model that another client is sent next (rows).",
        heading="Weights of neighbours",
        value="weight",
    ),
)

METHOD = Method(
    "feddwa",
    FedDWAParams,
    FedDWA,
    FedDWAUpdate,
    all_tensors,
    figures=FIGURES,
    not_private="its server compares single clients' models",
    overview=Overview(
        group="Parameters among similar clients",
        travels="model; up + 4d",
        server="4(d+b) a client",
        epochs="2 E",
        unseen="initial model",
        use="neighbours by the direction of training",
    ),
)
