"""Corolla: personalized federated learning on Flower. `from corolla import run, load, compare`: docs/notebook.md."""

from corolla.api import Run, compare, load, run
from fl_app.errors import RunFailed, UserError

__all__ = ["Run", "RunFailed", "UserError", "compare", "load", "run"]
