"""Corolla from Python: the same runs, run folders, tables and errors as the `corolla` command.

Importing this module is cheap: torch, pandas and Flower are imported on first use.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from corolla.api.brief import brief
from corolla.api.recorded_run import Run, folder, load
from fl_app import extras

if TYPE_CHECKING:
    import pandas

__all__ = ["Run", "compare", "load", "run"]

AnyPath = str | os.PathLike[str]


@brief
def run(
    preset: AnyPath | None = None,
    *,
    clients: int | None = None,
    superlink: str | None = None,
    output_dir: AnyPath | None = None,
    cpus_per_client: float = 1,
    gpus_per_client: float = 0,
    in_process: bool = False,
    clients_at_once: int = 1,
    resume: AnyPath | Run | None = None,
    replay: AnyPath | Run | None = None,
    from_run: AnyPath | Run | None = None,
    without: Sequence[str | int] = (),
    scale: str = "full",
    overwrite: bool = False,
    backend: str | None = None,
    strict: bool = False,
    verbose: bool = False,
    progress: bool = True,
    **keys: Any,
) -> Run:
    """Run one experiment, as `corolla run` does, and return it.

    - `preset`: a preset's name, or the path of a .toml file with config keys.
    - `clients`: number of simulated clients (default 10); with `superlink`, number of connected clients to wait for.
    - `superlink`: name of a SuperLink connection in Flower's config file; None: a simulation.
    - `output_dir`: directory of run folders (default: runs).
    - `cpus_per_client`, `gpus_per_client`: CPU cores and GPUs per simulated client; a fraction of a GPU is allowed.
    - `in_process`: run server and clients in this process, without Ray and SuperLink, for debugging.
    - `clients_at_once`: with `in_process`, number of clients that train together on one GPU; 0: as many as its memory
      holds.
    - `resume`: an interrupted run, or its folder, to continue from its last checkpoint.
    - `replay`: a run, or its folder, to repeat in simulation with the arrivals that it recorded.
    - `from_run`: a finished run, or its folder: the new run's clients go on from their own models and states.
    - `without`: with `resume`, or with `from_run` and `superlink`, names or ids of clients that are gone for good.
    - `scale`: "small" cuts clients, rounds and samples for a laptop; `keys` still win.
    - `overwrite`: replace the run of this `run_name` just before the new one starts.
    - `backend`: processes of simulated clients, "pool" or "ray"; None: a pool on Linux without GPUs, else Ray.
    - `strict`: with `resume`, refuse to continue with other code or other versions of the packages that compute.
    - `verbose`: show Flower's and Ray's log lines, and keep all frames of errors.
    - `progress`: show a panel in a notebook or on a terminal, and lines elsewhere; False: print only warnings and
      errors.
    - `keys`: run-config keys (docs/config.md) with _ for -. A method's own keys are in a table: `fedcac={"beta": 5}` or
      `**{"fedcac.beta": 5}`. None: not set.

    Raises UserError, with the command's message and before anything is written, for invalid input. Raises RunFailed if
    the run does not finish. Their tracebacks end at the caller's line. A first interrupt ends the run after the current
    round, a second one immediately; both raise KeyboardInterrupt.
    """
    from corolla.api import starting

    options = dict(
        clients=clients,
        superlink=superlink,
        output_dir=output_dir,
        cpus_per_client=cpus_per_client,
        gpus_per_client=gpus_per_client,
        in_process=in_process,
        clients_at_once=clients_at_once,
        resume=resume.path if isinstance(resume, Run) else resume,
        replay=replay.path if isinstance(replay, Run) else replay,
        from_run=from_run.path if isinstance(from_run, Run) else from_run,
        without=tuple(without),
        scale=scale,
        overwrite=overwrite,
        backend=backend,
        strict=strict,
        verbose=verbose,
    )
    return Run(starting.start(None if preset is None else os.fspath(preset), options, keys, progress))


@brief
def compare(
    runs: Iterable[AnyPath | Run] | AnyPath | Run, metric: str = "", reference: AnyPath | Run = ""
) -> pandas.DataFrame:
    """Compare finished runs, as `corolla compare` does: one row per group of runs that differ only in the seed.

    - `runs`: runs, run folders, or folders of run folders (a sweep's).
    - `metric`: the metric to compare, such as "auc"; empty: each run's headline.
    - `reference`: the row to compare with, which becomes the first: its method, its values, or one of its runs, also as
      a Run; empty: the first.

    Columns of the result:

    - the method, and the settings in which rows differ;
    - `n`: number of runs;
    - `clients`, such as `4 of 6 clients`, only if final figures of a row lack clients;
    - figures of the metrics: mean over the runs, as ratios, and standard deviation (`-std`);
    - the paired difference to the runs of the first row. A pair is a client, with its difference averaged over seeds:
      `pairs`, `seeds`, `difference`, `low` and `high` (95 % interval over clients), p of the `wilcoxon` test, `holm` (the
      same p, corrected for all comparisons of the table), `low-over-seeds` and `high-over-seeds` (95 % interval over
      seeds), `clients-better` (a share), `by-client` (all differences by client), `client-names` (only if clients have
      names), `verdict`.

    Printed, it leaves out columns without values and names them below.

    Unfinished runs are skipped and listed on standard error. Raises UserError for a path without runs, if no run is
    finished, for a metric that a run did not measure, and for a reference that is not one row.
    """
    extras.require("pandas", "corolla.compare, whose result is a data frame,")
    from corolla.api import comparing

    if isinstance(runs, (str, os.PathLike, Run)) or not isinstance(runs, Iterable):
        runs = [runs]
    first = os.fspath(reference.path if isinstance(reference, Run) else reference)
    return comparing.frame([one.path if isinstance(one, Run) else folder(one) for one in runs], metric, first)
