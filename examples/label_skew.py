"""Three methods under label skew: ten clients, each with its own mix of digits.

    python examples/label_skew.py --picture label-skew.svg

FedAvg trains one model for all clients. FedCAC gives each client its own model. Local shares nothing.
"""

from __future__ import annotations

import tempfile

import pictures
from matplotlib import pyplot

from corolla import Run, compare, run

COLOURS = {"fedcac": pictures.BLUE, "fedavg": pictures.ORANGE, "local": pictures.GREEN}


def train(directory: str) -> dict[str, Run]:
    """Run the three methods on the same clients; return the runs by method."""
    return {
        method: run(
            method=method,
            run_name=method,
            clients=10,
            num_server_rounds=12,
            dirichlet_alpha=0.1,
            train_samples=40,
            evaluate_every=1,
            output_dir=directory,
            in_process=True,
            progress=False,
            **({"fedcac": {"beta": 6}} if method == "fedcac" else {}),
        )
        for method in COLOURS
    }


def draw(runs: dict[str, Run], path: pictures.Path) -> None:
    """Draw the accuracy of all clients by round: mean, and the band between the quartiles of the clients."""
    figure, axes = pyplot.subplots(figsize=(6.4, 3.6))
    for method, one in runs.items():
        by_round = 100 * one.clients["evaluation-accuracy"].dropna().unstack("client")
        axes.plot(by_round.index, by_round.mean(axis=1), color=COLOURS[method], label=method)
        low, high = by_round.quantile(0.25, axis=1), by_round.quantile(0.75, axis=1)
        axes.fill_between(by_round.index, low, high, color=COLOURS[method], alpha=0.15, linewidth=0)
    axes.set(xlabel="round", ylabel="accuracy of all clients, %", ylim=(0, 100))
    axes.legend(loc="lower right")
    pictures.save(figure, path)


def main() -> None:
    """Train, print the comparison, draw."""
    path = pictures.picture_path(__doc__ or "")
    with tempfile.TemporaryDirectory() as directory:
        runs = train(directory)
        found = compare(runs.values())
        print(found[["method", "final-accuracy", "difference", "low", "high"]].to_string(index=False))
        if path:
            draw(runs, path)


if __name__ == "__main__":
    main()
