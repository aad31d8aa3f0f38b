"""FedAvg or FedPer as FL-bench runs them: the clients of replayed.py, its initial weights, and FedPer's newcomers as there.

In FL-bench's FedPer the classifier travels and is averaged too. A client that has trained lays its own over the one it receives; a
newcomer starts from the average of the others', in FedPer (and in Corolla) from the initial one.
"""

import torch
from replayed import SEED, Params, Replayed
from torch import nn

from fl_app.layout import Model
from strategies.base import ClientState, LocalUpdate, Method, RoundContext, all_tensors

OWN = ("own.params", "own.buffers")


class AsLogged(LocalUpdate[Params]):
    """FedPer's client half, its classifier uploaded too; or FedAvg's."""

    def merge(self, received: Model, state: ClientState, ctx: RoundContext[Params]) -> Model:
        """Start from FL-bench's weights in the first round; then lay the client's own classifier, if any, over the received."""
        if ctx.round == 1:
            return ctx.layout.model({name: tensor.numpy() for name, tensor in initial_weights().items()})
        if OWN[0] not in state.arrays:
            return received
        return ctx.layout.put(received, Model(*(state.arrays[name] for name in OWN)), ctx.layout.classifier)

    def train(self, start: Model, state: ClientState, ctx: RoundContext[Params]) -> Model:
        """Train, and keep the classifier if it is personal."""
        after = ctx.trainer.train(start)
        if ctx.params.personal == "classifier":
            kept = ctx.layout.take(after, ctx.layout.classifier)
            state.arrays[OWN[0]], state.arrays[OWN[1]] = kept.params, kept.buffers
        return after


METHOD = Method("as_logged", Params, Replayed, AsLogged, all_tensors)


def initial_weights() -> dict[str, torch.Tensor]:
    """Return FL-bench's CNN for 28 x 28 grey images, its layers drawn one after the other from torch's seed 42; float32."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(SEED)
        layers: dict[str, nn.Module] = {"conv1": nn.Conv2d(1, 32, 5), "conv2": nn.Conv2d(32, 64, 5)}
        layers |= {"fc1": nn.Linear(1024, 512), "classifier": nn.Linear(512, 10)}
    return {f"{name}.{key}": value for name, layer in layers.items() for key, value in layer.state_dict().items()}
