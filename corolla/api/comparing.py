"""`corolla compare` as a data frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corolla.api.console import say_partial, say_unfinished
from corolla.experiments import compare, significance
from corolla.experiments.result_table import columns
from corolla.experiments.runs import RecordedRun
from fl_app.errors import UserError
from strategies import METHOD_PARAMS

if TYPE_CHECKING:
    import pandas


def frame(paths: Sequence[Path], metric: str = "", reference: str = "") -> pandas.DataFrame:
    """Return the comparison of run folders as numbers: see `corolla.compare`."""
    from corolla.api.printed import ComparisonFrame

    found, unfinished = compare.load(paths, METHOD_PARAMS, metric)
    say_unfinished(unfinished)
    say_partial(found)
    try:
        groups = compare.with_reference(compare.group(found), reference)
    except UserError as error:
        raise UserError(str(error).removeprefix("--")) from None
    return ComparisonFrame(rows_of(groups))


def rows_of(groups: Sequence[Sequence[RecordedRun]]) -> list[dict[str, Any]]:
    """Return the rows of `corolla.compare` as dictionaries, which `corolla compare --json` prints."""
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
    found, of = significance.compared(groups), compare.references(groups)
    if any(found) or any(significance.other_samples(runs, groups[0]) for runs in groups[1:]):
        names = significance.client_names(groups)
        for k, comparison in enumerate(found):
            lacking = {"pairs": 0, "seeds": 0, "verdict": significance.verdict_without(k, of, groups)}
            rows[k] |= lacking if comparison is None else differences(comparison, names)
    return rows


def differences(one: significance.Comparison, names: Mapping[str, str]) -> dict[str, Any]:
    """Return a row's columns about the paired difference to its reference's runs.

    names: the clients' names by id, of those that have one.
    """
    low, high = one.over_clients or (None, None)
    low_seeds, high_seeds = one.over_seeds or (None, None)
    return {
        "pairs": one.pairs,
        "seeds": one.seeds,
        "difference": one.mean,
        "low": low,
        "high": high,
        "wilcoxon": one.wilcoxon,
        "holm": one.holm,
        "low-over-seeds": low_seeds,
        "high-over-seeds": high_seeds,
        "clients-better": one.share_better,
        "by-client": {int(i): difference for i, difference in one.by_client.items()},
        **({"client-names": {int(i): names[i] for i in one.by_client if i in names}} if names else {}),
        "verdict": one.verdict,
    }
