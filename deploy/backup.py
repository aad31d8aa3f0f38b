"""What a server and a site must keep, in one archive, and back on a machine that lost it.

A server keeps the inventory, the keys, the SuperLink's database, and run folders with their checkpoints. A site keeps
its keys, its audit and approvals, client state, and its notes of spent privacy budgets and answered private rounds. The
archive is an uncompressed tar file that only its owner can read: it holds private keys. Its first member,
`manifest.json`, has the parts and their paths. A restore puts every part back at its path, or changes nothing.

Of a server, symbolic links are followed: the archive has the files that they lead to, so that no part depends on a path
outside the archive. Directories that applications may write (a site's, its notes, client state) are read by
fl_app/foreign_files.py: regular files alone. An application that leads a link to another file, before or meanwhile, must
not find that file's content in its state after a restore. Their temporary files, and Flower's, are left out.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from deploy import site, superlink
from deploy.audit import FILE as AUDIT
from deploy.detached import state_home
from deploy.inventory import LOCAL, Inventory
from fl_app import foreign_files
from fl_app.errors import MALFORMED, DeploymentError
from fl_app.files import explain_full_disk, make_directory, publish
from fl_app.machine import versions
from fl_app.run_secret import EXPERIMENT_ID
from fl_app.site_directory import VARIABLE, site_directory, user_state

MANIFEST, FORMAT = "manifest.json", 1
_DATABASE, _SITE, _NOTES, _CLIENT_STATE = "database", "site", "notes of budgets and answers", "client state"
# applications may write there
_FOREIGN = (_SITE, _NOTES, _CLIENT_STATE)
# directories of a site, beside its audit: those that nobody needs later, and the one that applications write
_LEFT_OUT, _STATE = ("tmp", "flwr"), "state"
# copied first: what is written later refers to them
_FIRST = "checkpoints"


@dataclass(frozen=True)
class KeptPath:
    """A file or directory that is kept. what: its kind, in words."""

    what: str
    path: Path


# What is kept ---------------------------------------------------------------------------------------------------------


def of_server(inventory: Inventory, file: Path, runs: Iterable[Path], states: Iterable[Path] = ()) -> list[KeptPath]:
    """Return the parts of a cluster's server on this machine, and of the sites that the cluster has here.

    file: the inventory's. runs: directories of run folders. states: as for `of_site`. Raises UserError if the SuperLink is
    on another host.
    """
    link = inventory.superlink
    if link.host != LOCAL:
        raise DeploymentError(
            key="superlink.host", rule=f"{link.host} has the database and run folders; make the backup there"
        )
    found = [KeptPath("inventory", file.absolute()), KeptPath("keys", Path(inventory.keys))]
    if link.database:
        found.append(KeptPath(_DATABASE, Path(link.database).absolute()))
    found += [KeptPath("run folders", path.absolute()) for path in runs]
    here = [node for node in inventory.supernodes if node.host == LOCAL]
    named = [Path(node.environment["COROLLA_STATE_DIR"]) for node in here if "COROLLA_STATE_DIR" in node.environment]
    theirs = of_site([*named, *states], {node.site for node in here if node.site})
    _refuse_foreign(found, [*_roots([*named, *states]), *(part.path for part in theirs if part.what in _FOREIGN)])
    return _existing([*found, *theirs])


def _refuse_foreign(parts: Iterable[KeptPath], foreign: Iterable[Path]) -> None:
    """Raise UserError if a place that applications may write lies in a part of which links are followed."""
    for place in foreign:
        for part in parts:
            if place.resolve().is_relative_to(part.path.resolve()):
                raise DeploymentError(
                    key="backup",
                    rule=f"{place}, which applications may write, lies in {part.path} ({part.what}), where links "
                    "are followed; move one of them to a separate directory",
                )


def _roots(states: Iterable[Path]) -> list[Path]:
    """Return the directories of client state: the usual one, and others."""
    usual = Path(os.environ.get("COROLLA_STATE_DIR") or user_state())
    return list(dict.fromkeys(path.expanduser().absolute() for path in (usual, *states)))


def of_site(states: Iterable[Path] = (), rules: Iterable[str] = ()) -> list[KeptPath]:
    """Return the parts of all sites on this machine.

    states: directories of client state beside the usual one. rules: `site.toml` files beside the usual one.
    """
    found = [KeptPath(_SITE, path) for path in sorted((state_home() / "sites").glob("*")) if path.is_dir()]
    notes = {site_directory()}
    for name in {"", *rules}:
        if path := site.find(name):
            found.append(KeptPath("rules", path.absolute()))
            kept = site.read_site(path).site_dir
            notes |= {Path(kept)} if kept and VARIABLE not in os.environ else set()
    found += [KeptPath(_NOTES, path) for path in sorted(notes)]
    for root in _roots(states):
        there = foreign_files.entries(root) if root.is_dir() else []
        named = [entry.path for entry in there if entry.is_directory and EXPERIMENT_ID.fullmatch(entry.path)]
        found += [KeptPath(_CLIENT_STATE, root / name) for name in named]
    return _existing(found)


def _existing(parts: Iterable[KeptPath]) -> list[KeptPath]:
    """Return the parts that exist, without those that lie in others. Raises UserError for a link that leads nowhere."""
    parts = list(parts)
    for part in parts:
        _refuse_dangling(part.path)
    there = list(dict.fromkeys(part for part in parts if part.path.exists()))
    paths = {part.path for part in there}
    return [part for part in there if not paths & set(part.path.parents)]


# Backup ---------------------------------------------------------------------------------------------------------------


def write(archive: Path, parts: list[KeptPath]) -> None:
    """Write an archive of parts, with mode 0600. It exists completely or not at all.

    A run may go on meanwhile: the database is copied by SQLite, checkpoints before the records that are cut to them.
    Raises UserError if there is nothing to keep, if the archive exists, or if it cannot be written.
    """
    if not parts:
        raise DeploymentError(key="backup", rule="nothing on this machine must be kept")
    if archive.exists():
        raise DeploymentError(f"{archive} exists already; choose another name")
    for part in parts:
        _refuse_inside(archive, part.path)
    foreign = {part: _foreign_entries(part) for part in parts if part.what in _FOREIGN}
    _refuse_too_large(archive, foreign)
    about = {
        "format": FORMAT,
        "made": time.strftime("%Y-%m-%d %H:%M:%S"),
        "corolla": versions().get("corolla", ""),
        "parts": [{"what": part.what, "path": str(part.path), "is-file": part.path.is_file()} for part in parts],
    }

    def pack(path: Path) -> None:
        # dereference: a link, and the second name of a file, become files
        with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, dereference=True) as tar:
            content = json.dumps(about, indent=2).encode()
            head = tarfile.TarInfo(MANIFEST)
            head.size, head.mode = len(content), 0o600
            tar.addfile(head, io.BytesIO(content))
            for number, part in enumerate(parts):
                if part in foreign:
                    _pack_foreign(tar, str(number), part, foreign[part])
                else:
                    _pack(tar, str(number), part, archive.absolute())

    try:
        with explain_full_disk("backup", archive.absolute().parent):
            publish(archive, pack)
    except OSError as error:
        raise DeploymentError(key="backup", rule=f"{error.filename or archive}: {error.strerror}") from None


def _pack(tar: tarfile.TarFile, name: str, part: KeptPath, archive: Path) -> None:
    """Add a part. A copy of the database is made beside the archive.

    Raises UserError if a part is neither a file nor a directory, if a link leads nowhere, or if one leads to the archive.
    """
    if not part.path.is_file() and not part.path.is_dir():
        raise DeploymentError(key="backup", rule=f"{part.what}: {part.path} is neither a file nor a directory")
    if part.what == _DATABASE:
        with tempfile.TemporaryDirectory(prefix=".corolla-", dir=archive.parent) as directory:
            copy = Path(directory, "copy")
            superlink.copy_database(part.path, copy)
            tar.add(copy, name, filter=_plain)
        return
    tar.add(part.path, name, recursive=False, filter=_plain)
    if part.path.is_dir():
        for path in _ordered(part.path):
            if path.is_symlink() and path.is_dir():
                _refuse_inside(archive, path)
            # a run that goes on deletes files
            with contextlib.suppress(FileNotFoundError):
                tar.add(path, f"{name}/{path.relative_to(part.path).as_posix()}", recursive=False, filter=_plain)


def _foreign_entries(part: KeptPath) -> list[foreign_files.FoundFile]:
    """Return the entries that are kept of a part that applications may write.

    Raises UserError for a link in a site's own directory: nobody but the site made it, and it would be missing.
    """
    root, inside = _root(part)
    found = list(foreign_files.walk(root, inside))
    if part.what != _SITE:
        return found
    sites = {entry.path.removesuffix(AUDIT).rstrip("/") for entry in found if f"/{entry.path}".endswith(f"/{AUDIT}")}
    scratch = {(*_parts_of(site), name) for site in sites for name in _LEFT_OUT}
    theirs = scratch | {(*_parts_of(site), _STATE) for site in sites}

    def lies_in(path: str, places: set[tuple[str, ...]]) -> bool:
        parts = _parts_of(path)
        return any(parts[:k] in places for k in range(1, len(parts) + 1))

    own = ["", *(entry.path for entry in found if entry.is_directory and not lies_in(entry.path, theirs))]
    for path in (path for folder in own for path in sorted((root / folder).iterdir())):
        if path.is_symlink() and not lies_in(path.relative_to(root).as_posix(), theirs):
            raise DeploymentError(
                key="backup",
                rule=f"{path} is a link to {os.readlink(path)}; of a site links are not kept: put the file there",
            )
    return [entry for entry in found if not lies_in(entry.path, scratch)]


def _parts_of(path: str) -> tuple[str, ...]:
    return tuple(path.split("/")) if path else ()


def _root(part: KeptPath) -> tuple[Path, str]:
    """Return a directory that no application can replace, and the part's path below it."""
    return (part.path.parent, part.path.name) if part.what == _CLIENT_STATE else (part.path, "")


def _refuse_too_large(archive: Path, foreign: Mapping[KeptPath, Sequence[foreign_files.FoundFile]]) -> None:
    """Raise UserError if there is no room for these entries: a file without content can be of any size."""
    needed = sum(entry.nbytes for found in foreign.values() for entry in found)
    if needed > (free := shutil.disk_usage(archive.absolute().parent).free):
        largest = max(
            ((e.nbytes, _root(p)[0] / e.path) for p, found in foreign.items() for e in found), default=(0, "")
        )
        raise DeploymentError(
            key="backup",
            rule=f"needs {needed} bytes under {archive.absolute().parent}, which has {free}; the largest "
            f"file is {largest[1]}, of {largest[0]} bytes",
        )


def _pack_foreign(tar: tarfile.TarFile, name: str, part: KeptPath, found: Iterable[foreign_files.FoundFile]) -> None:
    """Add a part that applications may write. Entries that are no files any more, or are locked, are left out."""
    root, inside = _root(part)

    def add_directory(name: str) -> None:
        member = tarfile.TarInfo(name)
        member.type, member.mode = tarfile.DIRTYPE, 0o700
        tar.addfile(member)

    add_directory(name)
    for entry in found:
        here = f"{name}/{entry.path.removeprefix(inside).lstrip('/')}"
        if entry.is_directory:
            add_directory(here)
            continue
        with contextlib.suppress(FileNotFoundError, foreign_files.Refused):
            with foreign_files.open_file(root, entry.path, entry.nbytes) as content:
                tar.addfile(tar.gettarinfo(arcname=here, fileobj=content), _Filled(content))


class _Filled(io.RawIOBase):
    """A file that goes on with zeros if it is cut while it is read: its size stands before it in the archive."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def read(self, size: int = -1) -> bytes:
        """Return as many bytes as are asked for."""
        return self._file.read(size).ljust(size, b"\0")


def _ordered(directory: Path) -> Iterator[Path]:
    """Yield everything in a directory: files of checkpoints first, also those that appear meanwhile."""
    seen: set[Path] = set()
    while new := [p for p in _all(directory) if p.parent.name == _FIRST and p not in seen]:
        for folder in (above for path in new for above in reversed(path.relative_to(directory).parents[:-1])):
            if (folder := directory / folder) not in seen:
                seen.add(folder)
                yield folder
        seen.update(new)
        yield from new
    yield from (path for path in list(_all(directory)) if path not in seen)


def _all(directory: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Yield everything in a directory, by name, each directory before its content.

    Links are followed, except those that lead back to a directory above. Raises UserError for a link that leads nowhere.
    """
    above = (*above, directory.resolve())
    try:
        found = sorted(directory.iterdir())
    # a run that goes on deletes directories
    except FileNotFoundError:
        return
    for path in found:
        if path.is_symlink():
            _refuse_dangling(path)
            if path.resolve() in above:
                continue
        yield path
        if path.is_dir():
            yield from _all(path, above)


def _refuse_dangling(path: Path) -> None:
    """Raise UserError for a link that leads nowhere: what it led to is not kept, for example on a disk that is away."""
    if path.is_symlink() and not path.exists():
        raise DeploymentError(
            key="backup",
            rule=f"{path} is a link to {os.readlink(path)}, which is not there; put it back, or remove the link",
        )


def _refuse_inside(archive: Path, kept: Path) -> None:
    """Raise UserError if the archive would lie in a directory that is kept."""
    if archive.resolve().is_relative_to(kept.resolve()):
        raise DeploymentError(key=archive, rule=f"lies in {kept}, which is kept; choose another directory")


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Return a member if it is a file or directory; sockets and devices are left out."""
    return member if member.isfile() or member.isdir() else None


# Restore --------------------------------------------------------------------------------------------------------------


def read(archive: Path) -> list[KeptPath]:
    """Put every part of an archive back at its path, and return the parts.

    Raises UserError, and has changed nothing, if one of the paths exists, or if the archive is damaged.
    """
    try:
        with tarfile.open(archive, "r:") as tar:
            parts = _parts(tar, archive)
            if there := [str(part.path) for part in parts if os.path.lexists(part.path)]:
                raise DeploymentError(
                    "restore: these exist and are not overwritten; move them away:\n  " + "\n  ".join(there)
                )
            _unpack(tar, parts, archive)
    except (tarfile.TarError, EOFError) as error:
        raise DeploymentError(key=archive, rule=f"is damaged, or no backup: {error}") from None
    except OSError as error:
        raise DeploymentError(key="restore", rule=f"{error.filename or archive}: {error.strerror}") from None
    return parts


def _parts(tar: tarfile.TarFile, archive: Path) -> list[KeptPath]:
    head = tar.next()
    sound = head is not None and head.name == MANIFEST and head.size <= foreign_files.MOST_BYTES
    file = tar.extractfile(head) if head is not None and sound else None
    try:
        about = json.loads(file.read()) if file else {}
        found = [KeptPath(part["what"], Path(part["path"])) for part in about["parts"]]
        sound = about["format"] == FORMAT and all(_is_place(part) for part in found) and _are_apart(found)
    except MALFORMED:
        sound = False
    if not sound:
        raise DeploymentError(
            key=archive, rule=f"is no backup of this version of Corolla (no {MANIFEST} of format {FORMAT})"
        )
    return found


def _is_place(part: KeptPath) -> bool:
    """Return whether a part can be put back somewhere, and shown."""
    words, path = (part.what, str(part.path)), part.path
    return all(type(word) is str and word.isprintable() for word in words) and (
        path.is_absolute() and path.name != "" and ".." not in path.parts
    )


def _are_apart(parts: Sequence[KeptPath]) -> bool:
    """Return whether there are parts, and none lies in another one."""
    paths = {part.path for part in parts}
    return len(paths) == len(parts) > 0 and not any(paths & set(path.parents) for path in paths)


def _unpack(tar: tarfile.TarFile, parts: list[KeptPath], archive: Path) -> None:
    """Extract all parts beside their paths, then rename them. After an error nothing is left."""
    fresh = [part.path.with_name(f".{part.path.name}.restoring-{os.getpid()}") for part in parts]
    missing = {str(k): part for k, part in enumerate(parts)}
    known = dict(zip(missing, fresh, strict=True))
    absent = {above for path in fresh for above in path.parents if not above.exists()}
    try:
        for path in fresh:
            make_directory(path)
        for member in tar:
            if member.name == MANIFEST:
                continue
            number = member.name.partition("/")[0]
            if number not in known or not (member.isfile() or member.isdir()):
                raise DeploymentError(key=archive, rule=f"is no sound backup: it contains {member.name!r:.200}")
            missing.pop(number, None)
            # refuses names that lead out of the directory
            tar.extract(member, known[number], filter="data")
            if member.isdir():
                # the filter leaves a directory's mode to the umask
                (known[number] / member.name).chmod(member.mode & 0o755 | 0o700)
        if missing:
            raise DeploymentError(key=archive, rule=f"is damaged: {next(iter(missing.values())).path} is missing")
        _put_back([(path / number, part.path) for (number, path), part in zip(known.items(), parts, strict=True)])
    finally:
        for path in fresh:
            shutil.rmtree(path, ignore_errors=True)
        # those that hold nothing, the innermost first
        for path in sorted(absent, reverse=True):
            with contextlib.suppress(OSError):
                path.rmdir()


def _put_back(moves: Sequence[tuple[Path, Path]]) -> None:
    """Rename all, or none. Raises OSError."""
    with contextlib.ExitStack() as undone:
        for source, target in moves:
            os.rename(source, target)
            undone.callback(os.rename, target, source)
        undone.pop_all()
