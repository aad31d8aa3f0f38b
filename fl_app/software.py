"""The software that the bits of a result depend on: Corolla's own code, and the packages that compute.

A checkpoint carries these facts, and every client sends them with its properties. A difference is named: the digest may
then differ from that of an undisturbed run.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import fl_app
from fl_app import machine
from fl_app.errors import MALFORMED, listed, plain

COMPUTING = ("fl_app", "strategies", "client_app")
"""Packages of the app that server and clients compute with. The others start runs and show results."""
CODE, COROLLA, WIRE = "code", "corolla", "wire"
_PACKAGES = ("flwr", "numpy", "torch")
_DIGITS, _LONGEST = 12, 40
_ROOT = Path(fl_app.__file__).resolve().parent.parent


@functools.cache
def code_hash(root: Path = _ROOT) -> str:
    """Return the sha256 over the paths and contents of the computing packages' Python files.

    A clone, a wheel, and the app on a node have the same one. root: the directory of the packages.
    """
    digest = hashlib.sha256()
    for package in COMPUTING:
        for path in sorted((root / package).rglob("*.py")):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def used() -> dict[str, str]:
    """Return what bits depend on: the code's hash, and the versions of Flower, NumPy and PyTorch."""
    found = machine.versions()
    return {CODE: code_hash(), **{name: found[name] for name in _PACKAGES if name in found}}


def announced() -> dict[str, str]:
    """Return what a client tells the server: `used`, and the installed Corolla's version."""
    return {**used(), COROLLA: machine.versions().get(COROLLA, "")}


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return the facts that differ, as in `torch 2.5.1, not 2.6.0`; "" if none does.

    A fact that one side lacks is unknown, and does not count: earlier versions recorded fewer.
    """
    found = []
    for name in (COROLLA, CODE, *_PACKAGES):
        if name in before and name in now and before[name] != now[name]:
            digits = _DIGITS if name == CODE else None
            found.append(f"{name} {now[name][:digits]}, not {before[name][:digits]}")
    return listed(found, "; ", len(found))


def told(text: object) -> dict[str, str]:
    """Return the facts of a client's answer; those that are missing or malformed are left out."""
    try:
        given = json.loads(str(text))
    except MALFORMED:
        return {}
    if not isinstance(given, dict):
        return {}
    lengths = {CODE: 64, WIRE: 9, **dict.fromkeys((COROLLA, *_PACKAGES), _LONGEST)}
    return {name: plain(str(given[name]))[:most] for name, most in lengths.items() if isinstance(given.get(name), str)}
