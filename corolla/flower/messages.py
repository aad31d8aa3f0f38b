"""The messages between strategy and mod: the user's own records, and beside them one record that only the two read.

A download has the user's ArrayRecord, with the tensors that travel, and the user's ConfigRecord. `HEADER` says what the mod needs.
`EXTRAS` has the method's further arrays, and `INITIAL` the tensors that stay on a client, for a client that has none yet. An
upload has the user's metrics and Corolla's own upload (fl_app/transport/wire.py). A trained model that the method uploads as it is
stays in the user's own ArrayRecord, and is not copied.

If a method judges models by their losses before it trains, an evaluate message with the same download comes first. The train
message has the losses of its reply.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_app.config import RunConfig
from fl_app.errors import UserError, listed
from fl_app.keys import specs
from fl_app.layout import Layout, Model, Slot, Split, Vector, packed
from fl_app.transport.flower import ArrayRecord
from fl_app.transport.wire import named_record, viewed

HEADER, EXTRAS, INITIAL = "corolla", "corolla-extras", "corolla-initial"
# Entry of the header: the losses of the models that a client judges before it trains. A message without any asks for them.
LOSSES = "losses"
# Arrays among the extras: several models side by side, in place of the user's one.
MODELS = ("models.params", "models.buffers")
# Metric beside an error: no client of the app can run the method.
REFUSED = "refused"
# kinds of dtypes: floats, and what is sent as it was at the start
_NUMBERS = "fiub"
STATISTICS = ("*running_mean", "*running_var")
"""Names of the tensors that are no parameters: BatchNorm's running statistics, as PyTorch names them."""
OF_EVERY_RUN = ("method", "num-clients", "num-server-rounds")
"""Keys that every message has."""
RUN_KEYS = {
    spec.field: spec
    for spec in specs(RunConfig)
    if spec.name
    in (
        "seed",
        "robust",
        "byzantine-ratio",
        "max-update-norm",
        "max-size-weight",
        "server-optimizer",
        "server-learning-rate",
        "server-beta1",
        "server-beta2",
        "server-tau",
        "server-memory-limit",
        "local-epochs",
    )
}
"""The keys of a run that a strategy takes besides those of its method, by argument."""


class ReadModel(Model):
    """A model in the arrays of a record. Its vectors are made when one is read: many a method only passes its model on."""

    def __init__(self, arrays: Sequence[NDArray[Any]], layout: Layout, into: Model | None) -> None:
        # the parent is frozen, and its fields stay unset
        vars(self).update(_arrays=arrays, _layout=layout, _into=into)

    @cached_property
    def _made(self) -> Model:
        arrays, count = self.__dict__["_arrays"], len(self.__dict__["_layout"].params)
        into = self.__dict__["_into"] or Model(*(np.empty(n, np.float32) for n in self._lengths))
        # a value beyond float32 becomes infinite, and is refused as that
        with np.errstate(over="ignore"):
            for vector, parts in ((into.params, arrays[:count]), (into.buffers, arrays[count:])):
                if parts:
                    np.concatenate([part.reshape(-1) for part in parts], out=vector, casting="unsafe")
        return into

    @property
    def _lengths(self) -> tuple[int, int]:
        layout: Layout = self.__dict__["_layout"]
        return layout.d, layout.b

    @property
    def params(self) -> Vector:
        """Return the parameters, float32 [d]."""
        return self._made.params

    @property
    def buffers(self) -> Vector:
        """Return the buffers, float32 [b]."""
        return self._made.buffers


@dataclass(frozen=True)
class AppForm:
    """The tensors of the user's model, known by their names, shapes and dtypes alone.

    layout: of the tensors of floats. dtypes: of all tensors by name, in the user's order; those that are no floats are sent as they
    were at the start.
    """

    layout: Layout
    dtypes: Mapping[str, str]

    @classmethod
    def of(cls, arrays: ArrayRecord, statistics: Sequence[str] = STATISTICS, classifier: Sequence[str] = ()) -> AppForm:
        """Return the form of an ArrayRecord. statistics, classifier: names, or patterns such as `fc.*`.

        Raises UserError for arrays that Corolla cannot compute with, and for a pattern that fits no tensor.
        """
        dtypes, shapes = {}, {}
        for name, array in arrays.items():
            try:
                kind: str = np.dtype(array.dtype).kind
            except TypeError:
                kind = ""
            if kind not in tuple(_NUMBERS):
                raise UserError(key=name, rule="must have real numbers of a dtype of NumPy's", value=array.dtype)
            dtypes[name] = array.dtype
            if kind == "f":
                shapes[name] = tuple(array.shape)
        if not any(math.prod(shape) for shape in shapes.values()):
            raise UserError(key="initial_arrays", rule="must have an array of floats", value=listed(list(dtypes)))
        among = _matching("statistics", statistics if statistics != STATISTICS else (), shapes) or {
            name for name in shapes if any(fnmatch.fnmatchcase(name, pattern) for pattern in statistics)
        }
        params = packed((name, shape) for name, shape in shapes.items() if name not in among)
        paths = {_path(name) for name in among}
        layout = Layout(
            params,
            packed((name, shapes[name]) for name in shapes if name in among),
            batchnorm=frozenset(name for name in shapes if _path(name) in paths),
        )
        split = _split({slot.name: slot for slot in params}, _matching("classifier", classifier, shapes))
        return cls(dataclasses.replace(layout, classifier=split.classifier & layout.names, split=split), dtypes)

    @cached_property
    def constants(self) -> list[str]:
        """Names of the tensors that are no floats."""
        return [name for name in self.dtypes if name not in self.layout.names]

    def record(self, layout: Layout, model: Model, constants: Mapping[str, Any]) -> ArrayRecord:
        """Return a model's tensors, and the constants, as the user's record: in the user's order and dtypes.

        layout: of the model, a subset of the whole layout.
        """
        tensors = layout.tensors(model) if model.params.size + model.buffers.size else {}
        arrays = {name: tensor.astype(self.dtypes[name], copy=False) for name, tensor in tensors.items()}
        made = {**named_record(arrays), **constants}
        return ArrayRecord({name: made[name] for name in self.dtypes if name in made})

    def read(self, layout: Layout, record: ArrayRecord, whose: str, into: Model | None = None) -> Model:
        """Return the model in a record. Raises UserError unless all tensors of the layout are there, in their shapes.

        Its vectors are made when one is read. into: a model whose vectors take them.
        """
        slots = (*layout.params, *layout.buffers)
        if lacking := [slot.name for slot in slots if slot.name not in record]:
            raise UserError(key=whose, rule=f"must have the arrays of the message; {listed(lacking)} missing")
        found = [viewed(record[slot.name]) for slot in slots]
        for slot, array in zip(slots, found, strict=True):
            if array.shape != slot.shape:
                raise UserError(key=f"{whose}: {slot.name}", rule=f"must have shape {slot.shape}", value=array.shape)
            if array.dtype.kind not in _NUMBERS:
                raise UserError(key=f"{whose}: {slot.name}", rule="must have real numbers", value=array.dtype)
        return ReadModel(found, layout, into)

    def to_json(self) -> str:
        """Return the form as JSON, for the mod."""
        layout = self.layout
        return json.dumps(
            {
                "params": [[slot.name, slot.shape] for slot in layout.params],
                "buffers": [[slot.name, slot.shape] for slot in layout.buffers],
                "batchnorm": sorted(layout.batchnorm),
                "classifier": sorted(layout.classifier),
                "layer": layout.split.layer,
                "fault": layout.split.fault,
                "dtypes": self.dtypes,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> AppForm:
        """Return the form that `to_json` wrote."""
        said = json.loads(text)
        params, buffers = (packed((name, tuple(shape)) for name, shape in said[part]) for part in ("params", "buffers"))
        split = Split(frozenset(said["classifier"]), said["layer"], fault=said["fault"])
        batchnorm = frozenset(said["batchnorm"])
        return cls(Layout(params, buffers, split.classifier, batchnorm, split=split), said["dtypes"])


def _path(name: str) -> str:
    """Return the path of the module that a tensor belongs to."""
    return name.rpartition(".")[0]


def _matching(key: str, patterns: Sequence[str], names: Mapping[str, Any]) -> frozenset[str]:
    """Return the names that fit a pattern. Raises UserError for a pattern that fits none."""
    found: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        fitting = fnmatch.filter(names, pattern)
        if not fitting:
            raise UserError(key=key, rule=f"must name arrays of floats: {listed(list(names))}", value=pattern)
        found.update(fitting)
    return frozenset(found)


def _split(params: Mapping[str, Slot], chosen: frozenset[str]) -> Split:
    """Return the model's split. chosen: the classifier; empty: the module of the last weight of two or more dimensions."""
    weights = [name for name, slot in params.items() if len(slot.shape) > 1]
    path = _path(weights[-1]) if weights else ""
    if not (chosen or path):
        return Split(fault="the names of its arrays do not tell the classifier")
    return _of_names(params, chosen or frozenset(name for name in params if _path(name) == path))


def _of_names(params: Mapping[str, Slot], classifier: frozenset[str]) -> Split:
    """Return the split with this classifier. It counts as one linear layer if it is a matrix and at most a vector of a module."""
    paths = {_path(name) for name in classifier}
    shapes = {name.rpartition(".")[2]: params[name].shape for name in classifier if name in params}
    linear = len(paths) == 1 and {"weight"} <= set(shapes) <= {"weight", "bias"} and len(shapes["weight"]) == 2
    return Split(classifier, min(paths) if len(paths) == 1 else None, linear)
