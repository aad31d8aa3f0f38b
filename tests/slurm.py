"""Slurm as its scripts see it, on one machine: sbatch runs a script with bash, srun a copy of a command for every task."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path

SRUN = """#!/bin/bash
# a step: every task has its number, its output in a file of its own, and ends with the step
pids=()
trap 'kill "${pids[@]}" 2> /dev/null; wait' TERM
while [[ "$1" == --* ]]; do
  case "$1" in
    --ntasks=*) tasks="${1#*=}" ;;
    --output=*) output="${1#*=}" ;;
    *) echo "srun: what is $1?" >&2; exit 1 ;;
  esac
  shift
done
for ((task = 0; task < tasks; task++)); do
  SLURM_PROCID=$task "$@" > "${output/\\%t/$task}" 2>&1 &
  pids+=($!)
done
wait
"""


def options(script: Path) -> dict[str, str]:
    """Return what a script's #SBATCH lines ask for; Slurm reads them up to the first command."""
    found = {}
    lines = script.read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    for line in lines[1:]:
        if not line.startswith("#"):
            break
        if line.startswith("#SBATCH "):
            (option,) = shlex.split(line.removeprefix("#SBATCH "))
            name, _, value = option.partition("=")
            found[name] = value
    return found


def tasks(script: Path) -> list[int]:
    """Return the numbers of an array's tasks."""
    first, last = re.fullmatch(r"(\d+)-(\d+)(%\d+)?", options(script)["--array"]).groups()[:2]  # type: ignore[union-attr]
    return list(range(int(first), int(last) + 1))


def sbatch(
    script: Path,
    *arguments: str,
    directory: Path,
    environment: Mapping[str, str] | None = None,
    task: int | None = None,
    job: int = 1,
) -> subprocess.Popen[str]:
    """Start a job, or one task of an array, as Slurm would on a node: the script is a copy, its output one stream."""
    bin_ = directory / "slurm-bin"
    bin_.mkdir(exist_ok=True)
    (bin_ / "srun").write_text(SRUN)
    (bin_ / "srun").chmod(0o755)
    env = {**(environment or os.environ), "SLURM_JOB_ID": str(job), "SLURM_SUBMIT_DIR": str(directory)}
    env["PATH"] = f"{bin_}{os.pathsep}{env['PATH']}"
    if task is not None:
        env["SLURM_ARRAY_TASK_ID"] = str(task)
    spooled = bin_ / "slurm_script"
    spooled.write_text(script.read_text())
    return subprocess.Popen(
        ["bash", str(spooled), *arguments],
        cwd=directory,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
