"""The packages that serve some runs or commands alone, and the extra of Corolla that installs each."""

from __future__ import annotations

import importlib.util

from fl_app.errors import UserError

EXTRAS = {
    "matplotlib": "report",
    "pandas": "tables",
    "pyarrow": "tables",
    "datasets": "tables",
    "flwr_datasets": "partitions",
    "torchmetrics": "metrics",
    "opacus": "dp",
}
"""By the name a package is imported by: the extra in pyproject.toml that brings it."""


def require(package: str, what: str) -> None:
    """Raise UserError unless a package is installed here. what: the key, value or command that needs it."""
    spec = importlib.util.find_spec(package)
    # A directory of that name is no package.
    if spec is None or spec.origin is None:
        raise UserError(
            f"{what} needs {package}, which is not installed here: pip install 'corolla[{EXTRAS[package]}]'"
        )
