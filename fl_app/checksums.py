"""Checksums of a directory that is built once: written when it is, compared when it is opened, and wholly on demand.

`checksums.json` holds for every other file its size, the sha256 of its first 4 KiB (an array's header is in them) and the sha256 of
all of it. Opening compares the first two, which takes well under a millisecond; `corolla data verify` reads everything.
"""

from __future__ import annotations

import hashlib
import json
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
    """Return what is wrong with a directory's files, in words; whole: read them to their ends.

    What an earlier version built has no checksums: nothing is known to be wrong then, unless `whole` is asked for.
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
    """Return one sha256, as hexadecimal digits, of some files of a directory and of a text.

    It takes each file's from `checksums.json`, and reads the files where that lacks them. Raises OSError.
    """
    try:
        known = json.loads((directory / CHECKSUMS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    parts = [[name, known.get(name, {}).get("sha256") or sha256_of(directory / name)] for name in names]
    return hashlib.sha256(json.dumps([*parts, more]).encode()).hexdigest()


# of a hash, as far as people are shown it
SHOWN_DIGITS = 12
# of a keyed hash: they name the key
KEY_DIGITS = 16


class DataHashes(NamedTuple):
    """Hashes of a data set and of its partition, as hexadecimal digits.

    A client that tells nobody what its data are has a keyed hash of both as the first, and none as the second.
    """

    data: str
    partition: str

    def difference(self, other: DataHashes) -> str:
        """Say what differs from another data set, with both hashes; empty if nothing does, or if two keys leave it unknown."""
        if self == other:
            return ""
        if not self.partition and not other.partition and self.data[:KEY_DIGITS] != other.data[:KEY_DIGITS]:
            return ""
        if self.data != other.data:
            return f"data set ({shown(self.data, other.data)})"
        return f"partition ({shown(self.partition, other.partition)})"


HASHES = ("data-sha256", "partition-sha256")
"""How clients call the two."""


def told_hashes(answer: Mapping[str, object]) -> DataHashes | None:
    """Return the hashes that a client tells of its data; None if it tells none."""
    data, partition = (str(answer.get(name, "")) for name in HASHES)
    known = re.fullmatch("[0-9a-f]{64}", data) and re.fullmatch("([0-9a-f]{64})?", partition)
    return DataHashes(data, partition) if known else None


def shown(found: str, expected: str) -> str:
    """Show the beginnings of two hashes, where they differ: those of one key begin alike."""
    start = KEY_DIGITS if found[:KEY_DIGITS] == expected[:KEY_DIGITS] else 0
    cut = slice(start, start + SHOWN_DIGITS)
    return f"sha256 {found[cut]}..., expected {expected[cut]}..."


Stamp = tuple[int, int, int]
"""What changes when a file is replaced or written to: its size, the time of its last change, its inode."""


def stamp_of(path: Path) -> Stamp | None:
    """Return a file's stamp, None if it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino


def stamps_in(*directories: Path) -> dict[Path, Stamp]:
    """Return the stamps of all files in some directories, and of these, which a new one of the same name replaces."""
    paths = [path for directory in directories for path in (directory, *directory.iterdir())]
    return {path: stamp for path in paths if (stamp := stamp_of(path)) is not None}


def unchanged(stamps: Mapping[Path, Stamp]) -> bool:
    """Tell whether files are still those that were stamped."""
    return all(stamp_of(path) == stamp for path, stamp in stamps.items())


def refuse_damage(key: str, directory: Path, problems: list[str]) -> None:
    """Raise UserError if there are problems. key: of the configuration."""
    if problems:
        raise UserError(
            f"{key}: {directory} is damaged ({listed(problems, '; ')}): prepare it again by `corolla data prepare --force` with "
            "the run's settings, or remove it, and it is prepared again when it is next needed"
        )


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file, as hexadecimal digits. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _facts(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        head = hashlib.sha256(file.read(_HEAD)).hexdigest()
    return {"bytes": path.stat().st_size, "head": head, "sha256": sha256_of(path)}


def _why(path: Path, nbytes: int, head: str, sha256: str, whole: bool) -> str:
    """Return what is wrong with a file, or ""."""
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
