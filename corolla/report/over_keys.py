"""A sweep's rows as lines: the final headline metric over keys with several numbers.

A key is swept if rows differ in it alone. Its values are numbers; a key of words gets a line per word.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from corolla.experiments.result_table import Mean
from corolla.report.groups import Group
from fl_app.keys import Scalar, show

# the value of each key of a line or map
At = tuple[float, ...]


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
        at = _numbers([own.pop(key, "") for key in keys])
        if at is not None:
            same = group.method, *sorted((key, show(value)) for key, value in own.items())
            means = found.setdefault(same, KeyLine(group.method, own, {})).means
            means[at] = means.get(at) or _final(group)
    return list(found.values())


def _numbers(values: Sequence[Scalar]) -> At | None:
    """Return values that are all numbers, else None. True and false are no numbers."""
    found = tuple(value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool))
    return found if len(found) == len(values) else None


def _final(group: Group) -> Mean | None:
    """Return the final headline metric over the group's runs; None if a run is not finished, or the metric not finite."""
    mean = group.row.means.get("final") if all(run.finished for run in group.runs) else None
    return mean if mean and math.isfinite(mean[0]) else None


def is_grid(line: KeyLine) -> bool:
    """Return whether both keys of a line vary together, not only one at a time."""
    columns: dict[float, set[float]] = {}
    for one, other in line.means:
        columns.setdefault(one, set()).add(other)
    return sum(len(column) > 1 for column in columns.values()) > 1


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
