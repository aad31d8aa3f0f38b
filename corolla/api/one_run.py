"""One run from options to run folder: configured, checked, started on its backend, and shown while it runs."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.markup import escape

from corolla.api import settings
from corolla.api.checks import check_locally, check_resources, check_resumable, network_of, warn_of_settings
from corolla.api.console import command, console, errors, warn
from corolla.api.live import Display, answered, log_to
from corolla.api.settings import (
    Backend,
    Scale,
    look_for_plugins,
    name_plugins,
    number_of_clients,
    read_preset,
    ready,
    resolve,
    scaled,
    with_clients,
)
from corolla.api.waiting import Submit, waiting
from corolla.experiments.runs import RecordedRun, elsewhere
from fl_app import debugging, plugins
from fl_app.config import RunConfig, ids_in
from fl_app.config.rules import SIMULATED
from fl_app.errors import RunFailed, UserError, counted
from fl_app.keys import Scalar, specs, without_others
from fl_app.server import arrivals
from fl_app.server.events import Failed, ProgressEvents
from fl_app.server.record import lacking
from fl_app.server.run_folder import (
    FROM,
    MODELS,
    PLUGINS,
    called_in,
    changed_keys,
    check_free,
    check_unchanged,
    ended_by_full_disk,
    is_run,
    read_about,
    read_metrics,
    refuse_fewer_rounds,
)
from fl_app.sources import NODE

if TYPE_CHECKING:
    from corolla.experiments.launch import RayCluster
    from strategies.base.handed_on import SharedNetwork

# (config, parsed, verbose, where, until) -> the run's folder; see `run_one`
Simulate = Callable[..., Path | None]

# allowed values of a run's options, for the command and the Python keywords
CLIENTS = click.IntRange(min=1)
CPUS = click.FloatRange(min=0.1)
GPUS = click.FloatRange(min=0)
AT_ONCE = click.IntRange(min=0)
OPTION_TYPES: Mapping[str, click.ParamType[Any]] = {
    "clients": CLIENTS,
    "cpus_per_client": CPUS,
    "gpus_per_client": GPUS,
    "clients_at_once": AT_ONCE,
    "scale": click.Choice([scale.value for scale in Scale]),
    "backend": click.Choice([backend.value for backend in Backend]),
}


@dataclasses.dataclass(frozen=True)
class LaunchOptions:
    """Options of `corolla run` other than config keys: where and how a run runs."""

    clients: int | None = None
    superlink: str | None = None
    output_dir: str | None = None
    cpus_per_client: float = 1
    gpus_per_client: float = 0
    in_process: bool = False
    resume: Path | None = None
    scale: Scale = Scale.full
    verbose: bool = False
    ray_address: str | None = None
    clients_at_once: int = 1
    overwrite: bool = False
    backend: Backend | None = None
    strict: bool = False
    replay: Path | None = None
    from_run: Path | None = None
    without: Sequence[str | int] = ()


SET_BY_US = {
    "plugins": "set by `corolla run` from the files that method, model and task name",
    "scale": "set by `corolla run --scale`",
    "replay": "set by `corolla run --replay`",
    "from-run": "set by `corolla run --from`",
    "without": "set by `corolla run --without`",
}


# keys that decide whether another key has an effect
REFERRED_TO = {"method", "num-server-rounds", "dataset", "partition"}


def configure(preset: str | None, given: dict[str, Scalar], how: LaunchOptions) -> tuple[dict[str, Scalar], RunConfig]:
    """Return a run's config, flat and parsed, from a preset or .toml file, the given keys and the options.

    Warns of settings without effect. Raises UserError for invalid input.
    """
    where = {"--superlink": how.superlink, "--in-process": how.in_process, "--ray-address": how.ray_address is not None}
    if len(named := [option for option, chosen in where.items() if chosen]) > 1:
        raise UserError(f"{' and '.join(named)} exclude each other")
    if how.in_process or how.superlink is not None:
        settings.refuse_beside(named[0], how.backend)
    settings.refuse_unable(how.backend, how.ray_address, how.gpus_per_client)
    if how.clients_at_once != 1 and not how.in_process:
        raise UserError(f"--clients-at-once needs --in-process, got {how.clients_at_once} without it")
    if how.in_process and how.gpus_per_client:
        raise UserError(
            key="--gpus-per-client",
            rule="not with --in-process: set the key device for where clients train, and "
            f"--clients-at-once for how many train together, got {how.gpus_per_client:g}",
        )
    if how.in_process and how.cpus_per_client != 1:
        raise UserError(
            key="--cpus-per-client",
            rule=f"not with --in-process, where all clients run in one process, got {how.cpus_per_client:g}",
        )
    base: dict[str, Scalar] = {}
    if how.resume:
        base = opened("resume", how.resume).settings | {"resume": str(how.resume.resolve())}
        if given_too := _beside(preset, how, ("--output-dir", how.output_dir is not None)):
            raise UserError(
                f"--resume takes its configuration from the run folder {how.resume}: leave out {' and '.join(given_too)}; "
                "keys can be changed (--set)"
            )
    if how.replay:
        base = replayed_config(preset, how)
    if how.from_run:
        also = ("--resume", how.resume is not None), ("--replay", how.replay is not None)
        if beside := _beside(preset, how, *also):
            raise UserError(
                f"--from takes its configuration from the run {how.from_run}: leave out {' and '.join(beside)}; keys can be "
                "changed (--set)"
            )
        base = next_config(how.from_run)
    given = with_clients(given, how.clients)
    for key, by in SET_BY_US.items():
        if key in given:
            raise UserError(key=key, rule=f"{by}; it cannot be given", value=given[key])
    if not how.resume and not how.replay and not how.from_run:
        base = scaled(read_preset(preset) if preset else {}, how.scale)
    if how.strict and not how.resume:
        raise UserError("--strict needs --resume: it refuses to continue with other software")
    if how.resume and (how.overwrite or given.get("overwrite")):
        raise UserError("--resume and --overwrite exclude each other")
    options: dict[str, Scalar] = {} if how.output_dir is None else {"output-dir": how.output_dir}
    if how.overwrite:
        options["overwrite"] = True
    if how.strict:
        options["strict"] = True
    if how.without:
        options["without"] = _gone(how, base)
    config = ready(without_others({"output-dir": "runs", **base, **given, **options}, [str(base.get("method"))]))
    if how.superlink is None:
        config["num-clients"] = number_of_clients(config)
    parsed = resolve(config)
    # it may have fewer rounds than the other run
    if how.replay and (changed := changed_keys(base, parsed)):
        lines = "\n".join(changed)
        raise UserError(
            f"replay: these keys must be as in {how.replay}, because its arrivals follow from them:\n{lines}"
        )
    # no warning for values that another run, or a shipped preset, itself sets, while what they depend on is the preset's too
    shipped = bool(preset) and not str(preset).endswith(".toml") and not given.keys() & REFERRED_TO
    warn_of_settings(given, [(parsed, given if how.resume or how.from_run or shipped else {**base, **given})])
    name_plugins([config])
    return config, parsed


def start(config: dict[str, Scalar], parsed: RunConfig, how: LaunchOptions) -> Path | None:
    """Check a run, then run or resume it. Return the folder's path; None if Flower did not report it.

    Raises UserError before anything is written if the run is invalid, RunFailed if it does not finish.
    """
    if how.resume:
        check_unchanged(how.resume, parsed)
        for copy in sorted((how.resume / PLUGINS).rglob("*.py")):
            here = Path(copy.relative_to(how.resume / PLUGINS))
            if here.is_file() and here.read_bytes() != copy.read_bytes():
                warn(f"{here} has changed since the run started; the run uses its copy {copy}")
        if is_finished(how.resume, parsed):
            if missing := lacking(parsed, list(read_metrics(how.resume)), called_in(how.resume)):
                raise UserError(f"this run is complete: {missing}")
            summary = RecordedRun(how.resume).summary
            early, models = summary.get("stopped-early"), how.resume / MODELS
            has_models = all((models / f"client-{i}.safetensors").is_file() for i in range(summary["num-clients"]))
            if has_models or not parsed.collect_personal_models:
                console.print(
                    "this run is complete; there is nothing to resume" + (f" ({escape(early)})" if early else "")
                )
                return how.resume
        check_resumable(how.resume, parsed, here=how.superlink is None)
    if how.superlink is not None:
        return run_deployed(config, how.superlink, how.verbose)
    # a sweep resumes a run by its config key `resume`, not by the option
    if not parsed.resume:
        check_free(parsed)
    backend = settings.backend_of(how.backend, how.ray_address, how.gpus_per_client, [parsed.device])
    check_locally(parsed, runs_here=how.in_process or backend is Backend.pool)
    if how.in_process:
        return run_in_process(config, parsed, at_once=how.clients_at_once)
    at, per_client = how.ray_address, (how.cpus_per_client, how.gpus_per_client)
    if at is None:
        check_resources(*per_client)
        ray = None
    else:
        config, ray = on_cluster(config, parsed, at, *per_client)
    where = f"--ray-address {at} " if ray else f"--backend {how.backend.value} " if how.backend else ""
    with simulating(backend, parsed.num_clients, *per_client, ray) as simulate:
        return simulate(config, parsed, how.verbose, where)


def _beside(preset: str | None, how: LaunchOptions, *others: tuple[str, bool]) -> list[str]:
    """Return what was given in vain where a run folder has the configuration. others: options, and whether they were given."""
    every = [(preset or "", bool(preset)), *others, ("--scale", how.scale is Scale.small)]
    return [name for name, is_given in every if is_given]


def _gone(how: LaunchOptions, base: Mapping[str, Scalar]) -> str:
    """Return the ids of the clients that a run goes on without, with those that are gone already. Raises UserError."""
    from corolla.experiments.exported.run_models import client_id

    # elsewhere than at sites, the data decide which clients there are, and their order
    run = how.resume or (how.from_run if how.superlink is not None else None)
    if run is None:
        raise UserError(f"--without needs --resume, or --from and --superlink; got {', '.join(map(str, how.without))}")

    def known(folder: Path, name: str | int) -> int:
        try:
            return client_id(RecordedRun(folder), name)
        except UserError:
            # one that had left before is in an earlier month alone
            earlier = str(read_about(folder).get(FROM, {}).get("run", ""))
            if not how.from_run or not earlier or not is_run(Path(earlier)):
                raise
            return known(Path(earlier), name)

    before = ids_in(base.get("without", ""))
    return ",".join(str(i) for i in sorted(before | {known(run, name) for name in how.without}))


def replayed_config(preset: str | None, how: LaunchOptions) -> dict[str, Scalar]:
    """Return the config of a run to repeat with its arrivals. Raises UserError if it cannot be repeated here."""
    run = how.replay
    assert run is not None, "only called for a replay"
    also = ("--resume", how.resume is not None), ("--superlink", how.superlink is not None)
    if beside := _beside(preset, how, *also):
        raise UserError(
            f"--replay takes its configuration from {run}, and simulates it: leave out {' and '.join(beside)}"
        )
    settings = opened("replay", run).settings
    if settings.get("dataset") == NODE:
        raise UserError(key="replay", rule=f"the data of {run} are at its sites (dataset = {NODE}), and not here")
    arrivals.read(run)
    # the arrivals follow from the other run, not from these
    timeless = {spec.name: spec.default for spec in specs(RunConfig) if spec.name in SIMULATED}
    return settings | timeless | {"replay": str(run.resolve()), "run-name": "", "overwrite": False}


def next_config(run: Path) -> dict[str, Scalar]:
    """Return the config of a run that goes on from another one. The data may have more or fewer clients."""
    recorded = opened("from", run)
    # raises UserError unless the run is finished
    _ = recorded.summary
    settings = dict(recorded.settings)
    for key in ("run-name", "initial-weights", "initial-weights-partial", "replay", "from-run", "without"):
        settings.pop(key, None)
    if settings.get("client") or settings.get("dataset") == NODE:
        settings.pop("num-clients", None)
    return settings | {"from-run": str(run.resolve()), "overwrite": False}


def opened(key: str, run: Path) -> RecordedRun:
    """Return the run of an option's folder. Its copies of the user's own files are used from then on. Raises UserError."""
    if not is_run(run):
        raise UserError(key=key, rule=f"{run} is not a run folder{elsewhere(run)}")
    look_for_plugins(run / PLUGINS)
    return RecordedRun(run)


def is_finished(run: Path, config: RunConfig) -> bool:
    """Return whether a run has its summary and all its rounds, or ended early (`stop-when`).

    Raises UserError if it has more rounds than configured.
    """
    recorded = RecordedRun(run)
    if not recorded.finished:
        return False
    rounds = recorded.summary["rounds"]
    refuse_fewer_rounds(config, rounds)
    return "stopped-early" in recorded.summary or bool(rounds == config.num_server_rounds)


def run_deployed(config: Mapping[str, Scalar], superlink: str, verbose: bool) -> Path | None:
    """Run on a SuperLink named in Flower's config file."""
    from corolla.experiments.launch import flwr_run
    from deploy.cluster import database_here
    from deploy.connection import bad_certificate, require_closed, require_known
    from fl_app.processes import flower_environment
    from fl_app.server.disk import full_database

    plugins.refuse_left_behind(config)
    require_known(superlink)
    require_closed(superlink)
    environment = flower_environment()
    try:
        where = f"--superlink {superlink} "
        return run_one(config, lambda c, on_line: flwr_run(superlink, c, environment, on_line), verbose, where)
    except (UserError, RunFailed) as error:
        if isinstance(error, UserError) and (path := database_here(superlink)) and (full := full_database(path)):
            raise UserError(full) from None
        if why := bad_certificate(superlink):
            words = (
                f"superlink {superlink}: its certificate cannot be trusted: {why}; if it is your cluster, run "
                "`corolla cluster keys --renew CLUSTER.yaml`, then `down` and `up`"
            )
            if isinstance(error, RunFailed):
                # with the command that continues the run
                raise RunFailed(f"{words}\n{error}") from None
            raise UserError(words) from None
        raise


def on_cluster(
    config: dict[str, Scalar], parsed: RunConfig, address: str, cpus_per_client: float, gpus_per_client: float
) -> tuple[dict[str, Scalar], RayCluster]:
    """Return a config with absolute paths that hold on all machines of a Ray cluster, and the cluster. Raises UserError."""
    from client_app.stored_state import state_root
    from corolla.experiments import ray_cluster
    from corolla.experiments.launch import RayCluster
    from fl_app.data import data_root
    from fl_app.site_directory import VARIABLE, site_directory

    places = {
        "output-dir": Path(parsed.output_dir),
        "state-dir": state_root(parsed.state_dir),
        "data-dir": data_root(parsed),
    }
    places = {key: path.expanduser().resolve() for key, path in places.items()}
    shared = {key: places[key] for key in ("output-dir", "state-dir")}
    if parsed.is_confidential:
        # a client may run on another machine each round, and must find its notes there
        shared[VARIABLE] = site_directory()
    with waiting(console) as shown:
        shown.step(f"looking at the Ray cluster at {address}")
        ray_cluster.check(address, shared, cpus_per_client, gpus_per_client)
    # below the depth at which run folders are searched
    inner = places["output-dir"] / ".corolla" / "simulations"
    return {**config, **{key: str(path) for key, path in places.items()}}, RayCluster(address, inner)


def run_one(
    config: Mapping[str, Scalar], submit: Submit, verbose: bool, where: str = "", until: int = 0
) -> Path | None:
    """Submit one run and show it. Return the folder's path if it is on this machine.

    Raises RunFailed if the run failed. where: the option that names its backend, with a trailing space, for the printed
    resume command. until: the round after which it is asked to end, or one later if that comes too late; 0: the last.
    """
    from corolla.experiments.launch import COMPLETED, LOST

    parsed = resolve(config)
    display = Display(parsed.method, console, parsed.num_server_rounds, verbose, until)
    with stopping(display, where), display, answered(display):
        display.step("sending the app to the SuperLink")
        status = submit(config, display.raw)
    match display.failed:
        case Failed(kind="input", message=message):
            raise UserError(message)
        case Failed(kind="own-code", message=message):
            more = "" if verbose else "; --verbose shows the traceback"
            raise RunFailed(f"{message}{more}")
    # a SuperLink on a full disk cannot pass on the error
    if status != COMPLETED and display.folder and (full := ended_by_full_disk(display.folder)):
        raise UserError(full)
    if status == LOST:
        more = f"; {resume_line(display.folder, where)}" if display.folder else ""
        raise RunFailed(f"the SuperLink ended or can no longer be reached{more}")
    if status != COMPLETED:
        if not verbose:
            console.print(escape("\n".join(display.lines)), soft_wrap=True)
        raise RunFailed(f"the run ended as {status}; the end of its log is above")
    return display.folder


def run_in_process(config: Mapping[str, Scalar], parsed: RunConfig, until: int = 0, at_once: int = 1) -> Path:
    """Run without Ray or SuperLink. until: see `run_one`. at_once: clients that train together; 0: as many as fit."""
    display = Display(parsed.method, console, parsed.num_server_rounds, until=until)
    with stopping(display, "--in-process "), display, log_to(display), answered(display):
        display.step("starting server and clients in this process")
        from client_app.at_once import Lanes
        from client_app.client_app import app as client_app
        from fl_app import server_app
        from fl_app.transport import inprocess
        from strategies.base import drop_network

        lanes = None if at_once == 1 else Lanes(at_once)
        answer = lanes.answer if lanes else inprocess.first
        grid = inprocess.InProcessGrid(client_app, config, parsed.num_clients, answer=answer)
        # clients that train together need all their messages at the same time
        in_flight = math.inf if lanes else server_app.SIMULATION_IN_FLIGHT
        try:
            return server_app.run(grid, parsed, ProgressEvents(display.take), in_flight).path
        finally:
            drop_network()
            if lanes:
                lanes.close()


@contextlib.contextmanager
def simulating(
    backend: Backend, num_clients: int, cpus_per_client: float, gpus_per_client: float, ray: RayCluster | None = None
) -> Iterator[Simulate]:
    """Yield a function that runs simulations of `num_clients` clients, one after the other. ray: use this cluster."""
    if backend is Backend.ray:
        from corolla.experiments.launch import simulation

        # the simulation itself reports its end
        shown = waiting(console, interrupted="")
        with shown as steps, simulation(num_clients, cpus_per_client, gpus_per_client, steps.step, ray) as submit:
            yield lambda config, parsed, *how: run_one(config, submit, *how)
        return
    from corolla.experiments.pool import workers

    count = workers(cpus_per_client, num_clients)
    yield lambda config, parsed, *how: run_pooled(config, parsed, count, *how)


def run_pooled(
    config: Mapping[str, Scalar], parsed: RunConfig, count: int, verbose: bool = False, where: str = "", until: int = 0
) -> Path:
    """Run with the server in this process and the clients in `count` workers. verbose, where, until: see `run_one`.

    Raises RunFailed for an exception in the user's own code on the server.
    """
    display = Display(parsed.method, console, parsed.num_server_rounds, verbose, until)
    with stopping(display, where), display, log_to(display, traces=verbose), answered(display):
        display.step(f"starting the server in this process, its clients in {counted(count, 'worker')}")
        from client_app import worker
        from corolla.experiments.pool import Pool, PoolGrid
        from fl_app import server_app

        with shared_network(parsed) as network, contextlib.ExitStack() as started:
            setup, files = worker.Setup.of(config, parsed.num_clients, network), [network.file] if network else []
            pool = started.enter_context(Pool(count, worker.COMMAND, setup.to_json(), display.raw, files))
            grid = PoolGrid(pool, parsed.num_clients)
            try:
                progress = ProgressEvents(display.take)
                return server_app.run(grid, parsed, progress, server_app.SIMULATION_IN_FLIGHT).path
            except Exception as error:
                if isinstance(error, (UserError, RunFailed)) or not debugging.place_of(error):
                    raise
                more = "" if verbose else "; --verbose shows the traceback"
                raise RunFailed(f"{debugging.reason(error)}{more}") from error


@contextlib.contextmanager
def shared_network(config: RunConfig) -> Iterator[SharedNetwork | None]:
    """Yield the network of a run with frozen tensors for its workers. The server takes it too. None: each builds its own."""
    if not config.train:
        yield None
        return
    from fl_app import data
    from strategies.base.handed_on import drop_network, leave_network, sharing

    leave_network(network_of(config, data.check(config)))
    try:
        with sharing() as network:
            yield network
    finally:
        drop_network()


@contextlib.contextmanager
def stopping(display: Display, where: str) -> Iterator[None]:
    """Context that prints how to resume a run ended by Ctrl-C.

    It raises KeyboardInterrupt also if the run ended after its round.
    """
    try:
        yield
        if display.stopped is not None and not display.stopped_as_planned:
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        if display.folder:
            after = "" if display.stopped is None else f" after round {display.stopped}"
            errors.print(f"stopped{after}; {resume_line(display.folder, where)}", soft_wrap=True)
        raise


def resume_line(folder: Path, where: str) -> str:
    """Return the command that resumes an interrupted run, as a sentence."""
    return f"continue with: {command()} run {where}--resume {folder}"
