"""A sweep as a Slurm job array: a script with one run per task. A restarted task resumes its run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from corolla.experiments.sweep import Point
from fl_app import shell
from fl_app.files import make_directory, publish_text

SCRIPT = "array.sbatch"  # in the sweep's directory
_TEXT = """#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --array=0-{last}{limit}
#SBATCH --cpus-per-task={cpus}
{gpus}#SBATCH --signal=B:TERM@60
#SBATCH --output={log}
#
# {title}: one run per task, in the folder of its name. Submitted again, it resumes interrupted runs from their last checkpoints,
# and skips finished ones. Set memory, time and partition by options of sbatch, or by more #SBATCH lines.
set -eu
runs=(
{runs}
)
cd {here}
exec {command} "${{runs[$SLURM_ARRAY_TASK_ID]}}"
"""


def write_array(
    points: Sequence[Point], directory: Path, title: str, words: Sequence[str], *, at_once: int, cpus: int, gpus: int
) -> Path:
    """Write a sweep's array script into its directory, and return its path.

    words: of the `corolla sweep` that a task calls, except the option that names its run. at_once: tasks at the same
    time; 0: as many as Slurm has room for. cpus, gpus: per task.
    """
    logs = directory / "logs"
    make_directory(logs)
    path = directory / SCRIPT
    text = _TEXT.format(
        name=shell.word(f"corolla-{directory.name}"),
        last=len(points) - 1,
        limit=f"%{at_once}" if at_once else "",
        cpus=cpus,
        gpus=f"#SBATCH --gpus-per-task={gpus}\n" if gpus else "",
        log=shell.word(f"{logs}/%a.log"),
        title=title,
        runs="\n".join(f"  {shell.word(point.name)}" for point in points),
        here=shell.word(str(Path.cwd())),
        command=shell.line([sys.executable, "-P", "-m", "corolla", "sweep", *words, "--only"]),
    )
    publish_text(path, text)
    return path
