"""Shared parts of the gallery's scripts: the option `--picture`, and a look that fits light and dark pages."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")

# Middle tones: readable on white and on black. The paper is transparent.
INK = "#808080"
BLUE, ORANGE, GREEN = "#3b8fd0", "#e07020", "#20a070"
LOOK: dict[str, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "lines.linewidth": 2,
    "svg.hashsalt": "corolla",
    "figure.constrained_layout.use": True,
} | dict.fromkeys(
    (
        "text.color",
        "axes.labelcolor",
        "axes.edgecolor",
        "xtick.color",
        "ytick.color",
        "grid.color",
        "legend.labelcolor",
    ),
    INK,
)
matplotlib.rcParams.update(LOOK)


def picture_path(description: str) -> Path | None:
    """Return the file of `--picture`, None without it."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the result into this SVG or PNG file")
    return parser.parse_args().picture


def save(figure: Any, path: Path) -> None:
    """Write a figure with transparent paper. The same figure gives the same bytes."""
    metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    figure.savefig(path, transparent=True, metadata=metadata, dpi=110)
