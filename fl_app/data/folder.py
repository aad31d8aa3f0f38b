"""Data sets as image folders: train/<class>/* and test/<class>/*.

The key contains the directories' modification times, because every client process can read them quickly. They do not
change when a file is overwritten in place. Therefore `look` compares all files, before a run and once in every process
of a client.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fl_app.data.prepared import DataRequest, Prepared, at_least_two, listed, not_read, note, open_or_convert
from fl_app.data.user_arrays import UNKNOWN
from fl_app.errors import DataError, counted

if TYPE_CHECKING:
    from fl_app.data.decode import Listing

RULES = 5
"""Version of the rules that convert files to arrays. Conversions of other versions are not used."""

IMAGE_SUFFIXES = frozenset(
    (
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".jif", ".jp2", ".j2k", ".j2c", ".jpc", ".jpf", ".jpx", ".mpo"),
        *(".png", ".apng", ".bmp", ".dib", ".webp", ".avif", ".gif", ".tif", ".tiff", ".tga", ".pcx", ".sgi"),
        *(".ppm", ".pgm", ".pbm", ".pnm", ".pfm"),
    )
)
"""An image is a file with one of these suffixes, in upper or lower case, and a name that does not begin with a dot."""


_SUBFOLDER = "subfolder of a class folder (not searched: images must lie directly in train/<class>/ and test/<class>/)"
_BESIDE = "file beside the class folders"
_PLURALS = {
    _SUBFOLDER: _SUBFOLDER.replace("subfolder of a class folder", "subfolders of class folders"),
    _BESIDE: _BESIDE.replace("file", "files"),
}
"""Plurals of reasons why an entry is not read."""


def prepare(request: DataRequest) -> Prepared:
    """Open an image folder. A site's own folder may lack classes and test/."""
    path, site = request.path, request.site
    train = _class_directories(path, "train")
    test = _class_directories(path, "test", required=not site)
    names = request.classes or tuple(train)
    if not request.hides:
        _check_class_directories(path, names, train, test, explicit=bool(request.classes), site=site)
    # without the folder's own time: a data directory inside the folder would change it
    stamps = [stamp(d) for d in (path / "train", path / "test", *train.values(), *test.values())]

    def convert(directory: Path) -> Sequence[str]:
        from fl_app.data.decode import decode

        listings: list[Listing] = []
        for side in (train, test):
            images = {name: images_in(side[name]) for name in names if name in side}
            empty = [name for name, files in images.items() if not files]
            if empty and side is train and not site:
                raise DataError(
                    key="dataset",
                    rule=f"class {empty[0]!r} has no images in {train[empty[0]]}{_below(train[empty[0]])}",
                )
            listing = [(file, names.index(name)) for name, files in images.items() for file in files]
            if request.hides:
                others = (directory for name, directory in side.items() if name not in names)
                listing += [(file, UNKNOWN) for directory in others for file in images_in(directory)]
            listings.append(listing)
        if not listings[0]:
            raise DataError(key="dataset", rule=f"no images in the class directories of {path / 'train'}")
        left_out = _left_out((path / "train", train), (path / "test", test))
        note(directory, not_read(path, [*_other_parts(path), *left_out]))
        decode(directory, listings[0], listings[1], request.image_size)
        return names

    def files() -> str:
        return _files_hash([*train.values(), *test.values()], _other_parts(path))

    parts = [RULES, str(path), stamps, names, request.image_size, site, *(["hides"] if request.hides else [])]
    return open_or_convert(request, f"folder-{path.name}", parts, convert, files)


def _class_directories(path: Path, side: str, required: bool = True) -> dict[str, Path]:
    """Return the class directories of one split by name, sorted."""
    if not path.is_dir():
        raise DataError(key="dataset", rule=f"no folder {path}")
    folder = path / side
    if not folder.is_dir():
        if not required:
            return {}
        raise DataError(key="dataset", rule=f"{path} has no {side}/; a folder holds train/<class>/ and test/<class>/")
    with os.scandir(folder) as entries:
        listed_entries = sorted((e for e in entries if e.name[0] != "."), key=lambda e: e.name)
    for entry in listed_entries:
        _refuse_dangling(entry)
    return {entry.name: folder / entry.name for entry in listed_entries if entry.is_dir()}


def _check_class_directories(
    path: Path, names: tuple[str, ...], train: dict[str, Path], test: dict[str, Path], *, explicit: bool, site: bool
) -> None:
    for side, found in (("train", train), ("test", test)):
        for name in found:
            if name not in names:
                known = "classes" if explicit else "train/'s"
                raise DataError(
                    key="dataset", rule=f"{path / side / name}: class {name!r} is not one of {known} {listed(names)}"
                )
    missing = [name for name in names if name not in train]
    if missing and not site:
        raise DataError(key="classes", rule=f"{path / 'train'} has no directory for class {missing[0]!r}")
    at_least_two(names, path / "train")


def stamp(path: Path) -> int:
    """Return a path's modification time in nanoseconds, 0 if the path does not exist."""
    return path.stat().st_mtime_ns if path.exists() else 0


def _files_hash(directories: Iterable[Path], others: Sequence[str]) -> str:
    """Return a sha256 over the names, sizes and modification times of all files in some directories, and over `others`."""
    found = hashlib.sha256("\0".join(others).encode(errors="surrogateescape"))
    for directory in directories:
        with os.scandir(directory) as entries:
            for entry in sorted(entries, key=lambda e: e.name):
                # a link that leads nowhere is hashed itself; images_in refuses it if it is an image
                stat = entry.stat(follow_symlinks=not _is_dangling(entry))
                found.update(
                    f"{directory}/{entry.name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode(errors="surrogateescape")
                )
    return found.hexdigest()


def images_in(folder: Path) -> list[Path]:
    """Return the image files directly in a folder, sorted by name. Raises UserError for a dangling link to an image."""
    with os.scandir(folder) as entries:
        found = sorted((entry for entry in entries if _is_image(entry.name)), key=lambda entry: entry.name)
    for entry in found:
        _refuse_dangling(entry)
    return [folder / entry.name for entry in found if entry.is_file()]


def _is_image(name: str) -> bool:
    return name[0] != "." and os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def _is_dangling(entry: os.DirEntry[str]) -> bool:
    return entry.is_symlink() and not os.path.exists(entry.path)


def _refuse_dangling(entry: os.DirEntry[str]) -> None:
    if _is_dangling(entry):
        raise DataError(key="dataset", rule=f"{entry.path} is a link to {os.readlink(entry.path)}, which is not there")


def _left_out(*sides: tuple[Path, Mapping[str, Path]]) -> list[str]:
    """Return the folders' entries that are not read, counted by reason.

    sides: (folder, class directories by name) of each part.
    """
    reasons: Counter[str] = Counter()
    for side, directories in sides:
        for directory in (side, *directories.values()) if side.is_dir() else ():
            with os.scandir(directory) as entries:
                for entry in entries:
                    if reason := _why_not_read(entry, beside=directory == side):
                        reasons[reason] += 1
    told = sorted((_PLURALS.get(reason, reason) if count > 1 else reason, count) for reason, count in reasons.items())
    return [f"{count} {reason}" for reason, count in told]


def _other_parts(path: Path) -> list[str]:
    """Return the entries with images beside train/ and test/, with the number of these images."""
    found = []
    for entry in sorted(path.iterdir()):
        if entry.name in ("train", "test") or entry.name[0] == ".":
            continue
        files = [entry.name] if entry.is_file() else (name for _, _, names in os.walk(entry) for name in names)
        if images := sum(map(_is_image, files)):
            found.append(f"{entry.name}/ ({counted(images, 'image')})" if entry.is_dir() else entry.name)
    return found


def _below(directory: Path) -> str:
    """Return the end of an error about a class folder without images: the names of its subfolders, if it has any."""
    inner = sorted(path.name for path in directory.glob("*/"))
    return f"; its subfolders are not searched: {listed(tuple(inner))}" if inner else ""


def _why_not_read(entry: os.DirEntry[str], *, beside: bool) -> str:
    """Return why an entry of a class directory is not read; "" if it is. beside: it lies beside class directories."""
    if entry.name[0] == ".":
        return "hidden (the name begins with a dot)"
    if entry.is_dir():
        return "" if beside else _SUBFOLDER
    if beside:
        return _BESIDE
    suffix = os.path.splitext(entry.name)[1].lower()
    return "" if suffix in IMAGE_SUFFIXES else f"{suffix or 'without a suffix'} (no suffix of an image)"
