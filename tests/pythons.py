"""The quick tests and equal digests on other versions of Python: `python -m tests.pythons 3.12 3.13 -- PYTEST OPTIONS`.

An interpreter is looked for on PATH and among pyenv's. Its environment is `.venv-VERSION`, with the packages of constraints/ for
this Flower. A version without an interpreter is named, and is no failure.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from fl_app.transport.app_bundle import APP_DIRECTORY
from tests.e2e.test_next import digest

WAYS = {"in one process": ("--in-process",), "in a simulation": ()}


def main() -> None:
    """Try each version; exit with 1 if one fails."""
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    failed = [version for version in words[:end] if not passes(version, words[end + 1 :])]
    if failed:
        sys.exit(f"failed on Python {', '.join(failed)}")


def passes(version: str, options: Sequence[str]) -> bool:
    """Return whether a version passes the tests that the options select, with equal digests; True if there is no interpreter."""
    python = interpreter(version)
    if not python:
        print(f"Python {version}: NOT TRIED, no interpreter is found on PATH or in {pyenv()}", flush=True)
        return True
    print(f"Python {version}: {python}", flush=True)
    own = environment(version, python)
    tests = subprocess.run(
        [own, "-m", "pytest", *options], env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=APP_DIRECTORY
    )
    return same_digests(version, own) and tests.returncode == 0


def interpreter(version: str) -> str:
    """Return a version's interpreter, "" if there is none that works."""
    installed = sorted(pyenv().glob(f"{version}.*/bin/python"), key=lambda path: path.stat().st_mtime, reverse=True)
    for found in (shutil.which(f"python{version}"), *map(str, installed)):
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        if found and subprocess.run([found, "-c", code], capture_output=True, text=True).stdout.strip() == version:
            return found
    return ""


def pyenv() -> Path:
    """Return the directory of pyenv's interpreters."""
    return Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"


def environment(version: str, python: str) -> str:
    """Make a version's environment unless it is up to date. Return its Python."""
    flower = ".".join(metadata.version("flwr").split(".")[:2])
    packages, place = APP_DIRECTORY / "constraints" / f"flwr-{flower}.txt", APP_DIRECTORY / f".venv-{version}"
    done = place / f".installed-{flower}"
    if not done.exists() or done.stat().st_mtime < packages.stat().st_mtime:
        pip = [str(place / "bin" / "python"), "-m", "pip", "install"]
        steps = (
            [python, "-m", "venv", str(place)],
            [*pip, "--require-hashes", "--requirement", str(packages)],
            [*pip, "--no-deps", "--no-build-isolation", "--editable", "."],
        )
        for words in steps:
            subprocess.run(words, cwd=APP_DIRECTORY, check=True)
        for old in place.glob(".installed-*"):
            old.unlink()
        done.touch()
    return str(place / "bin" / "python")


def same_digests(version: str, python: str) -> bool:
    """Return whether runs on a version end with the digests of this Python's."""
    with tempfile.TemporaryDirectory(prefix="corolla-pythons-") as place:
        same = []
        for number, (way, options) in enumerate(WAYS.items()):
            ours, theirs = (
                digest(each, f"{number}-{k}", Path(place), *options) for k, each in enumerate((sys.executable, python))
            )
            print(
                f"Python {version}, a run {way}: digest {'equal' if ours == theirs else f'{theirs}, here {ours}'}",
                flush=True,
            )
            same.append(ours == theirs)
    return all(same)


if __name__ == "__main__":
    main()
