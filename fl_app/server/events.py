"""TensorBoard events of a run, one step per round, in RUN/tensorboard; the package `tensorboard` is optional."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fl_app.errors import UserError
from fl_app.files import FILE_MODE, make_directory

DIRECTORY = "tensorboard"


def require_tensorboard() -> None:
    """Raise UserError if TensorBoard's events cannot be written here."""
    if importlib.util.find_spec("tensorboard") is None:
        raise UserError(
            "tensorboard: the package tensorboard is not installed where the server runs; pip install tensorboard, or "
            "leave tensorboard = false"
        )


class EventFiles:
    """Writes rounds as events.

    metric: the task's headline. last_round: rounds after it, left by an interrupted run, are hidden by TensorBoard.
    """

    def __init__(self, run: Path, last_round: int = 0, metric: str = "accuracy") -> None:
        from torch.utils.tensorboard import SummaryWriter

        make_directory(run / DIRECTORY)
        self._metric = metric
        self._writer: Any = SummaryWriter(str(run / DIRECTORY), purge_step=last_round + 1)
        self._writer.flush()  # it is there then, open to all as the writer makes it
        for file in (run / DIRECTORY).iterdir():
            file.chmod(FILE_MODE)

    def add(self, record: Mapping[str, Any]) -> None:
        """Write one round, at once."""
        for name, value in scalars(record, self._metric):
            self._writer.add_scalar(name, value, record["round"])
        self._writer.flush()


def scalars(record: Mapping[str, Any], metric: str = "accuracy") -> Iterator[tuple[str, float]]:
    """Yield name and value of what a round's record says of all clients: the headline metric, losses, bytes, seconds by phase."""
    found = {
        f"{metric}/before-training": record[f"{metric}-before"],
        f"{metric}/after-training": record[f"{metric}-after"],
        f"{metric}/all-clients": record.get("evaluation", {}).get(metric),
        "loss/training": record["loss"],
        "loss/before-training": record["loss-before"],
        "loss/after-training": record["loss-after"],
        "bytes/upload": record["upload-bytes"],
        "bytes/download": record["download-bytes"],
        "failures": len(record["failures"]),
        **{f"seconds/{phase}": seconds for phase, seconds in record["seconds"].items()},
    }
    yield from ((name, value) for name, value in found.items() if value is not None)
