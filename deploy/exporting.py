"""`corolla node export` behind the walls of a site's applications.

A site's own model of a run, and the Python files that the model is built with, lie in a directory that applications
write. The command starts itself once more behind the walls that `confine` gives applications, and there writes into an
empty directory. From it this process takes files as data.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from deploy import bubblewrap, confine
from deploy.confine import Confinement
from deploy.site import Site
from deploy.supernode import walls_for
from fl_app import foreign_files
from fl_app.errors import UserError, plain
from fl_app.files import make_directory
from fl_app.site import VARIABLE, site_directory

SECONDS = 600.0
"""Most seconds of an export."""
MOST_BYTES = 8 << 30
"""Most bytes of a file that an export writes."""
_INSIDE = "COROLLA_EXPORT_INSIDE"
# a model, its card, its plugins (corolla/experiments/exported/export.py)
_WRITTEN = re.compile(r"[\w-][\w.-]*\.(?:pt|onnx)(?:\.json|\.plugins(?:/[\w-][\w.-]*)+)?")


def is_inside() -> bool:
    """Return whether this process is the one behind the walls."""
    return _INSIDE in os.environ


def export_inside(rules: Site, words: Sequence[str], to: Path) -> list[Path]:
    """Export behind walls, and move what was written into a directory. Return the new files.

    words: the command's arguments but its directory. Raises UserError if the export fails, takes too long, or a file of
    this name is no regular file of a fair size.
    """
    assert rules.confine
    walls = walls_for(rules.confine)
    with tempfile.TemporaryDirectory(prefix="corolla-export-") as made:
        fresh = Path(made)
        inside = Confinement(confine.installation(), (str(site_directory()), made), ())
        command = [
            sys.executable,
            "-P",
            "-m",
            "corolla",
            "node",
            "export",
            *words,
            "--to",
            str(fresh / "out"),
            "--quiet",
        ]
        # the rules' file, which may lie below HOME, is not there
        more = {_INSIDE: "1", "COROLLA_SITE": "", "HOME": made, "TMPDIR": made, VARIABLE: str(site_directory())}
        inside.refuse_led_out()
        environment = confine.cleaned(os.environ, inside.write) | more
        if walls is None:
            process = bubblewrap.Inside(confine.confined_command(inside, command), environment)
        else:
            process = walls.start(inside, command, made, environment)
        late = threading.Timer(SECONDS, process.kill)
        late.start()
        code = process.wait()
        late.cancel()
        process.output.join(1)
        if code:
            raise UserError(
                f"node export: failed behind the walls of applications (exit code {code}), for the reason above"
            )
        return list(_taken(fresh, "out", to))


def _taken(root: Path, below: str, to: Path) -> Iterator[Path]:
    """Copy an export's files from below a directory, and yield their new paths. Raises UserError for any other file."""
    for entry in foreign_files.walk(root, below):
        if entry.is_directory:
            continue
        path = entry.path.removeprefix(f"{below}/")
        # a directory of the person's may have files that programs read by their names
        if not _WRITTEN.fullmatch(path):
            raise UserError(f"node export: must write a model, its card and its own Python files, wrote {plain(path)}")
        make_directory(to)
        foreign_files.write(to, path, foreign_files.read(root, entry.path, MOST_BYTES))
        yield to / path
