"""Choice of a sweep's best row, and the data that it is based on (`corolla sweep --best-by`)."""

from __future__ import annotations

from collections.abc import Sequence

from corolla.experiments.compare import data_settings, references
from corolla.experiments.result_table import Row, setting, show
from corolla.experiments.significance import compared, opposite, why_unpaired
from corolla.experiments.sweep import Point
from fl_app.errors import UserError, listed

# heading of the figure, by kind of data
_FIGURES = {"validation": "validation", "test": "final"}
ON_TEST = "chosen on test data, so this figure is too good; set validation-ratio to choose on validation data"


def check(points: Sequence[Point], by: str) -> None:
    """Raise UserError if a sweep should choose by validation data and some of its runs have none."""
    lacking = [point.name for point in points if not point.parsed.validation_ratio]
    if by == "validation" and lacking:
        raise UserError(
            key="--best-by validation", rule=f"needs validation-ratio above 0, which is 0 in {listed(lacking)}"
        )


def best_lines(rows: Sequence[Row], by: str = "") -> list[str]:
    """Return lines that name the best row of each method with several rows, and of all rows, by mean over seeds.

    Rows with other data have their own best: figures on easier data are higher. A line says if the best of all is better
    than the next row, over clients (`corolla compare`).
    by: `validation` or `test`; empty: validation data if all rows have that figure, else test data. Rows without the
    figure, or with another headline than the first row, are not compared.
    """
    known = [row for row in rows if row.runs and row.headline == rows[0].headline]
    by = by or ("validation" if all("validation" in row.means for row in known) else "test")
    measured = [row for row in known if _FIGURES[by] in row.means]
    of = references([row.runs for row in measured])
    parts = {first: [row for row, its in zip(measured, of, strict=True) if its == first] for first in dict.fromkeys(of)}
    lines = []
    for part in parts.values():
        lines += _best_of_part(part, by, f"{_data_of(part[0])}: " if len(parts) > 1 else "")
    return [*lines, ON_TEST] if lines and by == "test" else lines


def _best_of_part(rows: Sequence[Row], by: str, start: str) -> list[str]:
    """Return the lines of rows with the same data, each with this start; none for a single row."""
    if len(rows) < 2:
        return []
    methods: dict[str, list[Row]] = {}
    for row in rows:
        methods.setdefault(row.runs[0].method, []).append(row)
    several = {method: own for method, own in methods.items() if len(own) > 1}
    lines = [_line(f"best of {method}", own, by) for method, own in several.items() if len(methods) > 1]
    lines += [_line("best of all", rows, by), *_verdicts(rows, by)]
    return [start + line for line in lines]


def _data_of(row: Row) -> str:
    """Return the settings of a row's data in which rows differ."""
    keys = data_settings(row.runs[0])
    return ", ".join(f"{key} {setting(value)}" for key, value in row.varying.items() if key in keys) or "other data"


def _ranked(rows: Sequence[Row], by: str) -> list[Row]:
    """Return rows by the figure that chooses them, the best first."""
    return sorted(rows, key=lambda row: row.means[_FIGURES[by]][0], reverse=rows[0].headline.higher_is_better)


def _verdicts(rows: Sequence[Row], by: str) -> list[str]:
    """Return the paired comparisons of the best row with the next one and with the first one of the table.

    They are corrected as if the best row had been compared with all others, because it was chosen among them.
    """
    best, after, *rest = _ranked(rows, by)
    others = {"next": after} if rows[0] in (best, after) else {"next": after, "first": rows[0]}
    ranked = [best, after, *rest]
    against = dict(zip(map(id, ranked), compared([row.runs for row in ranked]), strict=True))
    lines = []
    for place, other in others.items():
        found = against[id(other)]
        verdict = opposite(found.verdict) if found else why_unpaired(best.runs, other.runs)
        lines.append(f"compared with the {place} row, {_named(other)}: {verdict}")
    return lines


def _named(row: Row) -> str:
    named = ", ".join(f"{key} {setting(value)}" for key, value in row.varying.items() if value is not None)
    return named or row.runs[0].path.name


def _line(what: str, rows: Sequence[Row], by: str) -> str:
    headline, best = rows[0].headline, _ranked(rows, by)[0]
    told = f"{what} by {by} {headline.title}: {_named(best)} ({show(best.means[_FIGURES[by]], headline)}"
    return told + (f"; on test data {show(best.means.get('final'), headline)})" if by == "validation" else ")")
