"""Pictures of a sweep: the final headline metric over a swept key as lines, and over two as heat maps.

A key is swept if rows differ in it alone. Its values are numbers; a key of words gets a line per word.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas

from corolla.experiments.result_table import Mean
from corolla.report import charts
from corolla.report.all_runs import by_metric
from corolla.report.charts import WIDTH, Axis, Chart, Panel, metric_axis, sentences
from corolla.report.groups import TOGETHER, Group, behind, marked, short
from fl_app.keys import Scalar, show
from fl_app.metrics import Metric

# the value of each key of a line or map
At = tuple[float, ...]
# an axis is logarithmic if its values differ by this factor (the last digits allow for 1 - 0.99)
DECADES = 100 - 1e-9
# most heat maps in one picture
MOST_MAPS = 12
MAPS_IN_A_ROW = 3
CELL = 40  # height of a heat map's cell in pixels


def swept(groups: Sequence[Group]) -> Iterator[Panel]:
    """Yield the pictures over swept keys, per headline metric: groups of different tasks do not share a picture."""
    for metric, same in by_metric(groups):
        keys = swept_keys(same)
        maps, mapped = _maps(same, keys)
        for pair, several in maps.items():
            yield _map_panel(metric, pair, several)
        for key in keys:
            lines = [line for line in lines_over(same, [key]) if key not in mapped.get(line.method, ())]
            if any(len(line.known) > 1 for line in lines):
                levels = lines_over([group for group in same if not set(keys) & set(group.settings)], [])
                yield _line_panel(metric, key, lines, [line for line in levels if line.known])


def _maps(
    groups: Sequence[Group], keys: Sequence[str]
) -> tuple[dict[tuple[str, str], list[KeyLine]], dict[str, set[str]]]:
    """Return the heat maps by their two keys, and by method the keys that need no line, because maps show them.

    A method that varies more than two keys together has maps over the first two, one per value of the others.
    """
    maps: dict[tuple[str, str], list[KeyLine]] = {}
    mapped: dict[str, set[str]] = {}
    for method in dict.fromkeys(group.method for group in groups):
        own = [group for group in groups if group.method == method]
        together = [pair for pair in itertools.combinations(keys, 2) if any(map(is_grid, lines_over(own, pair)))]
        for pair, covered in _joined(together):
            maps.setdefault(pair, []).extend([line for line in lines_over(own, pair) if line.known and is_grid(line)])
            mapped.setdefault(method, set()).update(covered)
    return {pair: lines for pair, lines in maps.items() if lines}, mapped


def _joined(pairs: Sequence[tuple[str, str]]) -> list[tuple[tuple[str, str], set[str]]]:
    """Return the first pair of each set of keys that pairs join, with the set."""
    found: list[tuple[tuple[str, str], set[str]]] = []
    for pair in pairs:
        touching = [one for one in found if one[1] & set(pair)]
        first = touching[0][0] if touching else pair
        found = [one for one in found if one not in touching]
        found.append((first, set(pair).union(*(keys for _, keys in touching))))
    return found


def _name(metric: Metric, *keys: str) -> str:
    return f"{metric.name}-over-{'-and-'.join(key.replace('.', '-') for key in keys)}"


def _repeated(lines: Sequence[KeyLine]) -> bool:
    return any(std is not None for line in lines for _, std in line.known)


# Rows as lines --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeyLine:
    """Rows of one method that differ only in some keys.

    settings: their other settings in which the report's rows differ. means: final metric by the keys' values; None if a
    row has no final figure.
    """

    method: str
    settings: Mapping[str, Scalar]
    means: dict[At, Mean | None]
    label: str = ""

    @property
    def known(self) -> list[Mean]:
        """The final figures."""
        return [mean for mean in self.means.values() if mean is not None]


def swept_keys(groups: Sequence[Group]) -> list[str]:
    """Return the keys with numbers in which groups differ alone: all their other settings are equal."""
    keys = dict.fromkeys(key for group in groups for key in group.settings if key != "seed")
    return [key for key in keys if any(len(line.means) > 1 for line in lines_over(groups, [key]))]


def lines_over(groups: Sequence[Group], keys: Sequence[str]) -> list[KeyLine]:
    """Return the groups with numbers for all `keys` as lines: groups with equal other settings share one.

    Of two groups with equal settings the first one with a final figure counts.
    """
    found: dict[object, KeyLine] = {}
    for group in groups:
        own = {key: value for key, value in group.settings.items() if key != "seed"}
        at: Any = tuple(own.pop(key, "") for key in keys)
        # true and false are no numbers
        if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in at):
            same = group.method, *sorted((key, show(value)) for key, value in own.items())
            means = found.setdefault(same, KeyLine(group.method, own, {})).means
            mean = group.row.means.get("final")
            final = mean and math.isfinite(mean[0]) and all(run.finished for run in group.runs)
            means[at] = means.get(at) or (mean if final else None)
    return list(found.values())


def is_grid(line: KeyLine) -> bool:
    """Return whether both keys of a line vary together, not only one at a time."""
    columns = Counter(one for one, _ in line.means)
    return sum(count > 1 for count in columns.values()) > 1


def labelled(lines: Sequence[KeyLine]) -> list[KeyLine]:
    """Return lines with their labels: the method, and as few other settings as distinguish them, words first."""
    names = list(dict.fromkeys(name for line in lines for name in line.settings))
    names.sort(key=lambda name: not any(isinstance(line.settings.get(name), str) for line in lines))
    told: list[str] = []

    def words(line: KeyLine, names: Sequence[str]) -> tuple[str, ...]:
        return tuple(f"{n.rpartition('.')[2]} {show(line.settings[n])}" for n in names if n in line.settings)

    def distinct(names: Sequence[str]) -> int:
        return len({(line.method, *words(line, names)) for line in lines})

    for name in names:
        if distinct([*told, name]) > distinct(told):
            told.append(name)
    return [replace(line, label=", ".join([line.method, *words(line, told)])) for line in lines]


def values_of(lines: Sequence[KeyLine], place: int = 0) -> list[float]:
    """Return the values of a key in all lines, ascending."""
    return sorted({at[place] for line in lines for at in line.means if at})


# Lines over one key ---------------------------------------------------------------------------------------------------


def _line_panel(metric: Metric, key: str, lines: Sequence[KeyLine], levels: Sequence[KeyLine]) -> Panel:
    drawn = labelled([*(line for line in lines if len(line.means) > 1 and line.known), *levels])
    kind = placed(values_of(drawn))[1]
    gaps = any(None in line.means.values() for line in drawn)
    return Panel(
        _name(metric, key),
        f"Final {metric.title} over {key}",
        sentences(
            f"{drawn[0].label}." * (len(drawn) == 1),
            "Mean over all clients after the last round.",
            "Bands: ± one sample standard deviation over the seeds." * _repeated(drawn),
            "Rows that differ only in this key share a line." * (len(drawn) > 1),
            "Horizontal lines: methods without swept keys." * bool(levels),
            "A line has a gap at runs that are not finished or have no final figure." * gaps,
            f"The axis is {kind}." * bool(kind),
        ),
        lambda: _over_key(metric, key, drawn),
    )


def _over_key(metric: Metric, key: str, lines: Sequence[KeyLine]) -> Chart:
    values = values_of(lines)
    places, kind = placed(values)
    place, texts = dict(zip(values, places, strict=True)), dict(zip(values, map(show, values), strict=True))
    first, last = min(places), max(places)
    margin = 0.05 * (last - first)
    axis = Axis(
        f"{key} ({kind})" if kind else key,
        limits=(first - margin, last + margin),
        places=tuple(zip(places, texts.values(), strict=True)),
    )
    found = []
    for turn, line in enumerate(lines):
        rows = [(*at, *(line.means[at] or (np.nan, None))) for at in sorted(line.means)]
        # a line without values is a level
        rows = [(math.nan, *row) for row in rows * 2] if () in line.means else rows
        own = pandas.DataFrame(rows, columns=["value", "mean", "std"]).astype(float).fillna({"std": 0.0})
        own.insert(0, "x", own["value"].map(place).fillna(pandas.Series(axis.limits)))
        std = own.pop("std")
        if std.any():
            low, high = metric.range
            own["low"], own["high"] = (own["mean"] - std).clip(low, high), (own["mean"] + std).clip(low, high)
        own["value"] = own["value"].map(texts)
        own = own.assign(run=short(line.label), method=line.method)
        found.append(marked(own, turn, every=True))
    frame = pandas.concat(found, ignore_index=True)
    frame = behind(frame) if len(lines) > 2 * TOGETHER else frame
    return charts.lines(frame, axis, metric_axis(metric))


def placed(values: Sequence[float]) -> tuple[list[float], str]:
    """Return where ascending values stand on an axis, and the axis's kind: empty if it is linear, and places are values.

    It is logarithmic if the values differ by DECADES, or those above 0 do, or the distances from 1. A place is then in
    decades.
    """
    above = [value for value in values if value > 0]
    if above and above[-1] >= DECADES * above[0]:
        if len(above) == len(values):
            return [math.log10(value) for value in values], "logarithmic"
        decades = [math.log10(value / above[0]) + 1 if value > 0 else value / above[0] for value in values]
        return decades, f"logarithmic, and linear below {show(above[0])}"
    below = [1 - value for value in values if value < 1]
    if values and values[0] >= 0 and values[-1] <= 1 and below and below[0] >= DECADES * below[-1]:
        # 1 itself stands half a decade beyond the last value below it
        decades = [-math.log10(1 - value) if value < 1 else 0.5 - math.log10(below[-1]) for value in values]
        return decades, "logarithmic in the distance from 1"
    return list(values), ""


# Heat maps over two keys ----------------------------------------------------------------------------------------------


def _map_panel(metric: Metric, pair: tuple[str, str], maps: Sequence[KeyLine]) -> Panel:
    # the key with more values is across
    turned = len(values_of(maps, 0)) < len(values_of(maps, 1))
    if turned:
        pair = (pair[1], pair[0])
        maps = [replace(one, means={at[::-1]: mean for at, mean in one.means.items()}) for one in maps]
    drawn = labelled(maps)[:MOST_MAPS]
    spread = ", below it the sample standard deviation over the seeds" * _repeated(drawn)
    return Panel(
        _name(metric, *pair),
        f"Final {metric.title} over {pair[0]} and {pair[1]}",
        sentences(
            f"{drawn[0].label}." * (len(drawn) == 1),
            f"Mean over all clients after the last round{spread}.",
            "Colours are the same in all maps." * (len(drawn) > 1),
            "Grey: no finished run with a final figure.",
            f"The first {MOST_MAPS} of {len(maps)} maps." * (len(maps) > MOST_MAPS),
        ),
        lambda: _heat_maps(metric, pair, drawn),
    )


def _heat_maps(metric: Metric, pair: tuple[str, str], maps: Sequence[KeyLine]) -> Chart:
    across, up = values_of(maps, 0), values_of(maps, 1)
    columns = min(MAPS_IN_A_ROW, len(maps))
    means = [mean for line in maps for mean, _ in line.known]
    low, high = min(means), max(means)
    width, height = (WIDTH - 100) // columns - 60, max(CELL * len(up), 110)
    axis = Axis(f"final {metric.title}", "~%" if metric.ratio else "~g")
    x = charts.names("x", "across", pair[0], [*map(show, across)])
    y = charts.names("y", "up", pair[1], [*map(show, up[::-1])])
    found = []
    for line in maps:
        rows = []
        for at, known in line.means.items():
            if known is not None:
                mean, std = known
                text = metric.text(mean, 1) + (f"\n± {metric.text(std, 1)}" if std is not None else "")
                fits = charts.LETTER * max(map(len, text.splitlines())) <= width / len(across)
                rows.append((*map(show, at), mean, text * fits))
        # the colours' lightness grows with the value
        dark = f"datum.value > {low + 0.6 * (high - low)}" if high > low else "false"
        own = charts.cells(
            pandas.DataFrame(rows, columns=["across", "up", "value", "text"]),
            x,
            y,
            charts.coloured(axis, (low, high)),
            axis,
            width,
            height,
        )
        found.append(charts.written(own, "text:N", dark).properties(title=short(line.label, 48) * (len(maps) > 1)))
    return charts.beside(*found, columns=columns, independent=[])
