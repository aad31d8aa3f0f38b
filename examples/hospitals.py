"""A table with one client per hospital: is sharing better for each of them?

    python examples/hospitals.py --picture hospitals.svg

The rows are scikit-learn's breast cancer data. Large tumours go to the university hospital more often, so the hospitals see
different patients, and the village sees few.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pictures
from matplotlib import pyplot
from sklearn.datasets import load_breast_cancer

from corolla import Run, run

COLOURS = {"local": pictures.GREEN, "fedavg": pictures.ORANGE, "ditto": pictures.BLUE}
HOSPITALS = ("village", "town", "city", "university")
FEATURES = ["mean texture", "mean smoothness", "mean symmetry", "mean fractal dimension"]
SEEDS = 8
SHARES = (0.16, 0.2, 0.28, 0.36)
"""Each hospital's share of the patients."""


def write_table(path: Path) -> None:
    """Write the CSV file: four features, the diagnosis, and the hospital."""
    frame = load_breast_cancer(as_frame=True).frame
    size = frame["mean radius"].rank(pct=True)
    frame = frame[[*FEATURES, "target"]]
    frame["target"] = np.where(frame["target"] == 1, "benign", "malignant")
    noise = np.random.default_rng(0).normal(0, 0.5, len(frame))
    rank = np.argsort(np.argsort(size + noise)) / len(frame)
    frame["hospital"] = np.array(HOSPITALS)[np.searchsorted(np.cumsum(SHARES)[:-1], rank, side="right")]
    frame.to_csv(path, index=False)


def train(directory: Path) -> dict[str, list[Run]]:
    """Run the three methods with eight seeds each; return the runs by method. Each seed draws other test rows."""
    write_table(directory / "tumours.csv")
    return {
        method: [
            run(
                method=method,
                run_name=f"{method}-seed{seed}",
                seed=seed,
                partition_seed=seed,
                clients=len(HOSPITALS),
                dataset=f"table:{directory / 'tumours.csv'}",
                target="target",
                client="hospital",
                headline="auc",
                num_server_rounds=8,
                local_epochs=3,
                output_dir=directory,
                in_process=True,
                progress=False,
            )
            for seed in range(SEEDS)
        ]
        for method in COLOURS
    }


def by_hospital(runs: list[Run]) -> dict[str, float]:
    """Return each hospital's AUC after the last round in per cent, mean over the seeds."""
    found = {}
    for client, name in enumerate(sorted(HOSPITALS)):
        last = [one.clients.xs(client, level="client")["evaluation-auc"].dropna().iloc[-1] for one in runs]
        found[name] = 100 * float(np.mean(last))
    return found


def draw(figures: dict[str, dict[str, float]], path: Path) -> None:
    """Draw one row per hospital and one dot per method."""
    figure, axes = pyplot.subplots(figsize=(6.4, 2.8))
    rows = np.arange(len(HOSPITALS))
    for k, ((method, auc), marker) in enumerate(zip(figures.items(), "o^s", strict=True)):
        values = [auc[name] for name in HOSPITALS]
        axes.plot(values, rows + 0.2 * (k - 1), marker, color=COLOURS[method], label=method, markersize=8)
    axes.set(xlabel="AUC on the hospital's own test rows, %", yticks=rows, yticklabels=HOSPITALS)
    axes.invert_yaxis()
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    pictures.save(figure, path)


def main() -> None:
    """Train, print the table, draw."""
    path = pictures.picture_path(__doc__ or "")
    with tempfile.TemporaryDirectory() as directory:
        figures = {method: by_hospital(runs) for method, runs in train(Path(directory)).items()}
    print(f"{'':12}" + "".join(f"{name:>12}" for name in HOSPITALS))
    for method, auc in figures.items():
        print(f"{method:12}" + "".join(f"{auc[name]:12.1f}" for name in HOSPITALS))
    if path:
        draw(figures, path)


if __name__ == "__main__":
    main()
