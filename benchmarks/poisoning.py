"""The effect of lying clients, and the defences: attack x method x defence, the table of studies/attacks.md.

`python -m benchmarks.poisoning [METHOD ...]` trains on digits in one process, 10 clients, 15 rounds, all other keys at
their defaults. The last client, or the last three, lie in every round (benchmarks/attacks.py). The script prints the
honest clients' mean accuracy after the last round. The columns are no defence (the default), `max-update-norm = 3`,
each rule of `robust` alone, and the bound with the median. `ends`: the run had too few usable uploads. --defences: only
these columns; --attacks: only these rows; --byzantine: only these numbers; --lowest: the lowest accuracy of an honest
client, too; --rounds: another number of rounds; --processes: number of runs at once.
"""

from __future__ import annotations

import argparse
import functools
import logging
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import attacks
from benchmarks.attacks import ATTACKS, WITH_CLASSES, WITH_MASKS
from fl_app.config import parse
from fl_app.errors import UserError
from fl_app.keys import Scalar
from fl_app.server.run_folder import read_metrics
from fl_app.server_app import run
from fl_app.transport.inprocess import InProcessGrid
from strategies import METHOD_PARAMS, METHODS
from strategies.engine.screening import USUAL

CLIENTS, ROUNDS = 10, 15
NUMBERS = (1, 3)
METHODS_SHOWN = ("fedavg", "fedcac", "feddac")
# methods with masks in their uploads
WITH_A_MASK = ("fedcac", "feddac")
# with an array of classes beside the model
WITH_AN_ARRAY = ("fedgen", "pfedfda")
NOBODY = "nobody lies"
NO_BOUND: dict[str, Scalar] = {"max-update-norm": 0.0}
BOUND: dict[str, Scalar] = {"max-update-norm": USUAL}


@dataclass(frozen=True)
class Trial:
    """One run: method, attack, number of Byzantine clients, defence."""

    method: str
    attack: str
    num_byzantine: int
    defence: str


@dataclass(frozen=True)
class Outcome:
    """Honest clients' mean accuracy, None if the run ended early.

    lowest: the lowest accuracy of an honest client. honest_dropped, byzantine_dropped: number of dropped uploads of honest
    clients, and of Byzantine clients.
    """

    accuracy: float | None
    honest_dropped: int = 0
    byzantine_dropped: int = 0
    lowest: float = 0.0


def defences(method: str) -> dict[str, dict[str, Scalar]]:
    """Return the run config of every defence, by its name in the table."""
    rules = sorted(METHODS[method].strategy.means.rules)
    alone: dict[str, dict[str, Scalar]] = {rule: {"robust": rule, **NO_BOUND} for rule in rules}
    both: dict[str, dict[str, Scalar]] = (
        {"bound and median": {"robust": "median", **BOUND}} if "median" in rules else {}
    )
    return {"none": NO_BOUND, "bound": BOUND, **alone, **both}


def trials(
    method: str, chosen: Sequence[str] = (), tried: Sequence[str] = (), numbers: Sequence[int] = NUMBERS
) -> Iterator[Trial]:
    """Yield all runs of a method, those without Byzantine clients first.

    chosen, tried: defences and attacks by name; all if empty. numbers: of Byzantine clients.
    """
    names = [name for name in defences(method) if name in chosen or not chosen]
    yield from (Trial(method, NOBODY, 0, name) for name in names)
    for attack in tried or ATTACKS:
        if applies(attack, method):
            yield from (Trial(method, attack, num_byzantine, name) for num_byzantine in numbers for name in names)


def applies(attack: str, method: str) -> bool:
    """Return whether a method's uploads have what an attack changes."""
    return (method in WITH_A_MASK or attack not in WITH_MASKS) and (
        method in WITH_AN_ARRAY or attack not in WITH_CLASSES
    )


def outcome(trial: Trial, clients: int = CLIENTS, rounds: int = ROUNDS) -> Outcome:
    """Run a trial."""
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as directory:
        raw: dict[str, Scalar] = {
            "method": trial.method,
            "num-server-rounds": rounds,
            "num-clients": clients,
            "device": "cpu",
            "run-name": "run",
            "output-dir": directory,
            "state-dir": f"{directory}/state",
            **defences(trial.method)[trial.defence],
        }
        config = parse(raw, METHOD_PARAMS)
        app = attacks.client_app(ATTACKS.get(trial.attack, attacks.honest), trial.num_byzantine, config)
        try:
            run(InProcessGrid(app, raw, clients), config, lambda *_: None)
        except UserError:
            return Outcome(None)
        records = list(read_metrics(Path(directory) / "run"))
    honest = range(clients - trial.num_byzantine)
    dropped = [failure["client"] in honest for record in records for failure in record["failures"]]
    last = records[-1]["evaluation"]["clients"]
    found = [last[str(i)]["accuracy"] if str(i) in last else 0.0 for i in honest]
    return Outcome(float(np.mean(found)), sum(dropped), len(dropped) - sum(dropped), min(found))


def outcomes_table(method: str, outcomes: dict[Trial, Outcome], lowest: bool = False) -> str:
    """Return the Markdown of a method's outcomes: a row per attack and number of Byzantine clients, a column per defence.

    lowest: with the lowest accuracy of an honest client.
    """
    names = list(dict.fromkeys(trial.defence for trial in outcomes if trial.method == method))
    lines = [f"| `{method}` | Byzantine | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for attack, num_byzantine in dict.fromkeys(
        (trial.attack, trial.num_byzantine) for trial in outcomes if trial.method == method
    ):
        cells = [cell(outcomes[Trial(method, attack, num_byzantine, name)], lowest) for name in names]
        lines.append(f"| {attack} | {num_byzantine} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(found: Outcome, lowest: bool = False) -> str:
    """Return an accuracy, with the lowest one if asked for, and the number of dropped uploads of honest clients, if any."""
    if found.accuracy is None:
        return "ends"
    least = f", lowest {_short(found.lowest)}" if lowest else ""
    lost = f" (honest uploads dropped: {found.honest_dropped})" if found.honest_dropped else ""
    return f"{_short(found.accuracy)}{least}{lost}"


def _short(accuracy: float) -> str:
    return f"{accuracy:.3f}".removeprefix("0")


def main(arguments: Iterable[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="*", metavar="METHOD", default=METHODS_SHOWN)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--defences", nargs="+", default=(), metavar="NAME")
    parser.add_argument("--attacks", nargs="+", default=(), metavar="NAME", choices=list(ATTACKS))
    parser.add_argument("--byzantine", "--liars", dest="num_byzantine", nargs="+", type=int, default=NUMBERS)
    parser.add_argument("--lowest", action="store_true")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args(None if arguments is None else list(arguments))
    for method in options.methods:
        todo = list(trials(method, options.defences, options.attacks, options.num_byzantine))
        with ProcessPoolExecutor(options.processes) as pool:
            outcomes = dict(zip(todo, pool.map(functools.partial(outcome, rounds=options.rounds), todo), strict=True))
        print(outcomes_table(method, outcomes, options.lowest), end="\n\n", flush=True)
        kept = sum(found.byzantine_dropped for found in outcomes.values())
        print(f"{method}: {len(todo)} runs, {kept} uploads of Byzantine clients dropped", file=sys.stderr)


if __name__ == "__main__":
    main()
