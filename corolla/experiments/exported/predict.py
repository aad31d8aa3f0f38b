"""Predictions of a trained model for raw samples: a table's rows, image files or an .npz.

`corolla predict` and `Run.model` share this module.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from corolla.experiments.exported.loading import Answers, answers_of
from fl_app import tasks
from fl_app.checksums import sha256_of
from fl_app.config import RunConfig
from fl_app.config.rules import split_names
from fl_app.data import npz, table, table_files, user_arrays
from fl_app.data.columns import Columns
from fl_app.data.encoding import BOOLEAN, NUMBER, TEXT, WORDS, Encoding
from fl_app.data.moments import Stored
from fl_app.data.parsing import FROM_ZERO, Places, is_number, missing
from fl_app.data.prepared import listed
from fl_app.data.site_columns import SiteColumns
from fl_app.errors import MALFORMED, UserError
from fl_app.model_card import Card
from fl_app.sources import suffix_of
from fl_app.tasks import Metric

BATCH = 512
READING = ("separator", "na-values")
"""Keys with which `predict` reads a table, as a run does."""
# names of an .npz file's arrays: samples, and targets if it has any
_ARRAYS = (("x", "y"), ("x_test", "y_test"))
# the texts that pandas reads as booleans
_BOOLEANS = {form(str(value)): value for value in (True, False) for form in (str, str.lower, str.upper)}


@dataclass(frozen=True)
class ModelInputs:
    """Samples for a model. names: one per row. samples: [n, ...] as the model takes them, of the rows that are not bad.

    targets: [n, ...], or None. remark: reason why targets in the file are not used; else empty. bad: the reason by place
    of every row that cannot be read. ignored: columns that the model does not know.
    how: a site's own way to read the table, as JSON; "" for the run's.
    """

    names: list[str]
    samples: NDArray[Any]
    targets: NDArray[Any] | None = None
    remark: str = ""
    bad: Mapping[int, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    how: str = ""


def read_inputs(
    inputs: Sequence[Path],
    card: Card,
    reading: Mapping[str, str] = MappingProxyType({}),
    on_error: str = "refuse",
    own: SiteColumns | None = None,
) -> ModelInputs:
    """Read the samples for a model.

    inputs: image files, one table with a header, or one .npz with `x` or `x_test` (and `y` or `y_test`). reading: values
    of `separator` and `na-values` for the table; of the run's where they are not given. on_error: `row` leaves out rows
    that do not fit, and ignores columns that the model does not know; `refuse` refuses all. own: how a site's table differs
    from the run's, with columns that the run may have left out; None: as the card says. Raises UserError naming the mismatch
    if they do not fit the model.
    """
    if unknown := [name for name in reading if name not in READING]:
        raise UserError(key="--set", rule=f"predict takes {' and '.join(READING)}, got {listed(unknown)}")
    if not inputs:
        raise UserError("give image files, a table or an .npz file")
    if any(suffix_of(path) in (".npz", *table_files.SUFFIXES) for path in inputs):
        if len(inputs) > 1:
            raise UserError(
                f"one table or .npz file at a time, or image files, got {listed([str(path) for path in inputs])}"
            )
        is_npz = suffix_of(inputs[0]) == ".npz"
        by_row = on_error == "row"
        return _from_npz(inputs[0], card, by_row) if is_npz else _from_table(inputs[0], card, reading, by_row, own)
    from fl_app.data.decode import read_image

    wanted = card["input"]
    if len(wanted["shape"]) != 3 or wanted["dtype"] != "uint8":
        raise UserError(
            key=inputs[0], rule=f"the model takes {_wanted(card)}, not images; give samples as x of an .npz file"
        )
    # cards of earlier versions have no bits
    resize, bits = bool(wanted["image-size"]), wanted.get("bits", 0)

    def read(part: Sequence[int]) -> NDArray[Any]:
        shape = tuple(wanted["shape"])
        return np.stack([read_image(inputs[k], shape, resize=resize, bits=bits) for k in part])

    samples, bad = _rows_read(len(inputs), read, card, on_error == "row")
    return ModelInputs([str(path) for path in inputs], samples, bad=bad)


def _rows_read(
    count: int, read: Callable[[Sequence[int]], NDArray[Any]], card: Card, by_row: bool
) -> tuple[NDArray[Any], dict[int, str]]:
    """Return the samples of the rows that can be read, and why the others cannot, by place.

    read: returns the samples of some rows. by_row: bad rows are searched by halves; else the first one refuses all.
    """
    bad: dict[int, str] = {}
    left = [range(count)] if count else []
    while left and by_row:
        part = left.pop()
        try:
            read(part)
        except UserError as error:
            if len(part) == 1:
                bad[part[0]] = str(error)
            else:
                middle = len(part) // 2
                left += [part[:middle], part[middle:]]
    good = [k for k in range(count) if k not in bad]
    if bad and not good:
        return np.zeros((0, *card["input"]["shape"]), card["input"]["dtype"]), bad
    return read(good), bad


def are_own_data(inputs: Sequence[Path], card: Card) -> bool | None:
    """Return whether the samples come from the data file of the model's run; None if the card lacks its hash."""
    known = card["data"].get("file-sha256", "")
    return None if not known else any(sha256_of(path) == known for path in inputs)


def on_own_data(card: Card) -> str:
    """Return the words that a figure needs if its samples come from the run's own file."""
    if not card.get("table"):
        return "these samples are the run's own data"
    share = "most" if card["settings"].get("test-ratio", 0) < 0.5 else "some"
    return f"these rows are the run's own data, {share} of them training rows: the run's own figures are over test rows"


def _from_table(
    path: Path, card: Card, reading: Mapping[str, str], by_row: bool, own: SiteColumns | None
) -> ModelInputs:
    settings = card["settings"]
    separator = reading.get("separator", settings.get("separator", ""))
    na_values = split_names(reading.get("na-values", settings.get("na-values", "")))
    how = dataclasses.replace(own or SiteColumns.of(card.get("table", {}).get("site", {})), may_lack=True)
    if "separator" in reading:
        how = dataclasses.replace(how, separator="")
    encodings = (card.get("table") or {}).get("encodings", ())
    # a text may be anything
    long_rows = by_row and all(fields["kind"] != TEXT for fields in encodings)
    rows = table_files.read_rows(path, separator, na_values, _names_in(card), how, long_rows)
    places = table_files.places_in(path, separator, how)
    typed = {fields["column"]: fields["kind"] for fields in encodings} if by_row else {}
    ignored = _unknown_columns(rows, card) if by_row or own is not None else ()
    rows = {name: values for name, values in rows.items() if name not in ignored}

    def read(part: Sequence[int]) -> NDArray[Any]:
        there = dataclasses.replace(
            places,
            number=lambda k: places.number(part[k]),
            written=lambda column, k: places.written(column, part[k]),
        )
        return from_columns(path, _some(rows, part, typed), card, there)

    count = len(next(iter(rows.values()), ()))
    samples, bad = _rows_read(count, read, card, by_row)
    found = ModelInputs(
        [f"row {places.number(k)}" for k in range(count)],
        samples,
        bad={k: why.removeprefix(f"{path}: ") for k, why in bad.items()},
        ignored=ignored,
        how=how.text,
    )
    try:
        good = [k for k in range(count) if k not in bad]
        return dataclasses.replace(found, targets=_targets_in(path, _some(rows, good), card) if good else None)
    except UserError as error:
        # predictions need no targets
        return dataclasses.replace(found, remark=f"no metric was measured: {error}")


def _some(rows: Columns, part: Sequence[int], kinds: Mapping[str, str] = MappingProxyType({})) -> Columns:
    """Return some rows of columns. Without a word in it, a column that was read as text may hold numbers or booleans."""
    found = {name: values[list(part)] for name, values in rows.items()}
    return {name: _as_trained(values, kinds.get(name, "")) for name, values in found.items()}


def _as_trained(values: NDArray[Any], kind: str) -> NDArray[Any]:
    """Return texts that are all numbers, or all booleans, or missing, as such if a column is of this kind; else unchanged."""
    texts = values[~missing(values)]
    if values.dtype.kind != "O" or not all(isinstance(value, str) for value in texts):
        return values
    if kind == NUMBER and all(map(is_number, texts)):
        return np.array([float(value) if isinstance(value, str) else np.nan for value in values])
    if kind == BOOLEAN and all(value in _BOOLEANS for value in texts):
        return np.array([_BOOLEANS[value] if isinstance(value, str) else None for value in values], dtype=object)
    return values


def _unknown_columns(rows: Columns, card: Card) -> tuple[str, ...]:
    """Return the columns that are none of the run's table."""
    known = card.get("table") or {}
    named = {fields["column"] for fields in known.get("encodings", ())} | set(known.get("others", ()))
    return tuple(name for name in rows if named and name not in named)


def _names_in(card: Card) -> dict[str, list[str]]:
    """Return the known names in each column of a model's table that holds names or texts: of categories, of classes."""
    encodings = [Encoding.from_json(fields) for fields in card.get("table", {}).get("encodings", ())]
    targets = split_names(card["settings"].get("target", "")) if card["has-classes"] else ()
    words = {encoding.column: list(encoding.words) for encoding in encodings if encoding.kind == WORDS}
    words |= {encoding.column: [] for encoding in encodings if encoding.kind == TEXT}
    return words | {name: list(card["classes"]) for name in targets}


def from_columns(where: Path, rows: Columns, card: Card, places: Places = FROM_ZERO) -> NDArray[Any]:
    """Return a table's rows as samples [n, ...] of the shape and dtype that the model takes.

    Columns are matched by name, in any order. where, places: name the rows in errors. Raises UserError with both lists
    of columns if one is missing, or if one is not a column of the run's table.
    """
    known = card.get("table", {})
    encodings = [Encoding.from_json(fields) for fields in known.get("encodings", ())]
    if not encodings:
        raise UserError(
            key=where, rule=f"the model takes {_wanted(card)}, not named columns; give samples as x of an .npz file"
        )
    needed = [encoding.column for encoding in encodings]
    missing = [name for name in needed if name not in rows]
    named = {*needed, *known.get("others", ())}
    foreign = [name for name in rows if name not in named]
    if missing or foreign:
        wrong = [f"{listed(missing)} {'is' if len(missing) == 1 else 'are'} missing"] * bool(missing)
        wrong += [f"{listed(foreign)} {'is' if len(foreign) == 1 else 'are'} unknown"] * bool(foreign)
        raise UserError(
            key=where,
            rule=f"its columns must be the model's: {' and '.join(wrong)}; the model has {listed(needed)}; "
            f"the table has {listed(list(rows))}",
        )
    if not len(rows[needed[0]]):
        raise UserError(key=where, rule="has no rows")
    wanted = card["input"]
    x = table.samples_of_rows(where, encodings, rows, wanted["shift"], wanted["scale"], places)
    if list(x.shape[1:]) != wanted["shape"]:
        raise UserError(
            key=where, rule=f"its rows give samples {_shape_and_type(x)}, but the model takes {_wanted(card)}"
        )
    return x.astype(wanted["dtype"], copy=False)


def _targets_in(where: Path, rows: Columns, card: Card) -> NDArray[Any] | None:
    """Return the targets of a table's rows; None without a target column, or if a row has no target."""
    names = split_names(card["settings"].get("target", ""))
    if not names or any(name not in rows or missing(rows[name]).any() for name in names):
        return None
    y = [rows[name] for name in names]
    return _stored_targets(where, f"column {', '.join(names)}", y[0] if len(y) == 1 else np.stack(y, axis=1), card)


def _stored_targets(where: Path, name: str, y: NDArray[Any], card: Card) -> NDArray[Any]:
    shift = tuple(card.get("target-shift", ()))
    try:
        both = name, Stored(shift, (1.0,) * len(shift)).of(y)
    except MALFORMED as error:
        raise UserError(key=where, rule=f"{name} must hold {len(shift)} numbers in each row: {error}") from None
    return user_arrays.targets(where, tasks.named(card["task"]), both, both, card["classes"])[0]


def _from_npz(path: Path, card: Card, by_row: bool) -> ModelInputs:
    names = [name for pair in _ARRAYS for name in pair]
    found = npz.members(path, names, optional=names)
    named = next((pair for pair in _ARRAYS if pair[0] in found), None)
    if named is None:
        raise UserError(key=path, rule="has no array x or x_test with samples as in the run's data")
    raw, y = found[named[0]], found.get(named[1])
    count = len(raw) if raw.ndim else 0
    if y is not None and len(y) != count:
        user_arrays.refuse(path, named[1], f"have one target for each of the {count} samples", len(y))
    if not count:
        user_arrays.refuse(path, named[0], "hold samples", "none")
    x, bad = _rows_read(count, lambda part: from_array(path, named[0], raw[list(part)], card), card, by_row)
    good = [k for k in range(count) if k not in bad]
    return ModelInputs(
        [f"{path}[{k}]" for k in range(count)],
        x,
        None if y is None or not good else _stored_targets(path, named[1], y[good], card),
        bad=bad,
    )


def from_array(where: Path, name: str, raw: NDArray[Any], card: Card) -> NDArray[Any]:
    """Return an array as samples [n, ...] of the shape and dtype that the model takes.

    where, name: name the array in errors. Raises UserError if it does not fit.
    """
    wanted = card["input"]
    # scale as the data set does (fl_app/data/moments.py); other shapes are refused below
    how = Stored(tuple(wanted.get("shift", ())), tuple(wanted.get("scale", ())))
    fits = (raw.shape[-1] if raw.ndim > 1 else 1) == len(how.shift)
    x = user_arrays.samples(where, name, how.of(raw) if fits else raw)
    if list(x.shape[1:]) != wanted["shape"] or (x.dtype == np.uint8) != (wanted["dtype"] == "uint8"):
        raise UserError(
            key=where, rule=f"{name} holds samples {_shape_and_type(x)}, but the model takes {_wanted(card)}"
        )
    return x.astype(wanted["dtype"], copy=False)


def _shape_and_type(x: NDArray[Any]) -> str:
    return f"{x.dtype} {list(x.shape[1:])}"


def _wanted(card: Card) -> str:
    return f"{card['input']['dtype']} {card['input']['shape']}"


def ask(predictor: Answers, samples: NDArray[Any], card: Card) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return (outputs, predictions), float32 [n, K] each.

    Raises UserError if the number of outputs differs from the card's.
    """
    if not len(samples):
        nothing = np.zeros((0, len(card["classes"])), np.float32)
        return nothing, nothing
    answers = [predictor(np.ascontiguousarray(samples[at : at + BATCH])) for at in range(0, len(samples), BATCH)]
    outputs, predictions = (np.concatenate(side) for side in zip(*answers, strict=True))
    if predictions.shape[1:] != (len(card["classes"]),):
        raise UserError(
            key=card["file"],
            rule=f"gives {list(predictions.shape[1:])} outputs per sample, its card names "
            f"{len(card['classes'])}: {listed(card['classes'])}",
        )
    return outputs, predictions


def answers_in_words(predictions: NDArray[np.float32], card: Card) -> NDArray[Any]:
    """Return predictions [n, K] as classes [n] if targets are classes, else as numbers float64 [n, K].

    Classes that were integers or booleans in the data are these, int64 or bool; others are names.
    """
    if card["has-classes"]:
        return np.asarray(_labels(card["classes"])[predictions.argmax(1)])
    shift = card.get("target-shift") or [0.0] * len(card["classes"])
    return np.asarray(predictions.astype(np.float64) + shift)


def _labels(classes: Sequence[str]) -> NDArray[Any]:
    """Return the classes with the type that they had as labels: a run names integers and booleans by their digits and words."""
    if set(classes) == {"False", "True"}:
        return np.array([name == "True" for name in classes])
    if all(re.fullmatch(r"0|-?[1-9]\d{0,17}", name, re.ASCII) for name in classes):
        return np.array([int(name) for name in classes])
    return np.array(classes, dtype=object)


class Predictor(nn.Module):
    """A trained network with its preprocessing: `predict(data)` takes raw samples and returns class names or numbers.

    As a module it is the network itself: the same tensors with the same names, called with inputs as in training. card:
    returns the model's card; called on the first use of samples.
    """

    def __init__(self, network: nn.Module, config: RunConfig, card: Callable[[], Card]) -> None:
        super().__init__()
        # Sharing the registries keeps names, values and devices of tensors equal to the network's. A tuple hides the
        # network from nn.Module, which would register a submodule.
        self._parameters, self._buffers, self._modules = network._parameters, network._buffers, network._modules
        self._non_persistent_buffers_set = network._non_persistent_buffers_set
        self._network, self._config, self._ask_card = (network,), config, card
        self.training = network.training

    @property
    def network(self) -> nn.Module:
        """The network by itself."""
        return self._network[0]

    @cached_property
    def card(self) -> Card:
        """The model's card: `classes`, `features`, `input`, ...

        Raises UserError if building it needs the run's data and they are missing.
        """
        return self._ask_card()

    @property
    def classes(self) -> list[str]:
        """Names of the outputs: of the classes, labels or numbers."""
        return list(self.card["classes"])

    @property
    def features(self) -> list[str]:
        """Names of the features in order; empty if the data have none."""
        return list(self.card["features"])

    def predict(self, data: Any) -> NDArray[Any]:
        """Return classes [n], integers if the labels were; for a task without classes, numbers float64 [n, K].

        data: a pandas DataFrame with the columns of the run's table, in any order; or an array of samples [n, ...] in
        the form of the run's data. Raises UserError if the data do not fit the model.
        """
        return answers_in_words(self._predictions(data), self.card)

    def probabilities(self, data: Any) -> NDArray[np.float32]:
        """Return the task's predictions, float32 [n, K] in the order of `classes`: probabilities if these are classes.

        data: as in `predict`. Raises UserError for a task whose outputs are its predictions, as regression.
        """
        if len(self.card["outputs"]) == 1:
            raise UserError(key="probabilities", rule=f"task {self.card['task']} predicts none; use predict")
        return self._predictions(data)

    def _predictions(self, data: Any) -> NDArray[np.float32]:
        where = Path(type(data).__name__)
        if isinstance(data, str | bytes | Path):
            raise UserError(
                key="predict", rule="takes an array or a data frame; `corolla predict` reads files", value=str(data)
            )
        if hasattr(data, "columns"):
            samples = from_columns(
                where, {str(name): np.asarray(data[name]) for name in data.columns}, self.card, Places(of_model=True)
            )
        else:
            samples = from_array(where, "it", np.asarray(data), self.card)
            if not len(samples):
                raise UserError(key=where, rule="must hold samples, got none")
        device = next((tensor.device for tensor in self.parameters()), None)
        if device is not None and device.type != "cpu":
            raise UserError(key="predict", rule=f"the model must be on the CPU, it is on {device}")
        was_training = self.network.training
        try:
            return ask(answers_of(self.network, self._config, self.card), samples, self.card)[1]
        finally:
            self.network.train(was_training)

    def forward(self, *inputs: Any, **more: Any) -> Any:
        """Return the network's outputs for inputs as in training."""
        return self.network(*inputs, **more)

    def train(self, mode: bool = True) -> Predictor:
        """Put the network into training or evaluation mode."""
        self.network.train(mode)
        self.training = mode
        return self

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the network's own class."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_network":
                raise
            return getattr(self._network[0], name)


def rows_with_bad_ones(rows: Sequence[dict[str, Any]], asked: ModelInputs) -> list[dict[str, Any]]:
    """Return rows of predictions with one for each bad one: null in place of the answers, and `error`."""
    left = iter(rows)
    empty = dict.fromkeys(rows[0], None) if rows else {}
    return [
        {**empty, "input": name, "error": asked.bad[k]} if k in asked.bad else {**next(left), "error": ""}
        for k, name in enumerate(asked.names)
    ]


def predictions_table(rows: Sequence[Mapping[str, Any]], card: Card, with_errors: bool = False) -> list[list[str]]:
    """Return `predictions_rows` as a table, header first: the class and its probability, or the value of every output.

    with_errors: with a column of the reasons why rows are bad.
    """
    # a shifted target is large compared with its spread, so it needs more digits
    columns, digits = ["input", *card["classes"]], ".12g" if any(card.get("target-shift", ())) else ".4g"
    if card["has-classes"]:
        columns, digits = ["input", "class", "probability" if len(card["outputs"]) > 1 else "output"], ".4f"
    columns += ["error"] * with_errors

    def text(value: object) -> str:
        return format(value, digits) if isinstance(value, float) else "" if value is None else str(value)

    return [columns, *([text(row.get(name)) for name in columns] for row in rows)]


def predictions_rows(names: Sequence[str], predictions: NDArray[np.float32], card: Card) -> list[dict[str, Any]]:
    """Return predictions, one mapping per input: the class and its probability, or the value of every output.

    With classes it also has the probability of each.
    """
    words = answers_in_words(predictions, card).tolist()
    classes: list[str] = card["classes"]
    if card["has-classes"]:
        single = len(card["outputs"]) == 1
        return [
            {"input": name, "class": word, "output" if single else "probability": float(row.max())}
            | ({} if single else {"probabilities": dict(zip(classes, map(float, row), strict=True))})
            for name, word, row in zip(names, words, predictions, strict=True)
        ]
    return [
        {"input": name, **dict(zip(classes, map(float, row), strict=True))}
        for name, row in zip(names, words, strict=True)
    ]


def measure(outputs: NDArray[np.float32], targets: NDArray[Any], card: Card) -> tuple[Metric, float]:
    """Return the run's headline metric, and its value for samples with targets."""
    import torch

    task = tasks.named(card["task"])
    task.judged_by = card["settings"].get("headline", "")
    metric = task.headline
    return metric, task.measure(torch.from_numpy(outputs), torch.from_numpy(targets), (metric.name,))[metric.name]
