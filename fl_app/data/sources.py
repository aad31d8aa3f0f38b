"""From the run config's `dataset` to a prepared data set: which source reads it."""

from __future__ import annotations

from pathlib import Path

from fl_app.catalogue import DATASETS
from fl_app.data import folder, medmnist, named, npz
from fl_app.data.prepared import Prepared
from fl_app.errors import UserError


def prepare(
    dataset: str, root: Path, *, classes: tuple[str, ...] = (), image_size: int = 0, force: bool = False
) -> Prepared:
    """Open a data set, converting it first if no process has yet, or if `force`.

    dataset: as in the run config, but `node`. classes: label order of `folder:` and `npz:`; empty: sorted directory
    names, "0" .. "max". image_size: pixels, 0: as the images are. Raises UserError naming what is wrong with the data.
    """
    kind, _, path = dataset.partition(":")
    if kind == "folder":
        return folder.prepare(Path(path), root, classes, image_size, force, site=False)
    if kind == "npz":
        return npz.prepare(Path(path), root, classes, image_size, force, site=False)
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


def prepare_site(
    data_path: str, root: Path, *, classes: tuple[str, ...], image_size: int = 0, force: bool = False
) -> Prepared:
    """Open one site's own data (dataset `node`): an image folder or an .npz file, converted first if needed.

    classes: label order shared by all sites; the site may lack some of them, and its test set may be missing or empty.
    Raises UserError for a class not in `classes`, for a site without training samples, and as `prepare` does.
    """
    path = Path(data_path).expanduser()
    if path.is_file() or path.suffix == ".npz":
        return npz.prepare(path, root, classes, image_size, force, site=True)
    return folder.prepare(path, root, classes, image_size, force, site=True)
