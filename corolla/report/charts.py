"""Charts: each is a function of one tidy data frame, and returns an Altair chart that can be changed (`+`, `.properties`).

Columns that several frames share: `run` (label of a row of runs), `method`, `client` (its name or id), `round`, and
`part` (heading of a small chart). A line has `mean`, and for its bands `low` and `high`, `lowest` and `highest`. Every
other column is shown when a reader points at a mark. Without a number a cell is empty. A `Panel` is a picture of the
report: a chart with its title and caption, and its files.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import altair as alt
import numpy as np
from altair.utils.schemapi import debug_mode

from corolla.report.theme import (
    COLOURS,
    COLOURS_OF_VALUES,
    CONFIG,
    EMPTY,
    INK,
    SOFT,
    STILL,
    VERMILLION,
    looks,
    of_colour,
    plain_looks,
    two,
)
from fl_app.metrics import Metric

Chart = Any
Frame = Any
# of a whole picture's marks, in pixels
WIDTH = 960
# pixels of a PNG per pixel of the page
SCALE = 1.6
# about the pixels of a letter, and of what stands beside a legend's text
LETTER, SYMBOL = 7, 50
# most classes of a confusion matrix with numbers in its cells
MOST_WRITTEN = 20
# small charts in a row
IN_A_ROW = 4
# columns that draw, and are not in tooltips
DRAWN = ["mark", "part", "method", "place", "until", "other", "x", "left"]
GREYS = {"range": [two("#ffffff", "#17181a"), two("#111111", "#f5f5f5")]}
# of a mark: its client is highlighted; none is, or its own; its run is picked in the legend
CLIENT = "datum.client === client"
NO_OTHER = f"client === '' || {CLIENT}"
PICKED = {"param": "pick"}


@dataclass(frozen=True)
class Axis:
    """An axis. format: of numbers, in d3's language. limits: its ends; outside them nothing is drawn.

    places: ticks as (place, text), in place of round numbers. tight: it ends where the numbers do, and not at round ones.
    """

    title: str
    format: str = "~g"
    limits: tuple[float, float] | None = None
    log: bool = False
    zero: bool = False
    places: tuple[tuple[float, str], ...] = ()
    tight: bool = False

    def on(self, channel: Any, field: str) -> Any:
        """Return a field's encoding. channel: alt.X or alt.Y."""
        kind = "log" if self.log else "linear"
        scale = alt.Scale(type=kind, zero=self.zero, nice=not self.tight, padding=8 if self.tight else 0)
        if self.limits:
            scale = alt.Scale(type=kind, domain=list(self.limits), nice=False)
        axis = alt.Axis(format=self.format, tickMinStep=1 if self.format == "d" else 0)
        if self.places:
            texts = json.dumps({f"{place:g}": text for place, text in self.places})
            axis = alt.Axis(values=[place for place, _ in self.places], labelExpr=f"{texts}[datum.value]")
        return channel(f"{field}:Q", title=self.title, scale=scale, axis=axis)


def metric_axis(metric: Metric, limits: tuple[float, float] | None = None) -> Axis:
    """Return the axis of a metric on test data, in per cent if it is a ratio."""
    return Axis(f"test {metric.title}", "~%" if metric.ratio else "~g", limits)


ROUNDS = Axis("round", "d", tight=True)
_SPENT = Axis("bytes sent and received until then, of all clients", "~s", tight=True)
_ELAPSED = Axis("seconds until then", tight=True)
# choices of lines over rounds, as `Panel.switch` takes them: other axes, of other columns of the frame
BY_COST = {
    "over rounds": {},
    "over bytes": {"round": _SPENT.on(alt.X, "bytes").to_dict(validate=False)},
    "over seconds": {"round": _ELAPSED.on(alt.X, "seconds").to_dict(validate=False)},
}


def sentences(*texts: str) -> str:
    """Return a caption of sentences; empty ones are left out."""
    return " ".join(filter(None, texts))


@dataclass(frozen=True)
class Panel:
    """A picture of the report. name: its files' name. caption: explains it. folded: the page shows it on demand.

    draw: returns its chart. switch: by the names of the reader's choices, what changes along the sides that show a field.
    """

    name: str
    title: str
    caption: str
    draw: Callable[[], Chart]
    folded: bool = False
    switch: Mapping[str, Mapping[str, Any]] | None = None

    @cached_property
    def spec(self) -> dict[str, Any]:
        """The picture as Vega-Lite's JSON. `datasets` has its data as CSV, by name."""
        # checking each part against Vega-Lite's schema takes most of the time; the tests do it
        with debug_mode(False):
            found: dict[str, Any] = self.draw().to_dict(validate=False)
        extra = {"usermeta": {"switch": self.switch}} if self.switch else {}
        return {**found, "config": CONFIG, "description": f"{self.title}. {self.caption}", **extra}

    @cached_property
    def svg(self) -> str:
        """The picture as SVG. Its parts are numbered anew: the program counts on from picture to picture."""
        import vl_convert

        numbers: dict[str, int] = {}
        return re.sub(
            r'(id="|url\(#)([a-z_]+)(\d+)',
            lambda part: f"{part[1]}{part[2]}{numbers.setdefault(part[2] + part[3], len(numbers))}",
            vl_convert.vegalite_to_svg({**self.spec, "config": STILL}),
        )

    def render(self, kind: str = "png") -> bytes:
        """Return the picture as a png, svg or pdf file. Equal pictures give equal bytes, but for pdf."""
        import vl_convert

        if kind == "svg":
            return self.svg.encode()
        found = vl_convert.svg_to_pdf(self.svg) if kind == "pdf" else vl_convert.svg_to_png(self.svg, scale=SCALE)
        return bytes(found)


# Pieces ---------------------------------------------------------------------------------------------------------------


def inline(frame: Frame) -> Any:
    """Return a frame as a chart's data: CSV, with each column's type."""
    kinds = {name: "number" if kind.kind in "iuf" else "string" for name, kind in frame.dtypes.items()}
    text = frame.to_csv(index=False, float_format="%.6g", lineterminator="\n")
    return alt.InlineData(values=text.replace("\r", ""), format=alt.CsvDataFormat(type="csv", parse=kinds))


def tooltips(frame: Frame, value: Axis) -> list[Any]:
    """Return the tooltip of a mark. value: the axis of the frame's measured numbers."""
    found = []
    for name, kind in frame.dropna(axis=1, how="all").drop(columns=DRAWN, errors="ignore").dtypes.items():
        tip = alt.Tooltip(f"{name}:{'Q' if kind.kind in 'iuf' else 'N'}")
        if kind.kind == "f":
            tip = tip.format(".2%" if name in MEASURED and value.format.endswith("%") else ".4~g")
        found.append(tip)
    return found


MEASURED = {"mean", "reference", "low", "high", "lowest", "highest", "value", "share", "final"}


def legend_columns(names: Sequence[str]) -> int:
    """Return the number of columns of a legend below a picture, so that it is no wider than the page."""
    return max(1, min(len(names), (WIDTH + 100) // (LETTER * max(map(len, names)) + SYMBOL)))


def series(frame: Frame, title: str | None = None, orient: str = "bottom") -> dict[str, Any]:
    """Return colour, dashes and shape of each run, or of each line without a method."""
    firsts = frame.drop_duplicates("run")
    names = firsts["run"].tolist()
    styles = looks(firsts["method"].tolist()) if "method" in frame else plain_looks(len(names))
    several = alt.Legend(
        title=title, symbolOpacity=1, orient=orient, columns=legend_columns(names) if orient == "bottom" else 1
    )

    def scaled(channel: Any, values: Sequence[Any]) -> Any:
        legend = several if len(names) > 1 else None
        return channel("run:N", scale=alt.Scale(domain=names, range=list(values)), legend=legend)

    return {
        "color": scaled(alt.Color, [style.drawn for style in styles]),
        "strokeDash": scaled(alt.StrokeDash, [style.line for style in styles]),
        "shape": scaled(alt.Shape, [style.marker for style in styles]),
    }


def when(channel: Any, test: Any, yes: float | str, no: float | str) -> Any:
    """Return the encoding of a number or colour that depends on a test: an expression, or Vega-Lite's predicate."""
    return channel(no, condition={"test": test, "value": yes})


def small_width(columns: int) -> int:
    """Return the width of one of several charts in a row."""
    return (WIDTH - 46 * (columns - 1)) // columns


def columns_of(parts: Sequence[str]) -> int:
    """Return the number of charts in a row: at most IN_A_ROW, and no title is wider than its chart."""
    longest = LETTER * max(map(len, parts))
    return max(n for n in range(1, min(len(parts), IN_A_ROW) + 1) if n == 1 or longest <= small_width(n))


def faceted(
    chart: Chart, frame: Frame, width: int = 0, height: int = 0, independent: Sequence[str] = (), columns: int = 0
) -> Chart:
    """Return a chart once for each `part` of its frame. independent: scales of their own. columns: default `columns_of`."""
    parts = frame["part"].drop_duplicates().tolist()
    columns = columns or columns_of(parts)
    sized = chart.properties(
        width=width or small_width(columns), height=height or (250 if len(parts) <= columns else 170)
    )
    several = sized.facet(facet=alt.Facet("part:N").sort(parts).title(None), columns=columns)
    return several.resolve_scale(**dict.fromkeys(independent, "independent"))


# Lines ----------------------------------------------------------------------------------------------------------------


def lines(
    frame: Frame, x: Axis, y: Axis, height: int = 0, legend: str | None = None, right: bool = False, width: int = WIDTH
) -> Chart:
    """Return lines with their bands. frame: run, x or round, mean, and perhaps low, high, lowest, highest, part, line, other.

    part: a small chart for each. line: separates lines of one run. other: lines of this name are grey in all parts.
    left: a dotted rule where it is not empty.
    A click on the legend shows some lines alone; a drag moves along x, and the wheel with Ctrl enlarges.
    """
    pick = alt.selection_point(name="pick", fields=["run"], bind="legend", toggle="true")
    zoom = alt.selection_interval(
        name="zoom", bind="scales", encodings=["x"], zoom="wheel![event.ctrlKey || event.metaKey]"
    )
    style, across = series(frame, legend, "right" if right else "bottom"), x.on(alt.X, "x" if "x" in frame else "round")
    base, layers = alt.Chart(), []
    # nothing stands outside other axes until a reader moves them, and cutting off takes most of the time of a file
    clip = y.limits is not None or alt.ExprRef("moves")
    if "other" in frame:
        layers.append(
            alt.Chart(inline(frame.drop(columns="part")))
            .mark_line(strokeWidth=1, stroke=SOFT, opacity=0.4, clip=clip)
            .encode(x=across, y=y.on(alt.Y, "mean"), detail="other:N")
        )
    for low, high, opacity in (("lowest", "highest", 0.1), ("low", "high", 0.18)):
        if low in frame and frame[low].notna().any():
            band = base.mark_area(clip=clip).encode(x=across, y=y.on(alt.Y, low), y2=high, color=style["color"])
            layers.append(band.encode(opacity=when(alt.OpacityValue, PICKED, opacity, 0)))
    if "left" in frame:
        layers.append(
            base.transform_filter("datum.left")
            .mark_rule(strokeDash=[1.3, 1.4], clip=clip)
            .encode(x=across, color=style["color"], tooltip=["run:N", "round:Q", "left:N"])
        )
    line = base.mark_line(clip=clip).encode(
        x=across,
        y=y.on(alt.Y, "mean"),
        color=style["color"],
        strokeDash=style["strokeDash"],
        opacity=when(alt.OpacityValue, PICKED, 1, 0.08),
    )
    if "line" in frame:
        line = line.encode(detail="line:N")
    marked = "datum.mark === 1" + (f" || {CLIENT}" if "client" in frame else "")
    # the others show what they are when a reader points at them, which nobody does in a file
    points = base.transform_filter("moves || datum.mark === 1")
    dots = points.mark_point(filled=True, clip=y.limits is not None or x.limits is not None).encode(
        x=across,
        y=y.on(alt.Y, "mean"),
        color=style["color"],
        shape=style["shape"],
        opacity=when(alt.OpacityValue, {"and": [PICKED, marked]}, 1, 0),
        size=when(alt.SizeValue, CLIENT, 260, 50) if "client" in frame else alt.SizeValue(50),
        tooltip=tooltips(frame, y),
    )
    chart = alt.layer(*layers, line.add_params(pick, zoom), dots, data=inline(frame))
    return (
        faceted(chart, frame, height=height) if "part" in frame else chart.properties(width=width, height=height or 300)
    )


# Bars -----------------------------------------------------------------------------------------------------------------


def histogram(frame: Frame, x: Axis, y: Axis) -> Chart:
    """Return a histogram for each part, with its mean and quantiles.

    frame: run, method, part, low, high (ends of the bin), share; and the part's mean, lowest, highest.
    """
    base, colour = alt.Chart(), series(frame)["color"].legend(None)
    across, up = x.on(alt.X, "low").bin("binned"), y.on(alt.Y, "share")
    layers = [
        bars(base, frame, across, up, y).mark_bar(opacity=0.55).encode(color=colour),
        *(
            base.mark_rule(strokeDash=dash, strokeWidth=1.6).encode(
                x=alt.X(f"mean({name}):Q", title=x.title), color=colour
            )
            for name, dash in (("mean", [7, 3]), ("lowest", [2, 2]), ("highest", [2, 2]))
        ),
    ]
    return faceted(alt.layer(*layers, data=inline(frame)), frame)


def bars(chart: Chart, frame: Frame, x: Any, y: Any, value: Axis) -> Chart:
    """Return the bars of a histogram. frame: low, high (ends of the bin), and the fields of x and y."""
    return chart.mark_bar(color=of_colour(COLOURS[0]), opacity=0.6).encode(
        x=x, x2="high", y=y, tooltip=tooltips(frame, value)
    )


def stacked(frame: Frame) -> Chart:
    """Return bars of seconds by phase. frame: part (whose seconds), run, phase, seconds."""
    runs, phases = frame["run"].drop_duplicates().tolist(), frame["phase"].drop_duplicates().tolist()
    row = alt.Y("run:N").sort(runs).title(None)
    if len(runs) == 1:
        row = row.axis(None)
    base = alt.Chart()
    seconds = base.mark_bar(opacity=0.8).encode(
        x=alt.X("seconds:Q").stack("zero").title("seconds per round"),
        y=row,
        color=alt.Color("phase:N").scale(**palette(phases, 1)).title(None),
        order=alt.Order("place:Q"),
        tooltip=["run:N", "phase:N", alt.Tooltip("seconds:Q").format(".3~g")],
    )
    total = base.mark_text(align="left", dx=4).encode(
        x="sum(seconds):Q", y=row, text=alt.Text("sum(seconds):Q").format(".3~g")
    )
    longest = LETTER * max(map(len, runs)) if len(runs) > 1 else 0
    return faceted(
        alt.layer(seconds, total, data=inline(frame)),
        frame,
        max(200, (WIDTH - 60 - longest) // max(1, frame["part"].nunique())),
        30 * len(runs) + 10,
        ["x"],
    )


def spans(frame: Frame, closes: Frame) -> Chart:
    """Return who worked when. frame: client, round, begins, ends, became. closes: second, at which a round closed."""
    clients = frame["client"].drop_duplicates().tolist()
    across = Axis("seconds since the run began", limits=(0.0, float(closes["second"].max())))
    works = (
        alt.Chart(inline(frame))
        .mark_bar(height={"band": 0.72}, clip=True)
        .encode(
            x=across.on(alt.X, "begins"),
            x2="ends",
            y=alt.Y("client:N").sort(clients),
            color=alt.Color("became:N").scale(**palette(WORKS, 1)).title(None),
            opacity=when(alt.OpacityValue, NO_OTHER, 0.8, 0.2),
            tooltip=tooltips(frame, across),
        )
    )
    return alt.layer(
        works, alt.Chart(inline(closes)).mark_rule(color=INK, strokeWidth=1).encode(x="second:Q")
    ).properties(width=WIDTH, height=max(90, min(20 * len(clients), 640)))


IN_TIME, LATE, LOST, WORKING = WORKS = "used in time", "used late", "thrown away or failed", "still working"


# Cells ----------------------------------------------------------------------------------------------------------------


def names(side: str, field: str, title: str | None, order: Sequence[str], shown: bool = True, room: int = 0) -> Any:
    """Return the encoding of names along a side, x or y. room: pixels, if long names stand upright in them."""
    upright = bool(room and room < 1.2 * LETTER * sum(map(len, order)))
    channel = alt.X if side == "x" else alt.Y
    axis = alt.Axis(ticks=False, domain=False, labels=shown, labelAngle=-90 * upright)
    return channel(f"{field}:N", sort=list(order), title=title, axis=axis)


def coloured(axis: Axis, limits: tuple[float, float] | None = None, share: bool = False, across: int = 0) -> Any:
    """Return the colour of `value`. share: from paper to ink. across: length of a legend below the chart, in pixels."""
    kind: dict[str, Any] = GREYS if share else {"scheme": COLOURS_OF_VALUES}
    if limits:
        kind = {**kind, "domain": list(limits), "clamp": True}
    place = {"orient": "bottom", "direction": "horizontal", "gradientLength": across} if across else {"orient": "right"}
    whole = {"labelExpr": "datum.value % 1 ? '' : datum.label"} if axis.format == "d" else {}
    legend = alt.Legend(format=axis.format, tickCount=4, **place, **whole)
    return alt.Color("value:Q", scale=alt.Scale(**kind), title=axis.title or None, legend=legend)


def palette(texts: Sequence[str], first: int = 0) -> dict[str, Any]:
    """Return the scale of the colours of names, in their order. first: the place of the first colour."""
    looks = plain_looks(len(texts) + first)[first:]
    many = not first and len(texts) > len(COLOURS)
    return {"domain": list(texts), **({"scheme": "turbo"} if many else {"range": [look.drawn for look in looks]})}


def slider(chart: Chart, rounds: Sequence[int]) -> Chart:
    """Return a chart of one round at a time, the last one first. rounds: those of its frame, ascending."""
    gaps = {later - earlier for earlier, later in zip(rounds, rounds[1:], strict=False)}
    control = alt.binding_select(options=list(rounds), name="round ")
    if len(gaps) == 1:
        control = alt.binding_range(min=rounds[0], max=rounds[-1], step=gaps.pop(), name="round ")
    return chart.add_params(alt.param(name="shown", value=rounds[-1], bind=control)).transform_filter(
        "datum.round === shown"
    )


def outlined(chart: Chart, pairs: Frame) -> Chart:
    """Return cells with some outlined. pairs: client, other."""
    box = alt.Chart(inline(pairs.drop(columns="value"))).mark_rect(
        filled=False, stroke=of_colour(VERMILLION), strokeWidth=1.2, tooltip=None
    )
    side = chart.encoding
    return alt.layer(chart, box.encode(x=side.x, y=side.y))


def cells(frame: Frame, x: Any, y: Any, colour: Any, value: Axis, width: int, height: int) -> Chart:
    """Return coloured cells. frame: value, and the fields of x and y. Cells of the highlighted client are outlined."""
    tips, own = tooltips(frame, value), NO_OTHER
    if "other" in frame:
        tips.append(alt.Tooltip("other:N"))
        own += " || datum.other === client"
    mark = alt.Chart(inline(frame)).mark_rect(tooltip=True).encode(x=x, y=y, color=colour, tooltip=tips)
    if "client" in frame:
        mark = mark.encode(opacity=when(alt.OpacityValue, own, 1, 0.3))
    return mark.properties(width=width, height=height, view=alt.ViewBackground(fill=EMPTY))


def over_rounds(
    frame: Frame, y: Any, colour: Any, value: Axis, height: int, step: int = 1, width: int = WIDTH
) -> Chart:
    """Return rows of cells over the rounds. frame: round (the first of `step` rounds), value, and the field of y."""
    x = alt.X("from:Q").scale(zero=False, nice=False).title("round").axis(format="d", grid=False)
    ends = {"from": "datum.round - 0.5", "until": f"datum.round + {step - 0.5}"}
    return cells(frame, x, y, colour, value, width, height).encode(x2="until:Q").transform_calculate(**ends)


def dots(frame: Frame, clients: Sequence[str], classes: Sequence[str], title: str) -> Chart:
    """Return a dot per client and class, its area the number of samples. frame: client, class, samples."""
    height = max(90, min(30 * len(classes), 800))
    largest = (0.92 * min(WIDTH / len(clients), height / len(classes), 26)) ** 2
    return (
        alt.Chart(inline(frame))
        .mark_circle(color=of_colour(COLOURS[0]), opacity=1)
        .encode(
            x=names("x", "client", "client", clients, room=WIDTH),
            y=names("y", "class", title, classes[::-1]),
            size=alt.Size("samples:Q").scale(range=[0, largest], zero=True).title("training samples"),
            opacity=when(alt.OpacityValue, NO_OTHER, 1, 0.25),
            tooltip=["client:N", "class:N", "samples:Q"],
        )
        .properties(width=WIDTH, height=height)
    )


def quantiles(frame: Frame, x: str, order: Sequence[str], width: int, height: int) -> Chart:
    """Return median, middle half and middle 90 % of each class. frame: class, lowest, low, median, high, highest."""
    base, colour = alt.Chart(inline(frame)), of_colour(COLOURS[0])
    row = names("y", "class", None, order, shown=False)
    return alt.layer(
        base.mark_rule(color=colour).encode(x=alt.X("lowest:Q").title(x), x2="highest", y=row),
        base.mark_rule(color=colour, strokeWidth=7, opacity=0.5).encode(x="low:Q", x2="high", y=row),
        base.mark_point(color=colour, filled=True, size=60).encode(
            x="median:Q", y=row, tooltip=tooltips(frame, Axis(""))
        ),
    ).properties(width=width, height=height)


def counts(frame: Frame, x: str, y: str, width: int = WIDTH, height: int = 100) -> Chart:
    """Return a histogram. frame: low, high, count."""
    chart = bars(
        alt.Chart(inline(frame)),
        frame,
        alt.X("low:Q").bin("binned").title(x).scale(zero=False, nice=False),
        alt.Y("count:Q").title(y),
        Axis(""),
    )
    return chart.properties(width=width, height=height)


def confusions(frame: Frame, classes: Sequence[str], whose: Sequence[str]) -> Chart:
    """Return the confusion matrix of one of `whose` at a time, the first one first.

    frame: whose, class, predicted, samples, value. The highlighted client is shown if it has a matrix.
    """
    side = max(200, min(560, 44 * len(classes)))
    x = names("x", "predicted", "predicted class", classes, room=side).scale(domain=list(classes))
    share = Axis("share of the class", ".0%")
    chart = cells(
        frame,
        x,
        names("y", "class", "true class", classes).scale(domain=list(classes)),
        coloured(share, (0.0, 1.0)),
        share,
        side,
        side,
    )
    if len(classes) <= MOST_WRITTEN:
        chart = written(chart, "samples:Q", "datum.value > 0.6")
    return chart.add_params(
        alt.param(
            name="chosen", value=whose[0], bind=alt.binding_select(options=list(whose), name="confusion matrix of ")
        )
    ).transform_filter(f"datum.whose === (indexof({json.dumps(list(whose))}, client) < 0 ? chosen : client)")


def written(chart: Chart, text: str, dark: str) -> Chart:
    """Return cells with their texts. text: its field. dark: an expression of cells whose text is black, not white."""
    return alt.layer(
        chart,
        chart.mark_text(fontSize=11, lineBreak="\n").encode(
            text=text, color=when(alt.ColorValue, dark, "black", "white")
        ),
    )


# Points ---------------------------------------------------------------------------------------------------------------


def maps(frame: Frame, classes: Sequence[str]) -> Chart:
    """Return maps of clients, a row for each kind. frame: kind, part (a round), client, x, y, and `class` if it is known."""
    rows = []
    for kind, own in frame.groupby("kind", sort=False):
        places = own[["x", "y"]]
        half = 0.54 * float(np.ptp(places.to_numpy(), axis=0).max()) or 1.0
        low, high = (places.max() + places.min()) / 2 - half, (places.max() + places.min()) / 2 + half
        mark = (
            alt.Chart()
            .mark_point(filled=True, size=70, opacity=0.9, color=of_colour(COLOURS[0]))
            .encode(
                x=alt.X("x:Q").scale(domain=[low["x"], high["x"]], nice=False).title(None),
                y=alt.Y("y:Q").scale(domain=[low["y"], high["y"]], nice=False).title(kind),
                opacity=when(alt.OpacityValue, NO_OTHER, 0.9, 0.15),
                tooltip=["client:N", "class:N"] if classes else ["client:N"],
            )
        )
        if classes:
            mark = mark.encode(**by_class(classes, "main class"))
        rows.append(faceted(alt.layer(mark, data=inline(own)), own, 270, 270))
    return alt.vconcat(*rows)


def by_class(classes: Sequence[str], title: str) -> dict[str, Any]:
    """Return the colour and the shape of points by `class`."""
    legend = alt.Legend(title=title, columns=legend_columns(classes))
    return {
        "color": alt.Color("class:N").scale(**palette(classes)).legend(legend),
        "shape": alt.Shape("class:N")
        .scale(domain=list(classes), range=[look.marker for look in plain_looks(len(classes))])
        .legend(legend),
    }


def features(frame: Frame, classes: Sequence[str]) -> Chart:
    """Return samples as points without axes. frame: client, class, predicted, x, y."""
    return (
        alt.Chart(inline(frame))
        .mark_point(filled=True, size=36)
        .encode(
            x=alt.X("x:Q").title(None).axis(None).scale(zero=False),
            y=alt.Y("y:Q").title(None).axis(None).scale(zero=False),
            **by_class(classes, "class"),
            opacity=when(alt.OpacityValue, NO_OTHER, 0.8, 0.06),
            tooltip=["client:N", "class:N", "predicted:N"],
        )
        .properties(width=640, height=640)
    )


def against(frame: Frame, x: Axis, y: Axis) -> Chart:
    """Return clients under two methods, with the diagonal. frame: part, run, client, reference, mean. x, y: equal limits."""
    assert x.limits
    base, style, (low, high) = alt.Chart(), series(frame), x.limits
    diagonal = base.transform_aggregate(clients="count()", groupby=["part"]).mark_rule(stroke=SOFT, strokeDash=[4, 3])
    diagonal = diagonal.encode(x=alt.datum(low), x2=alt.datum(high), y=alt.datum(low), y2=alt.datum(high))
    points = base.mark_point(filled=True).encode(
        x=x.on(alt.X, "reference"),
        y=y.on(alt.Y, "mean"),
        color=style["color"].legend(None),
        shape=style["shape"].legend(None),
        size=when(alt.SizeValue, CLIENT, 260, 60),
        opacity=when(alt.OpacityValue, NO_OTHER, 0.85, 0.15),
        tooltip=tooltips(frame, y),
    )
    side = min(270, small_width(columns_of(frame["part"].unique())))
    return faceted(alt.layer(points, diagonal, data=inline(frame)), frame, side, side)


def sensitivities(frame: Frame, classes: Sequence[str], inputs: int, step: float) -> Chart:
    """Return cells by class and input for each part, beside them a grey column of samples.

    frame: part, class, and input (the first of `step` inputs), value of a cell, or samples (a share).
    """
    share, room, base = Axis("share of the client's largest", "~%"), 0.06 * inputs, alt.Chart()
    across = Axis("input of the last layer", limits=(-room, inputs)).on(alt.X, "input")
    row, columns = names("y", "class", None, classes), min(3, frame["part"].nunique())
    # a cell reaches below the next one, so that no paper shows between them
    cells = base.transform_filter("isValid(datum.value)").transform_calculate(until=f"datum.input + {2 * step}")
    samples = base.transform_filter("isValid(datum.samples)").mark_rect(fill=INK)
    layers = (
        cells.mark_rect(clip=True).encode(
            x=across.axis(labels=False, ticks=False, grid=False, domain=False),
            x2="until:Q",
            y=row,
            color=coloured(share, (0.0, 1.0), across=200),
            tooltip=["class:N", "input:Q", alt.Tooltip("value:Q").format(".2%")],
        ),
        samples.encode(
            x=alt.datum(-room),
            x2=alt.datum(-room / 4),
            y=row,
            fillOpacity=alt.FillOpacity("samples:Q").scale(domain=[0, 1], range=[0, 1]).legend(None),
            tooltip=["class:N", alt.Tooltip("samples:Q").format(".2%")],
        ),
    )
    width = (WIDTH - LETTER * max(map(len, classes))) // columns - 20
    height = max(110, min(14 * len(classes), 230))
    return faceted(alt.layer(*layers, data=inline(frame)), frame, width, height, columns=columns)


def local_values(frame: Frame) -> Chart:
    """Return histograms of single parameters with rules: part, and low, high, count of a bin, or kind, value of a rule.

    The second half of the parts has a row of its own.
    """
    kinds = frame["kind"].dropna().unique().tolist()
    scale = alt.Scale(domain=kinds, range=list(map(of_colour, (VERMILLION, COLOURS[0], COLOURS[5])))[: len(kinds)])
    dashes = alt.Scale(domain=kinds, range=[[1, 0], [6, 3], [2, 2]][: len(kinds)])
    base, columns = alt.Chart(), -(-frame["part"].nunique() // 2)
    across = alt.X("low:Q").bin("binned").title("value").scale(zero=False, nice=False)
    bins = bars(base, frame.drop(columns=["kind", "value"]), across, alt.Y("count:Q").title("clients"), Axis(""))
    rules = base.mark_rule(strokeWidth=2.2).encode(
        x="value:Q",
        color=alt.Color("kind:N").scale(scale).title(None),
        strokeDash=alt.StrokeDash("kind:N").scale(dashes).title(None),
        tooltip=["kind:N", "value:Q"],
    )
    layers = (
        bins.transform_filter("datum.kind === null").mark_bar(color=SOFT, opacity=0.6),
        rules.transform_filter("datum.kind !== null"),
    )
    return faceted(alt.layer(*layers, data=inline(frame)), frame, small_width(3), 170, ["x", "y"], columns)


def beside(*charts: Chart, columns: int = 0, independent: Sequence[str] = ("color", "size")) -> Chart:
    """Return charts side by side. independent: scales that each has for itself."""
    with warnings.catch_warnings():
        # a pick in the legend, and a zoom, are those of all
        warnings.filterwarnings("ignore", "Automatically deduplicated")
        found = alt.concat(*charts, columns=columns or len(charts))
    return found.resolve_scale(**dict.fromkeys(independent, "independent"))


def below(*charts: Chart, shared: bool = False) -> Chart:
    """Return charts one below the other, each with colours of its own. shared: with one x axis."""
    x = {"x": "shared"} if shared else {}
    return alt.vconcat(*charts).resolve_scale(color="independent", **x)
