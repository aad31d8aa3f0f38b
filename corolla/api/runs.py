"""A run from its options to its folder: configured, checked, started where it is to run, shown while it goes on."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.markup import escape

from corolla.api.checks import check_locally, check_resources, warn_of_settings
from corolla.api.console import command, console, errors, warn
from corolla.api.interrupts import answered
from corolla.api.live import Display, log_to
from corolla.api.settings import (
    DEFAULT_CLIENTS,
    Scale,
    look_for_plugins,
    name_plugins,
    read_preset,
    ready,
    resolve,
    scaled,
    with_clients,
)
from corolla.api.waiting import Submit, simulated, waiting
from corolla.experiments.runs import RecordedRun
from fl_app.config import RunConfig
from fl_app.errors import RunFailed, UserError
from fl_app.keys import Scalar, without_others
from fl_app.server.record import lacking
from fl_app.server.run_folder import PLUGINS, check_free, check_state, check_unchanged, read_metrics

if TYPE_CHECKING:
    from corolla.experiments.launch import RayCluster

# What the options of a run may be, for the command and for keywords.
CLIENTS = click.IntRange(min=1)
CPUS = click.FloatRange(min=0.1)
GPUS = click.FloatRange(min=0)
OPTION_TYPES: Mapping[str, click.ParamType[Any]] = {
    "clients": CLIENTS,
    "cpus_per_client": CPUS,
    "gpus_per_client": GPUS,
    "scale": click.Choice([scale.value for scale in Scale]),
}


@dataclasses.dataclass(frozen=True)
class How:
    """The options of `corolla run` but for its keys: where and how a run runs."""

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


SET_BY_US = {
    "plugins": "set by `corolla run` from the files that method, model and task name",
    "scale": "set by `corolla run --scale`, which cuts what is run",
}


def configure(preset: str | None, given: dict[str, Scalar], how: How) -> tuple[dict[str, Scalar], RunConfig]:
    """Return a run's config, flat and parsed, from a preset or .toml file, the given keys and the options.

    Warns of settings without effect. Raises UserError for what is wrong with any of them.
    """
    where = {"--superlink": how.superlink, "--in-process": how.in_process, "--ray-address": how.ray_address is not None}
    if len(named := [option for option, chosen in where.items() if chosen]) > 1:
        raise UserError(f"{' and '.join(named)} exclude each other")
    if how.resume and (preset or how.output_dir is not None or how.scale is Scale.small):
        raise UserError("--resume takes its configuration from the run folder: no preset, no --output-dir, no --scale")
    given = with_clients(given, how.clients)
    for key, by in SET_BY_US.items():
        if key in given:
            raise UserError(f"{key}: {by}; it cannot be given, got {given[key]!r}")
    base = saved_config(how.resume) if how.resume else scaled(read_preset(preset) if preset else {}, how.scale)
    options: dict[str, Scalar] = {} if how.output_dir is None else {"output-dir": how.output_dir}
    config = ready(without_others({"output-dir": "runs", **base, **given, **options}, [str(base.get("method"))]))
    if how.superlink is None:
        config["num-clients"] = config.get("num-clients") or DEFAULT_CLIENTS
    parsed = resolve(config)
    warn_of_settings(given, [(parsed, given if how.resume else {**base, **given})])
    name_plugins([config])
    return config, parsed


def start(config: dict[str, Scalar], parsed: RunConfig, how: How) -> Path | None:
    """Check a run, run it or continue it; the folder's path, None if Flower told none.

    Raises UserError before anything is written if it cannot run, RunFailed if it did not finish.
    """
    if how.resume:
        check_unchanged(how.resume, parsed)
        warn_of_changed_plugins(how.resume / PLUGINS)
        if is_finished(how.resume, parsed):
            if missing := lacking(parsed, list(read_metrics(how.resume))):
                raise UserError(f"this run is complete: {missing}")
            console.print("this run is complete; there is nothing to resume")
            return how.resume
        check_state(how.resume)
    if how.superlink is not None:
        return run_deployed(config, how.superlink, how.verbose)
    # a sweep's run goes on by its config
    if not parsed.resume:
        check_free(parsed)
    check_locally(parsed)
    if how.in_process:
        return run_in_process(config, parsed)
    at, per_client = how.ray_address, (how.cpus_per_client, how.gpus_per_client)
    if at is None:
        check_resources(*per_client)
        ray = None
    else:
        config, ray = on_cluster(config, parsed, at, *per_client)
    with simulated(console, parsed.num_clients, *per_client, ray) as submit:
        return run_one(config, submit, how.verbose, f"--ray-address {at} " if ray else "")


def saved_config(run: Path) -> dict[str, Scalar]:
    """Read the config an interrupted run is continued with; of the user's own files it has copies."""
    look_for_plugins(run / PLUGINS)
    return RecordedRun(run).settings | {"resume": str(run.resolve())}


def warn_of_changed_plugins(copies: Path) -> None:
    """Say which of the user's own files are no longer what the run was started with; it goes on with its copies."""
    for copy in sorted(copies.rglob("*.py")):
        here = Path(copy.relative_to(copies))
        if here.is_file() and here.read_bytes() != copy.read_bytes():
            warn(f"{here} has changed since the run was started, which goes on with {copy}")


def is_finished(run: Path, config: RunConfig) -> bool:
    """Tell whether a run has all its rounds and its summary."""
    return RecordedRun(run).finished and RecordedRun(run).summary["rounds"] >= config.num_server_rounds


def run_deployed(config: Mapping[str, Scalar], superlink: str, verbose: bool) -> Path | None:
    """Run on a SuperLink that Flower's config file names."""
    from corolla.experiments.launch import flwr_run
    from deploy.connection import bad_certificate
    from fl_app.processes import flower_environment

    environment = flower_environment()
    try:
        where = f"--superlink {superlink} "
        return run_one(config, lambda c, on_line: flwr_run(superlink, c, environment, on_line), verbose, where)
    except UserError:
        if why := bad_certificate(superlink):
            raise UserError(
                f"superlink {superlink}: its certificate is not to be trusted: {why}; if it is a cluster of yours, "
                "`corolla cluster keys --renew CLUSTER.yaml`, then `down` and `up`"
            ) from None
        raise


def on_cluster(
    config: dict[str, Scalar], parsed: RunConfig, address: str, cpus_per_client: float, gpus_per_client: float
) -> tuple[dict[str, Scalar], RayCluster]:
    """Return a config whose places are the same on all machines of a Ray cluster, and the cluster. Raises UserError."""
    from client_app.state import state_root
    from corolla.experiments import ray_cluster
    from corolla.experiments.launch import RayCluster
    from fl_app.data import data_root
    from fl_app.site import VARIABLE, site_directory

    places = {
        "output-dir": Path(parsed.output_dir),
        "state-dir": state_root(parsed.state_dir),
        "data-dir": data_root(parsed),
    }
    places = {key: path.expanduser().resolve() for key, path in places.items()}
    shared = {key: places[key] for key in ("output-dir", "state-dir")}
    if parsed.private or parsed.dp_epsilon:
        # a client may be on another machine in each round, and must find its notes there
        shared[VARIABLE] = site_directory()
    with waiting(console) as shown:
        shown.step(f"looking at the Ray cluster at {address}")
        ray_cluster.check(address, shared, cpus_per_client, gpus_per_client)
    # deeper than run folders are looked for
    inner = places["output-dir"] / ".corolla" / "simulations"
    return {**config, **{key: str(path) for key, path in places.items()}}, RayCluster(address, inner)


def run_one(
    config: Mapping[str, Scalar], submit: Submit, verbose: bool, where: str = "", until: int = 0
) -> Path | None:
    """Submit one run and show it; the folder's path if it lies on this machine. Raises RunFailed if the run failed.

    where: the option that says where it runs, with a space, for the command that continues it. until: the round after which it is
    asked to end, one later if that comes too late; 0: the last.
    """
    from corolla.experiments.launch import COMPLETED, LOST

    parsed = resolve(config)
    display = Display(parsed.method, console, parsed.num_server_rounds, verbose, until)
    with stopping(display, where), display, answered(display):
        display.step("sending the app to the SuperLink")
        status = submit(config, display.raw)
    if display.errors:
        raise UserError("\n".join(display.errors))
    if status == LOST:
        more = f"; {resume_line(display.folder, where)}" if display.folder else ""
        raise RunFailed(f"the SuperLink ended or can no longer be reached{more}")
    if status != COMPLETED:
        if not verbose:
            console.print(escape("\n".join(display.lines)), soft_wrap=True)
        raise RunFailed(f"the run ended as {status}; the end of its log is above")
    return display.folder


def run_in_process(config: Mapping[str, Scalar], parsed: RunConfig, until: int = 0) -> Path:
    """Run without Ray or SuperLink. until: as of `run_one`."""
    display = Display(parsed.method, console, parsed.num_server_rounds, until=until)
    with stopping(display, "--in-process "), display, log_to(display), answered(display):
        display.step("starting server and clients in this process")
        from client_app.client_app import app as client_app
        from fl_app import server_app
        from fl_app.server.inprocess import InProcessGrid

        return server_app.run(InProcessGrid(client_app, config, parsed.num_clients), parsed, display.progress).path


@contextlib.contextmanager
def stopping(display: Display, where: str) -> Iterator[None]:
    """Say how a run goes on that Ctrl-C ended, and raise KeyboardInterrupt also when it ended after a round, as asked."""
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
    """Say how an interrupted run goes on."""
    return f"continue with: {command()} run {where}--resume {folder}"
