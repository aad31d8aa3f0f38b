"""Pictures of a sweep: the final headline metric over a swept key as lines, and over two as heat maps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pandas

from corolla.report import charts, frames
from corolla.report.charts import WIDTH, Axis, Chart
from corolla.report.groups import Group, short
from corolla.report.over_keys import KeyLine, is_grid, labelled, lines_over, swept_keys, values_of
from corolla.report.pictures import TOGETHER, Panel, metric_axis
from fl_app.keys import show
from fl_app.metrics import Metric

# an axis is logarithmic if its values differ by this factor (the last digits allow for 1 - 0.99)
DECADES = 100 - 1e-9
# most heat maps in one picture
MOST_MAPS = 12
MAPS_IN_A_ROW = 3
CELL = 40  # height of a heat map's cell in pixels


def swept(groups: Sequence[Group]) -> Iterator[Panel]:
    """Yield the pictures over swept keys, per headline metric: groups of different tasks do not share a picture."""
    by_metric: dict[Metric, list[Group]] = {}
    for group in groups:
        by_metric.setdefault(group.first.headline, []).append(group)
    for metric, same in by_metric.items():
        keys = swept_keys(same)
        maps, mapped = _maps(same, keys)
        for pair, several in maps.items():
            yield _map_panel(metric, pair, several)
        for key in keys:
            drawn = [line for line in lines_over(same, [key]) if key not in mapped.get(line.method, ())]
            if any(len(line.known) > 1 for line in drawn):
                yield _line_panel(metric, same, key, drawn, keys)


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
            several = [line for line in lines_over(own, pair) if line.known and is_grid(line)]
            maps.setdefault(pair, []).extend(several)
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


def _seeds(lines: Sequence[KeyLine], text: str) -> str:
    return text if any(std is not None for line in lines for _, std in line.known) else ""


# Lines over one key ---------------------------------------------------------------------------------------------------


def _line_panel(
    metric: Metric, groups: Sequence[Group], key: str, lines: Sequence[KeyLine], keys: Sequence[str]
) -> Panel:
    others = [group for group in groups if not set(keys) & set(group.settings)]
    levels = [line for line in lines_over(others, []) if line.known]
    drawn = labelled([line for line in lines if len(line.means) > 1 and line.known] + levels)
    named = f"{drawn[0].label}. " if len(drawn) == 1 else ""
    band = _seeds(drawn, " Bands: ± one sample standard deviation over the seeds.")
    text = f"{named}Mean over all clients after the last round.{band} "
    if len(drawn) > 1:
        text += "Rows that differ only in this key share a line. "
    if levels:
        text += "Horizontal lines: methods without swept keys. "
    if any(mean is None for line in drawn for mean in line.means.values()):
        text += "A line has a gap at runs that are not finished or have no final figure. "
    if (scale := _scale(values_of(drawn)))[0]:
        text += f"The axis is logarithmic{scale[1]}. "
    return Panel(
        _name(metric, key),
        f"Final {metric.title} over {key}",
        text.rstrip(),
        lambda: _over_key(metric, key, drawn),
    )


def _over_key(metric: Metric, key: str, lines: Sequence[KeyLine]) -> Chart:
    values = values_of(lines)
    place = dict(zip(values, places(values), strict=True))
    ends = (min(place.values()), max(place.values()))
    margin = 0.05 * (ends[1] - ends[0])
    scale, told = _scale(values)
    title = f"{key} (logarithmic{told})" if scale else key
    ticks = tuple((at, show(value)) for value, at in place.items())
    axis = Axis(title, limits=(ends[0] - margin, ends[1] + margin), places=ticks)
    found = []
    for turn, line in enumerate(lines):
        means = [line.means[at] or (np.nan, None) for at in sorted(line.means)]
        x = [place[at[0]] for at in sorted(line.means) if at] or list(axis.limits or ends)
        mean, std = np.array([[mean, std or 0.0] for mean, std in means], np.float64).T
        bounds = {}
        if std.any():
            bounds = dict(zip(("low", "high"), np.clip([mean - std, mean + std], *metric.range), strict=True))
        columns = {"x": x, "value": [show(at[0]) for at in sorted(line.means) if at] or np.nan, "mean": mean}
        if len(x) > len(mean):  # a level
            columns, bounds = {"x": x, "mean": mean[0]}, {name: ends[0] for name, ends in bounds.items()}
        own = pandas.DataFrame({"run": short(line.label), "method": line.method, **columns, **bounds})
        found.append(frames.marked(own, turn, every=True))
    frame = pandas.concat(found, ignore_index=True)
    if len(lines) > 2 * TOGETHER:
        frame = frames.behind(frame)
    return charts.lines(frame, axis, metric_axis(metric))


def _scale(values: Sequence[float]) -> tuple[str, str]:
    """Return the scale of an axis with these ascending values, and its description; both empty if it is linear.

    `log`: the values differ by DECADES. `symlog`: so do those above 0, and others are not. `near-one`: the distances
    from 1 differ by DECADES.
    """
    above = [value for value in values if value > 0]
    if above and above[-1] >= DECADES * above[0]:
        return ("log", "") if len(above) == len(values) else ("symlog", f", and linear below {show(above[0])}")
    below = [1 - value for value in values if value < 1]
    if values and values[0] >= 0 and values[-1] <= 1 and below and below[0] >= DECADES * below[-1]:
        return "near-one", " in the distance from 1"
    return "", ""


def places(values: Sequence[float]) -> list[float]:
    """Return where ascending values stand on an axis, in the unit of `_scale`: decades, or the values themselves."""
    scale, _ = _scale(values)
    if scale == "log":
        return [math.log10(value) for value in values]
    if scale == "symlog":
        least = min(value for value in values if value > 0)
        return [math.log10(value / least) + 1 if value > 0 else value / least for value in values]
    if scale == "near-one":
        least = min(1 - value for value in values if value < 1)
        # 1 itself stands half a decade beyond the last value below it
        return [-math.log10(1 - value) if value < 1 else 0.5 - math.log10(least) for value in values]
    return list(values)


# Heat maps over two keys ----------------------------------------------------------------------------------------------


def _map_panel(metric: Metric, pair: tuple[str, str], maps: Sequence[KeyLine]) -> Panel:
    # the key with more values is across
    turned = len(values_of(maps, 0)) < len(values_of(maps, 1))
    if turned:
        pair = (pair[1], pair[0])
        maps = [replace(one, means={at[::-1]: mean for at, mean in one.means.items()}) for one in maps]
    drawn = labelled(maps)[:MOST_MAPS]
    spread = _seeds(drawn, ", below it the sample standard deviation over the seeds")
    several = "Colours are the same in all maps. " if len(drawn) > 1 else ""
    named = f"{drawn[0].label}. " if len(drawn) == 1 else ""
    text = f"{named}Mean over all clients after the last round{spread}. {several}"
    text += "Grey: no finished run with a final figure. "
    if len(maps) > MOST_MAPS:
        text += f"The first {MOST_MAPS} of {len(maps)} maps."
    title = f"Final {metric.title} over {pair[0]} and {pair[1]}"
    return Panel(_name(metric, *pair), title, text.rstrip(), lambda: _heat_maps(metric, pair, drawn))


def _heat_maps(metric: Metric, pair: tuple[str, str], maps: Sequence[KeyLine]) -> Chart:
    across, up = values_of(maps, 0), values_of(maps, 1)
    columns = min(MAPS_IN_A_ROW, len(maps))
    means = [mean for line in maps for mean, _ in line.known]
    low, high = min(means), max(means)
    width, height = (WIDTH - 100) // columns - 60, max(CELL * len(up), 110)
    axis = Axis(f"final {metric.title}", "~%" if metric.ratio else "~g")
    found = []
    for line in maps:
        rows = []
        for (x, y), known in line.means.items():
            if known is None:
                continue
            mean, std = known
            text = metric.text(mean, 1) + (f"\n± {metric.text(std, 1)}" if std is not None else "")
            fits = charts.LETTER * max(map(len, text.splitlines())) <= width / len(across)
            # the colours' lightness grows with the value
            ink = "black" if high > low and mean - low > 0.6 * (high - low) else "white"
            rows.append({"across": show(x), "up": show(y), "value": mean, "text": text if fits else "", "ink": ink})
        frame = pandas.DataFrame(rows)
        x, y = (
            charts.names(channel, name, key, [show(value) for value in values])
            for channel, name, key, values in (
                ("x", "across", pair[0], across),
                ("y", "up", pair[1], up[::-1]),
            )
        )
        own = charts.cells(frame, x, y, charts.coloured(axis, (low, high)), axis, width, height)
        found.append(charts.written(own, frame).properties(title=short(line.label, 48) if len(maps) > 1 else ""))
    return charts.beside(*found, columns=columns, independent=[])
