"""A site's audit of every run: a file of JSON lines, each with the hash of the line before.

A line is an object with `hash` as its last key: the sha256 of the line without it. Its `previous` is the hash of the
line before, 64 zeros in the first line. So a change, insertion or removal of one byte makes it necessary to rewrite
every later line. The last hash is kept beside the file, and `corolla node audit` prints it. A copy noted elsewhere
reveals a rewritten or truncated audit.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_app.errors import MALFORMED, DeploymentError, UserError
from fl_app.files import lock, make_directory, publish_text

FILE, HEAD, LOCK = "audit.jsonl", "audit.head", ".audit.lock"
_FIRST = "0" * 64
_HASH_KEY = ',"hash":"'
_TAIL = len(_HASH_KEY) + 64 + len('"}\n')


@dataclass(frozen=True)
class Chain:
    """An intact chain. hashes: of all its lines in order."""

    hashes: tuple[str, ...]

    @property
    def last(self) -> str:
        """The last hash, which depends on every line so far."""
        return self.hashes[-1] if self.hashes else _FIRST


def verify(directory: Path) -> Chain:
    """Read a site's audit.

    Raises UserError that names the first line that was changed, or states that the end is missing.
    """
    path = directory / FILE
    chain = chain_of(path)
    count, head = _head(directory)
    # a process killed between writing a line and updating the head leaves the head one line behind
    noted = chain.hashes[count - 1] if 0 < count <= len(chain.hashes) else _FIRST
    if count > len(chain.hashes):
        raise DeploymentError(
            key=path, rule=f"its end is missing: {len(chain.hashes)} of {count} lines are left ({directory / HEAD})"
        )
    if not count and len(chain.hashes) > 1:
        raise DeploymentError(
            f"{path} has {len(chain.hashes)} lines, but {directory / HEAD}, which counts them, is missing"
        )
    if noted != head or count < len(chain.hashes) - 1:
        raise DeploymentError(key=path, rule=f"line {count} was rewritten: {directory / HEAD} has another hash for it")
    return chain


def chain_of(path: Path) -> Chain:
    """Read an audit's lines, without the count of them beside it. Raises UserError that names the first changed line."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        content = b""
    hashes = [_FIRST]
    for number, line in enumerate(content.splitlines(keepends=True) if content else [], 1):
        hashes.append(_verify_line(line, hashes[-1], f"{path}: line {number}"))
    return Chain(tuple(hashes[1:]))


def _verify_line(line: bytes, previous: str, where: str) -> str:
    body, tail = line[:-_TAIL] + b"}", line[-_TAIL:]
    digest = hashlib.sha256(body).hexdigest()
    if tail != f'{_HASH_KEY}{digest}"}}\n'.encode():
        raise DeploymentError(f"{where} was changed: its hash does not match")
    try:
        found = json.loads(body)["previous"]
    except MALFORMED:
        raise DeploymentError(f"{where} is not a line of an audit") from None
    if found != previous:
        raise DeploymentError(f"{where} does not follow the line before it: lines were removed, inserted or changed")
    return digest


def _head(directory: Path) -> tuple[int, str]:
    """Return the number of lines when the last was written, and that line's hash."""
    path = directory / HEAD
    try:
        count, head = path.read_text(encoding="ascii").split()
        return int(count), head
    except FileNotFoundError:
        return 0, _FIRST
    except ValueError:
        raise DeploymentError(f"{path} was changed: it must be a number of lines and a hash") from None


class Audit:
    """The audit of one site, written by one process at a time.

    Raises UserError if another process holds it, or if the existing audit is not intact. Nothing is then appended.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            make_directory(directory)
            self._held = lock(directory / LOCK, wait=False)
        except BlockingIOError:
            raise DeploymentError(key=directory, rule="another SuperNode of this site is running") from None
        except OSError as error:
            raise DeploymentError(key=directory, rule=f"cannot be written ({error.strerror})") from None
        try:
            chain = verify(directory)
        except UserError as error:
            raise DeploymentError(
                f"{error}; keep it as evidence: move {directory / FILE} and {HEAD} away to begin anew"
            ) from None
        self._count, self._last = len(chain.hashes), chain.last
        self._size = path.stat().st_size if (path := directory / FILE).exists() else 0
        self._lock = threading.Lock()

    def append(self, kind: str, **fields: Any) -> str:
        """Write one line, durable on return, and return its hash. Raises UserError if it cannot be written."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with self._lock:
            entry = {"n": self._count + 1, "time": now, "kind": kind, **fields, "previous": self._last}
            body = json.dumps(entry, separators=(",", ":"))
            digest = hashlib.sha256(body.encode()).hexdigest()
            line = f'{body[:-1]}{_HASH_KEY}{digest}"}}\n'.encode()
            try:
                self._write(line)
                self._count, self._last, self._size = self._count + 1, digest, self._size + len(line)
                publish_text(self.directory / HEAD, f"{self._count} {digest}\n")
            except OSError as error:
                raise DeploymentError(
                    key="audit", rule=f"{self.directory / FILE} cannot be written ({error.strerror})"
                ) from None
        return digest

    def _write(self, line: bytes) -> None:
        """Append after this process's last line. Raises UserError if the file has another size."""
        descriptor = os.open(self.directory / FILE, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            if (size := os.fstat(descriptor).st_size) != self._size:
                raise DeploymentError(
                    key="audit",
                    rule=f"{self.directory / FILE} has {size} bytes instead of {self._size}: it was changed",
                )
            done = 0
            try:
                while done < len(line):
                    done += os.pwrite(descriptor, line[done:], self._size + done)
                os.fsync(descriptor)
            except OSError:
                # a full disk must not leave half a line
                os.ftruncate(descriptor, self._size)
                raise
        finally:
            os.close(descriptor)


def entries(place: Path) -> list[Mapping[str, Any]]:
    """Return the lines of an audit, without verifying them. place: its directory, or the file."""
    with open(place / FILE if place.is_dir() else place, encoding="utf-8") as file:
        return [json.loads(line) for line in file]
