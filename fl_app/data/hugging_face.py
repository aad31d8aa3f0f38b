"""The columns of a data set that Hugging Face's `datasets` saved, `hf:/path`.

datasets is imported only during conversion.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fl_app.data.columns import Read
from fl_app.data.prepared import DataRequest, not_read
from fl_app.errors import DataError, UserError, counted, describe

if TYPE_CHECKING:
    from datasets import Dataset


def read(request: DataRequest, notes: list[str]) -> Read:
    """Return the columns of the splits train and test, and the classes' names if the target has them.

    notes: receives remarks about how images were read. Raises UserError naming a split, column or row that cannot be
    read.
    """
    from datasets import ClassLabel, DatasetDict, load_from_disk

    path = request.path
    try:
        # datasets cannot load a split that it saved without rows
        for state in sorted(path.glob("*/state.json")):
            if json.loads(state.read_text(encoding="utf-8")).get("_data_files") == []:
                _refuse_no_rows(path, state.parent.name)
        found = load_from_disk(str(path))
    except UserError:
        raise
    except Exception as error:  # damaged files make datasets raise many kinds
        raise DataError(key="dataset", rule=f"{path} is no data set that datasets saved ({describe(error)})") from error
    if isinstance(found, DatasetDict):
        if "train" not in found:
            raise DataError(key="dataset", rule=f"{path} must have a split train, it has {', '.join(found)}")
        sets = {name: found[name] for name in ("train", "test") if name in found}
        notes += not_read(
            path, [f"split {name} ({counted(len(found[name]), 'row')})" for name in found if name not in sets]
        )
    else:
        sets = {"train": found}
        # the path may be that of one split of a DatasetDict
        others = path.parent.glob("*/state.json") if (path.parent / "dataset_dict.json").is_file() else ()
        notes += not_read(path.parent, [f"split {file.parent.name}" for file in sorted(others) if file.parent != path])
    for split, part in sets.items():
        if not len(part):
            _refuse_no_rows(path, split)
    labels = sets["train"].features.get(request.own.own_name(request.targets[0]))
    images = _read_images(sets, notes)
    parts = []
    for split, part in sets.items():
        names = part.column_names
        parts.append(
            {n: images[split, n] if (split, n) in images else _saved_column(path, split, part, n) for n in names}
        )
    return parts, labels.names if isinstance(labels, ClassLabel) else ()


def _read_images(sets: Mapping[str, Dataset], notes: list[str]) -> dict[tuple[str, str], NDArray[Any]]:
    """Return columns of images by split and name, uint8 [n, H, W] or [n, H, W, 3], read as image files are.

    notes: receives remarks about them. Raises UserError naming a row that cannot be read.
    """
    from datasets import Image

    from fl_app.data.decode import as_array

    found: dict[tuple[str, str], NDArray[Any]] = {}
    for name, kind in sets["train"].features.items():
        if not isinstance(kind, Image):
            continue
        having = {split: part for split, part in sets.items() if isinstance(part.features.get(name), Image)}
        rows: list[str] = []
        files: list[Path | bytes] = []
        for split, part in having.items():
            for row, value in enumerate(part.select_columns([name]).cast_column(name, Image(decode=False))):
                rows.append(f"column {name}, row {row} of {split}")
                if value[name] is None:
                    raise DataError(key="dataset", rule=f"{rows[-1]} has no image")
                files.append(value[name]["bytes"] or Path(value[name]["path"]))
        images, said = as_array(rows, files)
        notes += said
        ends = np.cumsum([len(part) for part in having.values()])[:-1]
        found |= {(split, name): part for split, part in zip(having, np.split(images, ends), strict=True)}
    return found


def _refuse_no_rows(path: Path, split: str) -> None:
    advice = {"train": "", "test": "; remove this split, and test-ratio divides train"}.get(
        split, "; remove this split"
    )
    raise DataError(key="dataset", rule=f"{path} has no rows in its split {split}{advice}")


def _saved_column(path: Path, split: str, part: Any, name: str) -> NDArray[Any]:
    """Return a column of a split: numbers in their own type, labels as names, lists and arrays as one array."""
    from datasets import ClassLabel, Value

    feature = part.features[name]
    if isinstance(feature, ClassLabel):
        codes = np.asarray(part.with_format("arrow")[:][name].to_pandas(), np.float64)
        known = [*feature.names, None]
        return np.array([known[-1 if np.isnan(code) or code < 0 else int(code)] for code in codes], dtype=object)
    if isinstance(feature, Value):
        return np.asarray(part.with_format("arrow")[:][name].to_pandas())
    # by default datasets converts lists of float64 to float32
    numbers = {"dtype": np.float64} if _element(feature) == "float64" else {}
    try:
        return np.asarray(part.select_columns(name).with_format("numpy", **numbers)[:][name])
    except (ValueError, TypeError, OSError) as error:
        raise DataError(
            key="dataset", rule=f"{path}: column {name} of split {split} cannot be read ({error})"
        ) from error


def _element(feature: Any) -> str:
    """Return the type of the elements of a feature that is a list or an array; "" for any other feature."""
    while hasattr(feature, "feature"):
        feature = feature.feature
    found = getattr(feature, "dtype", "")
    return found if isinstance(found, str) else ""
