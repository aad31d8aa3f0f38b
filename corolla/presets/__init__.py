"""Presets: named settings, one per published figure of the papers' tables, and a few of our own.

corolla/presets/*.toml holds two kinds of files. A plain file (demo.toml) is one run config, named after the file. A
file with `tables` describes a paper and gives one preset per cell of its tables: `<file>/<column>` for the paper's own
method (`own`), and `<file>/<column>/<method>` for the others.

A pattern may also name the paper's own method in full, `<file>/<column>/<method>`: `<file>/<column>/*` is a whole column.

A cell merges the `settings` of six layers, later ones winning: the file, the column's `datasets` entry, its `splits`
entry, the table, the column, and the row's `methods` entry. Keys of other methods' tables are dropped.

- `rows`: published figures in per cent, column by column: 86.82±1.18 or 87.02(0.17), "-" for none.
- `notes`: settings that depart from the paper, or that it does not state. A note that holds only while keys have the
  preset's values is a table, `{ keys = ["test-ratio"], note = "..." }`.
- `metric`: our figure that is compared (corolla/experiments/compare.py); "" if a run does not record it.
- `repeats`: number of the paper's runs per cell; a table's own number wins.
- `ran` of a method: the method that the table's authors ran instead, under this name.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fl_app.config import RunConfig
from fl_app.config.earlier_keys import current
from fl_app.errors import ConfigurationError
from fl_app.files import no_such
from fl_app.keys import Scalar, own
from fl_app.known_names import BY_COLUMN, OWN_PARTITION, UNBALANCED
from fl_app.paths import anchored
from fl_app.toml import flatten, read_toml

PRESETS = Path(__file__).parent
SMALL_ROUNDS, SMALL_CLIENTS, SMALL_PARTICIPANTS, SMALL_BATCH = 20, 10, 5, 20
SMALL_SAMPLES = {"train-samples": 100, "test-samples": 40}
ALL_DATA = ("dirichlet", "dirichlet-fl-bench")


@dataclass(frozen=True)
class Published:
    """One cell of a paper's table, in per cent; std is None if the paper gives none."""

    mean: float
    std: float | None

    def __format__(self, spec: str) -> str:
        """Pad like a string."""
        return format(str(self), spec)

    def __str__(self) -> str:
        """Return it as `corolla presets` and `compare` print it."""
        return f"{self.mean:.2f}" + (f" ± {self.std:.2f}" if self.std is not None else "")


@dataclass(frozen=True)
class Preset:
    """Settings (flat run config) with their source. All other fields are empty for presets of our own.

    paper, source: name the cell. table, column: its place; `column` is the part of its name without the method, and
    `label` the column's heading. row: its method, as the last part of a name. metric: name of our figure to compare.
    repeats: number of the paper's runs. notes: departures from the paper. bound: the keys whose values a note is about,
    by note. ran: the method that the authors ran instead of the one they name; "" if they ran that one.
    """

    name: str
    settings: Mapping[str, Scalar]
    published: Published | None = None
    paper: str = ""
    source: str = ""
    table: str = ""
    column: str = ""
    label: str = ""
    row: str = ""
    metric: str = ""
    repeats: int = 0
    notes: tuple[str, ...] = ()
    bound: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ran: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The name, and for a paper's own method also the name in full: `<file>/<column>/<method>`."""
        return (self.name, f"{self.column}/{self.row}") if self.name == self.column else (self.name,)

    def notes_on(self, config: RunConfig) -> list[str]:
        """Return the notes that hold for a run: those on keys only if they act in it, with the preset's values."""
        acting = {key.name: value for key, value in config.own_keys() if key.divides(config.divisions)}
        return [
            note
            for note in self.notes
            if all(acting.get(name) == self.settings[name] for name in self.bound.get(note, ()))
        ]


@functools.cache
def all_presets() -> Mapping[str, Preset]:
    """Return all presets by name, in the order of files and tables."""
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
                notes = [note for layer in layers[:-1] for note in layer.get("notes", ())]
                notes += [f"{paper['paper']}'s table ran another method under this name: {ran}"] if ran else []
                notes += entry.get("notes", ())
                method = str(settings["method"])
                place, last = f"{stem}/{column['name']}", entry.get("name", method)
                label = ", ".join(part for part in (dataset["label"], column.get("label", "")) if part)
                yield Preset(
                    place if row == paper["own"] else f"{place}/{last}",
                    own(settings, method),
                    published=_published(cell),
                    paper=f"{paper['paper']} ({paper['citation']})",
                    source=f"{table['table']}: {row}, {label}",
                    table=table["table"],
                    column=place,
                    label=label,
                    row=last,
                    metric=entry.get("metric", paper["metric"]),
                    repeats=table.get("repeats", paper["repeats"]),
                    notes=tuple(map(_text, notes)),
                    bound={_text(note): tuple(note["keys"]) for note in notes if isinstance(note, dict)},
                    ran=ran,
                )


def _text(note: str | Mapping[str, Any]) -> str:
    return note if isinstance(note, str) else str(note["note"])


def _published(cell: str) -> Published | None:
    if cell == "-":
        return None
    match = re.fullmatch(r"([\d.]+)(?:±([\d.]+)|\(([\d.]+)\))?", cell)
    assert match, f"not a published figure: {cell}"
    std = match[2] or match[3]
    return Published(float(match[1]), float(std) if std else None)


def find(pattern: str = "") -> list[Preset]:
    """Return the presets with `pattern` in their names; a pattern with wildcards must match the whole name.

    A paper's own method also has its name in full, so that `<file>/<column>/*` is a whole column. Raises UserError if no
    name matches.
    """
    wild = pattern if set(pattern) & set("*?[") else f"*{pattern}*"
    found = [
        preset for preset in all_presets().values() if any(fnmatch.fnmatchcase(name, wild) for name in preset.names)
    ]
    found.sort(key=lambda preset: preset.name.split("/"))
    if not found:
        raise ConfigurationError(key="preset", rule=f"none matches {pattern!r}{_nearest(pattern)}")
    return found


def named(patterns: Iterable[str]) -> list[str]:
    """Return the names of the presets that any of the patterns names, each once; a preset's whole name is that preset.

    Raises UserError if a pattern matches no name.
    """
    found = [
        name for one in patterns for name in ([one] if one in all_presets() else [preset.name for preset in find(one)])
    ]
    return list(dict.fromkeys(found))


def by_column(presets: Iterable[Preset]) -> dict[tuple[str, str, str], list[Preset]]:
    """Return presets by (paper, table, column), in the order of the papers' tables; our own are under ("", "", "")."""
    order = {name: k for k, name in enumerate(all_presets())}
    found: dict[tuple[str, str, str], list[Preset]] = {}
    for preset in sorted(presets, key=lambda preset: order[preset.name]):
        found.setdefault((preset.paper, preset.table, preset.column), []).append(preset)
    return found


def _nearest(name: str) -> str:
    """Return the end of an error about an unknown name: the nearest name; for a pattern, the nearest columns."""
    if set(name) & set("*?["):
        columns = list(dict.fromkeys(f"{preset.column}/*" for preset in all_presets().values() if preset.column))
        close = difflib.get_close_matches(name, columns, n=3, cutoff=0.5)
    else:
        close = difflib.get_close_matches(name, list(all_presets()), n=1, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else "; `corolla presets` lists them"


def read_preset(name: str) -> dict[str, Scalar]:
    """Return a preset, by name, or a TOML file, by path, as a flat run config. Raises UserError for an unknown name."""
    path = Path(name)
    if name.endswith(".toml"):
        return read_file(path).settings
    preset = all_presets().get(name)
    if preset is None:
        if path.is_file():
            raise ConfigurationError(
                key="preset",
                rule=f"{name} is a file whose name does not end in .toml; rename it if it holds config keys; a "
                "data set is a value of the key dataset: --set dataset=...",
            )
        raise ConfigurationError(
            key="preset", rule=f"no preset or .toml file {name!r}{_file_beside(path) or _nearest(name)}"
        )
    return dict(preset.settings)


@dataclass(frozen=True)
class RunFile:
    """A file of config keys as read. settings: flat run config. files: the file, then those that it extends."""

    settings: dict[str, Scalar]
    files: tuple[Path, ...]


def read_file(path: Path) -> RunFile:
    """Read a file of config keys, with the file that it `extends` and the `preset` that it starts from.

    A file's keys, including `preset`, win over those of the file that it extends; both win over the preset's. Paths are
    relative to the file that names them. Raises UserError if a file is missing, is a sweep, or extends itself.
    """
    keys: dict[str, Any] = {}
    files: list[Path] = []
    following: Path | None = path
    while following is not None:
        if following.resolve() in [file.resolve() for file in files]:
            raise ConfigurationError(
                key="extends", rule=f"files extend each other: {' -> '.join(map(str, [*files, following]))}"
            )
        own = _keys_of(following, files)
        files.append(following)
        base = own.pop("extends", None)
        keys = own | keys
        following = None if base is None else following.parent / base
    preset = keys.pop("preset", None)
    if preset is not None and preset not in all_presets():
        hint = "; `extends` names a file" if str(preset).endswith(".toml") else _nearest(str(preset))
        raise ConfigurationError(key=path, rule=f"preset: no preset {preset!r}{hint}")
    below = {} if preset is None else all_presets()[preset].settings
    return RunFile({**below, **keys}, tuple(files))


def _keys_of(path: Path, extended_by: Sequence[Path]) -> dict[str, Any]:
    """Return the keys in one file. extended_by: the files that led to it; the last of these names it."""
    if not path.exists():
        where = f"{extended_by[-1]}: extends: " if extended_by else ""
        raise ConfigurationError(f"{where}{no_such(path)}")
    content = read_toml(path)
    if "grid" in content or "variants" in content:
        if extended_by:
            raise ConfigurationError(key=extended_by[-1], rule=f"extends: {path} is a sweep, not a file of config keys")
        raise ConfigurationError(f"{path} is a sweep: use `corolla sweep {path}`")
    for key in ("extends", "preset"):
        if not isinstance(content.get(key, ""), str):
            raise ConfigurationError(key=path, rule=f"{key}: expected a string", value=content[key])
    return anchored(current(flatten(content), warn=True), path.parent)


def _file_beside(path: Path) -> str:
    """Return the end of an error about a missing file: a .toml file of a similar name beside it, if any."""
    close = difflib.get_close_matches(path.name, [found.name for found in path.parent.glob("*.toml")], n=1, cutoff=0.8)
    return f"; did you mean {path.parent / close[0]}?" if close else ""


def small(config: RunConfig) -> dict[str, Scalar]:
    """Return the changes that `--scale small` makes to a config: clients, rounds and samples for minutes on a laptop.

    Keys that count rounds shrink in proportion. If only some clients take part in a round, at least five do. The batch
    size is at most 20. `dirichlet` and `dirichlet-fl-bench` distribute all data, so they become `dirichlet-client`, which
    distributes a given number of samples. For the same reason `blocks-unbalanced` becomes `blocks`. Raises UserError for a
    `file:` partition, since its clients are fixed.
    """
    if config.partition.startswith(OWN_PARTITION):
        raise ConfigurationError(
            key="--scale small", rule=f"cannot cut the clients of {config.partition}; give a smaller file"
        )
    rounds = min(config.num_server_rounds, SMALL_ROUNDS)
    clients = min(config.num_clients or SMALL_CLIENTS, SMALL_CLIENTS)
    if config.partition == BY_COLUMN and config.num_clients:
        # the data define the clients
        clients = config.num_clients
    before: dict[str, Any] = {key.name: value for key, value in config.own_keys()}
    out: dict[str, Scalar] = {
        "scale": "small",
        "num-server-rounds": rounds,
        "num-clients": clients,
        "fraction-train": max(config.fraction_train, min(1.0, SMALL_PARTICIPANTS / clients)),
        "batch-size": min(config.batch_size, SMALL_BATCH),
        "partition": "dirichlet-client" if config.partition in ALL_DATA else config.partition,
    }
    if config.pathological_assignment == UNBALANCED:
        out["pathological-assignment"] = "blocks"
    out |= {name: min(before[name] or most, most) for name, most in SMALL_SAMPLES.items()}
    for key, value in config.own_keys():
        if key.counts_rounds and value:
            least = max(1, round(before[key.name] * rounds / config.num_server_rounds))
            out[key.name] = next(
                r for r in range(least, before[key.name] + 1) if key.rule is None or key.rule.admits(r)
            )
    return {name: value for name, value in out.items() if value != before[name]}


def cut(flat: Mapping[str, Scalar], config: RunConfig) -> dict[str, Scalar]:
    """Return a flat config with the changes of `small`, without keys that lose their effect with the partition.

    config: flat, parsed.
    """
    changes = small(config)
    after = replace(config, partition=str(changes.get("partition", config.partition)))
    lost = {
        key.name for key, _ in config.own_keys() if key.divides(config.divisions) and not key.divides(after.divisions)
    }
    return {name: value for name, value in flat.items() if name not in lost} | changes
