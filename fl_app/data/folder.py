"""Data sets as image folders: train/<class>/* and test/<class>/*.

The key is made of the directories' modification times, which every client process can afford to read. They do not change when a
file is overwritten in place. `look` compares all files: before a run, and once in every process of a client.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fl_app.data.prepared import DataRequest, Prepared, at_least_two, listed, open_or_convert
from fl_app.errors import UserError

if TYPE_CHECKING:
    from fl_app.data.decode import Listing

RULES = 2
"""Version of the rules by which files become arrays; conversions of other versions are not used."""

IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".pnm", ".gif", ".tif", ".tiff"}


def prepare(request: DataRequest) -> Prepared:
    """Open an image folder. A site's own may lack classes and test/."""
    path, site = request.path, request.site
    train = _class_directories(path, "train")
    test = _class_directories(path, "test", required=not site)
    names = request.classes or tuple(train)
    _check_class_directories(path, names, train, test, explicit=bool(request.classes), site=site)
    # the folder's own time is not among them: a data directory inside the folder would change it
    stamps = [stamp(d) for d in (path / "train", path / "test", *train.values(), *test.values())]

    def convert(directory: Path) -> Sequence[str]:
        from fl_app.data.decode import decode

        listings: list[Listing] = []
        for side in (train, test):
            images = {name: images_in(side[name]) for name in names if name in side}
            empty = [name for name, files in images.items() if not files]
            if empty and side is train and not site:
                raise UserError(f"dataset: class {empty[0]!r} has no images in {train[empty[0]]}")
            listings.append([(file, names.index(name)) for name, files in images.items() for file in files])
        if not listings[0]:
            raise UserError(f"dataset: no images in the class directories of {path / 'train'}")
        decode(directory, listings[0], listings[1], request.image_size)
        return names

    def files() -> str:
        return _files_hash([*train.values(), *test.values()])

    parts = [RULES, str(path), stamps, names, request.image_size, site]
    return open_or_convert(request, f"folder-{path.name}", parts, convert, files)


def _class_directories(path: Path, side: str, required: bool = True) -> dict[str, Path]:
    """Return the class directories of one split by name, sorted."""
    if not path.is_dir():
        raise UserError(f"dataset: no folder {path}")
    folder = path / side
    if not folder.is_dir():
        if not required:
            return {}
        raise UserError(f"dataset: {path} has no {side}/; a folder holds train/<class>/ and test/<class>/")
    with os.scandir(folder) as entries:
        return {name: folder / name for name in sorted(e.name for e in entries if e.name[0] != "." and e.is_dir())}


def _check_class_directories(
    path: Path, names: tuple[str, ...], train: dict[str, Path], test: dict[str, Path], *, explicit: bool, site: bool
) -> None:
    for side, found in (("train", train), ("test", test)):
        for name in found:
            if name not in names:
                known = "classes" if explicit else "train/'s"
                raise UserError(f"dataset: {path / side / name}: class {name!r} is not one of {known} {listed(names)}")
    missing = [name for name in names if name not in train]
    if missing and not site:
        raise UserError(f"classes: {path / 'train'} has no directory for class {missing[0]!r}")
    at_least_two(names, path / "train")


def stamp(path: Path) -> int:
    """Return a path's modification time in nanoseconds, 0 if there is none."""
    return path.stat().st_mtime_ns if path.exists() else 0


def _files_hash(directories: Iterable[Path]) -> str:
    """Return a sha256 over the names, sizes and modification times of all files in some directories."""
    found = hashlib.sha256()
    for directory in directories:
        with os.scandir(directory) as entries:
            for entry in sorted(entries, key=lambda e: e.name):
                stat = entry.stat()
                found.update(
                    f"{directory}/{entry.name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode(errors="surrogateescape")
                )
    return found.hexdigest()


def images_in(folder: Path) -> list[Path]:
    """List the image files directly in a folder by name."""
    with os.scandir(folder) as entries:
        names = sorted(e.name for e in entries if e.name[0] != "." and e.is_file())
    return [folder / name for name in names if os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES]
