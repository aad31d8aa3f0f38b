"""Comparison of runs with the published figures.

A run's published counterpart is a preset with the same method, data set and partition (its kind, and alpha or classes
per client; the Dirichlet kinds count as one). Among these it is the preset that differs in the fewest keys; ties are
all shown. A run cut by `--scale small` is matched with presets cut the same way, but its listed differences are those
from the paper's settings. Keys that no paper states, or that do not affect the partition or the method, are not
compared (`settings`).

Runs that differ only in the seed are one line, mean ± std (corolla/experiments/grouping.py). Each preset names the
figure of ours that corresponds to the paper's (`METRICS`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from corolla.experiments import grouping
from corolla.experiments.grouping import by_settings, differing_settings, differing_values, mean_std
from corolla.experiments.result_table import Row, row_of, setting
from corolla.experiments.runs import RecordedRun, find
from corolla.presets import Preset, all_presets, small
from fl_app.config import RunConfig, parse
from fl_app.errors import UserError, listed
from fl_app.keys import Scalar, nearest, specs
from fl_app.known_names import divisions
from fl_app.metrics import Record
from fl_app.server.run_folder import SUMMARY

LAST_ROUNDS = 10
# most rows in an error about an unknown row
MOST_ROWS = 20


@dataclass(frozen=True)
class PaperLine:
    """A group of runs beside one preset; figures are ratios. ours is None if the runs do not record the paper's figure.

    differences: (key, our value, the paper's value); None where a key does not apply to one of the two.
    """

    runs: Sequence[RecordedRun]
    preset: Preset
    ours: tuple[float, float | None] | None
    finetuned: tuple[float, float | None] | None
    differences: Sequence[tuple[str, Scalar | None, Scalar | None]]


# Our figures ----------------------------------------------------------------------------------------------------------


def _mean_of_last(records: Iterable[Record], name: str) -> float | None:
    known = [value for record in [*records][-LAST_ROUNDS:] if (value := record.get(name)) is not None]
    return sum(known) / len(known) if known else None


Measure = Callable[[RecordedRun], float | None]


@dataclass(frozen=True)
class Reading:
    """One meaning of a paper's "accuracy": its description, and a function that returns it for a run.

    finetuned: returns the fine-tuned figure beside it. of_tests: the figure is of a run's tests, so it depends on their
    number.
    """

    words: str
    ours: Measure
    finetuned: Measure
    of_tests: bool = False


def _summary(name: str) -> Measure:
    return lambda run: run.summary.get(name)


def _best_test(name: str) -> Measure:
    def best(run: RecordedRun) -> float | None:
        return max(
            [test[name] for test in run.evaluations.values() if test.get(name) is not None],
            default=run.summary.get(f"final-{name}"),
        )

    return best


_MEAN = _summary("final-accuracy-finetuned")
_POOLED = _summary("final-accuracy-finetuned-pooled")
METRICS: dict[str, Reading] = {
    "": Reading("a run does not record the paper's figure", lambda run: None, _MEAN),
    "best-accuracy": Reading("highest mean over a round's clients, before training", _summary("best-accuracy"), _MEAN),
    "best-tested-accuracy-pooled": Reading(
        "the best test of all clients (evaluate-every), pooled over all test samples",
        _best_test("accuracy-pooled"),
        _best_test("accuracy-finetuned-pooled"),
        of_tests=True,
    ),
    "final-accuracy-finetuned-pooled": Reading(
        "all clients' test data after the last round, each client with its fine-tuned model", _POOLED, _POOLED
    ),
    "last-10-accuracy-pooled": Reading(
        "mean over the last 10 rounds of the accuracy on the round's clients' test data, before training",
        lambda run: _mean_of_last(run.rounds.values(), "accuracy-before-pooled"),
        _POOLED,
    ),
    "last-10-tested-accuracy-global-pooled": Reading(
        "the global model (evaluate-global), mean over the last 10 tests of all clients (evaluate-every), pooled over all test "
        "samples",
        lambda run: _mean_of_last(run.evaluations.values(), "accuracy-global-pooled"),
        _POOLED,
        of_tests=True,
    ),
}


def measure(runs: Iterable[RecordedRun], of: Measure) -> tuple[float, float | None] | None:
    """Return mean and std of a figure over runs; None without runs, or if one run lacks the figure."""
    values = [of(run) for run in runs]
    known = [value for value in values if value is not None]
    return mean_std(known) if known and len(known) == len(values) else None


# Runs -----------------------------------------------------------------------------------------------------------------


def load(paths: Sequence[Path], methods: Mapping[str, type], metric: str = "") -> tuple[list[RecordedRun], list[Path]]:
    """Read run folders, or folders of run folders (a sweep's). Return (finished runs, unfinished folders).

    metric: metric to judge the runs by; empty: each run's headline. Raises UserError for a path without runs, if no run
    is finished, and for a metric that a finished run did not measure.
    """
    if not paths:
        raise UserError("no runs to compare: name run folders, or folders of run folders")
    found = find(paths, methods, metric)
    for run in found:
        if (run.path / SUMMARY).is_file():
            run.summary  # noqa: B018 - read now, for its errors
    if not any(run.finished for run in found):
        raise UserError(f"no finished run (with {SUMMARY}) among {', '.join(map(str, paths))}")
    finished = [run for run in found if run.finished]
    for run in finished:
        run.config  # noqa: B018 - likewise
    lacking = [run for run in finished if metric and run.headline.name != metric]
    if lacking:
        measured = list(dict.fromkeys(one.name for run in lacking for one in run.metrics))
        folders = listed([str(run.path) for run in lacking])
        raise UserError(
            key=f"--metric {metric}",
            rule=f"not measured in {folders}, only {', '.join(measured)}; set the key metrics to measure "
            f"more{nearest(metric, measured)}",
        )
    return finished, [run.path for run in found if not run.finished]


def _settings_of(runs: Sequence[RecordedRun]) -> list[dict[str, Scalar]]:
    return grouping.settings_of(runs, lambda run: run.config.resolved)


def group(runs: Iterable[RecordedRun]) -> list[list[RecordedRun]]:
    """Group runs that differ only in the seed, or in keys that cannot change a result. Each group has a seed once."""
    every = list(runs)
    told = dict(zip(map(id, every), _settings_of(every), strict=True))
    return by_settings(every, lambda run: told[id(run)])


def repeated(runs: Iterable[RecordedRun]) -> list[tuple[RecordedRun, RecordedRun]]:
    """Return (run, earlier run) for every run with the settings and the seed of an earlier one."""
    found: dict[tuple[tuple[str, str], ...], RecordedRun] = {}
    every = list(runs)
    known = list(zip(every, _settings_of(every), strict=True))
    first = [
        (run, found.setdefault(tuple(sorted((k, repr(v)) for k, v in given.items())), run)) for run, given in known
    ]
    return [(run, before) for run, before in first if run is not before]


def settings(config: RunConfig, metric: str) -> dict[str, Scalar]:
    """Return the keys that define a run's result and that papers state, without the seed.

    A data set counts by its name only. metric: a key of METRICS. `evaluate-every` is included only if the figure is of
    a run's tests.
    """
    counted = {"evaluate-every"} if METRICS[metric].of_tests else set()
    out = {
        key.name: value
        for key, value in config.own_keys()
        if key.tells_runs_apart and (key.compared or key.name in counted) and key.divides(config.divisions)
    }
    return out | {"dataset": grouping.kind(config.dataset)}


# The papers -----------------------------------------------------------------------------------------------------------


def beside(runs: Sequence[RecordedRun], methods: Mapping[str, type], dataset: str = "") -> list[PaperLine]:
    """Return the published counterparts of a group of runs that differ only in the seed; empty if there are none.

    dataset: name as which the user's own data set (`folder:`, `npz:`) counts, e.g. cifar10. A data set with a name
    keeps it.
    """
    config = runs[0].config
    counts_as = grouping.kind(config.dataset) if grouping.named(config.dataset) or not dataset else dataset
    found = []
    for preset in all_presets().values():
        if preset.published is None or preset.settings["method"] != config.method:
            continue
        theirs = parse(preset.settings, methods)
        same_data = grouping.kind(theirs.dataset) == counts_as and _split(theirs) == _split(config)
        if same_data and theirs.task == config.task:
            cut = small(theirs) if config.scale == "small" else {}
            ours = settings(config, preset.metric)
            apart = differing_values(ours, settings(parse({**preset.settings, **cut}, methods), preset.metric))
            # among equally many differences, those about the data count less: the paper ran the method in this way
            distance = len(apart), sum(key not in _ABOUT_DATA for key, _, _ in apart)
            found.append((distance, preset, differing_values(ours, settings(theirs, preset.metric))))
    nearest = min((distance for distance, _, _ in found), default=(0, 0))
    return [
        PaperLine(
            runs,
            preset,
            measure(runs, METRICS[preset.metric].ours),
            measure(runs, METRICS[preset.metric].finetuned),
            diffs,
        )
        for distance, preset, diffs in found
        if distance == nearest
    ]


_ABOUT_DATA = {spec.name for spec in specs(RunConfig) if spec.about == "data"}


def _split(config: RunConfig) -> tuple[str, float]:
    """Return a partition's kind and its degree of skew."""
    if config.partition == "pathological":
        return "pathological", config.classes_per_client
    return ("dirichlet", config.dirichlet_alpha) if config.partition.startswith("dirichlet") else (config.partition, 0)


def kind(config: RunConfig) -> str:
    """Return the facts that are matched with the papers, as text: method, data set, partition."""
    name, skew = _split(config)
    return f"{config.method}, {grouping.kind(config.dataset)}, {name}" + (f" {skew:g}" if skew else "")


def data_settings(run: RecordedRun) -> dict[str, Scalar]:
    """Return the keys that determine which samples a run's clients hold, except the seed.

    Keys of other partitions are left out.
    """
    found = {key.name: run.settings.get(key.name, key.default) for key in specs(RunConfig)}
    kinds = divisions(str(found["partition"]), str(found["dataset"]), int(found["test-samples"]))
    about_data = [key for key in specs(RunConfig) if key.about == "data" and key.divides(kinds)]
    return {key.name: found[key.name] for key in about_data}


def references(groups: Sequence[Sequence[RecordedRun]]) -> list[int]:
    """Return for each group the place of the group that it is compared with: the first one with the same settings of the data."""
    data = [data_settings(runs[0]) for runs in groups]
    return [data.index(one) for one in data]


def with_reference(groups: Sequence[list[RecordedRun]], reference: str) -> list[list[RecordedRun]]:
    """Return groups by their data, in each part the reference first, with which its others are compared.

    reference: a group's method, or its values as `row_names` has them, or the name or path of one of its runs; empty:
    the first group. In a part without it, the group with the same settings, except those of the data, takes its place.
    Raises UserError, with all rows, for a name that no group has, or several groups with the same data.
    """
    names, of = row_names(groups), references(groups)

    def named(k: int) -> bool:
        paths = (run.path.resolve() for run in groups[k])
        return reference in (groups[k][0].method, names[k]) or any(
            Path(reference).resolve() == path or reference.rstrip("/") == path.name for path in paths
        )

    found = [k for k in range(len(groups)) if named(k)] if reference else [0]
    if not found or len({of[k] for k in found}) < len(found):
        why = f"names {len(found)} of the rows; name one of its runs" if found else "no row has this name"
        known = [f"{name} ({run.path.name})" for name, (run, *_) in zip(names, groups, strict=True)]
        rows = "; ".join(known[:MOST_ROWS]) + ("; ..." if len(known) > MOST_ROWS else "")
        hint = "" if found else nearest(reference, names)
        raise UserError(key=f"--reference {reference}", rule=f"{why}; the rows are: {rows}{hint}")
    alike = _without_data(groups[found[0]][0])

    def place(k: int) -> tuple[bool, int, bool, bool]:
        return of[k] != of[found[0]], of[k], k not in found, _without_data(groups[k][0]) != alike

    return [groups[k] for k in sorted(range(len(groups)), key=place)]


def _without_data(run: RecordedRun) -> dict[str, Scalar]:
    """Return the settings that distinguish a run, without those of its data and without its seed."""
    about = {*data_settings(run), "seed", grouping.DATA_SHA256}
    return {name: value for name, value in grouping.settings(run.config.resolved).items() if name not in about}


def row_names(groups: Sequence[Sequence[RecordedRun]]) -> list[str]:
    """Return each group's name: its method, and its values of the settings in which groups differ."""
    return [", ".join(row) for row in varying_as_text(groups)[1:]]


def varying(groups: Sequence[Sequence[RecordedRun]]) -> list[dict[str, Scalar | None]]:
    """Return each group's method and the settings in which groups differ; None for a key that does not apply to a group."""
    every = _settings_of([runs[0] for runs in groups])
    differ = {"method", *differing_settings(every)} - {"seed"}
    keys = [key for key in dict.fromkeys(key for one in every for key in one) if key in differ]
    rest = [key for key in keys if key != "plugins"]
    if len({tuple(one.get(key) for key in rest) for one in every}) == len(every):
        # Rows that differ without `plugins` do not need that column: the method's name identifies the file.
        keys = rest
    return [{key: one.get(key) for key in keys} for one in every]


def varying_as_text(groups: Sequence[Sequence[RecordedRun]]) -> list[list[str]]:
    """Return `varying` as text: the keys, then each group's values."""
    found = varying(groups)
    return [list(found[0]), *([setting(value) for value in one.values()] for one in found)]


def result_rows(groups: Sequence[Sequence[RecordedRun]]) -> list[Row]:
    """Return groups of runs as rows of a table of results."""
    found = []
    for of, runs in zip(varying(groups), groups, strict=True):
        measured = (runs[0].headline, *runs[0].others)
        found.append(row_of(of, runs, measured, figures=lambda run: run.result))
    return found
