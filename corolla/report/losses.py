"""Pictures of the losses over rounds, drawn as the accuracy over rounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from corolla.report.accuracy import Curves, bands_told, drawn, late, picture_name, side_by_side
from corolla.report.charts import Axis, by_cost
from corolla.report.groups import Group, long_runs
from corolla.report.pictures import Panel
from fl_app.metrics import LOSS, Metric, moments

BEFORE, AFTER = moments(LOSS.name)
TITLES = {
    LOSS.name: "Training loss",
    BEFORE: "Test loss before local training",
    AFTER: "Test loss after local training",
}
# y is logarithmic if the means differ by this factor
DECADES = 100


def losses(groups: Sequence[Group]) -> Iterator[Panel]:
    """Yield the pictures of the losses per headline metric: different tasks have different losses."""
    by_metric: dict[Metric, list[Group]] = {}
    for group in groups:
        if group.last_round:
            by_metric.setdefault(group.first.headline, []).append(group)
    for metric, same in by_metric.items():
        known = {name: curves for name in TITLES if (curves := drawn(same, name, LOSS))}
        if known:
            yield _panel(metric, same, known)


def _panel(metric: Metric, groups: Sequence[Group], known: Mapping[str, Curves]) -> Panel:
    lines = [(found.rounds, found.mean) for curves in known.values() for found in curves.values()]
    means = np.concatenate([mean for _, mean in lines])
    logarithmic = bool(means.min() > 0 and means.max() >= DECADES * means.min())
    limits = (means.min() / 1.5, 1.5 * means.max()) if logarithmic else late(lines)
    text = (
        "Lines: mean over the round's clients, each on its own data. Training loss: over the last local epoch. "
        f"{bands_told(groups, known)} A test loss that rises while the training loss falls shows overfitting. "
        f"{'The vertical axis is logarithmic.' * logarithmic}"
    )
    return Panel(
        picture_name(LOSS.name, metric),
        "Loss over rounds",
        text.rstrip() + long_runs(groups, cut=bool(limits) and not logarithmic),
        lambda: side_by_side(groups, known, TITLES, Axis("loss", "~g", limits, logarithmic)),
        switch=by_cost(),
    )
