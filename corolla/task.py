"""Everything that a task's file imports, in one line (docs/tasks.md). Importing it does not load torch."""

from __future__ import annotations

from fl_app.errors import UserError
from fl_app.tasks import Classification, Metric, MultiLabel, Regression, Task

__all__ = ["Classification", "Metric", "MultiLabel", "Regression", "Task", "UserError"]
