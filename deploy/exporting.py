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
from collections.abc import Sequence
from pathlib import Path

from deploy import bubblewrap, confine
from deploy.confine import Confinement
from deploy.site import Site
from deploy.supernode import readable, walls_for
from fl_app import foreign_files
from fl_app.errors import DeploymentError, plain
from fl_app.files import make_directory
from fl_app.site_directory import VARIABLE, site_directory

SECONDS = 600.0
"""Most seconds of an export."""
MOST_BYTES = 8 << 30
"""Most bytes of all files that an export writes."""
_INSIDE = "COROLLA_EXPORT_INSIDE"
# a model, its card, its plugins; an adapter or a merged model is a folder of them (corolla/experiments/exported/export.py)
_NAME = r"[\w-][\w.-]*"
_OWN = rf"\.json|\.plugins(?:/{_NAME})+"
_FILE, _FOLDER = rf"{_NAME}\.(?:pt|onnx)", rf"{_NAME}-(?:adapter|merged)/{_NAME}"
_MODEL = re.compile(rf"{_FILE}|{_FOLDER}\.safetensors")
_WRITTEN = re.compile(rf"{_FILE}(?:{_OWN})?|{_FOLDER}(?:\.safetensors|{_OWN})")


def is_inside() -> bool:
    """Return whether this process is the one behind the walls."""
    return _INSIDE in os.environ


def export_inside(rules: Site, words: Sequence[str], to: Path) -> list[Path]:
    """Export behind walls, and move what was written into a directory. Return the new files.

    words: the command's arguments but its directory. Raises UserError if the export fails, takes too long, or a file of
    this name exists, or is no regular file of a fair size.
    """
    assert rules.confine
    walls = walls_for(rules.confine)
    with tempfile.TemporaryDirectory(prefix="corolla-export-") as made:
        fresh = Path(made)
        inside = Confinement((*confine.installation(), *readable(rules)), (str(site_directory()), made), ())
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
            raise DeploymentError(
                key="node export",
                rule=f"failed behind the walls of applications (exit code {code}), for the reason above",
            )
        return taken(fresh, "out", to)


def taken(root: Path, below: str, to: Path) -> list[Path]:
    """Copy an export's files from below a directory, and return their new paths.

    There is one model, a new one: a file, or a folder. Raises UserError for any other file, and if the model or a file of it
    exists already: the files of another model in the directory are the person's, and some of them are code.
    """
    found = {
        entry.path.removeprefix(f"{below}/"): entry
        for entry in foreign_files.walk(root, below)
        if not entry.is_directory
    }
    for path in found:
        # a directory of the person's may have files that programs read by their names
        if not _WRITTEN.fullmatch(path):
            raise DeploymentError(
                key="node export", rule=f"must write a model, its card and its own Python files, wrote {plain(path)}"
            )
    model, *others = sorted(path for path in found if _MODEL.fullmatch(path)) or [""]
    folder = model.rpartition("/")[0]
    own = (f"{folder}/",) if folder else (f"{model}.json", f"{model}.plugins/")
    if not model or others or not all(path == model or path.startswith(own) for path in found):
        raise DeploymentError(
            key="node export",
            rule=f"must write one model and its own files, wrote {', '.join(sorted(found)) or 'none'}",
        )
    if (size := sum(entry.nbytes for entry in found.values())) > MOST_BYTES:
        raise DeploymentError(key="node export", rule=f"may write {MOST_BYTES} bytes, wrote {size}")
    for name in (folder,) if folder else (model, f"{model}.json", f"{model}.plugins"):
        if os.path.lexists(to / name):
            raise DeploymentError(
                key="node export",
                rule=f"{to / name} exists already, and is not overwritten; choose another --to or --name",
            )
    make_directory(to)
    for path, entry in found.items():
        foreign_files.write(to, path, foreign_files.pieces(root, entry.path, entry.nbytes))
    return [to / path for path in found]
