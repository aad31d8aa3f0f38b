"""`corolla compare` as a data frame."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas

from corolla.api.console import say_partial, say_unfinished
from corolla.experiments import compare, significance
from corolla.experiments.runs import RecordedRun
from corolla.experiments.table import columns
from strategies import METHOD_PARAMS


def frame(paths: Sequence[Path]) -> pandas.DataFrame:
    """Return what `corolla compare` prints of run folders, as numbers: see `corolla.compare`."""
    found, unfinished = compare.load(paths, METHOD_PARAMS)
    say_unfinished(unfinished)
    say_partial(found)
    groups = compare.group(found)
    found_rows = compare.result_rows(groups)
    shown = columns(found_rows)
    rows: list[dict[str, Any]] = []
    for one in found_rows:
        row: dict[str, Any] = {**one.varying, "n": len(one.runs)}
        if any(other.coverage_note for other in found_rows):
            row["clients"] = one.coverage_note or "all"
        for name in shown:
            row[name], row[f"{name}-std"] = one.by_name.get(name, (None, None))
        rows.append(row)
    others = [significance.paired(runs, groups[0]) for runs in groups[1:]]
    if any(others) or any(significance.other_samples(runs, groups[0]) for runs in groups[1:]):
        compared = zip(rows, groups, [None, *others], strict=True)
        rows = [row | differences(one, runs, groups[0]) for row, runs, one in compared]
        rows[0]["verdict"] = significance.FIRST
    return pandas.DataFrame(rows)


def differences(
    one: significance.Comparison | None, ours: Sequence[RecordedRun], theirs: Sequence[RecordedRun]
) -> dict[str, Any]:
    """Return a row's columns about the paired difference to the first row's runs; empty cells where there is none."""
    if one is None:
        return {"pairs": 0, "seeds": 0, "verdict": significance.why_unpaired(ours, theirs)}
    low, high = one.over_pairs or (None, None)
    low_seeds, high_seeds = one.over_seeds or (None, None)
    return {
        "pairs": one.pairs,
        "seeds": one.seeds,
        "difference": one.mean,
        "low": low,
        "high": high,
        "low-over-seeds": low_seeds,
        "high-over-seeds": high_seeds,
        "clients-better": one.share_better,
        "verdict": one.verdict,
    }
