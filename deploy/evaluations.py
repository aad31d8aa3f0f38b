"""A site's count of the evaluations that it has answered in confidential runs: `max-evaluations` of site.toml.

The server chooses the model of an evaluation. Enough questions tell a site's test labels, whatever the run's
configuration is. A run itself is a question too: whether the site's data suit it. Runs and SuperNodes can name the same
rows by many paths. So all SuperNodes of a machine account have one count, over all runs and clusters, beside their
audits, where no confined application can change it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from fl_app.errors import DeploymentError
from fl_app.files import lock, make_directory, publish_text
from fl_app.keys import Scalar
from fl_app.transport.outgoing import OPEN, modes_of

FILE = "evaluations"
# Messages without a model.
_WITHOUT_FIGURES = ("query", "get_properties", "get_parameters")


def place(sites: Path) -> Path:
    """Return the directory with the count of a machine account. sites: the directory of all sites."""
    return sites / "of-all"


def hides(config: Mapping[str, Scalar]) -> bool:
    """Return whether a run is confidential."""
    return modes_of(config) != OPEN


def counts(kind: str, config: Mapping[str, Scalar]) -> bool:
    """Return whether the reply to a message has figures of a confidential run. kind: the message's type."""
    return kind not in _WITHOUT_FIGURES and hides(config) and bool(config.get("report-accuracy", True))


def claim(directory: Path, most: int) -> str:
    """Count an evaluation before it is answered. Return the reason to refuse it, or "".

    directory: `place`. most: the site's limit. Raises UserError if the count cannot be read or written, or is
    no count: then nothing is answered.
    """
    path = directory / FILE
    try:
        make_directory(path.parent)
        with lock(path.with_suffix(".lock"), wait=True):
            text = path.read_text(encoding="ascii") if path.exists() else "0\n"
            # int() reads "-9", "1_0" and "٣" too
            if not re.fullmatch(r"[0-9]{1,18}\n", text):
                raise ValueError(text)
            answered = int(text)
            if answered >= most:
                return f"max-evaluations: this site answers {most}, and has answered them"
            publish_text(path, f"{answered + 1}\n")
    except (OSError, ValueError):
        raise DeploymentError(
            key="max-evaluations", rule="this site cannot count its evaluations, so it answers none"
        ) from None
    return ""
