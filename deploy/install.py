"""`make install`: a virtual environment with Corolla, made in steps, with progress at least every ten seconds.

`python deploy/install.py .venv constraints/flwr-1.39.txt` needs only Python's standard library, because nothing is
installed yet. The file names every package with its version and its hashes: all that development needs too, or those
of running alone.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

OLDEST = (3, 11)
SILENCE_SECONDS = 8.0
_LARGE = re.compile(r"\s*Downloading (?:\S*/)?([^\s/]+\.(?:whl|tar\.gz)) \((\d+(?:\.\d+)? [MG]B)\)")
_PACKAGES = re.compile(r"\s*Installing collected packages: (.+)")


def main() -> None:
    """Install the clone in the current directory, with all packages of a file."""
    if sys.version_info < OLDEST:
        sys.exit(f"Python {'.'.join(map(str, OLDEST))} or newer is needed, this is {sys.version}")
    venv, constraints = Path(sys.argv[1]), sys.argv[2]
    python = str(venv / "bin" / "python")
    if not Path(python).exists():
        print(f"1/3 making the virtual environment {venv}", flush=True)
        run([sys.executable, "-m", "venv", str(venv)], "making it")
    else:
        print(f"1/3 the virtual environment {venv} exists", flush=True)
    print("2/3 fetching and installing packages (PyTorch among them: up to 5 GB, minutes)", flush=True)
    pip = [python, "-m", "pip", "install", "--progress-bar", "off"]
    run([*pip, "--require-hashes", "--requirement", constraints], "looking up packages", summarize)
    run([*pip, "--no-deps", "--no-build-isolation", "--editable", "."], "installing Corolla")
    print("3/3 testing the installation", flush=True)
    run([python, "-c", "import corolla.cli"], "importing Corolla for the first time")
    print(f"installed: {venv / 'bin' / 'corolla'} --help", flush=True)


def summarize(line: str) -> str:
    """Return the progress that a line of pip's output shows, in a few words, or ""."""
    if large := _LARGE.match(line):
        return f"downloading {large[1].split('-')[0]} ({large[2]})"
    if found := _PACKAGES.match(line):
        return f"installing {len(found[1].split(', '))} packages"
    return ""


def run(command: list[str], doing: str, summary: Callable[[str], str] = lambda line: "") -> None:
    """Run a command. Print the summaries of its lines, and the current step when nothing was printed for a while.

    If the command fails, exit with the end of its output.
    """
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    assert process.stdout is not None
    lines: deque[str] = deque(maxlen=40)
    printed = since = time.monotonic()

    def watch() -> None:
        nonlocal printed
        while process.poll() is None:
            time.sleep(0.2)
            now = time.monotonic()
            if now - printed > SILENCE_SECONDS:
                printed = now
                print(f"    {doing} ({now - since:.0f} s)", flush=True)

    threading.Thread(target=watch, daemon=True).start()
    for line in process.stdout:
        lines.append(line)
        if text := summary(line):
            doing, printed = text, time.monotonic()
            since = printed
            print(f"    {text}", flush=True)
    if process.wait():
        sys.exit(f"{''.join(lines)}\nthe command failed: {' '.join(command)}")


if __name__ == "__main__":
    main()
