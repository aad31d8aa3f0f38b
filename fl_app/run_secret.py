"""The id of a run's experiment, which follows from the run's secret. This file imports nothing of Flower."""

from __future__ import annotations

import hashlib
import re

EXPERIMENT_ID = re.compile("[0-9a-f]{32}")
"""An experiment's id, which also names the directory of its clients' state."""


def experiment_of(secret: str) -> str:
    """Return the id of the experiment with this secret: 128 bits of its hash, from which nobody finds the secret."""
    return hashlib.sha256(f"corolla experiment {secret}".encode()).hexdigest()[:32]
