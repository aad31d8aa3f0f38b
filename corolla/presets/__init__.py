"""Presets: named settings, one per published figure of the papers' tables, and a few of our own.

corolla/presets/*.toml holds two kinds of files. A plain one (demo.toml) is a run config by the file's name. One with
`tables` is a paper: a preset per cell of its tables, `<file>/<column>` for the paper's own method (`own`) and
`<file>/<column>/<method>` for the others. A cell's settings are inherited: `settings` of the file, then of the column's
`datasets` entry, its `splits` entry, the table, the column, and of the row's `methods` entry, later ones winning; keys of
other methods' tables are dropped. `rows` are the published figures in per cent, column by column: 86.82±1.18 or
87.02(0.17), "-" for none. `notes` say where a setting departs from the paper or is not in it; `metric` is the figure of ours
that is compared (corolla/experiments/compare.py; "" if a run does not record it); a method's `ran` says what the table's
authors ran under its name, where that was another method.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_app.config import RunConfig
from fl_app.errors import UserError
from fl_app.keys import Scalar, own
from fl_app.known_names import OWN_PARTITION
from fl_app.toml import flatten, read_toml

PRESETS = Path(__file__).parent
SMALL_ROUNDS, SMALL_CLIENTS, SMALL_PARTICIPANTS, SMALL_BATCH = 20, 10, 5, 20
SMALL_SAMPLES = {"train-samples": 100, "test-samples": 40}


@dataclass(frozen=True)
class Published:
    """One cell of a paper's table, in per cent; std is None where the paper gives none."""

    mean: float
    std: float | None

    def __format__(self, spec: str) -> str:
        """Pad like a string."""
        return format(str(self), spec)

    def __str__(self) -> str:
        """Return it as the tables of `corolla presets` and `compare` show it."""
        return f"{self.mean:.2f}" + (f" ± {self.std:.2f}" if self.std is not None else "")


@dataclass(frozen=True)
class Preset:
    """Settings (flat run config) with their source.

    paper and source name the cell; repeats: runs behind it; metric: which figure of ours it is; notes: where the settings
    depart from the paper; ran: the other method that the cell is of, "" if it is of the one it names. All are empty for presets of
    our own.
    """

    name: str
    settings: Mapping[str, Scalar]
    published: Published | None = None
    paper: str = ""
    source: str = ""
    metric: str = ""
    repeats: int = 0
    notes: tuple[str, ...] = ()
    ran: str = ""


@functools.cache
def all_presets() -> Mapping[str, Preset]:
    """All presets by name, in the order of the files and tables."""
    found: dict[str, Preset] = {}
    for path in sorted(PRESETS.glob("*.toml")):
        content = read_toml(path)
        for preset in _cells(path.stem, content) if "tables" in content else [Preset(path.stem, flatten(content))]:
            assert preset.name not in found, f"two presets are named {preset.name}"
            found[preset.name] = preset
    return found


def _cells(stem: str, paper: Mapping[str, Any]) -> Iterator[Preset]:
    for table in paper["tables"]:
        for row, line in table["rows"].items():
            entry = paper["methods"][row]
            for column, cell in zip(table["columns"], line.split(), strict=True):
                dataset, split = (
                    paper["datasets"][column["dataset"]],
                    paper.get("splits", {}).get(column.get("split"), {}),
                )
                layers = (paper, dataset, split, table, column, entry)
                settings: dict[str, Scalar] = {}
                for layer in layers:
                    settings |= flatten(layer.get("settings", {}))
                ran = entry.get("ran", "")
                other = [f"{paper['paper']}'s table ran another method under this name: {ran}"] if ran else []
                method = str(settings["method"])
                name = f"{stem}/{column['name']}"
                yield Preset(
                    name if row == paper["own"] else f"{name}/{entry.get('name', method)}",
                    own(settings, method),
                    published=_published(cell),
                    paper=f"{paper['paper']} ({paper['citation']})",
                    source=f"{table['table']}: {row}, "
                    + ", ".join(label for label in (dataset["label"], column.get("label", "")) if label),
                    metric=entry.get("metric", paper["metric"]),
                    repeats=paper["repeats"],
                    notes=(
                        *(note for layer in layers[:-1] for note in layer.get("notes", ())),
                        *other,
                        *entry.get("notes", ()),
                    ),
                    ran=ran,
                )


def _published(cell: str) -> Published | None:
    if cell == "-":
        return None
    match = re.fullmatch(r"([\d.]+)(?:±([\d.]+)|\(([\d.]+)\))?", cell)
    assert match, f"not a published figure: {cell}"
    std = match[2] or match[3]
    return Published(float(match[1]), float(std) if std else None)


def find(pattern: str = "") -> list[Preset]:
    """Presets whose name contains `pattern` or, if it has wildcards, matches it. Raises UserError if none does."""
    wild = pattern if set(pattern) & set("*?[") else f"*{pattern}*"
    found = [preset for name, preset in all_presets().items() if fnmatch.fnmatchcase(name, wild)]
    found.sort(key=lambda preset: preset.name.split("/"))
    if not found:
        raise UserError(f"preset: none matches {pattern!r}{_nearest(pattern)}")
    return found


def _nearest(name: str) -> str:
    close = difflib.get_close_matches(name, list(all_presets()), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else "; `corolla presets` lists them"


def read_preset(name: str) -> dict[str, Scalar]:
    """Read a preset by name, or a TOML file by path, as a flat run config. Raises UserError for a wrong name, with the nearest."""
    path = Path(name)
    if name.endswith(".toml"):
        if not path.exists():
            raise UserError(f"{name}: no such file{_file_beside(path)}")
        content = read_toml(path)
        if "grid" in content or "variants" in content:
            raise UserError(f"{name} is a sweep: use `corolla sweep {name}`")
        return flatten(content)
    preset = all_presets().get(name)
    if preset is None:
        if path.is_file():
            raise UserError(
                f"preset: {name} is a file whose name does not end in .toml; rename it if it holds config keys"
            )
        raise UserError(f"preset: no preset or .toml file {name!r}{_file_beside(path) or _nearest(name)}")
    return dict(preset.settings)


def _file_beside(path: Path) -> str:
    """Return the end of an error about a file that is not there: the .toml file there it may be meant for, if any is close."""
    close = difflib.get_close_matches(path.name, [found.name for found in path.parent.glob("*.toml")], n=1, cutoff=0.8)
    return f"; did you mean {path.parent / close[0]}?" if close else ""


def small(config: RunConfig) -> dict[str, Scalar]:
    """What `--scale small` changes in a config: clients, rounds and samples, to what a laptop does in minutes.

    Keys that count rounds shrink with them; when only some clients take part in a round, at least five do; the batch is at
    most 20; `dirichlet`, which deals out all data, becomes `dirichlet-client`, which deals out as little as it is told.
    Raises UserError for a `file:` partition, whose clients are given.
    """
    if config.partition.startswith(OWN_PARTITION):
        raise UserError(f"--scale small: the clients of {config.partition} cannot be cut; give a smaller file")
    rounds = min(config.num_server_rounds, SMALL_ROUNDS)
    clients = min(config.num_clients or SMALL_CLIENTS, SMALL_CLIENTS)
    before: dict[str, Any] = {key.name: value for key, value in config.own_keys()}
    out: dict[str, Scalar] = {
        "scale": "small",
        "num-server-rounds": rounds,
        "num-clients": clients,
        "fraction-train": max(config.fraction_train, min(1.0, SMALL_PARTICIPANTS / clients)),
        "batch-size": min(config.batch_size, SMALL_BATCH),
        "partition": "dirichlet-client" if config.partition == "dirichlet" else config.partition,
    }
    out |= {name: min(before[name] or most, most) for name, most in SMALL_SAMPLES.items()}
    for key, value in config.own_keys():
        if key.counts_rounds and value:
            least = max(1, round(before[key.name] * rounds / config.num_server_rounds))
            allowed = (r for r in range(least, before[key.name] + 1) if key.rule is None or key.rule.admits(r))
            out[key.name] = next(allowed)
    return {name: value for name, value in out.items() if value != before[name]}
