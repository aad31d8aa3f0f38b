"""A run folder as an object: its records as data frames, its models as modules, its report."""

from __future__ import annotations

import os
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corolla.experiments.runs import RecordedRun, find, listing
from fl_app import extras
from fl_app.errors import UserError, listed
from fl_app.server.run_folder import CLIENTS, METRICS, PLUGINS, SUMMARY

if TYPE_CHECKING:
    import pandas
    from torch import nn

    from fl_app.keys import Scalar


class Run:
    """One run, finished or not. path: its folder. What it holds is read once, when it is first asked for; see `load`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._finished: RecordedRun | None = None

    @property
    def _recorded(self) -> RecordedRun:
        """The run as its folder records it: read anew until it is finished."""
        if self._finished is not None:
            return self._finished
        if not self.path.is_dir():
            raise UserError(f"the run folder is not on this machine, but on the SuperLink's: {self.path}")
        recorded = RecordedRun(self.path)
        if recorded.finished:
            self._finished = recorded
        return recorded

    @property
    def config(self) -> dict[str, Scalar]:
        """Every key as it was resolved, flat: {"method": "fedcac", "fedcac.tau": 0.5, ...}."""
        return dict(self._recorded.settings)

    @property
    def state(self) -> str:
        """`running`, `finished`, or `interrupted`: `run(resume=...)` continues it."""
        return self._recorded.state

    @property
    def summary(self) -> dict[str, Any]:
        """What summary.json holds: final-accuracy, best-accuracy, digest, ... Raises UserError if the run is not finished."""
        return dict(self._recorded.summary)

    @cached_property
    def metrics(self) -> pandas.DataFrame:
        """One row per round (the index): every number of metrics.jsonl, those of `evaluation` and `seconds` with this prefix."""
        extras.require("pandas", "a run's metrics as a data frame")
        import pandas

        from corolla.report.csv_files import round_lines

        lines = round_lines(self._recorded)
        return pandas.DataFrame(lines, columns=_columns("round", lines=lines)).set_index("round")

    @cached_property
    def clients(self) -> pandas.DataFrame:
        """One row per round and client that took part or was evaluated (the index): their numbers, as in `metrics`."""
        extras.require("pandas", "a run's clients as a data frame")
        import pandas

        from corolla.report.csv_files import client_lines

        lines = client_lines(self._recorded)
        return pandas.DataFrame(lines, columns=_columns("round", "client", lines=lines)).set_index(["round", "client"])

    def model(self, client: int | None = None) -> nn.Module:
        """Return a client's personal model after the last round, or the global one, on the CPU, in evaluation mode.

        The same that `corolla export` writes, compared with the hash that the client told when it was evaluated last. Raises
        UserError if the run is not finished, there is no such client, or the server has not got the model.
        """
        from corolla.api.settings import look_for_plugins
        from corolla.experiments.exported import run_models
        from strategies import METHODS

        look_for_plugins(self._recorded.path / PLUGINS)
        model = run_models.load(self._recorded.path, client, METHODS)
        run_models.refuse_parts(model)
        return model.module

    def report(self, output: str | os.PathLike[str] | None = None) -> Path:
        """Write report.html and its pictures, as `corolla report` does, into `output` or the run folder; the page's path."""
        extras.require("matplotlib", "a run's report")
        from corolla.report.page import write_report

        return write_report([self._recorded.path], self._recorded.path if output is None else Path(output))[0]

    def __repr__(self) -> str:
        """Name it."""
        return f"Run({str(self.path)!r})"

    def _repr_html_(self) -> str:
        """Draw it: its state and what it has come to."""
        try:
            return self._table()
        except UserError as error:
            return f"<p><code>{escape(str(self.path))}</code>: {escape(str(error))}</p>"

    def _table(self) -> str:
        from corolla.experiments.table import single_runs

        recorded = self._recorded
        if recorded.finished:
            header, row = single_runs([recorded])
        else:
            header, row = listing([recorded])
            header, row = header[1:], row[1:]
        cells = [
            "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in line) for tag, line in (("th", header), ("td", row))
        ]
        return f"<table><tr>{cells[0]}</tr><tr>{cells[1]}</tr></table><p><code>{escape(str(self.path))}</code></p>"


def load(path: str | os.PathLike[str]) -> Run:
    """Return the run of a run folder, finished or not.

    Raises UserError if it is none, holds several runs, or is damaged: a file that cannot be read, or rounds without a record.
    """
    where = folder(path).expanduser().resolve()
    found = find([where])
    if [run.path for run in found] != [where]:
        inside = listed([run.path.name for run in found])
        raise UserError(f"{where} is no run folder, but holds some: {inside}; load one of them, or compare them all")
    run = found[0]
    if (where / CLIENTS).exists() and not run.clients:
        raise UserError(f"{where / CLIENTS} cannot be read")
    planned = run.summary["rounds"] if (where / SUMMARY).exists() else max(run.rounds, default=0)
    if missing := sorted(set(range(1, planned + 1)) - set(run.rounds)):
        raise UserError(f"{where / METRICS}: no readable record of round {listed([str(n) for n in missing])}")
    return Run(where)


def folder(path: object) -> Path:
    """Return the path of a run folder. Raises UserError for what is none."""
    if not isinstance(path, (str, os.PathLike)):
        raise UserError(f"a run must be a Run or the path of its folder, got {path!r}")
    return Path(path)


def _columns(*first: str, lines: list[dict[str, object]]) -> list[str]:
    return list(dict.fromkeys([*first, *(name for line in lines for name in line)]))
