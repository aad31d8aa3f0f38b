"""Attacks of a lying client within the format, by name, and the client half that applies one to its own uploads.

Every upload here passes the checks of form: names, shapes, finite numbers, the right number of ones in a mask. A Byzantine client
trains as the method does, then changes its upload. The strongest attacks know all other uploads of the round; several
Byzantine clients cooperate.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from client_app.client import CorollaClient
from client_app.client_app import KINDS
from client_app.session import Session
from fl_app.config import RunConfig
from fl_app.data import open_client
from fl_app.layout import NOTHING, Model, Vector
from fl_app.transport.wire import Expected, Upload
from strategies import METHODS
from strategies.base import ClientState, LocalUpdate, RoundContext
from strategies.base.state import UploadBuffer
from strategies.baselines import ifca
from strategies.engine.screening import USUAL, Screening
from strategies.kernels import masks

HUGE = 1e6
BACKWARDS = 5
NOISE, NEAR = 1.0, 0.1  # standard deviations
# of digits
CLASSES = 10
# fraction of the bound that an adaptive Byzantine client uses
MARGIN = 0.95


@dataclass(frozen=True)
class Scene:
    """A Byzantine client's knowledge when it uploads.

    It knows the model it was sent, its honest upload, all other clients' uploads of this round, and the models that
    they were sent (starts). It also knows the server's memory of uploads after each past round (screenings).
    """

    sent: Model
    honest: Upload
    others: Sequence[Upload]
    num_byzantine: int
    random: np.random.Generator
    starts: Sequence[Vector]
    round: int = 1
    screenings: dict[int, Screening] = field(default_factory=dict)


Attack = Callable[[Scene], Upload]


def honest(scene: Scene) -> Upload:
    """Upload the honest upload."""
    return scene.honest


def scaled(scene: Scene) -> Upload:
    """Upload a million times the trained model."""
    model = scene.honest.model
    return _with(scene, model.params * np.float32(HUGE), model.buffers * np.float32(HUGE))


def negated(scene: Scene) -> Upload:
    """Upload the trained model with all signs reversed."""
    return _with(scene, -scene.honest.model.params, scene.honest.model.buffers)


def backwards(scene: Scene) -> Upload:
    """Upload five times the update, backwards."""
    return _with(
        scene,
        scene.sent.params - BACKWARDS * (scene.honest.model.params - scene.sent.params),
        scene.honest.model.buffers,
    )


def noise(scene: Scene) -> Upload:
    """Upload the trained model with noise of standard deviation 1."""
    params = scene.honest.model.params
    return _with(scene, params + scene.random.normal(0, NOISE, params.shape), scene.honest.model.buffers)


def crafted_mask(scene: Scene) -> Upload:
    """Upload the update backwards, under the mask most similar to all others'.

    Its ones are where most other masks have ones.
    """
    return _chosen_by_all(scene, backwards(scene))


def copied_mask(scene: Scene) -> Upload:
    """Upload the update backwards, under the first other client's mask: the victim's closest collaborator."""
    return dataclasses.replace(backwards(scene), mask=scene.others[0].mask)


def changing_mask(scene: Scene) -> Upload:
    """Upload the update backwards, under the mask of another victim in every round."""
    return dataclasses.replace(backwards(scene), mask=scene.others[scene.round % len(scene.others)].mask)


def sybils(scene: Scene) -> Upload:
    """Upload the first other client's model with noise of standard deviation 0.1, the same for all of them.

    They resemble the victim and each other. So a method that looks for similar clients puts them together. They choose
    the victim's cluster and mask.
    """
    victim = scene.others[0]
    shared = np.random.default_rng(scene.round)
    params = victim.model.params + shared.normal(0, NEAR, victim.model.params.shape)
    upload = _with(scene, params, victim.model.buffers, victim.mask)
    return dataclasses.replace(upload, extras=victim.extras) if ifca.CLUSTER in victim.extras else upload


def shifted(scene: Scene) -> Upload:
    """Upload an honest model, and in the arrays beside it each class's values under the next class."""
    extras = {name: np.roll(told, 1, axis=0) for name, told in scene.honest.extras.items() if len(told) == CLASSES}
    return dataclasses.replace(scene.honest, extras={**scene.honest.extras, **extras})


def adaptive(scene: Scene) -> Upload:
    """Go against the others' mean update, as far from the median as the bound allows, with a crafted mask."""
    others = np.stack([upload.model.params for upload in scene.others])
    middle = np.median(others, axis=0)
    away = scene.sent.params - others.mean(axis=0, dtype=np.float64)
    away /= max(float(np.linalg.norm(away)), 1e-12)
    low, high = 0.0, 1.0
    while _inside(scene, middle + high * away) and high < HUGE:
        low, high = high, 2 * high
    for _ in range(20):
        far = (low + high) / 2
        low, high = (far, high) if _inside(scene, middle + far * away) else (low, far)
    _inside(scene, middle + low * away)
    return _chosen_by_all(scene, _with(scene, middle + low * away, scene.honest.model.buffers))


ATTACKS: Mapping[str, Attack] = {
    "x 1e6": scaled,
    "w -> -w": negated,
    "-5 x update": backwards,
    "noise": noise,
    "crafted mask": crafted_mask,
    "copied mask": copied_mask,
    "changing mask": changing_mask,
    "sybils": sybils,
    "shifted classes": shifted,
    "adaptive": adaptive,
}
# attacks on methods with masks in their uploads
WITH_MASKS = frozenset({"crafted mask", "copied mask", "changing mask"})
# on methods with arrays of classes beside the model
WITH_CLASSES = frozenset({"shifted classes"})


def _with(scene: Scene, params: np.ndarray, buffers: Vector, mask: NDArray[np.uint8] | None = None) -> Upload:
    own = scene.honest
    return dataclasses.replace(
        own, model=Model(params.astype(np.float32), buffers), mask=own.mask if mask is None else mask
    )


def _inside(scene: Scene, params: np.ndarray) -> bool:
    """Return whether the server would accept these parameters from all of them.

    Note the server's memory for that case.
    """
    before = [screening for round, screening in scene.screenings.items() if round < scene.round]
    screening = Screening.restored(before[-1].saved() if before else {})
    uploads = [*scene.others, *[_with(scene, params, scene.honest.model.buffers)] * scene.num_byzantine]
    starts = [*scene.starts, *[scene.sent.params] * scene.num_byzantine]
    buffer = UploadBuffer.of(list(range(len(uploads))), Expected(len(params), 0))
    for k, upload in enumerate(uploads):
        buffer.add(k, Upload(Model(upload.model.params, NOTHING.buffers), num_examples=upload.num_examples), {})
    stacks = {"parameters": buffer.W}
    outliers = screening.measure(scene.round, buffer, stacks, MARGIN * USUAL, lambda k: {"parameters": starts[k]})
    screening.accept(scene.round, buffer.ids)
    scene.screenings[scene.round] = screening
    return all(outlier.client_id < len(scene.others) for outlier in outliers)


def _chosen_by_all(scene: Scene, upload: Upload) -> Upload:
    """Return an upload with a mask that has its ones where most others have theirs."""
    if upload.mask is None or not scene.others:
        return upload
    d = upload.model.params.size
    votes = masks.unpack(upload.mask, d) * 0.5  # its own ones win a tie
    for other in scene.others:
        assert other.mask is not None
        votes += masks.unpack(other.mask, d)
    mask = np.zeros(d, dtype=bool)
    masks.mark_largest(votes, max(1, masks.popcount(upload.mask)), mask)
    return dataclasses.replace(upload, mask=masks.pack(mask))


# The client half ------------------------------------------------------------------------------------------------------


# by client, the model it was sent last, and its honest upload
Heard = dict[int, tuple[Vector, Upload]]


def hostile(
    update: type[LocalUpdate[Any]], attack: Attack, num_byzantine: int, heard: Heard, screenings: dict[int, Screening]
) -> type[LocalUpdate[Any]]:
    """Return a method's client half that lies when it uploads."""

    class Hostile(update):  # type: ignore[misc, valid-type]
        """Trains as the method does."""

        def upload(self, before: Model, after: Model, state: ClientState, ctx: RoundContext[Any]) -> Upload:
            """Apply the attack to the honest upload."""
            honest = super().upload(before, after, state, ctx)
            starts, others = zip(*heard.values(), strict=True)
            sent = ctx.layout.take(before, ctx.shared)
            return attack(Scene(sent, honest, others, num_byzantine, ctx.rng("attack"), starts, ctx.round, screenings))

    return Hostile


def overheard(update: type[LocalUpdate[Any]], heard: Heard) -> type[LocalUpdate[Any]]:
    """Return a method's client half that records its uploads in `heard`, by client."""

    class Overheard(update):  # type: ignore[misc, valid-type]
        """Works as the method does."""

        def upload(self, before: Model, after: Model, state: ClientState, ctx: RoundContext[Any]) -> Upload:
            """Upload honestly."""
            upload: Upload = super().upload(before, after, state, ctx)
            heard[ctx.client_id] = ctx.layout.take(before, ctx.shared).params, upload
            return upload

    return Overheard


def client_app(attack: Attack, num_byzantine: int, config: RunConfig) -> ClientApp:
    """Return a ClientApp for one process. The last `num_byzantine` clients lie, after all others have uploaded."""
    method, heard, screenings = METHODS[config.method], Heard(), dict[int, Screening]()
    data = functools.cache(lambda client_id: open_client(config, client_id))

    def app(message: Message, context: Context) -> Message:
        client_id, half = int(str(context.node_config["partition-id"])), type(method.local_update())
        if client_id < config.num_clients - num_byzantine:
            half = overheard(half, heard)
        else:
            half = hostile(half, attack, num_byzantine, heard, screenings)
        client = CorollaClient(Session(config, dataclasses.replace(method, local_update=half)), client_id, "")
        client.data = data(client_id)
        return Message(client.reply(KINDS[message.metadata.message_type], message.content), reply_to=message)

    return app  # type: ignore[return-value]
