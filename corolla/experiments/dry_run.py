"""Output of `corolla run --dry-run`: the resolved config and the bytes of a round, without data, clients or training."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fl_app.config import RunConfig
from fl_app.layout import Layout, Model
from fl_app.server import kept_uploads
from fl_app.server.disk import PARTS
from fl_app.server.run_folder import RunFolder
from fl_app.sources import named_data
from fl_app.transport import wire

Shape = Mapping[str, Any]  # arguments of a model's builder


@dataclass(frozen=True)
class RoundBytes:
    """Bytes of arrays on the wire per client, the number of clients in a round, and the bytes on the disk of kept uploads.

    upload, download: the mean over clients if each holds a part of the model (`Method.submodel`).
    kept: the largest number of bytes of a kept round (`keep-uploads`). kept_rounds: the rounds that are kept.
    """

    participants: int
    upload: int
    download: int
    kept: int
    kept_rounds: int


def known_shape(config: RunConfig) -> Shape | None:
    """Return the arguments of a model's builder for a data set with a name; None for the user's own data."""
    data = named_data(config.dataset)
    if data is None:
        return None
    size = config.image_size or data.image_size
    return {"in_channels": data.in_channels, "num_classes": data.num_classes, "image_size": size}


def round_bytes(config: RunConfig, method: Any, shape: Shape) -> RoundBytes:
    """Return the bytes of the last round, computed by the server half: the messages it would send and expect.

    method: the registered Method of config.method. shape: arguments of the model's builder. Raises UserError if the
    model does not fit the images, or the method does not fit the model.
    """
    method.check(config)
    layout = Layout.of(method.network(config, **shape))
    strategy = method.server(
        config,
        layout,
        Model(np.zeros(layout.d, np.float32), np.zeros(layout.b, np.float32)),
        method.travelling(config, layout),
        RunFolder(Path(), ""),
    )
    strategy.state = dataclasses.replace(strategy.state, round=config.num_server_rounds - 1)
    turn = strategy.protocol.turn = dataclasses.replace(strategy.protocol.turn, round=config.num_server_rounds)
    strategy.begin(turn)
    upload = strategy.protocol.expected().blank()
    # each client may hold another part of the model
    clients = range(min(config.num_clients, PARTS)) if strategy.submodel_of(0, turn) is not None else range(1)
    uploads = [wire.encode_upload(strategy.protocol.expected_from(i).blank()) for i in clients]
    downloads = [wire.encode_download(strategy.download_for(i, turn, "train")) for i in clients]
    n = len(
        strategy.sample_clients(strategy.state, list(range(config.num_clients)), dataclasses.replace(turn, round=1))
    )
    some = [strategy.download(strategy.state, i, turn).model.params for i in (0, config.num_clients - 1)]
    return RoundBytes(
        participants=n,
        upload=sum(map(wire.payload_bytes, uploads)) // len(clients),
        download=sum(map(wire.payload_bytes, downloads)) // len(clients),
        kept=kept_uploads.size(
            n,
            upload.model.params.size,
            upload.model.buffers.size,
            0 if upload.mask is None else upload.mask.size,
            n if strategy.holds.models or some[0] is not some[1] else 1,
        ),
        kept_rounds=sum(map(config.keeps_uploads_of, range(1, config.num_server_rounds + 1))),
    )
