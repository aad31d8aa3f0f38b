"""Flower's entry point on the server, `fl_app.server_app:app`, and the composition root: the one place that joins config,
model, method, clients and run folder.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import sys
import uuid
from collections.abc import Callable
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fl_app import received, weights
from fl_app.config import RunConfig, parse
from fl_app.errors import UserError
from fl_app.layout import Layout
from fl_app.server import checkpoint, events
from fl_app.server.exchange import Exchange
from fl_app.server.log_lines import LOG_MARK, LineProgress, error_lines, folder_line, resumed_line
from fl_app.server.record import summarize
from fl_app.server.roster import Roster
from fl_app.server.run_folder import RunFolder, read_metrics
from strategies import METHOD_PARAMS, METHODS
from strategies.base import PersonalizedStrategy

log = logging.getLogger("corolla")
app = ServerApp()

SIMULATION = "COROLLA_SIMULATION"  # set in the environment where all clients take turns on this machine
SIMULATION_IN_FLIGHT = 512e6

Progress = Callable[[str, int, int], None]


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment the run config describes."""
    configure_logging()
    try:
        in_flight = SIMULATION_IN_FLIGHT if os.environ.get(SIMULATION) else math.inf
        run(grid, parse(context.run_config, METHOD_PARAMS), LineProgress(), in_flight)
    except UserError as error:
        for line in error_lines(error):
            log.error("%s", line)
        raise


def run(grid: Grid, config: RunConfig, progress: Progress, in_flight: float = math.inf) -> RunFolder:
    """Wait for clients, build the model from what they say about their data, run the method, write the results.

    in_flight: bytes of unanswered messages beyond which no further one is sent.
    Raises UserError before anything is written if the model or a client's data does not fit.
    """
    if config.tensorboard:
        events.require_tensorboard()
    received.install()
    exchange = Exchange(grid, config, progress, in_flight)
    roster = exchange.roster
    roster.wait()
    config = dataclasses.replace(
        config, num_clients=roster.num_clients, resolved={**config.resolved, "num-clients": roster.num_clients}
    )
    method = METHODS[config.method]
    module = method.network(config, **common_shape(roster), initial_weights=config.initial_weights)
    layout, initial = Layout.of(module), weights.read(module)
    shared = method.shared(layout, config.params)
    if config.resume:
        folder = RunFolder.resume(config)
    else:
        folder = RunFolder.create(config, uuid.uuid4().hex[:12], method.figures)
    try:
        log.info("%s", folder_line(folder.path))
        folder.write_clients(roster.properties)
        strategy = method.strategy(config, config.params, layout, initial, shared, folder)
        if config.resume:
            saved = checkpoint.load_latest(folder.path)
            strategy.restore(saved)
            if strategy.round > config.num_server_rounds or (
                strategy.round == config.num_server_rounds and "evaluation" not in saved.meta["record"]
            ):
                raise UserError(f"num-server-rounds: the run has {strategy.round} rounds already, got {config.num_server_rounds}")
            folder.continue_with(config)
            folder.rewind(strategy.round, saved.meta["record"])
            log.info("%s", resumed_line(strategy.round))
        if config.tensorboard:
            folder.events = events.EventFiles(folder.path, strategy.round)
        strategy.start(exchange)
        folder.write_clients(roster.properties)  # again: some may have come later
        save_models(strategy, exchange, folder)
        folder.write_summary(summarize(config, folder.experiment, list(read_metrics(folder.path))))
        return folder
    finally:
        folder.close()


def common_shape(roster: Roster) -> dict[str, int]:
    """Return in_channels, num_classes, image_size, on which all clients must agree (UserError names those that differ)."""
    shapes: dict[tuple[int, ...], list[int]] = {}
    for client_id, properties in sorted(roster.properties.items()):
        shape = tuple(int(properties[name]) for name in ("in-channels", "num-classes", "image-size"))
        shapes.setdefault(shape, []).append(client_id)
    if len(shapes) > 1:
        lines = [f"  clients {ids}: {s[0]} channels, {s[1]} classes, {s[2]} pixels" for s, ids in shapes.items()]
        raise UserError("clients' data must have the same channels, classes and image size:\n" + "\n".join(lines))
    in_channels, num_classes, image_size = next(iter(shapes))
    return {"in_channels": in_channels, "num_classes": num_classes, "image_size": image_size}


def save_models(strategy: PersonalizedStrategy[Any], exchange: Exchange, folder: RunFolder) -> None:
    """Write the final models: global, per client where the server holds them, and collected personal models."""
    config = strategy.config
    if strategy.has_global_model():
        folder.save_model("global", strategy.exported_layout(strategy.layout), strategy.exported_global())
    if config.collect_personal_models:
        whole = strategy.exported_layout(strategy.full_layout)
        for client_id, model in strategy.collect(exchange, config.num_server_rounds).items():
            folder.save_model(f"client-{client_id}", whole, model)
    else:
        layout = strategy.exported_layout(strategy.layout)
        for client_id in sorted(strategy.personal):
            held = strategy.personal_model(client_id)
            if held is not None:
                folder.save_model(f"client-{client_id}", layout, held)


def configure_logging() -> None:
    """Log to standard error, whatever hosts the app; the mark tells our lines from Flower's and Ray's."""
    if not log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(f"{LOG_MARK}%(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
