"""The card of an exported model, FILE.json beside FILE: its origin, metrics, inputs and outputs.

The card holds the SHA-256 of FILE and of itself, so that a change of either is detected.
"""

from __future__ import annotations

import hashlib
import json
from importlib import metadata
from pathlib import Path
from typing import Any

from corolla.experiments.exported.run_models import Trained
from fl_app import tasks
from fl_app.checksums import sha256_of
from fl_app.errors import MALFORMED, UserError
from fl_app.files import no_such, publish_text
from fl_app.server.properties import SAMPLES
from fl_app.server.run_folder import NAME

Card = dict[str, Any]

FORMAT = 1
_OWN = "card-sha256"
# key of `data`: the hash of the run's data file
FILE_HASH = "file-sha256"
# keys that hold a path on the run's machine
_PATHS = ("initial-weights",)
# keys with values that may contain a path: `kind:/path`
_NAMED = ("dataset", "partition")


def beside(file: Path) -> Path:
    """Return the path of a file's card."""
    return file.with_name(f"{file.name}.json")


def about(trained: Trained) -> Card:
    """Return the card's description of a model's run: the model, its training, its metrics and its data."""
    run, config = trained.run, trained.config
    client = None if trained.client is None else str(trained.client)
    clients = run.clients if client is None else {client: run.clients.get(client, {})}
    metric = run.headline.name
    return {
        "format": FORMAT,
        "made-by": f"corolla {metadata.version('corolla')}",
        "run": {
            "name": run.path.resolve().name,
            "experiment": run.summary["experiment"],
            "digest": run.summary["digest"],
            "digest-version": run.summary.get("digest-version", 1),
            "rounds": run.summary["rounds"],
            "clients": run.summary["num-clients"],
            f"final-{metric}": run.summary.get(f"final-{metric}"),
        },
        "model": trained.name,
        **({} if client is None or NAME not in clients[client] else {"client": clients[client][NAME]}),
        "method": config.method,
        "parameters-sha256": trained.sha256,
        "metrics": measured(trained),
        "data": {
            "dataset": _without_path(config.dataset),
            **{
                what: sum(told)
                for what in SAMPLES
                if (told := [n for facts in clients.values() if (n := facts.get(what))])
            },
            **_class_counts(list(clients.values())),
        },
        "task": config.task,
        "settings": {
            key.name: _without_path(str(value)) if key.name in _NAMED else value
            for key, value in config.own_keys()
            if key.tells_runs_apart and key.name not in _PATHS
        },
        "shape": {**trained.shape, "input_shape": list(trained.shape.get("input_shape", ()))},
    }


def measured(trained: Trained) -> Card:
    """Return the last metrics of exactly this model: means over the clients evaluated with it, and their number.

    Empty if there are none: for example, a global model that no client uses unchanged.
    """
    rounds = list(trained.run.rounds.values())
    rows = rounds[-1].get("evaluation", {}).get("clients", {}) if rounds else {}
    mine = rows if trained.client is None else {i: row for i, row in rows.items() if i == str(trained.client)}
    same = [row for row in mine.values() if trained.is_of(row)]
    found: Card = {"clients": len(same)} if same else {}
    for metric in tasks.of(trained.config).metrics:
        if values := [row[metric.name] for row in same if row.get(metric.name) is not None]:
            found[metric.name] = sum(values) / len(values)
    return found


def _class_counts(clients: list[Card]) -> Card:
    """Return the sum of training samples per class; empty unless all clients sent theirs."""
    counts = [facts.get("class-counts") for facts in clients]
    if not counts or not all(counts):
        return {}
    return {"class-counts": [sum(column) for column in zip(*counts, strict=True)]}  # type: ignore[arg-type]


def _without_path(value: str) -> str:
    """Return `kind:/a/b` as `kind:b`: a card is passed on, and must not reveal paths."""
    kind, colon, path = value.partition(":")
    return f"{kind}:{Path(path).name}" if colon else value


# Files ----------------------------------------------------------------------------------------------------------------


def write(file: Path, facts: Card) -> Card:
    """Write a file's card and return it. facts: entries other than those about the file itself."""
    card = {"file": file.name, "sha256": sha256_of(file), "bytes": file.stat().st_size, **facts}
    card[_OWN] = _own_hash(card)
    publish_text(beside(file), _text(card))
    return card


def read(file: Path) -> Card:
    """Read a card, and check it and its file. Raises UserError if either is missing or has changed."""
    path = beside(file)
    for needed in (file, path):
        if not needed.is_file():
            more = f"{needed}: no such file or directory; {file.name} needs its card beside it"
            raise UserError(more if needed is path else no_such(needed))
    card: Card = {}
    try:
        text = path.read_text(encoding="utf-8")
        card = json.loads(text)
        intact = isinstance(card, dict) and text == _text(card) and card[_OWN] == _own_hash(card)
    except (OSError, *MALFORMED):
        intact = False
    if not intact:
        raise UserError(f"{path} is not a card, or has changed since it was written")
    if card["format"] != FORMAT:
        raise UserError(f"{path} was written by {card['made-by']}: this version cannot read its cards")
    if (sha256 := sha256_of(file)) != card["sha256"]:
        raise UserError(
            f"{file} has changed since it was exported: its sha256 is {sha256} ({file.stat().st_size} bytes), in its card "
            f"{card['sha256']} ({card['bytes']} bytes)"
        )
    return card


def _own_hash(card: Card) -> str:
    return hashlib.sha256(_text({name: value for name, value in card.items() if name != _OWN}).encode()).hexdigest()


def _text(card: Card) -> str:
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in card.items()) + "\n}\n"
