"""Corolla from Python: the same runs, run folders, tables and errors as the `corolla` command's.

Importing this imports nothing heavy: torch, pandas and Flower come with what is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from corolla.api.results import Run, folder, load
from fl_app import extras

if TYPE_CHECKING:
    import pandas

__all__ = ["Run", "compare", "load", "run"]

AnyPath = str | os.PathLike[str]


def run(
    preset: AnyPath | None = None,
    *,
    clients: int | None = None,
    superlink: str | None = None,
    output_dir: AnyPath | None = None,
    cpus_per_client: float = 1,
    gpus_per_client: float = 0,
    in_process: bool = False,
    resume: AnyPath | Run | None = None,
    scale: str = "full",
    verbose: bool = False,
    progress: bool = True,
    **keys: Any,
) -> Run:
    """Run one experiment as `corolla run` does, and return it.

    preset: a preset's name or a .toml file. keys: run-config keys (docs/config.md) with _ for -, a method's own in a table,
    `fedcac={"beta": 5}` or `**{"fedcac.beta": 5}`. progress: show a panel, in a notebook or on a terminal, and lines elsewhere;
    the other options are those of `corolla run -h`.

    Raises UserError with the command's words for bad input, before anything is written, and RunFailed for a run that did not
    finish. An interrupt ends the run after its round, a second one at once; both raise KeyboardInterrupt.
    """
    from corolla.api import starting

    options = dict(
        clients=clients,
        superlink=superlink,
        output_dir=output_dir,
        cpus_per_client=cpus_per_client,
        gpus_per_client=gpus_per_client,
        in_process=in_process,
        resume=resume.path if isinstance(resume, Run) else resume,
        scale=scale,
        verbose=verbose,
    )
    return Run(starting.start(None if preset is None else os.fspath(preset), options, keys, progress))


def compare(runs: Iterable[AnyPath | Run] | AnyPath | Run) -> pandas.DataFrame:
    """Put finished runs beside each other, as `corolla compare` does: one row for runs that differ in the seed alone.

    runs: runs, run folders, or folders of them (a sweep's). Columns: the method and the settings in which rows differ; `n`, how
    many runs; the means over them of the headline metric's figures, as ratios, with `-std`; and the paired difference to the first
    row's runs: `pairs`, `seeds`, `difference`, the ends of its 95 % intervals, the share of `clients-better`, the `verdict`.
    Unfinished runs are named on standard error. Raises UserError for a path that holds no run, and if none is finished.
    """
    extras.require("pandas", "corolla.compare, whose result is a data frame,")
    from corolla.api import comparing

    if isinstance(runs, (str, os.PathLike, Run)) or not isinstance(runs, Iterable):
        runs = [runs]
    return comparing.frame([one.path if isinstance(one, Run) else folder(one) for one in runs])
