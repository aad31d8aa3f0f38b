"""Optional packages that only some runs or commands need, and the extra of Corolla that installs each."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from fl_app.errors import ConfigurationError

EXTRAS = {
    "altair": "report",
    "jinja2": "report",
    "vl_convert": "report",
    "pandas": "tables",
    "datasets": "tables",
    "flwr_datasets": "partitions",
    "torchmetrics": "metrics",
    "opacus": "dp",
    "prometheus_client": "monitoring",
    "optuna": "search",
    "tokenizers": "text",
    "peft": "peft",
}
"""The extra in pyproject.toml that installs a package, by the package's import name."""


def require(package: str, what: str) -> None:
    """Raise UserError unless a package is installed here. what: the key, value or command that needs it."""
    spec = importlib.util.find_spec(package)
    # A directory of that name is no package.
    if spec is None or spec.origin is None:
        raise ConfigurationError(
            f"{what} needs {package}, which is not installed here: pip install 'corolla[{EXTRAS[package]}]'"
        )


def module(package: str, what: str) -> Any:
    """Return a package, imported. Raises UserError as `require` does."""
    require(package, what)
    return importlib.import_module(package)


def require_pictures(what: str) -> None:
    """Raise UserError unless the report's pictures can be drawn here. what: the command that needs them."""
    for package in ("altair", "vl_convert"):
        require(package, what)
