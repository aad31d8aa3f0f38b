"""A private run beside a plain one: the server sees sums of masked uploads, and the accuracy hardly changes.

    python examples/private.py --picture private.svg

Nine clients form three aggregation groups of three. A simulation exercises the protocol; only a deployment with a key per site keeps its
promises.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pictures
from matplotlib import pyplot

from corolla import Run, run

COLOURS = {"plain": pictures.ORANGE, "private": pictures.BLUE}


def train(directory: Path) -> dict[str, Run]:
    """Run FedCAC twice, with and without masked uploads."""
    return {
        name: run(
            method="fedcac",
            fedcac={"beta": 5},
            private=name == "private",
            run_name=name,
            clients=9,
            dirichlet_alpha=0.3,
            num_server_rounds=10,
            output_dir=directory,
            in_process=True,
            progress=False,
        )
        for name in COLOURS
    }


def draw(runs: dict[str, Run], path: Path) -> None:
    """Draw the accuracy of both runs by round, and their uploads beside it."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(7.2, 3.2), width_ratios=(3, 1))
    for (name, one), line in zip(runs.items(), ("-", "--"), strict=True):
        accuracy = 100 * one.rounds["accuracy-before"]
        left.plot(accuracy.index, accuracy, line, color=COLOURS[name], label=name)
        right.bar(name, one.rounds["upload-bytes"].mean() / 9 / 1e3, color=COLOURS[name], width=0.6)
    left.set(xlabel="round", ylabel="accuracy of the received model, %")
    left.legend(loc="lower right")
    right.set(ylabel="upload per client, kB")
    pictures.save(figure, path)


def main() -> None:
    """Train, print both results, draw."""
    path = pictures.picture_path(__doc__ or "")
    with tempfile.TemporaryDirectory() as directory:
        runs = train(Path(directory))
        for name, one in runs.items():
            uploads = one.rounds["upload-bytes"].mean() / 9
            print(
                f"{name:8} final accuracy {100 * one.summary['final-accuracy']:.2f} %, {uploads:,.0f} bytes per upload"
            )
        if path:
            draw(runs, path)


if __name__ == "__main__":
    main()
