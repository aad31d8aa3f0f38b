"""Runs of a report: run folders, and their records as arrays. Methods' records of another form are left out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from numpy.typing import NDArray

from corolla.experiments.runs import RecordedRun, find
from fl_app.errors import UserError
from fl_app.figures import Figure, Layers, from_json
from fl_app.keys import show
from fl_app.metrics import UNSEEN, Record, moments
from fl_app.server import arrivals, client_rows
from fl_app.server import matrices as between
from fl_app.server.record import VIRTUAL

Floats = NDArray[np.float64]
Frame = Any
# curves of at least this many rounds are drawn as a running mean over a fortieth of them
LONG = 80
# for more clients than this, pictures show quantiles, histograms and groups instead of single clients
MANY = 60
# most clients whose numbers between each other are read round by round, and most rows of a picture
MOST_IN_ROUNDS = MOST_ROWS = 100
# curves over an evaluation's clients: of those that train, and of those that never do
EVALUATED = ("evaluation", "unseen")
# most letters of a client's name on an axis
ROOM = 20
# numbers of no client
EMPTY = pandas.Series([], np.arange(0), np.float64)


@dataclass(frozen=True)
class ReportedRun(RecordedRun):
    """A run of a report. number, label: its names in the report."""

    number: str = "1"
    label: str = ""

    @cached_property
    def finished(self) -> bool:
        """Whether it had its summary when it was read. It is read once, so that a run that ends meanwhile does not change."""
        return super().finished

    @cached_property
    def paced(self) -> dict[int, float]:
        """Seconds of each round in simulated time, or in a deployment whose rounds may close early; {} of other runs."""
        if simulated := {t: record[VIRTUAL] for t, record in self.rounds.items() if VIRTUAL in record}:
            return simulated
        try:
            return {int(line["round"]): float(line["seconds"]) for line in arrivals.read(self.path)}
        except UserError:
            return {}

    @cached_property
    def figures(self) -> tuple[Figure, ...]:
        """Figures that its method declared."""
        return from_json(self.about.get("figures", []))

    def but(self, **changes: Any) -> ReportedRun:
        """Return this run with another number, label, or metric that it is judged by. Data that were read are shared."""
        other = replace(self, **changes)
        # the outcome depends on the metric
        vars(other).update(vars(self) | vars(other))
        vars(other).pop("outcome", None)
        return other

    def setting(self, name: str) -> str:
        """Return a setting as text, a partition with its parameter."""
        text = show(self.settings.get(name, ""))
        parameter = "dirichlet-alpha" if text.startswith("dirichlet") else "classes-per-client"
        if name == "partition" and text.startswith(("dirichlet", "pathological")):
            return f"{text}, {parameter} {show(self.settings.get(parameter, '?'))}"
        return text

    def key(self, name: str) -> str:
        """Return the key of the headline metric in a record. Names other than those below are returned unchanged.

        name: `before` or `after` training, or an evaluation (EVALUATED).
        """
        before, after = moments(self.headline.name)
        return {"before": before, "after": after, **dict.fromkeys(EVALUATED, self.headline.name)}.get(name, name)

    def numbers(self, record: Record, name: str) -> Frame:
        """Return a metric of a round's clients, a series by client id, NaN if a client has none. name: see `key`."""
        measured = record.get("evaluation") or {} if name in EVALUATED else record
        table = measured.get("clients", {})
        found = pandas.Series(client_rows.numbers(table, self.key(name)), client_rows.ids(table))
        apart = found.index.isin(measured.get(UNSEEN, {}).get("ids", []))
        return found[apart == (name == "unseen")] if name in EVALUATED else found

    @property
    def has_unseen(self) -> bool:
        """Whether its evaluations include clients that never train."""
        return any(measured.get(UNSEEN, {}).get("ids") for measured in self.evaluations.values())


def read_runs(paths: Sequence[Path]) -> list[ReportedRun]:
    """Read run folders, or folders of run folders. Raises UserError naming every path that is neither."""
    return [read_run(run.path) for run in find(paths)]


def read_run(path: Path) -> ReportedRun:
    """Read one run folder, finished or not. Raises UserError if it has no readable config."""
    run = ReportedRun(path.resolve())
    run.settings  # noqa: B018 - read now, for its errors
    return run


# Clients' metrics -----------------------------------------------------------------------------------------------------


def curve(runs: Sequence[ReportedRun], name: str) -> Frame:
    """Return mean and quartiles (low, high) over the runs' clients of a metric, by round; None if it is not recorded.

    If a round has more than MANY clients, `lowest` and `highest` are the 5 % and the 95 % quantile. name: see
    `ReportedRun.key`.
    """
    every = [(t, run.numbers(record, name).dropna()) for run in runs for t, record in run.rounds.items()]
    samples = pandas.concat([values.set_axis([t] * len(values)) for t, values in every] or [EMPTY]).groupby(level=0)
    if not len(samples):
        return None
    found = samples.quantile([0.25, 0.75, 0.05, 0.95]).unstack().set_axis(["low", "high", "lowest", "highest"], axis=1)
    found.insert(0, "mean", samples.mean())
    many = max(len(values) for _, values in every) > MANY
    return found.rename_axis("round") if many else found[["mean", "low", "high"]].rename_axis("round")


def window(rounds: int) -> int:
    """Return the number of rounds in a drawn curve's running mean; odd."""
    return 1 if rounds < LONG else 2 * rounds // LONG | 1


def smooth(values: Frame) -> Frame:
    """Return the running mean over `window`, centred, of a series or frame by round.

    Near the start the window shrinks symmetrically; at the end it is cut off.
    """
    if len(values) < LONG:
        return values
    reach = window(len(values)) // 2
    means = values.rolling(2 * reach + 1, center=True, min_periods=1).mean()
    means.iloc[:reach] = values.expanding().mean().iloc[: 2 * reach : 2].to_numpy()
    return means


def last_known(run: ReportedRun) -> tuple[Frame, str]:
    """Return the last known headline metric of each client that trains, a series by id, and its source as text."""
    t, _ = run.last_evaluation or (0, {})
    found = run.numbers(run.rounds.get(t, {}), "evaluation").dropna()
    if t and (run.finished or len(found)):
        who = "all clients that train" if run.has_unseen else "all clients"
        return found, f"{who}, after round {t}"
    every = pandas.concat([EMPTY, *(run.numbers(record, "before").dropna() for record in run.rounds.values())])
    return every[~every.index.duplicated(keep="last")], "each client's last round, before training"


def last_unseen(run: ReportedRun) -> tuple[Frame, str]:
    """Return the final headline metric of clients that never train, a series by id, and its source as text."""
    t, _ = run.last_evaluation or (0, {})
    return run.numbers(run.rounds.get(t, {}), "unseen").dropna(), f"after round {t}"


def until(run: ReportedRun) -> Frame:
    """Return by round what was spent until its models: bytes and seconds, with their mean headline metric before training.

    bytes: exchanged until the clients had the models. seconds: until the round began, simulated ones or wall time.
    paced: the same seconds, in runs with simulated time and in deployments whose rounds may close early, else NaN.
    """
    rows = []
    sent = elapsed = 0.0
    for t, record in run.rounds.items():
        sent += record.get("download-bytes") or 0
        paced = elapsed if t in run.paced else math.nan
        rows.append((sent, elapsed, paced, record.get(run.key("before"))))
        sent += record.get("upload-bytes") or 0
        wall = record.get("seconds", {}).get("round")
        elapsed += (run.paced.get(t) if run.paced else wall) or 0.0
    return pandas.DataFrame(rows, [*run.rounds], ["bytes", "seconds", "paced", "mean"], np.float64)


def server_seconds(run: ReportedRun) -> dict[str, float]:
    """Return wall seconds per round by phase, as the mean over the recorded rounds."""
    return mean_of([record.get("seconds", {}) for record in run.rounds.values()])


def client_seconds(run: ReportedRun) -> dict[str, float]:
    """Return a client's seconds per round by phase, as the mean over rounds and clients."""
    return mean_of([row.get("seconds", {}) for r in run.rounds.values() for row in r.get("clients", {}).values()])


def mean_of(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each entry but `round`; a row without an entry counts as 0."""
    means: dict[str, float] = pandas.DataFrame(rows).drop(columns="round", errors="ignore").fillna(0.0).mean().to_dict()
    return means


# Methods' records, by kind of figure (fl_app/figures.py) --------------------------------------------------------------


def number(value: object) -> float:
    """Return a finite number unchanged, anything else as NaN."""
    plain = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if plain else math.nan  # type: ignore[arg-type]


def matrices(run: ReportedRun, record: str) -> tuple[list[int], dict[int, Floats]] | None:
    """Return client ids, and by round the number of each pair that was recorded last until then, [N, N]; NaN if none was.

    None without any. Of more than MOST_IN_ROUNDS clients there is the last round alone.
    """
    found = {t: one for t, e in run.rounds.items() if (one := between.matrix_of(run.path, e, record)) is not None}
    ids = sorted({int(i) for one in found.values() for i in (*one.rows, *one.columns)})
    values, by_round = np.full((len(ids), len(ids)), np.nan), {}
    for t, one in found.items():
        at = np.ix_(np.searchsorted(ids, np.int64(one.rows)), np.searchsorted(ids, np.int64(one.columns)))
        values[at] = np.where(np.isnan(one.values), values[at], one.values)
        if len(ids) <= MOST_IN_ROUNDS or t == max(found):
            by_round[t] = values.copy()
    off = ~np.eye(len(ids), dtype=bool)
    return (ids, by_round) if len(ids) > 1 and not np.isnan(values[off]).all() else None


def scalars(run: ReportedRun, record: str) -> tuple[list[int], Floats] | None:
    """Return client ids and one number per client, [clients, rounds 1 .. last], NaN if a client took no part.

    For one number per round there are no ids and one row. Returns None if there is no number.
    """
    found = _over_rounds({t: {int(i): number(v) for i, v in _noted(e, record).items()} for t, e in run.rounds.items()})
    if found:
        return found
    whole = _over_rounds({t: {"": number(entry.get(record))} for t, entry in run.rounds.items()})
    return ([], whole[1]) if whole else None


def groups(run: ReportedRun, record: str) -> tuple[list[int], Floats, list[str]] | None:
    """Return client ids, the index of each client's group, [clients, rounds 1 .. last], and the groups' names.

    None without any. The index is NaN if a client has no group in a round.
    """
    noted: dict[int, dict[str, str]] = {}
    for t, entry in run.rounds.items():
        whole = entry.get(record)
        pairs = whole if isinstance(whole, dict) else _noted(entry, record)
        noted[t] = {i: str(group) for i, group in pairs.items() if isinstance(group, (int, str)) and i.isdecimal()}
    names = sorted(
        {name for row in noted.values() for name in row.values()},
        key=lambda name: (not name.isdecimal(), len(name), name),
    )
    found = _over_rounds({t: {int(i): names.index(group) for i, group in row.items()} for t, row in noted.items()})
    return (*found, names) if found else None


def layers(run: ReportedRun, figure: Layers) -> tuple[list[str], Floats] | None:
    """Return the layers' names and the records by layer, [layers, rounds 1 .. last]; None without any.

    Clients' records are averaged. For shares, the values are each layer's share of the round's sum, weight and bias
    together; rounds with sum 0 are left out.
    """
    rows: dict[int, Any] = {}
    for t, entry in run.rounds.items():
        whole = entry.get(figure.record)
        tables = [whole] if isinstance(whole, dict) else _noted(entry, figure.record).values()
        known = [{name: number(v) for name, v in table.items()} for table in tables if isinstance(table, dict)]
        values = pandas.DataFrame(known, dtype=np.float64).dropna(how="all", axis=1)
        rows[t] = values.mean()
        if figure.shares and not values.empty:
            sums = values.sum()
            sums = sums.groupby([name.rpartition(".")[0] or name for name in sums.index], sort=False).sum()
            rows[t] = sums / (sums.sum() or math.nan)
    return _over_rounds(rows, ordered=False)


def _noted(entry: Record, record: str) -> dict[str, Any]:
    """Return the records of this name of the round's clients that have one, by client."""
    return {i: row[record] for i, row in entry.get("clients", {}).items() if record in row}


def _over_rounds(rows: Mapping[int, Any], ordered: bool = True) -> tuple[list[Any], Floats] | None:
    """Return names, and values by round and name as a matrix [names, rounds 1 .. last], NaN if there is none.

    None without any. ordered: by name, else as recorded.
    """
    known = pandas.DataFrame(rows, dtype=np.float64).dropna(how="all").dropna(how="all", axis=1)
    if known.empty:
        return None
    known = known.sort_index() if ordered else known
    return known.index.tolist(), known.reindex(columns=range(1, known.columns.max() + 1)).to_numpy()


# Clients and classes --------------------------------------------------------------------------------------------------


def class_counts(run: ReportedRun) -> tuple[list[int], NDArray[np.int64]] | None:
    """Return the ids of clients that sent their class counts, and these, [clients, classes]; None without any."""
    rows = {int(i): facts["class-counts"] for i, facts in run.clients.items() if facts.get("class-counts")}
    if len(set(map(len, rows.values()))) != 1:
        return None
    ids = sorted(rows)
    return ids, np.array([rows[i] for i in ids], np.int64)


def class_names(run: ReportedRun, num_classes: int) -> tuple[str, ...]:
    """Return class names in label order; empty if the run does not have one for each class."""
    return run.classes if len(run.classes) == num_classes else ()


def class_labels(run: ReportedRun, num_classes: int) -> list[str]:
    """Return the classes' labels on an axis: names, shortened if they are long, or indices."""
    return shortened(dict(enumerate(class_names(run, num_classes))), 16) or list(map(str, range(num_classes)))


def client_labels(run: ReportedRun, ids: Iterable[int]) -> list[str]:
    """Return the clients' labels on an axis: names, shortened if they are long, or ids."""
    return shortened({i: run.client_name(i) for i in ids})


def shortened(names: Mapping[int, str], room: int = ROOM) -> list[str]:
    """Return names by number as shown: longer ones than `room` letters lose their middle.

    Names that would then be equal end with their numbers instead.
    """
    end = (room - 1) // 2
    cut = {k: name if len(name) <= room else f"{name[: room - 1 - end]}…{name[-end:]}" for k, name in names.items()}
    alike = Counter(cut.values())
    return [
        shown if alike[shown] == 1 or shown == names[k] else f"{names[k][: room - len(str(k)) - 2].rstrip()}… {k}"
        for k, shown in cut.items()
    ]


def averaged(cells: Floats, most: int, axis: int = 0) -> Floats:
    """Average neighbouring rows (axis 0) or columns (1) until at most `most` remain. NaN is ignored."""
    count = cells.shape[axis]
    if count <= most:
        return cells
    if axis:
        return averaged(cells.T, most).T
    places = (np.arange(1, count + 1) * most - 1) // count
    return np.asarray(pandas.DataFrame(cells).groupby(places).mean())


def cosine(counts: NDArray[np.int64]) -> Floats:
    """Return the cosine similarity of the clients' class counts, [N, N]."""
    unit = counts / np.maximum(np.linalg.norm(counts, axis=1, keepdims=True), 1e-12)
    return np.asarray(unit @ unit.T)


def by_likeness(similarity: Floats) -> list[int]:
    """Return an order that puts similar clients side by side, by average linkage on 1 - similarity [N, N].

    NaN counts as the lowest similarity.
    """
    from scipy.cluster.hierarchy import leaves_list

    # the optimal order of the leaves takes cubic time
    order: list[int] = leaves_list(_tree(similarity, ordered=len(similarity) <= MOST_ROWS)).tolist()
    return order


def clusters(similarity: Floats) -> tuple[float, int]:
    """Return how clearly similar clients form clusters, in [0, 1], and the number of clusters.

    It is the largest gap between two merges of average linkage on 1 - similarity [N, N], as part of the last merge's height.
    """
    heights = _tree(similarity)[:, 2]
    gaps = np.diff(heights)
    if not gaps.any():
        return 0.0, 1
    widest = int(gaps.argmax())
    return float(gaps[widest] / heights[-1]), len(heights) - widest


def _tree(similarity: Floats, ordered: bool = False) -> Floats:
    """Return scipy's tree of average linkage on 1 - similarity. ordered: with similar leaves side by side."""
    from scipy.cluster.hierarchy import linkage

    off = ~np.eye(len(similarity), dtype=bool)
    filled = np.where(np.isnan(similarity), np.nanmin(similarity[off]), similarity)
    largest = float(filled[off].max())
    distance = np.maximum((largest if largest > 1 + 1e-9 else 1.0) - (filled + filled.T) / 2, 0)
    pairs = distance[np.triu_indices(len(distance), 1)]
    return np.asarray(linkage(pairs, "average", optimal_ordering=ordered))
