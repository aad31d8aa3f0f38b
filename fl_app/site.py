"""A site's own directory: what its records have spent and which private rounds it has answered are noted there, for good.

The key of the site's data hash (`hash-key`) lies there, too.
Its place follows from the machine alone: no key of a run's config names it, and none may name a place within it.
"""

from __future__ import annotations

import os
from pathlib import Path

from fl_app.errors import UserError

VARIABLE = "COROLLA_SITE_DIR"
# an experiment, whose state lies beside it, has no such name
DIRECTORY = ".site"


def user_state() -> Path:
    """Return corolla's directory in the user's state directory."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "corolla"


def site_directory() -> Path:
    """Return $COROLLA_SITE_DIR, which a site's gate sets from `site-dir` in site.toml, or a directory of the user's state.

    Raises UserError for a relative path: it would be another place in every working directory.
    """
    if not (given := os.environ.get(VARIABLE, "")):
        return user_state() / DIRECTORY
    path = Path(given).expanduser()
    if not path.is_absolute():
        raise UserError(f"{VARIABLE}: must be an absolute path, got {given}")
    return path


def refuse_within_site(key: str, directory: Path) -> None:
    """Raise UserError if a directory that a run's config names is the site's own, or lies in it. key: of the configuration."""
    if directory.expanduser().resolve().is_relative_to(site_directory().resolve()):
        raise UserError(f"{key}: {directory} lies in the site's own directory, which no run may name")
