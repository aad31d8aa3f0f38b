"""How a user's data set is to be read: what of the run config defines it, besides where it lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fl_app import tasks
from fl_app.config import RunConfig
from fl_app.config.rules import split_names
from fl_app.tasks import Task


@dataclass(frozen=True)
class Reading:
    """classes: names in label order; image_size: pixels, 0: as the images are. task: says what targets are. target: the columns
    they stand in, with commas; client: the column that says whose a sample is; test_ratio: part of a table's rows for test.
    """

    classes: tuple[str, ...] = ()
    image_size: int = 0
    task: str = "classification"
    target: str = ""
    client: str = ""
    test_ratio: float = 0.25

    @classmethod
    def of(cls, config: RunConfig) -> Reading:
        """Return how a run's data set is to be read."""
        return cls(
            split_names(config.classes), config.image_size, config.task, config.target, config.client, config.test_ratio
        )

    @property
    def of_task(self) -> Task:
        """The task."""
        return tasks.named(self.task)

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the columns that hold the targets."""
        return split_names(self.target)

    @property
    def beyond_labels(self) -> list[Any]:
        """What tells such a data set from one of labels without a column for clients, as part of its key."""
        task = [] if self.of_task.has_classes else [self.task]
        return task + ([{"client": self.client}] if self.client else [])
