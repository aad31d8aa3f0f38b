"""A site's audit of every run: a file of JSON lines, each of which carries the hash of the one before it.

A line is an object whose last key is `hash`: the sha256 of the line without it. Its `previous` is the hash of the line before,
64 zeros in the first. So whoever changes, inserts or removes one byte of a line has to make every later line anew; and the last
hash, kept beside the file and printed by `corolla node audit`, tells whether that has happened, or the end was cut off, to
everyone who has noted it elsewhere.
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

from fl_app.errors import UserError
from fl_app.files import lock, make_directory, publish_text

FILE, HEAD, LOCK = "audit.jsonl", "audit.head", ".audit.lock"
_FIRST = "0" * 64
_HASH_KEY = ',"hash":"'
_TAIL = len(_HASH_KEY) + 64 + len('"}\n')


@dataclass(frozen=True)
class Chain:
    """An intact chain: how many lines, and the hashes of all of them in order."""

    hashes: tuple[str, ...]

    @property
    def last(self) -> str:
        """The hash that stands for everything so far."""
        return self.hashes[-1] if self.hashes else _FIRST


def verify(directory: Path) -> Chain:
    """Read a site's audit. Raises UserError naming the first line that is not as it was written, or a tail that is missing."""
    path = directory / FILE
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        content = b""
    hashes = [_FIRST]
    for number, line in enumerate(content.splitlines(keepends=True) if content else [], 1):
        hashes.append(_verify_line(line, hashes[-1], f"{path}: line {number}"))
    chain = Chain(tuple(hashes[1:]))
    count, head = _head(directory)
    # a process that was killed between a line and its note in the head leaves the head one line behind
    noted = chain.hashes[count - 1] if 0 < count <= len(chain.hashes) else _FIRST
    if count > len(chain.hashes):
        raise UserError(
            f"{path}: its end is cut off: {len(chain.hashes)} lines are left of {count} ({directory / HEAD})"
        )
    if not count and len(chain.hashes) > 1:
        raise UserError(
            f"{path} has {len(chain.hashes)} lines, and {directory / HEAD}, which counts them, is not there"
        )
    if noted != head or count < len(chain.hashes) - 1:
        raise UserError(
            f"{path}: line {count}, the last when {directory / HEAD} was written, had another hash: rewritten"
        )
    return chain


def _verify_line(line: bytes, previous: str, where: str) -> str:
    body, tail = line[:-_TAIL] + b"}", line[-_TAIL:]
    digest = hashlib.sha256(body).hexdigest()
    if tail != f'{_HASH_KEY}{digest}"}}\n'.encode():
        raise UserError(f"{where} is not as it was written (its hash is another)")
    try:
        found = json.loads(body)["previous"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{where} is no line of an audit") from None
    if found != previous:
        raise UserError(f"{where} does not follow the line before it: lines were removed, inserted or changed")
    return digest


def _head(directory: Path) -> tuple[int, str]:
    """Return how many lines there were when the last was written, and its hash."""
    path = directory / HEAD
    try:
        count, head = path.read_text(encoding="ascii").split()
        return int(count), head
    except FileNotFoundError:
        return 0, _FIRST
    except ValueError:
        raise UserError(f"{path} is not as it was written: a number of lines and a hash") from None


class Audit:
    """The audit of one site, written by one process at a time.

    Raises UserError if another process has it, or the audit that is there is not intact: nothing is appended to it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            make_directory(directory)
            self._held = lock(directory / LOCK, wait=False)
        except BlockingIOError:
            raise UserError(f"{directory}: another SuperNode of this site is running") from None
        except OSError as error:
            raise UserError(f"{directory}: cannot be written ({error.strerror})") from None
        try:
            chain = verify(directory)
        except UserError as error:
            raise UserError(
                f"{error}; keep it as evidence: move {directory / FILE} and {HEAD} away to begin anew"
            ) from None
        self._count, self._last = len(chain.hashes), chain.last
        self._size = path.stat().st_size if (path := directory / FILE).exists() else 0
        self._lock = threading.Lock()

    def append(self, kind: str, **fields: Any) -> str:
        """Write one line, durable when this returns, and return its hash. Raises UserError if the file cannot be written."""
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
                raise UserError(f"audit: {self.directory / FILE} cannot be written ({error.strerror})") from None
        return digest

    def _write(self, line: bytes) -> None:
        """Append after this process's last line, at no other place."""
        descriptor = os.open(self.directory / FILE, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            if (size := os.fstat(descriptor).st_size) != self._size:
                raise UserError(
                    f"audit: {self.directory / FILE} has {size} bytes instead of {self._size}: it was changed"
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


def entries(directory: Path) -> list[Mapping[str, Any]]:
    """Read the lines of an audit, as they are."""
    with open(directory / FILE, encoding="utf-8") as file:
        return [json.loads(line) for line in file]
