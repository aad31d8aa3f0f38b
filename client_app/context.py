"""What a method's client half is given for one message: the run's model in a trainer, the client's data, what was received."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from client_app.trainer import LocalTrainer
from fl_app import trainable_tensors, weights
from fl_app.config import RunConfig
from fl_app.data import ClientData
from fl_app.errors import UserError
from fl_app.layout import Layout, Model
from fl_app.wire import SEED_KEYS, Download
from strategies.base import Method, RoundContext, Trainer


def build(
    config: RunConfig,
    method: Method[Any],
    data: ClientData,
    download: Download,
    client_id: int,
    directory: Path,
    keys: str,
    run: int,
) -> RoundContext[Any]:
    """Build it. directory: of the client's state. keys: where those of a private run are. run: Flower's id of it.

    Raises UserError if what was received is not of the model that is here, or if the state was trained without a budget.
    """
    weights_file = (
        config.initial_weights if config.train or config.share else ""
    )  # what does not travel comes from it too
    module = method.network(config, **data.info.model_arguments, initial_weights=weights_file)
    layout, initial = Layout.of(module), weights.read(module)
    shared = method.travelling(config, layout)

    @functools.cache
    def start() -> Model:
        """What does not travel starts from."""
        if weights_file or not config.initial_weights or not method.local_update.local_from_file:
            return initial
        return weights.read(method.network(config, **data.info.model_arguments, initial_weights=config.initial_weights))

    theirs = str(download.method.get(trainable_tensors.HASH, ""))
    if layout.constants != theirs:
        raise UserError(
            f"train: the tensors of model {config.model} that do not train are not the server's (sha256 "
            f"{layout.constants[:12] or 'of none'}, the server's {theirs[:12] or 'of none'}); every node needs the same file"
        )
    received = layout.subset(shared)
    if download.model.nbytes and (download.model.params.size, download.model.buffers.size) != (received.d, received.b):
        raise UserError(
            f"received {download.model.params.size} parameters and {download.model.buffers.size} buffer elements, this "
            f"client's model {config.model} shares {received.d} and {received.b}: is it the server's model?"
        )
    local = LocalTrainer(module, config, data, download.round, client_id)
    trainer: Trainer = local
    if config.dp_epsilon:
        from client_app.dp import Budget, NoisyTrainer  # Opacus takes seconds to import

        budget = Budget(directory, config, repeatable=keys == SEED_KEYS, run=run)
        budget.check_state()
        trainer = NoisyTrainer(local, budget=budget, epochs=method.dp_epochs_of(config))
    params, n = config.params, len(data.y_train)
    return RoundContext(config, params, download.round, client_id, layout, shared, start, trainer, n, download.extras)
