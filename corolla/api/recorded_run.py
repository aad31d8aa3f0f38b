"""A run folder as an object: its records as data frames, its models as modules, its report."""

from __future__ import annotations

import os
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corolla.api.brief import brief
from corolla.experiments.runs import RecordedRun, find, listing, named
from fl_app import extras
from fl_app.errors import UserError, listed
from fl_app.server import matrices
from fl_app.server.client_rows import RowFiles
from fl_app.server.run_folder import CLIENTS, METRICS, PLUGINS, SUMMARY

if TYPE_CHECKING:
    import pandas

    from corolla.experiments.exported.loading import ClientAnswers
    from corolla.experiments.exported.predict import Predictor
    from corolla.report.page import Plots
    from fl_app.keys import Scalar


class Run:
    """One run, finished or not. path: its folder. Files are read on first use and cached. `load` returns one."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._finished: RecordedRun | None = None

    @property
    def _recorded(self) -> RecordedRun:
        """The run as its folder records it; read again on each access until the run is finished."""
        if self._finished is not None:
            return self._finished
        if not self.path.is_dir():
            raise UserError(f"the run folder is on the SuperLink's machine, not on this one: {self.path}")
        recorded = RecordedRun(self.path)
        if recorded.finished:
            self._finished = recorded
        return recorded

    @property
    def config(self) -> dict[str, Scalar]:
        """Every resolved key, flat: {"method": "fedcac", "fedcac.tau": 0.5, ...}."""
        return dict(self._recorded.settings)

    @property
    def state(self) -> str:
        """`running`, `finished` or `interrupted`; `run(resume=...)` continues an interrupted run."""
        return self._recorded.state

    @property
    @brief
    def summary(self) -> dict[str, Any]:
        """Content of summary.json: final-accuracy, best-accuracy, digest, ... Raises UserError if the run is not finished."""
        return dict(self._recorded.summary)

    @cached_property
    @brief
    def rounds(self) -> pandas.DataFrame:
        """Numbers of metrics.jsonl, indexed by round; those of `evaluation` and `seconds` have this prefix."""
        pandas = extras.module("pandas", "a run's metrics as a data frame")

        from corolla.report.csv_files import round_lines

        lines = round_lines(self._recorded)
        return pandas.DataFrame(lines, columns=_columns("round", lines=lines)).set_index("round")

    @cached_property
    @brief
    def clients(self) -> pandas.DataFrame:
        """Numbers of clients, indexed by (round, client), for clients that took part or were evaluated.

        Columns as in `metrics`.
        """
        pandas = extras.module("pandas", "a run's clients as a data frame")

        from corolla.report.csv_files import client_lines

        lines = client_lines(self._recorded)
        return pandas.DataFrame(lines, columns=_columns("round", "client", lines=lines)).set_index(["round", "client"])

    @property
    def metrics(self) -> pandas.DataFrame:
        """The earlier name of `rounds`."""
        return self.rounds

    @cached_property
    @brief
    def pairs(self) -> pandas.DataFrame:
        """Numbers between two clients, indexed by (round, client, other): a column for each matrix of `matrix`.

        Rounds without a recorded matrix have no rows, and a pair without a number has none either.
        """
        pandas = extras.module("pandas", "a run's pairs as a data frame")
        found: dict[str, dict[int, Any]] = {}
        for t in self._recorded.rounds:
            for name, between in matrices.read(self.path, t).items():
                frame = pandas.DataFrame(between.values, index=between.rows, columns=between.columns)
                found.setdefault(name, {})[t] = frame.stack().dropna()
        names = ["round", "client", "other"]
        if not found:
            return pandas.DataFrame(index=pandas.MultiIndex.from_arrays([[], [], []], names=names))
        return pandas.DataFrame({name: pandas.concat(parts, names=names) for name, parts in found.items()})

    @cached_property
    @brief
    def plot(self) -> Plots:
        """The report's pictures as Altair charts: `run.plot.accuracy()`. Printed, it lists them."""
        extras.require("altair", "a run's pictures")
        from corolla.report.page import Plots

        return Plots(self._recorded.path, client_answers)

    @brief
    def matrix(self, name: str, round: int | None = None) -> pandas.DataFrame:
        """Return a matrix between clients that the method recorded, such as `overlap` or `attention`.

        Rows and columns are labelled with client ids. round: default is the last round that has one. Raises UserError
        if there is none.
        """
        pandas = extras.module("pandas", "a run's matrix as a data frame")
        recorded = self._recorded
        for t, record in reversed(recorded.rounds.items()):
            found = matrices.matrix_of(self.path, record, name) if round in (None, t) else None
            if found is not None:
                return pandas.DataFrame(found.values, index=found.rows, columns=found.columns)
        which = "" if round is None else f" in round {round}"
        raise UserError(key=self.path, rule=f"no matrix {name} between clients is recorded{which}")

    @brief
    def model(self, client: int | str | None = None) -> Predictor:
        """Return a client's personal model after the last round, or the global one, on the CPU in evaluation mode.

        client: number (its id), or name if the run has names; None: the global model. `model("Bern").predict(frame)`
        takes raw rows. Called as a module, it takes inputs as in training.

        `corolla export` writes the same model. Its hash is compared with the one that the client sent at its last
        evaluation. Raises UserError if the run is not finished, if the client does not exist, or if the server does not
        have the model.
        """
        from corolla.api.settings import look_for_plugins
        from corolla.experiments.exported import loading, run_models
        from corolla.experiments.exported.predict import Predictor
        from fl_app import model_card
        from strategies import METHODS

        look_for_plugins(self._recorded.path / PLUGINS)
        model = run_models.load(self._recorded.path, client, METHODS)
        run_models.refuse_parts(model)
        return Predictor(
            model.module,
            model.config,
            lambda: model_card.of_no_file(
                {"file": model.name, **run_models.about(model), **loading.described(model, "")}
            ),
        )

    @brief
    def report(self, output: str | os.PathLike[str] | None = None, features: bool = False) -> Path:
        """Write report.html and its pictures, as `corolla report` does, and return the page's path.

        output: default the run folder. features: as `--features`.
        """
        extras.require_pictures("a run's report")
        from corolla.report.page import write_report

        where = self._recorded.path if output is None else Path(output)
        return write_report([self._recorded.path], where, tested=client_answers if features else None)[0]

    def __repr__(self) -> str:
        """Return `Run('path')`."""
        return f"Run({str(self.path)!r})"

    def _repr_html_(self) -> str:
        """Return the run's state and results as an HTML table."""
        try:
            return self._table()
        except UserError as error:
            return f"<p><code>{escape(str(self.path))}</code>: {escape(str(error))}</p>"

    def _table(self) -> str:
        from corolla.experiments.result_table import single_runs

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


@brief
def load(path: str | os.PathLike[str]) -> Run:
    """Return the run of a run folder, finished or not.

    Raises UserError if the path is not a run folder, holds several runs, or is damaged: an unreadable file, or rounds
    without a record.
    """
    given = folder(path).expanduser()
    where, found = named(given).resolve(), find([given])
    if [run.path.resolve() for run in found] != [where]:
        inside = listed([run.path.name for run in found])
        raise UserError(
            f"{where} is not a run folder but holds several: {inside}; load one of them, or compare them all"
        )
    run = found[0]
    if (where / CLIENTS).exists() and not run.clients:
        raise UserError(f"{where / CLIENTS} cannot be read")
    RowFiles(where).check()
    planned = run.summary["rounds"] if (where / SUMMARY).exists() else max(run.rounds, default=0)
    if missing := sorted(set(range(1, planned + 1)) - set(run.rounds)):
        raise UserError(key=where / METRICS, rule=f"no readable record of round {listed([str(n) for n in missing])}")
    return Run(where)


def client_answers(path: Path) -> list[ClientAnswers]:
    """Return the answers of a run's final models on their clients' test samples, as `of_run` does, for its pictures."""
    # imported here because they bring torch and Flower
    from corolla.api.settings import look_for_plugins
    from corolla.experiments.exported.loading import answers_of_run
    from strategies import METHODS

    look_for_plugins(path / PLUGINS)
    return answers_of_run(path, METHODS)


def folder(path: object) -> Path:
    """Return a run folder's path. Raises UserError for an argument of another type."""
    if not isinstance(path, (str, os.PathLike)):
        raise UserError(f"a run must be a Run or the path of its folder, got {path!r}")
    return Path(path)


def _columns(*first: str, lines: list[dict[str, object]]) -> list[str]:
    return list(dict.fromkeys([*first, *(name for line in lines for name in line)]))
