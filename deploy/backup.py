"""What a server and a site must keep, in one archive, and back on a machine that lost it.

A server keeps the inventory, the keys, the SuperLink's database, and run folders with their checkpoints. A site keeps
its keys, its audit and approvals, client state, and its notes of spent privacy budgets and answered private rounds. The
archive is an uncompressed tar file that only its owner can read: it holds private keys. Its first member,
`manifest.json`, has the parts and their paths. A restore puts every part back at its path, or changes nothing.

Symbolic links are followed: the archive has the files that they lead to, so that no part depends on a path outside the
archive. Links in client state are left out, also those that an application makes while its state is copied. Corolla makes none
there, and an application that leads one to another file must not find that file's content in its state after a restore.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from deploy import database, site
from deploy.inventory import LOCAL, Inventory
from deploy.processes import state_home
from fl_app.errors import MALFORMED, UserError
from fl_app.files import explain_full_disk, make_directory, publish
from fl_app.machine import versions
from fl_app.run_secret import EXPERIMENT_ID
from fl_app.site import VARIABLE, site_directory, user_state

MANIFEST, FORMAT = "manifest.json", 1
_DATABASE, _CLIENT_STATE = "database", "client state"
# copied first: what is written later refers to them
_FIRST = "checkpoints"


@dataclass(frozen=True)
class Part:
    """A file or directory that is kept. what: its kind, in words."""

    what: str
    path: Path


# What is kept ---------------------------------------------------------------------------------------------------------


def of_server(inventory: Inventory, file: Path, runs: Iterable[Path], states: Iterable[Path] = ()) -> list[Part]:
    """Return the parts of a cluster's server on this machine, and of the sites that the cluster has here.

    file: the inventory's. runs: directories of run folders. states: as for `of_site`. Raises UserError if the SuperLink is
    on another host.
    """
    link = inventory.superlink
    if link.host != LOCAL:
        raise UserError(f"superlink.host: {link.host} has the database and run folders; make the backup there")
    found = [Part("inventory", file.absolute()), Part("keys", Path(inventory.keys))]
    if link.database:
        found.append(Part(_DATABASE, Path(link.database).absolute()))
    found += [Part("run folders", path.absolute()) for path in runs]
    here = [node for node in inventory.supernodes if node.host == LOCAL]
    named = [Path(node.environment["COROLLA_STATE_DIR"]) for node in here if "COROLLA_STATE_DIR" in node.environment]
    return _existing([*found, *of_site([*named, *states], {node.site for node in here if node.site})])


def of_site(states: Iterable[Path] = (), rules: Iterable[str] = ()) -> list[Part]:
    """Return the parts of all sites on this machine.

    states: directories of client state beside the usual one. rules: `site.toml` files beside the usual one.
    """
    found = [Part("site", path) for path in sorted((state_home() / "sites").glob("*")) if path.is_dir()]
    notes = {site_directory()}
    for name in {"", *rules}:
        if path := site.find(name):
            found.append(Part("rules", path.absolute()))
            kept = site.read_site(path).site_dir
            notes |= {Path(kept)} if kept and VARIABLE not in os.environ else set()
    found += [Part("notes of budgets and answers", path) for path in sorted(notes)]
    usual = Path(os.environ.get("COROLLA_STATE_DIR") or user_state())
    for root in dict.fromkeys(path.expanduser().absolute() for path in (usual, *states)):
        experiments = sorted(root.iterdir()) if root.is_dir() else []
        named = [path for path in experiments if EXPERIMENT_ID.fullmatch(path.name) and not path.is_symlink()]
        found += [Part(_CLIENT_STATE, path) for path in named]
    return _existing(found)


def _existing(parts: Iterable[Part]) -> list[Part]:
    """Return the parts that exist, without those that lie in others. Raises UserError for a link that leads nowhere."""
    parts = list(parts)
    for part in parts:
        _refuse_dangling(part.path)
    there = list(dict.fromkeys(part for part in parts if part.path.exists()))
    paths = {part.path for part in there}
    return [part for part in there if not paths & set(part.path.parents)]


# Backup ---------------------------------------------------------------------------------------------------------------


def write(archive: Path, parts: list[Part]) -> None:
    """Write an archive of parts, with mode 0600. It exists completely or not at all.

    A run may go on meanwhile: the database is copied by SQLite, checkpoints before the records that are cut to them.
    Raises UserError if there is nothing to keep, if the archive exists, or if it cannot be written.
    """
    if not parts:
        raise UserError("backup: nothing on this machine must be kept")
    if archive.exists():
        raise UserError(f"{archive} exists already; choose another name")
    for part in parts:
        _refuse_inside(archive, part.path)
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
                _pack(tar, str(number), part, archive.absolute())

    try:
        with explain_full_disk("backup", archive.absolute().parent):
            publish(archive, pack)
    except OSError as error:
        raise UserError(f"backup: {error.filename or archive}: {error.strerror}") from None


def _pack(tar: tarfile.TarFile, name: str, part: Part, archive: Path) -> None:
    """Add a part. A copy of the database is made beside the archive.

    Raises UserError if a part is neither a file nor a directory, if a link leads nowhere, or if one leads to the archive.
    """
    if not part.path.is_file() and not part.path.is_dir():
        raise UserError(f"backup: {part.what}: {part.path} is neither a file nor a directory")
    if part.what == _DATABASE:
        with tempfile.TemporaryDirectory(prefix=".corolla-", dir=archive.parent) as directory:
            copy = Path(directory, "copy")
            database.copy(part.path, copy)
            tar.add(copy, name, filter=_plain)
        return
    if part.what == _CLIENT_STATE:
        _pack_without_links(tar, name, part.path)
        return
    tar.add(part.path, name, recursive=False, filter=_plain)
    if part.path.is_dir():
        for path in _ordered(part.path):
            if path.is_symlink() and path.is_dir():
                _refuse_inside(archive, path)
            # a run that goes on deletes files
            with contextlib.suppress(FileNotFoundError):
                tar.add(path, f"{name}/{path.relative_to(part.path).as_posix()}", recursive=False, filter=_plain)


def _pack_without_links(tar: tarfile.TarFile, name: str, directory: Path) -> None:
    """Add a directory without its links, also if a file or a directory in it becomes one meanwhile.

    Each directory and file is opened from the open directory above it, and a link cannot be opened.
    """

    def add_directory(name: str) -> None:
        member = tarfile.TarInfo(name)
        member.type, member.mode = tarfile.DIRTYPE, 0o700
        tar.addfile(member)

    add_directory(name)
    for folder, below, files, above in os.fwalk(directory):
        here = f"{name}/{Path(folder).relative_to(directory).as_posix()}".removesuffix("/.")
        if here != name:
            add_directory(here)
        below.sort()
        for file in sorted(files):
            try:
                opened = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=above)
            except OSError as error:
                # it was deleted, or is a link, or a socket
                if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO):
                    continue
                raise
            with open(opened, "rb") as content:
                member = tar.gettarinfo(arcname=f"{here}/{file}", fileobj=content)
                if member.isfile():
                    tar.addfile(member, content)


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
        raise UserError(
            f"backup: {path} is a link to {os.readlink(path)}, which is not there; put it back, or remove the link"
        )


def _refuse_inside(archive: Path, kept: Path) -> None:
    """Raise UserError if the archive would lie in a directory that is kept."""
    if archive.resolve().is_relative_to(kept.resolve()):
        raise UserError(f"{archive}: lies in {kept}, which is kept; choose another directory")


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Return a member if it is a file or directory; sockets and devices are left out."""
    return member if member.isfile() or member.isdir() else None


# Restore --------------------------------------------------------------------------------------------------------------


def read(archive: Path) -> list[Part]:
    """Put every part of an archive back at its path, and return the parts.

    Raises UserError, and has changed nothing, if one of the paths exists, or if the archive is damaged.
    """
    try:
        with tarfile.open(archive, "r:") as tar:
            parts = _parts(tar, archive)
            if there := [str(part.path) for part in parts if os.path.lexists(part.path)]:
                raise UserError(
                    "restore: these exist and are not overwritten; move them away:\n  " + "\n  ".join(there)
                )
            _unpack(tar, parts, archive)
    except (tarfile.TarError, EOFError) as error:
        raise UserError(f"{archive}: is damaged, or no backup: {error}") from None
    except OSError as error:
        raise UserError(f"restore: {error.filename or archive}: {error.strerror}") from None
    return parts


def _parts(tar: tarfile.TarFile, archive: Path) -> list[Part]:
    head = tar.next()
    file = tar.extractfile(head) if head is not None and head.name == MANIFEST else None
    try:
        about = json.loads(file.read()) if file else {}
        found = [Part(str(part["what"]), Path(part["path"])) for part in about["parts"]]
        sound = about["format"] == FORMAT and all(part.path.is_absolute() for part in found)
    except MALFORMED:
        sound = False
    if not sound:
        raise UserError(f"{archive}: is no backup of this version of Corolla (no {MANIFEST} of format {FORMAT})")
    return found


def _unpack(tar: tarfile.TarFile, parts: list[Part], archive: Path) -> None:
    """Extract all parts beside their paths, then rename them. After an error nothing is left."""
    fresh = [part.path.with_name(f".{part.path.name}.restoring-{os.getpid()}") for part in parts]
    try:
        for path in fresh:
            make_directory(path)
        missing = set(range(len(parts)))
        for member in tar:
            if member.name == MANIFEST:
                continue
            number = member.name.partition("/")[0]
            if not number.isdecimal() or int(number) >= len(parts) or not (member.isfile() or member.isdir()):
                raise UserError(f"{archive}: is no sound backup: it contains {member.name!r}")
            missing.discard(int(number))
            # refuses names that lead out of the directory
            tar.extract(member, fresh[int(number)], filter="data")
            if member.isdir():
                # the filter leaves a directory's mode to the umask
                (fresh[int(number)] / member.name).chmod(member.mode & 0o755 | 0o700)
        if missing:
            raise UserError(f"{archive}: is damaged: {parts[min(missing)].path} is missing")
        for position, (part, path) in enumerate(zip(parts, fresh, strict=True)):
            os.rename(path / str(position), part.path)
    finally:
        for path in fresh:
            shutil.rmtree(path, ignore_errors=True)
