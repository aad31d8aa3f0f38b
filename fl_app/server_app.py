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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fl_app import flower_patches, tasks, weights
from fl_app.config import RunConfig, parse
from fl_app.errors import UserError
from fl_app.layout import Layout
from fl_app.metrics import Reports
from fl_app.server import checkpoint, trackers
from fl_app.server.exchange import Exchange
from fl_app.server.progress_protocol import (
    LOG_MARK,
    LineProgress,
    PlainFormatter,
    error_lines,
    folder_line,
    resumed_line,
    stopped_line,
)
from fl_app.server.properties import NORMALIZATION, SAMPLES, Properties, normalization
from fl_app.server.record import lacking, summarize
from fl_app.server.roster import Roster
from fl_app.server.run_folder import (
    DATA,
    DATA_HASH,
    FROZEN,
    NORMALIZED_BY,
    PARTITION_HASH,
    SHAPE,
    TESTED,
    RunFolder,
    read_hashes,
    read_metrics,
)
from fl_app.wire import SIMULATION
from strategies import METHOD_PARAMS, METHODS
from strategies.base import PersonalizedStrategy
from strategies.engine.rounds import Rounds

log = logging.getLogger("corolla")
app = ServerApp()

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
    Raises UserError before anything is written if the model or a client's data does not fit, and after everything is written if an
    evaluation or the final figure is missing. If somebody asked it to, the run ends after a round, without a summary.
    """
    method = METHODS[config.method]
    method.check(config)
    trackers.require(config.resolved)
    tasks.measured(config)
    flower_patches.install()
    exchange = Exchange(grid, config, progress, in_flight)
    roster = exchange.roster
    if config.resume:
        roster.recorded = read_hashes(Path(config.resume))
    progress("clients connected", 0, roster.minimum)
    roster.wait()
    config = dataclasses.replace(
        config, num_clients=roster.num_clients, resolved={**config.resolved, "num-clients": roster.num_clients}
    )
    # again: now it is known of how many clients
    method.check(config)
    assert roster.shape is not None
    module = method.network(config, **roster.shape._asdict(), initial_weights=config.initial_weights)
    layout, initial = Layout.of(module), weights.read(module)
    shared = method.travelling(config, layout)
    if config.resume:
        folder = RunFolder.resume(config)
    else:
        facts = {
            SHAPE: roster.shape._asdict(),
            FROZEN: layout.constants,
            TESTED: method.tested(config),
            **_data_facts(roster),
        }
        folder = RunFolder.create(config, uuid.uuid4().hex[:12], method.drawn, facts)
    try:
        log.info("%s", folder_line(folder.path))
        counted = method.reports_counts(config)
        folder.write_clients(_facts(roster.properties, counted))
        strategy = method.strategy(config, config.params, layout, initial, shared, folder)
        strategy.reports = Reports(method.reports)
        rounds = strategy.rounds(exchange)
        if config.resume:
            saved = checkpoint.load_latest(folder.path)
            rounds.restore(saved)
            if strategy.round > config.num_server_rounds or (
                strategy.round == config.num_server_rounds and "evaluation" not in saved.meta["record"]
            ):
                raise UserError(
                    f"num-server-rounds: the run has {strategy.round} rounds already, got {config.num_server_rounds}"
                )
            folder.continue_with(config)
            folder.rewind(strategy.round, saved.meta["record"])
            log.info("%s", resumed_line(strategy.round))
        here = () if os.environ.get(SIMULATION) else trackers.wanted(config.resolved)
        with trackers.following(here, folder.path, strategy.round, log.warning):
            if tested := method.tested(config):
                log.info("%s: %s", config.method, tested)
            rounds.run()
            # again: some may have come later
            folder.write_clients(_facts(roster.properties, counted))
            if strategy.round < config.num_server_rounds:
                log.info("%s", stopped_line(strategy.round))
                return folder
            save_models(strategy, rounds, folder)
            records = list(read_metrics(folder.path))
            folder.write_summary(summarize(config, folder.experiment, records))
            stateful = any(rounds.versions.values())
            if not config.keep_state and stateful:
                folder.note_state_removed()
            if not config.keep_state and (stateful or config.private or config.dp_epsilon):
                rounds.forget()
            if missing := lacking(config, records):
                raise UserError(f"{missing}\nall else of the run is in {folder.path}")
            return folder
    finally:
        folder.close()


def _facts(properties: Mapping[int, Properties], counted: bool) -> Mapping[int, Properties]:
    """What clients said of themselves, without numbers of samples that are none."""
    return {i: {name: said[name] for name in said if counted or name not in SAMPLES} for i, said in properties.items()}


def _data_facts(roster: Roster) -> dict[str, Any]:
    """Return what run.json keeps of data that all clients share: hashes, and what normalises inputs where clients tell it."""
    if roster.hashes is None:
        return {}
    told = (properties.get(NORMALIZATION) for _, properties in sorted(roster.properties.items()))
    constants = normalization(next((text for text in told if text), None))
    facts = {DATA_HASH: roster.hashes.data, PARTITION_HASH: roster.hashes.partition}
    return {DATA: facts | ({NORMALIZED_BY: constants} if constants else {})}


def save_models(strategy: PersonalizedStrategy[Any], rounds: Rounds, folder: RunFolder) -> None:
    """Write the final models: global, per client where the server holds them, and collected personal models."""
    config = strategy.config
    if strategy.has_global_model():
        folder.save_model("global", strategy.exported_layout(strategy.layout), strategy.exported_global())
    if config.collect_personal_models:
        whole = strategy.exported_layout(strategy.full_layout)
        for client_id, model in rounds.collect(config.num_server_rounds).items():
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
        handler.setFormatter(PlainFormatter(f"{LOG_MARK}%(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
