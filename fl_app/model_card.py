"""The card of an exported model, FILE.json beside FILE: its origin, metrics, inputs and outputs.

The card holds the SHA-256 of FILE and of itself, so that a change of either is detected. `Card` is its form: `read`
returns, and `write` writes, nothing else.
"""

from __future__ import annotations

import hashlib
import json
import math
import reprlib
import types
import typing
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict, cast, get_args, get_origin, get_type_hints

from fl_app import plugins, tasks
from fl_app.checksums import sha256_of
from fl_app.config.rules import split_names
from fl_app.data.encoding import TEXT, Encoding
from fl_app.errors import MALFORMED, UserError
from fl_app.files import no_such, publish_text
from fl_app.keys import Scalar

Entries = dict[str, Any]
"""Entries of a card that is being made."""


class _RunEntry(TypedDict):
    name: str
    digest: str


_InputEntry = TypedDict(
    "_InputEntry",
    {
        "dtype": Literal["uint8", "int64", "float32"],
        "shape": list[int],
        "image-size": int,
        "normalize": Literal["unit", "mean-std", "symmetric"],
        "mean": list[float],
        "std": list[float],
        # absent from cards of earlier versions
        "bits": NotRequired[int],
        "shift": NotRequired[list[float]],
        "scale": NotRequired[list[float]],
    },
)
_DataEntry = TypedDict("_DataEntry", {"dataset": str, "sha256": NotRequired[str], "file-sha256": NotRequired[str]})


class _SiteEntry(TypedDict, total=False):
    separator: str
    decimal: str
    rename: dict[str, str]
    scale: dict[str, float]
    fill: dict[str, float | str]
    exclude: list[str]


class _TableEntry(TypedDict, total=False):
    encodings: list[dict[str, Any]]
    others: list[str]
    site: _SiteEntry


_SettingsEntry = TypedDict(
    "_SettingsEntry",
    {
        "dataset": str,
        "task": str,
        "headline": str,
        "target": str,
        "separator": str,
        "na-values": str,
        "test-ratio": float,
    },
    total=False,
)


class _ShapeEntry(TypedDict):
    num_classes: int
    in_channels: int
    image_size: int
    input_shape: list[int]


Card = TypedDict(
    "Card",
    {
        "file": str,
        "format": int,
        "made-by": str,
        "run": _RunEntry,
        "model": str,
        "method": str,
        "data": _DataEntry,
        "task": str,
        "settings": _SettingsEntry,
        "shape": _ShapeEntry,
        "input": _InputEntry,
        "outputs": list[Literal["outputs", "predictions"]],
        "classes": list[str],
        "has-classes": bool,
        "features": list[str],
        "table": NotRequired[_TableEntry],
        "target-shift": NotRequired[list[float]],
        "missing": NotRequired[list[str]],
        "metrics": dict[str, Any],
    },
)
"""A model's card. It may have more entries than these, that no code reads."""


class Sealed(Card):
    """The card of a file: with the file's SHA-256 and its bytes."""

    sha256: str
    bytes: int


FORMAT = 1
# of a card: names of thousands of classes and columns take less
_MOST_BYTES = 1 << 26
_MOST_BITS = 16
_OWN = "card-sha256"
# key of `data`: the hash of the run's data file
FILE_HASH = "file-sha256"


def beside(file: Path) -> Path:
    """Return the path of a file's card."""
    return file.with_name(f"{file.name}.json")


def write(file: Path, facts: Entries) -> Entries:
    """Write a file's card and return its entries. facts: entries other than those about the file itself.

    Raises UserError if they are not a card.
    """
    card: Entries = {"file": file.name, "sha256": sha256_of(file), "bytes": file.stat().st_size, **facts}
    card[_OWN] = _own_hash(card)
    text = _text(card)
    _typed(beside(file), json.loads(text))
    publish_text(beside(file), text)
    return card


def read(file: Path) -> Sealed:
    """Read a card, and check it and its file.

    Raises UserError if either is missing or has changed, if the card has another form, or if it is another file's.
    """
    path = beside(file)
    for needed in (file, path):
        if not needed.is_file():
            more = f"{needed}: no such file or directory; {file.name} needs its card beside it"
            raise UserError(more if needed is path else no_such(needed))
    if (nbytes := path.stat().st_size) > _MOST_BYTES:
        raise UserError(f"{path} is not a card: it may have {_MOST_BYTES} bytes, it has {nbytes}")
    card: Any = None
    try:
        text = path.read_text(encoding="utf-8")
        card = json.loads(text)
        intact = text == _text(card) and card[_OWN] == _own_hash(card)
    except (OSError, *MALFORMED):
        intact = False
    if not intact:
        raise UserError(f"{path} is not a card, or has changed since it was written")
    if type(known := card.get("format")) is int and known != FORMAT and isinstance(maker := card.get("made-by"), str):
        raise UserError(f"{path} was written by {maker:.60}: this version cannot read its cards")
    found = _typed(path, card)
    if found["file"] != file.name:
        raise UserError(f"{path} is the card of {found['file']}, not of {file.name}: give the file its name back")
    if (sha256 := sha256_of(file)) != found["sha256"]:
        raise UserError(
            f"{file} has changed since it was exported: its sha256 is {sha256} ({file.stat().st_size} bytes), in its card "
            f"{found['sha256']} ({found['bytes']} bytes)"
        )
    return found


def of_no_file(facts: Entries) -> Card:
    """Return the card of a model in memory. Raises UserError as `write`."""
    return _typed(facts["file"], json.loads(_text(facts)), Card)


def _typed(name: object, card: Entries, form: type = Sealed) -> Sealed:
    """Return JSON as a card. name: of the card in an error. Raises UserError naming the entry that is wrong."""
    why = form_problem(card, form, "") or form_problem(card["settings"], dict[str, Scalar], "settings")
    why = why or _unfit(cast(Card, card))
    if not why:
        try:
            json.dumps(card, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            why = "it has a text that is none"
    if why:
        raise UserError(f"{name} is not a card: {why}")
    return cast(Sealed, card)


def _unfit(card: Card) -> str:
    """Return why a card's entries do not fit each other; empty if they do."""
    inputs, shape = card["input"], card["shape"]
    sides = [shape["in_channels"], shape["image_size"], shape["image_size"]]
    counts = [len(inputs["shape"]), len(card["classes"]), len(card["outputs"])]
    if min(*sides, shape["num_classes"], *inputs["shape"], *counts) < 1:
        return "shape, input.shape, classes and outputs must not be empty or 0"
    if more := sorted(shape.keys() - get_type_hints(_ShapeEntry)):
        return f"shape must have no other entries, got {reprlib.repr(more[0])}"
    if inputs["shape"] != (shape["input_shape"] or sides):
        return f"input.shape must be the model's {shape['input_shape'] or sides}, got {inputs['shape']}"
    if not 0 <= inputs.get("bits", 0) <= _MOST_BITS:
        return f"input.bits must be in [0, {_MOST_BITS}], got {inputs['bits']}"
    if any(std <= 0 for std in inputs["std"]):
        return "input.std must hold positive numbers"
    if any(len(set(card[key])) < len(card[key]) for key in ("classes", "features")):  # type: ignore[literal-required]
        return "classes and features must have names that differ"
    width: int = inputs["shape"][0 if len(inputs["shape"]) == 3 else -1]
    scaled = [len(inputs[name]) for name in ("mean", "std")] if inputs["normalize"] == "mean-std" else []
    stored = [len(inputs.get("shift", ())), len(inputs.get("scale", ()))]
    if any(count not in (1, width) for count in scaled) or stored not in ([0, 0], [width, width]):
        return f"input's mean, std, shift and scale must hold {width} numbers each"
    numbers = 0 if card["has-classes"] else len(card["classes"])
    if len(card.get("target-shift", ())) not in (0, numbers):
        return f"target-shift must hold {numbers} numbers, got {len(card.get('target-shift', ()))}"
    if card["settings"].get("task", card["task"]) != card["task"]:
        return f"task must be the settings' {card['settings'].get('task')!r}, got {card['task']!r}"
    if card["task"] not in tasks.BUILT_IN and not plugins.is_reference(card["task"]):
        return f"task must be one of {', '.join(tasks.BUILT_IN)}, or module:Class, got {reprlib.repr(card['task'])}"
    if more := sorted(card.get("table", {}).get("site", {}).keys() - get_type_hints(_SiteEntry)):
        return f"table.site must have no other entries, got {reprlib.repr(more[0])}"
    encodings = card.get("table", {}).get("encodings", [])
    for k, fields in enumerate(encodings):
        try:
            Encoding.from_json(fields)
        except MALFORMED:
            return f"table.encodings[{k}] must be the encoding of a column, got {reprlib.repr(fields)}"
    return _unfit_table(card, width) if encodings else ""


def _unfit_table(card: Card, width: int) -> str:
    """Return why the encodings of a table's columns do not fit the model's inputs; empty if they do."""
    encodings = [Encoding.from_json(fields) for fields in card["table"]["encodings"]]
    columns = [encoding.column for encoding in encodings]
    if len(set(columns)) < len(columns):
        return "table.encodings must have columns that differ"
    if lacking := [name for name in ("shift", "scale") if name not in card["input"]]:
        return f"input.{lacking[0]} is missing"
    targets = split_names(card["settings"].get("target", ""))
    wanted = 1 if card["has-classes"] else len(card["classes"])
    if len(targets) not in (0, wanted):
        return f"settings.target must name the model's {wanted} targets, got {len(targets)}"
    if any(encoding.kind == TEXT and [encoding.length] != card["input"]["shape"] for encoding in encodings):
        return f"table.encodings must give the model's {width} tokens"
    names = [name for encoding in encodings for name in encoding.names]
    if len(names) not in (1, width):
        return f"table.encodings must give the model's {width} features, got {len(names)}"
    return ""


def _own_hash(card: Entries) -> str:
    return hashlib.sha256(_text({name: value for name, value in card.items() if name != _OWN}).encode()).hexdigest()


def _text(card: Entries) -> str:
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in card.items()) + "\n}\n"


_WORDS = {str: "a text", int: "a whole number", float: "a finite number", bool: "true or false", type(None): "null"}


def form_problem(value: object, form: Any, name: str) -> str:
    """Return the first difference between a JSON value and a type as `NAME must be ..., got ...`; empty if there is none.

    form: a TypedDict, whose other keys are free, `list[T]`, `dict[str, T]`, a Literal, a union, or one of str, int, float,
    bool, None and Any. A whole number has at most 63 bits. name: of the value, in the message.
    """
    if form is Any:
        return ""
    if typing.is_typeddict(form):
        return _of_keys(value, form, name) if isinstance(value, dict) else _differs(value, "an object", name)
    origin, inside = get_origin(form), get_args(form)
    if origin in (types.UnionType, typing.Union):
        whys = [form_problem(value, one, name) for one in inside]
        return whys[-1] if all(whys) else ""
    if origin is typing.Literal:
        return "" if type(value) is str and value in inside else _differs(value, f"one of {', '.join(inside)}", name)
    if origin in (list, dict):
        if not isinstance(value, origin):
            return _differs(value, "a list" if origin is list else "an object", name)
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return next((why for key, one in items if (why := form_problem(one, inside[-1], f"{name}[{key!r:.40}]"))), "")
    return "" if _is(value, form) else _differs(value, _WORDS[form], name)


def _of_keys(value: dict[str, Any], form: Any, name: str) -> str:
    for key, hint in get_type_hints(form).items():
        within = f"{name}.{key}" if name else key
        if key not in value and key in form.__required_keys__:
            return f"{within} is missing"
        if key in value and (why := form_problem(value[key], hint, within)):
            return why
    return ""


def _is(value: object, form: type) -> bool:
    if form is float and type(value) is float:
        return math.isfinite(value)
    if type(value) is int:
        return form in (int, float) and abs(value) < 2**63
    return type(value) is form


def _differs(value: object, rule: str, name: str) -> str:
    return f"{name} must be {rule}, got {reprlib.repr(value)}"
