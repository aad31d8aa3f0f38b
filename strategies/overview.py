"""The built-in methods side by side, grouped by what their clients share: what each costs, and when to use it.

`corolla methods --table` prints it, and docs/methods.md has it. Sizes are bytes of defaults, in the letters of that page.
"""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """One method. travels: up and down per client and round; stays: what never leaves a client; server, disk: bytes kept there, the
    latter per client; epochs: of training per round, E being `local-epochs`; use: when.
    """

    method: str
    travels: str
    stays: str
    server: str
    disk: str
    epochs: str
    use: str


_MODEL, _BODY, _NONE = "model both ways", "body both ways", "–"

GROUPS: dict[str, tuple[Row, ...]] = {
    "Nothing": (Row("local", "nothing", "everything", _NONE, "4(d+b)", "E", "the line that sharing has to beat"),),
    "One global model for all": (
        Row("fedavg", _MODEL, _NONE, _NONE, _NONE, "E", "clients alike; the line for all others"),
        Row("fedprox", _MODEL, _NONE, _NONE, _NONE, "E", "long local training that drifts"),
        Row("feddyn", _MODEL, "λ", "4d", "4d", "E", "many rounds, drift; clients that count the same"),
        Row("scaffold", "model; down + 4d", "c_i", "4d", "4d", "E", "drift, and clients that often take part"),
        Row("moon", _MODEL, "last model", _NONE, "4(d+b)", "E, 3 E forward", "images whose features drift"),
        Row("fedntd", _MODEL, _NONE, _NONE, _NONE, "E, 2 E forward", "classes missing on clients, nothing kept"),
        Row("fedgen", "model; up + 4C, down + generator", _NONE, "generator", _NONE, "E", "classes missing on clients"),
        Row("fedpake", _MODEL, _NONE, _NONE, _NONE, "E", "parameters that clients disagree on"),
    ),
    "A global model, and one of one's own": (
        Row("ditto", _MODEL, "own model", _NONE, "4(d+b)", "2 E", "both models are wanted"),
        Row("pfedme", _MODEL, "own model", _NONE, "4(d+b)", "5 E", "as ditto, with work to spare"),
        Row(
            "apfl",
            _MODEL,
            "own model, its share",
            _NONE,
            "4(d+b) + 8",
            "2 E",
            "clients that differ in how much they differ",
        ),
        Row("fedala", _MODEL, "start's mixture", _NONE, "8h", "E, + 1 forward", "personal at no more traffic"),
    ),
    "A part of the model": (
        Row("fedper", _BODY, "classifier", _NONE, "4h", "E", "different classes per client; simple and strong"),
        Row("fedrep", _BODY, "classifier", _NONE, "4h", "E", "as fedper, little data per client"),
        Row("flute", _BODY, "classifier", _NONE, "4h", "E", "as fedper, few samples of many classes"),
        Row("fedas", _BODY, "own model", _NONE, "4(d+b)", "E + 1, + F", "as fedper, clients that seldom take part"),
        Row("fedbabu", _BODY, _NONE, _NONE, _NONE, "E", "clients that fine-tune; new ones too"),
        Row("perfedmask", "trained layers up, body down", _NONE, _NONE, _NONE, "up to E", "as fedbabu, weak clients"),
        Row(
            "pfedfda",
            "body and Gaussians",
            "class prior",
            _NONE,
            _NONE,
            "E, + 2 forward",
            "little data, shifted inputs",
        ),
        Row("fedbn", "all but BatchNorm", "BatchNorm", _NONE, "4(a+b)", "E", "inputs that look different"),
        Row("lg-fedavg", "classifier", "body", _NONE, "4(d−h+b)", "E", "little traffic"),
        Row("fedobp", _MODEL, "few parameters", _NONE, "4(d+b) + ⌈d/8⌉", "E", "a global model, hardly touched"),
        Row(
            "feddpa",
            _MODEL,
            "informative parameters",
            _NONE,
            "4d + ⌈d/8⌉",
            "2 E + 1",
            "as fedobp, by Fisher information",
        ),
        Row(
            "fedselect", "model; up + ⌈d/8⌉", "a growing part", _NONE, "4d + 2⌈d/8⌉", "2 E", "it is unknown which part"
        ),
        Row("pfedgate", _MODEL, "gate", _NONE, "the gate", "E", "one model, adapted by little; sparse models"),
    ),
    "Parameters among similar clients": (
        Row(
            "fedcac",
            "model; up + ⌈d/8⌉",
            _NONE,
            "4(d+b) + ⌈d/8⌉ a client",
            _NONE,
            "E",
            "groups of alike clients, unknown",
        ),
        Row("feddac", "model; up + ⌈d/8⌉", _NONE, "4(d+b) a client", _NONE, "E", "as fedcac, no global model"),
        Row("fedamp", _MODEL, "own model", "8(d+b) a client", "4(d+b)", "E", "few clients, clear groups"),
        Row("feddwa", "model; up + 4d", _NONE, "4(d+b) a client", _NONE, "2 E", "neighbours by where models go"),
        Row(
            "fedfomo",
            "model up, M others' down",
            "held-out data, θ⁰",
            "4(d+b) + 4N a client",
            "8(d+b)",
            "0.8 E",
            "clients that may see each other's models",
        ),
    ),
    "Several global models": (
        Row(
            "ifca", "one up, K down", _NONE, "4K(d+b)", _NONE, "E, + K forward", "few clear groups, seldom seen clients"
        ),
        Row("cfl", _MODEL, _NONE, "4(d+b) a cluster", _NONE, "E", "groups of unknown number, all take part"),
        Row(
            "fedem",
            "M models both ways",
            "weights π",
            "4M(d+b)",
            "4M",
            "M E, + M forward",
            "clients that mix kinds of data",
        ),
        Row(
            "fedconcat",
            "model; later classifier, and encoders down once",
            _NONE,
            "4K(d+b)",
            "4K(d−h+b)",
            "E; later 3 batches",
            "clear groups of labels, one model for all in the end",
        ),
        Row("floco", "model, M classifiers", _NONE, "4M a client", _NONE, "E", "degrees of likeness, one body"),
    ),
}

_HEADS = (
    "shared",
    "method",
    "travels",
    "stays on the client",
    "server keeps",
    "client's disk",
    "epochs",
    "when to use it",
)


def methods_table() -> str:
    """Return all of it as a Markdown table, a line per method."""
    lines = [_HEADS, tuple("---" for _ in _HEADS)]
    for group, rows in GROUPS.items():
        for k, row in enumerate(rows):
            lines.append(("" if k else group, f"`{row.method}`", *row[1:]))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
