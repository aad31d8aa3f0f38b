"""Flower's entry point on the server, `fl_app.server_app:app`, and the composition root.

This is the one place that joins config, model, method, clients and run folder.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from fl_app import debugging, log_format, software, tasks, weights
from fl_app.config import RunConfig, parse
from fl_app.errors import UserError, counted, listed
from fl_app.layout import Layout, Model
from fl_app.machine import available_memory
from fl_app.metrics import kept
from fl_app.model_names import ModelNames
from fl_app.privacy.secure_random import secret
from fl_app.server import checkpoint, disk, trackers, trail
from fl_app.server.arrivals import clock_of
from fl_app.server.events import (
    Failed,
    Finished,
    JsonLines,
    ProgressEvents,
    Started,
    Stopped,
    StreamFormatter,
    begin_logs,
    is_no_progress,
    tell,
)
from fl_app.server.properties import INPUT, NORMALIZATION, SAMPLES, Properties, input_facts, normalization
from fl_app.server.record import lacking, one_class_line, summarize
from fl_app.server.run_folder import (
    DATA,
    DATA_HASH,
    FROM,
    FROZEN,
    INITIAL,
    NORMALIZED_BY,
    PARTITION_HASH,
    READ_BY,
    SHAPE,
    SPLIT,
    STATE_REMOVED,
    SUMMARY,
    TESTED,
    RunFolder,
    called_in,
    folder_of,
    read_about,
    read_hashes,
    read_metrics,
    refuse_fewer_rounds,
)
from fl_app.server.start import (
    Origin,
    Start,
    goes_on_line,
    names_of_data,
    normalization_of,
    of_model,
    origin_of,
    private_names,
    recorded_scaling,
    start_of,
)
from fl_app.transport import app_bundle, flower_patches
from fl_app.transport.client_registry import ClientRegistry, clients_to_meet
from fl_app.transport.exchange import Exchange
from fl_app.transport.flower import Context, Grid, ServerApp
from fl_app.transport.inprocess import InProcessGrid
from fl_app.transport.wire import SHA256, SIMULATION, hashes
from strategies import METHOD_PARAMS, METHODS
from strategies.base import PersonalizedStrategy, leave_network
from strategies.engine import late
from strategies.engine.estimates import disk_estimate, fitting_limit, memory_estimate
from strategies.engine.rounds import Rounds

log = logging.getLogger("corolla")
app = ServerApp()

# Most bytes of unanswered messages if clients take turns on this machine.
SIMULATION_IN_FLIGHT = 512e6

Progress = Callable[[str, int, int], None]


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment that the run config describes."""
    configure_logging()
    debugging.refuse_breakpoints()
    simulated = bool(os.environ.get(SIMULATION))
    in_flight = SIMULATION_IN_FLIGHT if simulated else math.inf
    try:
        run(grid, parse(context.run_config, METHOD_PARAMS), ProgressEvents(), in_flight, hears=simulated)
    except Exception as error:
        tell(failed := Failed.of(named := _named(error)))
        if failed.kind == "own-code":
            debugging.show_trace(debugging.trace_of(error))
        if named is not error:
            raise named from error
        raise


def run(
    grid: Grid, config: RunConfig, progress: Progress, in_flight: float = SIMULATION_IN_FLIGHT, hears: bool = True
) -> RunFolder:
    """Wait for clients, build the model from their properties, run the method, write the results.

    in_flight: bytes of unanswered messages beyond which no further message is sent. hears: whether clients run on this
    machine, so that their output and the tracebacks of their errors are logged.

    Raises UserError before anything is written if the model or a client's data does not fit. Raises UserError after
    everything is written if an evaluation or the final figure is missing. If a user asks it to stop, the run ends after
    a round, without a summary.
    """
    method = METHODS[config.method]
    method.check(config)
    _check_time(config, simulated=hears)
    trackers.require(config.resolved, here=not os.environ.get(SIMULATION))
    tasks.measured(config)
    flower_patches.install()
    exchange = Exchange(grid, config, progress, in_flight, hears)
    registry = exchange.registry
    registry.expect(clients_to_meet(grid, config, method.needs_all))
    if config.resume:
        registry.recorded = read_hashes(Path(config.resume))
    progress("clients connected", 0, registry.minimum)
    registry.wait()
    config = dataclasses.replace(
        config, num_clients=registry.num_clients, resolved={**config.resolved, "num-clients": registry.num_clients}
    )
    # again: the number of clients is known here
    method.check(config)
    assert registry.agreed.shape is not None
    # for the run's log, which begins with its folder
    remarks: list[str] = registry.notes()
    scaled = _told_scaling(registry)
    start = start_of(config, registry, tuple(scaled["target-shift"]) if scaled else ())
    module = method.network(
        config,
        **registry.agreed.shape._asdict(),
        initial_weights=config.initial_weights,
        told=remarks.append,
        names=start.names if start else None,
    )
    remarks += start.remarks if start else []
    layout, initial = Layout.of(module), weights.read(module)
    origin = _origin(config, registry, layout)
    remarks += [goes_on_line(origin, config, normalization_of(config, registry))] if origin else []
    # its values are in `initial`, which the strategy keeps as long as it needs it
    if type(grid) is InProcessGrid:
        leave_network(module)
    del module
    shared = method.travelling(config, layout)
    trial = method.server(config, layout, initial, shared, RunFolder(Path(), ""))
    late.check_forms(trial)
    clock_of(config, layout.d)
    config = _fitted(config, grid, trial, remarks.append)
    place = Path(config.resume) if config.resume else folder_of(config, config.run_name)
    disk.Disks(place, disk_estimate(trial, trial.protocol.expected())).refuse()
    del trial
    names = start.names if start else private_names(config)
    folder, agreed = _opened_folder(config, registry, layout, names, start, origin)
    logs = begin_logs(folder.path)
    try:
        counted = method.reports_counts(config)
        folder.write_clients(_facts(registry.properties, counted))
        exchange.note = functools.partial(trail.add, folder.path)
        strategy = method.server(config, layout, initial, shared, folder)
        del initial
        scaling = {NORMALIZATION: json.dumps(agreed)} if agreed else {}
        strategy.told = scaling | (dict(start.told) if start else of_model(names) if names else {})
        rounds = strategy.rounds(exchange)
        if config.resume:
            _restore(rounds, strategy, folder)
        elif origin:
            origin.give(strategy)
            rounds.first = origin.first_messages()
        del origin
        done = strategy.state.round
        tell(Started(folder=str(folder.path), method=config.method, round=done, rounds=config.num_server_rounds))
        for line in remarks:
            log.warning("%s", line)
        here = () if os.environ.get(SIMULATION) else trackers.wanted(config.resolved)
        printed = debugging.printed_lines(lambda line: debugging.show_printed("server", line))
        with trackers.following(here, folder.path, done, tell), printed:
            if tested := method.tested_in(config):
                log.info("%s: %s", config.method, tested)
            log.info("model %s: %s", config.model, parts_line(layout))
            if unused := layout.parts["unused"]:
                log.warning(
                    "model %s: no gradient reaches %s; they travel as the method's other tensors do, unless the key share "
                    "leaves them out",
                    config.model,
                    listed(unused),
                )
            strategy.start(exchange)
            # again, for clients that came later
            folder.write_clients(_facts(registry.properties, counted))
            if strategy.state.round < config.num_server_rounds and not rounds.ended_early:
                tell(Stopped(round=strategy.state.round))
                return folder
            _finish(rounds, strategy, folder)
            return folder
    except Exception as error:
        for one in logs:
            one.ended_by(_named(error))
        raise
    finally:
        for one in logs:
            one.close()
        folder.close()


def parts_line(layout: Layout) -> str:
    """Return the layers of a model's body and classifier as one line, or why the model cannot be split."""
    if layout.split.fault or not layout.classifier:
        return f"no body and classifier, because {layout.split.fault or 'the classifier does not train'}"

    def layers(names: list[str]) -> str:
        return listed(list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))) or "none"

    return f"body {layers(layout.parts['body'])}; classifier {layers(layout.parts['classifier'])}"


def _check_time(config: RunConfig, simulated: bool) -> None:
    """Raise UserError if time is simulated where clients answer in real time, or the other way round."""
    if config.is_timed and not simulated:
        raise UserError(
            key="speeds", rule="a deployment's clients answer in real time; leave it none", value=config.speeds
        )
    if config.replay and not simulated:
        raise UserError(
            key="replay", rule="a run is repeated in a simulation; leave out --superlink", value=config.replay
        )
    if config.closes_early and simulated and not (config.is_timed or config.replay):
        name = "quorum" if config.quorum < 1 else "round-deadline"
        raise UserError(key=name, rule="who answers first in a simulation follows from the key speeds; set it too")


def _named(error: Exception) -> Exception:
    """Return the error that users see: Flower's errors do not name a full disk."""
    full = "" if isinstance(error, UserError) else disk.full_database()
    return UserError(full) if full else error


def _fitted(
    config: RunConfig, grid: Grid, strategy: PersonalizedStrategy[Any], told: Callable[[str], None]
) -> RunConfig:
    """Return the config, with a smaller `server-memory-limit` if this machine has too little memory for the given one.

    strategy: a new one. told: gets a line about a smaller limit. Raises UserError if the memory of a run whose clients
    train on this machine cannot fit.
    """
    ray = not isinstance(grid, InProcessGrid)
    at_once = grid.clients_at_once if isinstance(grid, InProcessGrid) else int(os.environ.get(SIMULATION) or 0)
    if not at_once:
        # a deployment, or clients on other machines
        return config
    at_once = min(at_once, config.cohort_size(config.num_clients))
    need = memory_estimate(strategy, strategy.protocol.expected(), at_once, ray=ray)
    limit = fitting_limit(strategy, need, available_memory(), type(grid) is InProcessGrid)
    if limit != config.server_memory_limit:
        told(f"server-memory-limit: lowered to {limit:.3g} GB, because this machine has no more memory left")
    return dataclasses.replace(config, server_memory_limit=limit)


def _opened_folder(
    config: RunConfig,
    registry: ClientRegistry,
    layout: Layout,
    names: ModelNames | None,
    start: Start | None,
    origin: Origin | None,
) -> tuple[RunFolder, dict[str, list[float]] | None]:
    """Return the run's folder, new or resumed, and the mean and std to send: those that sites agreed on, or the model's own.

    Raises UserError as `RunFolder.create` and `RunFolder.resume` do.
    """
    if config.resume:
        folder = RunFolder.resume(config)
        return folder, _recorded_scaling(folder, registry, start)
    assert registry.agreed.shape is not None
    method, agreed = METHODS[config.method], _sent_scaling(registry, start)
    if origin and config.normalizes_by_initial:
        agreed = recorded_scaling(origin.path)
    facts = {
        SHAPE: registry.agreed.shape._asdict(),
        SPLIT: layout.parts,
        FROZEN: layout.constants,
        TESTED: method.tested_in(config),
        **({FROM: origin.recorded} if origin else {}),
        **({INITIAL: names._asdict()} if names else {}),
        **_data_facts(registry, agreed),
    }
    return RunFolder.create(config, secret().hex(), method.drawn, facts), agreed


def _restore(rounds: Rounds, strategy: PersonalizedStrategy[Any], folder: RunFolder) -> None:
    """Continue from the last checkpoint.

    Raises UserError, before the folder changes, if the run has more rounds already, or with `strict` if other software
    wrote the checkpoint.
    """
    config, saved = strategy.config, checkpoint.load_latest(folder.path)
    if differs := software.differences(saved.meta[checkpoint.SOFTWARE], software.used()):
        line = f"resume: {differs} as in the rounds before; the digest may differ from that of an undisturbed run"
        if config.strict:
            raise UserError(f"{line} (--strict)")
        log.warning("%s", line)
    rounds.restore(saved)
    refuse_fewer_rounds(config, strategy.state.round, may_be_equal="evaluation" in saved.meta["record"])
    folder.continue_with(config, strategy.state.round)
    folder.rewind(strategy.state.round, saved.meta["record"])
    log.info("resumed after round %d", strategy.state.round)


def _finish(rounds: Rounds, strategy: PersonalizedStrategy[Any], folder: RunFolder) -> None:
    """Write models and summary, and let clients remove their state.

    Raises UserError after that if an evaluation or the final figure is missing.
    """
    config = strategy.config
    rounds.restore_best()
    lacking_models = save_models(strategy, rounds, folder)
    records = list(read_metrics(folder.path))
    summary = summarize(config, folder.experiment, records, rounds.ended_early)
    # a run with this file is complete
    folder.write(SUMMARY, json.dumps(summary, indent=2, allow_nan=False) + "\n")
    if line := one_class_line(records, config.learning_rate):
        log.warning("%s", line)
    stateful = any(rounds.versions.values())
    if not config.keep_state and stateful:
        # it cannot be resumed any more
        folder.note(**{STATE_REMOVED: True})
    if lacking_models:
        how = "collect-personal-models = true collects them at the end of a run, or keep-state = true after it"
        if config.keep_state or not stateful:
            how = f"--resume {folder.path} --set collect-personal-models=true collects them"
        log.info("models/ lacks the models of %s, which only they have: %s", counted(lacking_models, "client"), how)
    # clients of a private run delete its keys in any case
    if config.private or (not config.keep_state and (stateful or config.dp_epsilon)):
        rounds.forget()
    if missing := lacking(config, records, called_in(folder.path)):
        raise UserError(f"{missing}\nthe rest of the run is in {folder.path}")
    tell(Finished(summary=summary))


def _facts(properties: Mapping[int, Properties], counted: bool) -> Mapping[int, Properties]:
    """Return clients' properties.

    counted: whether clients report their numbers of samples; if not, they are left out.
    """
    return {i: {name: said[name] for name in said if counted or name not in SAMPLES} for i, said in properties.items()}


def _origin(config: RunConfig, registry: ClientRegistry, layout: Layout) -> Origin | None:
    """Return the run that a new run goes on from. All clients introduce themselves for this, to be known by name."""
    if not config.from_run or config.resume:
        return None
    registry.query(registry.client_ids)
    assert registry.agreed.shape is not None
    return origin_of(config, registry.properties, registry.agreed.shape, names_of_data(config, registry), layout)


def _sent_scaling(registry: ClientRegistry, start: Start | None) -> dict[str, list[float]] | None:
    """Return the scaling that a run's server sends: the model's own, or that which sites agreed on. None: it sends none."""
    return (start.scaling if start else None) or registry.agreed_scaling()


def _recorded_scaling(
    folder: RunFolder, registry: ClientRegistry, start: Start | None
) -> dict[str, list[float]] | None:
    """Return the scaling that the server of a resumed run sent when it started; None if it sends none.

    Raises UserError if the run's folder does not have it.
    """
    if not registry.config.normalizes_by_initial and _sent_scaling(registry, start) is None:
        return None
    recorded = normalization(json.dumps(read_about(folder.path).get(DATA, {}).get(NORMALIZED_BY)))
    if recorded is None:
        raise UserError(
            key="resume",
            rule=f"{folder.path} does not have the mean and std that its sites agreed on ({NORMALIZED_BY})",
        )
    return recorded


def _data_facts(registry: ClientRegistry, agreed: dict[str, list[float]] | None) -> dict[str, Any]:
    """Return run.json's facts about data: hashes of shared data, and the normalization where it is known.

    agreed: the scaling that the server sends.
    """
    known = [input_facts(properties.get(INPUT)) for _, properties in sorted(registry.properties.items())]
    first = next((facts for facts in known if facts), None)
    read_by = {READ_BY: first} if first else {}
    if registry.agreed.hashes is None:
        found = ({NORMALIZED_BY: agreed} if agreed else {}) | read_by
        return {DATA: found} if found else {}
    constants = agreed or _told_scaling(registry)
    facts = {DATA_HASH: registry.agreed.hashes.data, PARTITION_HASH: registry.agreed.hashes.partition}
    return {DATA: facts | ({NORMALIZED_BY: constants} if constants else {}) | read_by}


def _told_scaling(registry: ClientRegistry) -> dict[str, list[float]] | None:
    """Return the scaling of the data that clients share; None if none of them sends it."""
    told = (properties.get(NORMALIZATION) for _, properties in sorted(registry.properties.items()))
    return normalization(next((text for text in told if text), None))


def save_models(strategy: PersonalizedStrategy[Any], rounds: Rounds, folder: RunFolder) -> int:
    """Write the final models: the global one, and clients' models, collected or as the server holds them.

    Return the number of clients without a model here that were not evaluated with the global one.
    """
    config, form = strategy.config, strategy.form_of_exports
    if (model := strategy.exported()) is not None:
        folder.save_model("global", form.layout(strategy, strategy.layout), model)
    if config.collect_personal_models:
        whole = form.layout(strategy, strategy.full_layout)
        for client_id, model in rounds.collect(strategy.state.round).items():
            folder.save_model(f"client-{client_id}", whole, model)
        return 0
    layout = form.layout(strategy, strategy.layout)
    held = {i: own for i in sorted(strategy.state.clients) if (own := strategy.exported(i)) is not None}
    rows = kept(list(read_metrics(folder.path))).get("evaluation", {}).get("clients", {})
    if every := form.choices(strategy):
        held |= _used(every, rows)
    for client_id, own in held.items():
        folder.save_model(f"client-{client_id}", layout, own)
    # clients of a run with a promise send no hashes
    others = {i: row for i, row in rows.items() if int(i) not in held and SHA256 in row}
    return len(others) - len(_used([] if model is None else [model], others))


def _used(models: Iterable[Model], rows: Mapping[str, Mapping[str, Any]]) -> dict[int, Model]:
    """Return the one of these models that each client was evaluated with, by the hashes in an evaluation's rows."""
    known = [(hashes(model), model) for model in models]
    return {int(i): model for i, row in rows.items() for of, model in known if of.items() <= row.items()}


def configure_logging() -> None:
    """Log to standard error, in any host of the app. A mark separates Corolla's lines from Flower's and Ray's."""
    if not log.handlers:
        handler, as_events = logging.StreamHandler(sys.stderr), app_bundle.is_read_by_command()
        handler.setFormatter(JsonLines() if log_format.is_json() else StreamFormatter(as_events))
        if not as_events:
            handler.addFilter(is_no_progress)
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
