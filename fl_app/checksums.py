"""Checksums of a directory that is built once, and stamps that show whether files have changed.

Building writes `checksums.json`. For every other file it holds the size, the sha256 of the first 4 KiB (they contain an
array's header) and the sha256 of the whole file. Opening compares the first two, in well under a millisecond.
`corolla data verify` compares all three.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fl_app.errors import UserError, listed

CHECKSUMS = "checksums.json"
_HEAD = 4096  # bytes


def write(directory: Path) -> None:
    """Write the checksums of the files in a directory. Raises OSError."""
    facts = {path.name: _facts(path) for path in sorted(directory.iterdir()) if path.name != CHECKSUMS}
    (directory / CHECKSUMS).write_text(json.dumps(facts, indent=1))


def compare(directory: Path, *, whole: bool) -> list[str]:
    """Return a line for each damaged file of a directory. whole: read every file to its end.

    Directories of earlier versions have no checksums. That is an error only if `whole`.
    """
    try:
        facts = json.loads((directory / CHECKSUMS).read_text(encoding="utf-8"))
        known = {
            str(name): (int(fact["bytes"]), str(fact["head"]), str(fact["sha256"])) for name, fact in facts.items()
        }
    except FileNotFoundError:
        return [f"{CHECKSUMS} is missing"] if whole else []
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return [f"{CHECKSUMS} cannot be read"]
    return [f"{name} {why}" for name, fact in known.items() if (why := _why(directory / name, *fact, whole))]


def hash_of(directory: Path, names: Sequence[str], more: str = "") -> str:
    """Return one sha256, as hexadecimal digits, over some files of a directory and a text.

    It uses the files' sha256 in `checksums.json`, and reads a file only if its own is missing there. Raises OSError.
    """
    try:
        known = json.loads((directory / CHECKSUMS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    parts = [[name, known.get(name, {}).get("sha256") or sha256_of(directory / name)] for name in names]
    return hashlib.sha256(json.dumps([*parts, more]).encode()).hexdigest()


# leading digits of a hash that messages show
SHOWN_DIGITS = 12
# leading digits of a keyed hash that identify its key
KEY_DIGITS = 16


class DataHashes(NamedTuple):
    """Hashes of a data set and of its partition, as hexadecimal digits.

    A client that hides its data has a keyed hash of both as the first, and "" as the second.
    """

    data: str
    partition: str

    def difference(self, other: DataHashes) -> str:
        """Return, in words, the first difference from another data set, with both hashes.

        "": there is none, or it is unknown because the two hashes have different keys.
        """
        if self == other:
            return ""
        if not self.partition and not other.partition and self.data[:KEY_DIGITS] != other.data[:KEY_DIGITS]:
            return ""
        if self.data != other.data:
            return f"data set ({shown(self.data, other.data)})"
        return f"partition ({shown(self.partition, other.partition)})"


HASHES = ("data-sha256", "partition-sha256")
"""Names of the two hashes in a client's answer."""


def told_hashes(answer: Mapping[str, object]) -> DataHashes | None:
    """Return the hashes of a client's data from its answer; None if it has no valid ones."""
    data, partition = (str(answer.get(name, "")) for name in HASHES)
    known = re.fullmatch("[0-9a-f]{64}", data) and re.fullmatch("([0-9a-f]{64})?", partition)
    return DataHashes(data, partition) if known else None


def shown(found: str, expected: str) -> str:
    """Return the beginnings of two hashes, in words, without their key's digits if these are equal."""
    start = KEY_DIGITS if found[:KEY_DIGITS] == expected[:KEY_DIGITS] else 0
    cut = slice(start, start + SHOWN_DIGITS)
    return f"sha256 {found[cut]}..., expected {expected[cut]}..."


Stamp = tuple[int, int, int]
"""(size, time of the last change in nanoseconds, inode) of a file: it differs once a file was replaced or changed."""


def stamp_of(path: Path) -> Stamp | None:
    """Return a file's stamp; None if the file does not exist."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino


def stamps_in(*directories: Path) -> dict[Path, Stamp]:
    """Return the stamps of some directories and of all files in them.

    A directory's own stamp shows whether a new one of the same name replaced it.
    """
    paths = [path for directory in directories for path in (directory, *directory.iterdir())]
    return {path: stamp for path in paths if (stamp := stamp_of(path)) is not None}


def unchanged(stamps: Mapping[Path, Stamp]) -> bool:
    """Return whether all files still have their stamps."""
    return all(stamp_of(path) == stamp for path, stamp in stamps.items())


def refuse_damage(key: str, directory: Path, problems: list[str]) -> None:
    """Raise UserError if there are problems. key: the configuration's key to name."""
    if problems:
        raise UserError(
            key=key,
            rule=f"{directory} is damaged ({listed(problems, '; ')}): prepare it again by `corolla data "
            "prepare --force` with the run's settings, or remove it, and it is prepared again when "
            "it is next needed",
        )


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file, as hexadecimal digits. Raises OSError that names the file."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:  # of a read it has no name
        raise OSError(error.errno, error.strerror, str(path)) from None


def _facts(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        head = hashlib.sha256(file.read(_HEAD)).hexdigest()
    return {"bytes": path.stat().st_size, "head": head, "sha256": sha256_of(path)}


def _why(path: Path, nbytes: int, head: str, sha256: str, whole: bool) -> str:
    """Return the damage of a file in words, "" if there is none."""
    try:
        if (size := path.stat().st_size) != nbytes:
            return f"has {size} bytes, expected {nbytes}"
        with path.open("rb") as file:
            if hashlib.sha256(file.read(_HEAD)).hexdigest() != head:
                return "has other first bytes than were written"
        if whole and sha256_of(path) != sha256:
            return "has another checksum than was written"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return ""
