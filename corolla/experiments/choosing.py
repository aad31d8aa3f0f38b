"""Choice of a sweep's best row, and the data that it is based on (`corolla sweep --best-by`)."""

from __future__ import annotations

from collections.abc import Sequence

from corolla.experiments.significance import paired, why_unpaired
from corolla.experiments.sweep import Point
from corolla.experiments.table import Row, setting, show
from fl_app.errors import UserError, listed

# heading of the figure, by kind of data
_FIGURES = {"validation": "validation", "test": "final"}
ON_TEST = "chosen on test data, so this figure is too good; set validation-ratio to choose on validation data"


def check(points: Sequence[Point], by: str) -> None:
    """Raise UserError if a sweep should choose by validation data and some of its runs have none."""
    lacking = [point.name for point in points if not point.parsed.validation_ratio]
    if by == "validation" and lacking:
        raise UserError(f"--best-by validation: needs validation-ratio above 0, which is 0 in {listed(lacking)}")


def best_lines(rows: Sequence[Row], by: str = "") -> list[str]:
    """Return lines that name the best row of each method with several rows, and of all rows, by mean over seeds.

    A line says if the best of all is better than the next row, over clients (`corolla compare`).
    by: `validation` or `test`; empty: validation data if all rows have that figure, else test data. Rows without the
    figure, or with another headline than the first row, are not compared.
    """
    known = [row for row in rows if row.runs and row.headline == rows[0].headline]
    by = by or ("validation" if all("validation" in row.means for row in known) else "test")
    compared = [row for row in known if _FIGURES[by] in row.means]
    if len(compared) < 2:
        return []
    methods: dict[str, list[Row]] = {}
    for row in compared:
        methods.setdefault(row.runs[0].method, []).append(row)
    several = {method: own for method, own in methods.items() if len(own) > 1}
    lines = [_line(f"best of {method}", own, by) for method, own in several.items() if len(methods) > 1]
    lines += [_line("best of all", compared, by), *_verdicts(compared, by)]
    return [*lines, ON_TEST] if by == "test" else lines


def _ranked(rows: Sequence[Row], by: str) -> list[Row]:
    """Return rows by the figure that chooses them, the best first."""
    return sorted(rows, key=lambda row: row.means[_FIGURES[by]][0], reverse=rows[0].headline.higher_is_better)


def _verdicts(rows: Sequence[Row], by: str) -> list[str]:
    """Return the paired comparisons of the best row with the next one and with the first one of the table."""
    best, after, *_ = _ranked(rows, by)
    others = {"next": after} if rows[0] in (best, after) else {"next": after, "first": rows[0]}
    lines = []
    for place, other in others.items():
        found = paired(best.runs, other.runs)
        verdict = found.verdict if found else why_unpaired(best.runs, other.runs)
        lines.append(f"compared with the {place} row, {_named(other)}: {verdict}")
    return lines


def _named(row: Row) -> str:
    named = ", ".join(f"{key} {setting(value)}" for key, value in row.varying.items() if value is not None)
    return named or row.runs[0].path.name


def _line(what: str, rows: Sequence[Row], by: str) -> str:
    headline, best = rows[0].headline, _ranked(rows, by)[0]
    told = f"{what} by {by} {headline.title}: {_named(best)} ({show(best.means[_FIGURES[by]], headline)}"
    return told + (f"; on test data {show(best.means.get('final'), headline)})" if by == "validation" else ")")
