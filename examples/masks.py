"""FedCAC's masks over rounds: clients with similar data have critical parameters in the same places.

    python examples/masks.py --picture masks.png

Ten clients form five pairs; both clients of a pair have the same two classes. No client reports its classes to the method.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pictures
from matplotlib import pyplot
from numpy.typing import NDArray

from corolla import Run, run

CLIENTS, ROUNDS = 10, (1, 4, 12)


def train(directory: Path) -> Run:
    """Run FedCAC with clients of two classes each; the blocks of the partition give two clients the same classes."""
    return run(
        method="fedcac",
        fedcac={"beta": 8},
        clients=CLIENTS,
        partition="pathological",
        pathological_assignment="blocks",
        classes_per_client=2,
        train_samples=60,
        num_server_rounds=ROUNDS[-1],
        report_class_counts=False,
        output_dir=directory,
        in_process=True,
        progress=False,
    )


def overlaps(one: Run) -> dict[int, NDArray[np.float32]]:
    """Return the share of critical parameters that two clients have in common, [N, N], by round."""
    return {round_: one.matrix("overlap", round=round_).to_numpy() for round_ in ROUNDS}


def contrast(overlap: NDArray[np.float32]) -> float:
    """Return the mean overlap of pairs with the same classes minus that of all other pairs."""
    block = np.arange(len(overlap)) // 2
    same = block[:, None] == block
    other = ~same
    np.fill_diagonal(same, False)
    return float(np.nanmean(overlap[same]) - np.nanmean(overlap[other]))


def draw(found: dict[int, NDArray[np.float32]], path: Path) -> None:
    """Draw one matrix per round."""
    figure, panels = pyplot.subplots(1, len(found), figsize=(8, 2.9), sharey=True)
    low = min(np.nanmin(overlap) for overlap in found.values())
    for axes, (round_, overlap) in zip(panels, found.items(), strict=True):
        shown = np.where(np.eye(len(overlap), dtype=bool), np.nan, overlap)
        image = axes.imshow(shown, vmin=low, vmax=1, cmap="viridis")
        axes.set(title=f"round {round_}", xlabel="client", xticks=range(0, CLIENTS, 2), yticks=range(0, CLIENTS, 2))
        axes.grid(False)
    panels[0].set_ylabel("client")
    figure.colorbar(image, ax=panels, label="overlap of masks", shrink=0.85)
    pictures.save(figure, path)


def main() -> None:
    """Train, print how far pairs with the same classes stand out, draw."""
    path = pictures.picture_path(__doc__ or "")
    with tempfile.TemporaryDirectory() as directory:
        found = overlaps(train(Path(directory)))
    for round_, overlap in found.items():
        print(f"round {round_:2}: pairs with the same classes overlap by {contrast(overlap):.3f} more than others")
    if path:
        draw(found, path)


if __name__ == "__main__":
    main()
