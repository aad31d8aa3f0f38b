"""FedDWA: every client is sent a mixture of the clients whose models lie nearest to where its own would go next.

Liu, Wu, Wang, Sun, Li, Liu: "FedDWA: Personalized Federated Learning with Dynamic Weight Adjustment", IJCAI 2023.

Client: E epochs from what it is sent, w_i; then E more from w_i, the guidance g_i; it uploads both and goes on with neither.
Server: p_ij proportional to 1/(||g_i - w_j||^2 + 1e-12) over the round's clients j, the k largest kept, rows of sum 1; client i
is sent sum_j p_ij w_j next. There is no global model.

Deviations: the guidance is E more epochs, as in the authors' code, where it is called one step (the paper's is a gradient step).
`guidance = extrapolated` is 2 w_i - what the client was sent, the authors' commented variant, of which the server knows both: no
second vector. Distances are float64 and never divided by 0 (theirs: float32, and by 0 for equal models). In a tie the client
itself, then the lower id. Evaluated is what a client is sent, and what it trained of that; the authors test the mixture through
an alias. Under partial participation distances are among the round's clients, others keep their last mixture, and who never took
part has the initial model. Statistics are mixed with the same weights.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fl_app.figures import Matrix
from fl_app.keys import AT_LEAST_ONE, key
from fl_app.layout import Model
from fl_app.wire import Expected, Upload
from strategies import aggregate, feddac
from strategies.base import ClientState, LocalUpdate, Method, PersonalizedStrategy, RoundContext, Uploads, all_tensors

GUIDANCE = "guidance"  # up, float32 [d]
# Random stream of the second training's batches.
STREAM = "feddwa.guidance"


@dataclass(frozen=True)
class FedDWAParams:
    """Parameters of FedDWA, table `feddwa`."""

    neighbours: int = key(5, "Clients that are mixed for each, the client itself included (k).", AT_LEAST_ONE)
    guidance: Literal["trained", "extrapolated"] = key(
        "trained",
        "Where a client would go next: another training, uploaded as a second vector; or as far again as it went.",
    )


def neighbour_weights(guidance: aggregate.Stack, models: aggregate.Stack, k: int) -> NDArray[np.float64]:
    """Weights of all clients in each client's next model, p, float64 [N, N]; rows sum to 1, at most k (cut to N) are not 0.

    guidance, models: [N, d]. In a tie the client itself, then the lower position. Raises ValueError if k is below 1.
    """
    distances = aggregate.squared_distances(np.asarray(models), np.asarray(guidance))
    return feddac.neighbour_weights(distances, k, own_distance=True)


class FedDWA(PersonalizedStrategy[FedDWAParams]):
    """Server half. Kept per client: the mixture it is sent, `params` and `buffers`."""

    compared_extras = MappingProxyType({"guidance models": GUIDANCE})

    def expected(self) -> Expected:
        """The guidance beside the model, where it is trained."""
        extras = {GUIDANCE: ("<f4", (self.layout.d,))} if self.params.guidance == "trained" else {}
        return dataclasses.replace(super().expected(), extras=extras)

    def personalize(self, round: int, uploads: Uploads) -> None:
        """Mix the round's models for each of its clients."""
        guidance = uploads.extras.get(GUIDANCE)
        if guidance is None:
            sent = (self.model_for(i).params for i in uploads.ids)
            guidance = np.stack([2 * w - before for w, before in zip(uploads.W, sent, strict=True)])
        weights = neighbour_weights(guidance, uploads.W, self.params.neighbours)
        params = aggregate.mix(uploads.W, weights, out=uploads.W)
        buffers = aggregate.mix(uploads.B, weights)
        for i, client_id in enumerate(uploads.ids):
            self.keep_for(client_id, params=params[i], buffers=buffers[i])
            near = {str(uploads.ids[j]): float(np.round(weights[i, j], 6)) for j in np.flatnonzero(weights[i])}
            self.note(client_id, "neighbours", near)

    def model_for(self, client_id: int) -> Model:
        """Return the client's last mixture, the initial model if it has none."""
        return self.last_personal(client_id)

    def has_global_model(self) -> bool:
        """Tell that there is none."""
        return False


class FedDWAUpdate(LocalUpdate[FedDWAParams]):
    """Client half: plain training, and once more for the guidance."""

    def upload(self, before: Model, after: Model, state: ClientState, ctx: RoundContext[FedDWAParams]) -> Upload:
        """Send the model and, where it is trained, the guidance."""
        plain = super().upload(before, after, state, ctx)
        if ctx.params.guidance != "trained":
            return plain
        guidance = ctx.layout.take(ctx.trainer.train(after, purpose=STREAM), ctx.shared)
        return dataclasses.replace(plain, extras={GUIDANCE: guidance.params})


FIGURES = (
    Matrix(
        "neighbours",
        "Weights of the clients in each other's models",
        "weight of the column's client",
        "How much of each client's model, the columns, is in what another, a row, is sent next.",
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
)
