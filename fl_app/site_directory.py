"""A site's own directory: a permanent record of its spent privacy budget and of the private rounds it has answered.

The key of the site's data hash (`hash-key`) is there, too. The directory's place follows from the machine alone. No key
of a run's config names it, and none may name a place within it.
"""

from __future__ import annotations

import os
from pathlib import Path

from fl_app.errors import DeploymentError

VARIABLE = "COROLLA_SITE_DIR"
# Experiments have their state beside it; none has this name.
DIRECTORY = ".site"


def user_state() -> Path:
    """Return corolla's directory in the user's state directory."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "corolla"


def site_directory() -> Path:
    """Return $COROLLA_SITE_DIR, or a directory of the user's state if it is not set.

    A site's gate sets the variable from `site-dir` in site.toml. Raises UserError for a relative path: it would depend
    on the working directory.
    """
    if not (given := os.environ.get(VARIABLE, "")):
        return user_state() / DIRECTORY
    path = Path(given).expanduser()
    if not path.is_absolute():
        raise DeploymentError(key=VARIABLE, rule=f"must be an absolute path, got {given}")
    return path


def refuse_within_site(key: str, directory: Path) -> None:
    """Raise UserError if a directory in a run's config is the site's own, or lies in it. key: its key in the config."""
    if directory.expanduser().resolve().is_relative_to(site_directory().resolve()):
        raise DeploymentError(key=key, rule=f"{directory} lies in the site's own directory, which no run may name")
