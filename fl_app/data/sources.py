"""From the run config's `dataset` to a prepared data set: which source reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fl_app.config import RunConfig
from fl_app.data import folder, medmnist, named, npz, table
from fl_app.data.prepared import Prepared, data_root
from fl_app.data.source_options import Reading
from fl_app.errors import UserError
from fl_app.known_names import DATASETS


def prepare_for(config: RunConfig, data_path: str = "", *, force: bool = False, look: bool = False) -> Prepared:
    """Open a run's data set, or, for dataset `node`, the site's own at `data_path`: an image folder, an .npz file or a table.

    force, look: as `prepare`, as which it raises UserError, and for a site without training samples, or with a class that is not in
    `classes`. A site may lack classes, and its test set may be missing or empty.
    """
    reading = Reading.of(config)
    if config.dataset == "node":
        return _site(Path(data_path).expanduser(), data_root(config), reading, force, look)
    return _prepare(config.dataset, data_root(config), reading, force, look)


def prepare(
    dataset: str,
    root: Path,
    *,
    classes: tuple[str, ...] = (),
    image_size: int = 0,
    force: bool = False,
    look: bool = False,
    **more: Any,
) -> Prepared:
    """Open a data set, converting it first if no process has yet, or if `force`.

    dataset: as in the run config, but `node`. classes: label order of the user's own; empty: sorted directory names, sorted
    strings, "0" .. "max". image_size: pixels, 0: as the images are. look: whether files of a folder have been overwritten since;
    then convert them again. more: as in `Reading`. Raises UserError naming what is wrong with the data.
    """
    return _prepare(dataset, root, Reading(classes, image_size, **more), force, look)


def _prepare(dataset: str, root: Path, reading: Reading, force: bool, look: bool) -> Prepared:
    kind, _, path = dataset.partition(":")
    _refuse_another_kind(kind, Path(path).expanduser())
    if kind == "npz":
        if reading.target:
            raise UserError(
                f"target: {dataset} has its targets in y_train and y_test; leave it unset, got {reading.target!r}"
            )
        return npz.prepare(Path(path), root, reading, force, site=False)
    if kind in ("table", "hf"):
        return table.prepare(Path(path), root, reading, force, site=False, saved=kind == "hf")
    if not reading.of_task.has_classes:
        raise UserError(f"task: {dataset} has labels of classes, got {reading.task}")
    if reading.client:
        raise UserError(f"client: {dataset} has no columns, got {reading.client!r}")
    if reading.target:
        raise UserError(f"target: {dataset} has no columns, got {reading.target!r}")
    classes, image_size = reading.classes, reading.image_size
    if kind == "folder":
        return folder.prepare(Path(path), root, classes, image_size, force, site=False, look=look)
    for key, value in (("classes", ",".join(classes)), ("image-size", image_size)):
        if value and not (kind == "tiny-imagenet" and key == "image-size"):
            raise UserError(f"{key}: {dataset} has its own; leave it unset, got {value!r}")
    if kind == "tiny-imagenet" and path:
        return named.prepare_tiny_imagenet(Path(path), root, image_size, force)
    if dataset in DATASETS and DATASETS[dataset].file:
        return medmnist.prepare(dataset, root, force)
    if dataset == "digits" or (dataset in DATASETS and DATASETS[dataset].torchvision):
        return named.prepare(dataset, root, force)
    raise UserError(f"dataset: {dataset!r} cannot be prepared")


def _refuse_another_kind(kind: str, path: Path) -> None:
    """Raise UserError for a table, an .npz or a folder that is said to be another of these."""
    named = {".npz": "npz"} | dict.fromkeys(table.SUFFIXES, "table")
    fits = named.get(path.suffix.lower()) if path.is_file() else "folder" if path.is_dir() else None
    if fits in (None, kind) or kind not in ("npz", "table", "hf", "folder") or (fits, kind) == ("folder", "hf"):
        return
    more = (
        " with target=COLUMN, the one to learn"
        if fits == "table"
        else ", or hf: for what datasets saved" * (fits == "folder")
    )
    raise UserError(
        f"dataset: {kind}: takes no {path.suffix or 'folder'}, got {path}; did you mean {fits}:{path}{more}?"
    )


def _site(path: Path, root: Path, reading: Reading, force: bool, look: bool) -> Prepared:
    if path.suffix in table.SUFFIXES:
        return table.prepare(path, root, reading, force, site=True)
    if path.is_file() or path.suffix == ".npz":
        return npz.prepare(path, root, reading, force, site=True)
    if not reading.of_task.has_classes:
        raise UserError(f"task: an image folder has labels of classes, got {reading.task}")
    return folder.prepare(path, root, reading.classes, reading.image_size, force, site=True, look=look)
