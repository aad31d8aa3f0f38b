"""Pictures of a sweep: the final headline metric over a swept key as lines, and over two as heat maps."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from corolla.report.arrays import Floats
from corolla.report.figures import (
    TOGETHER,
    WIDTH,
    Panel,
    inches,
    label_outer,
    legend,
    metric_axis,
    new_figure,
    small_multiples,
    thinned,
)
from corolla.report.groups import Group, short
from corolla.report.over_keys import Line, is_grid, labelled, lines_over, swept_keys, values_of
from corolla.report.style import COLOURS_OF_VALUES, Look, empty_cells, looks, tone
from fl_app.keys import show
from fl_app.metrics import Metric

# an axis is logarithmic if its values differ by this factor (the last digits allow for 1 - 0.99)
DECADES = 100 - 1e-9
# most heat maps in one picture
MOST_MAPS = 12
MAPS_IN_A_ROW = 3
CELL = 0.42  # height of a heat map's cell in inches


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
) -> tuple[dict[tuple[str, str], list[Line]], dict[str, set[str]]]:
    """Return the heat maps by their two keys, and by method the keys that need no line, because maps show them.

    A method that varies more than two keys together has maps over the first two, one per value of the others.
    """
    maps: dict[tuple[str, str], list[Line]] = {}
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


def _seeds(lines: Sequence[Line], text: str) -> str:
    return text if any(std is not None for line in lines for _, std in line.known) else ""


# Lines over one key ---------------------------------------------------------------------------------------------------


def _line_panel(metric: Metric, groups: Sequence[Group], key: str, lines: Sequence[Line], keys: Sequence[str]) -> Panel:
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
        lambda: _over_key(metric, groups, key, drawn),
    )


def _over_key(metric: Metric, groups: Sequence[Group], key: str, lines: Sequence[Line]) -> Figure:
    style = dict(zip([line.label for line in lines], looks([line.method for line in lines]), strict=True))
    values = values_of(lines)

    def draw(axes: Axes, line: Line, in_focus: bool) -> None:
        _draw_line(axes, metric, line, style[line.label] if in_focus else None)

    if len(lines) > 2 * TOGETHER:
        figure, grid = small_multiples(lines, draw)
        label_outer(grid, 4, lambda axes: _key_axis(axes, key, values, WIDTH / 4 - 0.5), metric_axis(groups))
        return figure
    figure = new_figure(4.2)
    axes = figure.add_subplot()
    for line in lines:
        draw(axes, line, True)
    _key_axis(axes, key, values, WIDTH - 1)
    metric_axis(groups)(axes)
    legend(figure, axes)
    return figure


def _draw_line(axes: Axes, metric: Metric, line: Line, look: Look | None) -> None:
    """Draw a line with its band; without a look in grey, behind the others."""
    points = sorted(line.means)
    mean = np.array([found[0] if (found := line.means[at]) else np.nan for at in points])
    std = np.array([(found[1] or 0.0) if (found := line.means[at]) else np.nan for at in points])
    low, high = (np.clip(edge, *metric.range) for edge in (mean - std, mean + std))
    if look is None:
        grey: dict[str, Any] = {"color": tone(0.82), "linewidth": 0.9, "zorder": 1}
        axes.plot([at[0] for at in points], mean, **grey) if points[0] else axes.axhline(mean[0], **grey)
        return
    colour = look.drawn()
    if not points[0]:
        axes.axhline(mean[0], label=short(line.label), color=colour, linestyle=look.line)
        axes.axhspan(low[0], high[0], color=colour, alpha=0.1, linewidth=0)
        return
    x = [at[0] for at in points]
    if np.nansum(std) > 0:
        axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0)
        for edge in (low, high):
            axes.plot(x, edge, color=colour, linestyle=look.line, linewidth=0.6, alpha=0.7)
    axes.plot(x, mean, label=short(line.label), **look.line_style(len(x)) | {"markevery": 1})


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


def _set_scale_near_one(axes: Axes, least: float) -> None:
    """Make x logarithmic in the distance from 1, and linear beyond the last value below 1.

    least: the distance of that value. 1 itself lies half a decade beyond it.
    """
    last = -np.log10(least)

    def forward(x: Floats) -> Floats:
        distance = 1 - np.asarray(x, np.float64)
        return np.where(distance >= least, -np.log10(np.maximum(distance, least)), last + 0.5 * (1 - distance / least))

    def backward(y: Floats) -> Floats:
        beyond = np.asarray(y, np.float64) - last
        distance: Floats = np.where(beyond <= 0, 10.0 ** -np.minimum(y, last), least * (1 - 2 * beyond))
        return 1 - distance

    axes.set_xscale("function", functions=(forward, backward))


def _set_limits(axes: Axes, values: Sequence[float]) -> None:
    """Make x reach from the first to the last value with the usual margin, whatever else is drawn.

    matplotlib's own limits on a "function" scale count a horizontal line's ends, 0 and 1, as values.
    """
    first, last = (float(axes.transScale.transform((value, 0.5))[0]) for value in (values[0], values[-1]))
    margin = axes.get_xmargin() * (last - first)
    back = axes.transScale.inverted()
    axes.set_xlim(*(float(back.transform((end, 0.5))[0]) for end in (first - margin, last + margin)))


def _key_axis(axes: Axes, key: str, values: Sequence[float], room: float) -> None:
    """Make x the key, with ticks at its values. room: width of the axes in inches."""
    scale, told = _scale(values)
    if scale == "log":
        axes.set_xscale("log")
    elif scale == "symlog":
        axes.set_xscale("symlog", linthresh=min(value for value in values if value > 0))
    elif scale == "near-one":
        _set_scale_near_one(axes, min(1 - value for value in values if value < 1))
    _set_limits(axes, values)
    places = axes.transData.transform([(value, 0.0) for value in values])[:, 0]
    at = (room / 1.1) * (places - places[0]) / max(places[-1] - places[0], 1e-9)
    texts = [show(value) for value in values]
    kept: list[int] = []
    # the ends come first, then those that still have room
    for k in (len(values) - 1, 0, *range(len(values) - 2, 0, -1)):
        if all(abs(at[k] - at[j]) >= (inches([texts[k]]) + inches([texts[j]])) / 2 + 0.1 for j in kept):
            kept.append(k)
    axes.set_xticks([values[k] for k in kept], [texts[k] for k in kept], fontsize=9)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(f"{key} (logarithmic{told})" if scale else key)


# Heat maps over two keys ----------------------------------------------------------------------------------------------


def _map_panel(metric: Metric, pair: tuple[str, str], maps: Sequence[Line]) -> Panel:
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
    text += "Hatched: no finished run with a final figure. "
    if len(maps) > MOST_MAPS:
        text += f"The first {MOST_MAPS} of {len(maps)} maps."
    title = f"Final {metric.title} over {pair[0]} and {pair[1]}"
    return Panel(_name(metric, *pair), title, text.rstrip(), lambda: _heat_maps(metric, pair, drawn))


def _heat_maps(metric: Metric, pair: tuple[str, str], maps: Sequence[Line]) -> Figure:
    across, up = values_of(maps, 0), values_of(maps, 1)
    columns = min(MAPS_IN_A_ROW, len(maps))
    rows = math.ceil(len(maps) / columns)
    figure = new_figure(0.8 + rows * (0.6 + max(CELL * len(up), 1.2)))
    every = [mean for line in maps for mean, _ in line.known]
    width = (WIDTH - 1.8) / columns
    grid: list[Axes] = []
    for k, line in enumerate(maps):
        axes = figure.add_subplot(rows, columns, k + 1)
        cells = np.array([[found[0] if (found := line.means.get((x, y))) else np.nan for x in across] for y in up])
        axes.patch.set(**empty_cells())
        image = axes.imshow(
            cells,
            COLOURS_OF_VALUES,
            vmin=min(every),
            vmax=max(every),
            aspect="auto",
            interpolation="nearest",
            origin="lower",
        )
        axes.grid(visible=False)
        ticks = thinned(len(across), width, 0.1 + inches([show(x) for x in across]))
        axes.set_xticks(ticks, [show(across[k]) for k in ticks])
        ticks = thinned(len(up), CELL * len(up), 0.15)
        axes.set_yticks(ticks, [show(up[k]) for k in ticks] if k % columns == 0 else [""] * len(ticks))
        if len(maps) > 1:
            axes.set_title("\n".join(textwrap.wrap(short(line.label, 72), int(12 * width))), fontsize=9)
        _write_means(axes, metric, line, (across, up), width / len(across))
        axes.set_xlabel(pair[0] if k + columns >= len(maps) else "")
        axes.set_ylabel(pair[1] if k % columns == 0 else "")
        grid.append(axes)
    unit = f"{metric.title} (%)" if metric.ratio else metric.title
    bar = figure.colorbar(image, ax=grid, label=unit, fraction=0.04, pad=0.01)
    if metric.ratio:
        bar.ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}")
    return figure


def _write_means(axes: Axes, metric: Metric, line: Line, values: tuple[list[float], list[float]], room: float) -> None:
    """Write the cells' means, and deviations, as far as they fit into `room` inches."""
    low, high = axes.get_images()[0].get_clim()
    across, up = values
    for (x, y), found in line.means.items():
        if found is None:
            continue
        mean, std = found
        text = metric.text(mean, 1) + (f"\n± {metric.text(std, 1)}" if std is not None else "")
        if inches(text.splitlines(), 8) > room - 0.05:
            continue
        red, green, blue, _ = colormaps[COLOURS_OF_VALUES]((mean - low) / (high - low) if high > low else 0.0)
        ink = "black" if 0.3 * red + 0.6 * green + 0.1 * blue > 0.4 else "white"
        axes.text(across.index(x), up.index(y), text, ha="center", va="center", fontsize=8, color=ink)
