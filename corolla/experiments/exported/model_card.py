"""The card of an exported model, FILE.json beside FILE: where it comes from, how good it is, what it is given and what it answers.

It holds FILE's sha256, and one of itself: a byte that changes in either is found.
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
from fl_app.errors import UserError
from fl_app.files import publish_text
from fl_app.server.properties import SAMPLES

Card = dict[str, Any]

FORMAT = 1
_OWN = "card-sha256"
# keys that name a place on the machine of the run
_PATHS = ("initial-weights",)
# Keys whose values may hold a path: `kind:/path`.
_NAMED = ("dataset", "partition")


def beside(file: Path) -> Path:
    """Return where a file's card lies."""
    return file.with_name(f"{file.name}.json")


def about(trained: Trained) -> Card:
    """Return what a card tells of a model's run: what it is, its training, its metrics, its data."""
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
    """Return the run's last metrics of exactly this model: means over the clients they were measured on, and how many.

    Empty if none were: a global model that no client uses as it is.
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
    """Sum training samples per class, if all clients told theirs."""
    counts = [facts.get("class-counts") for facts in clients]
    if not counts or not all(counts):
        return {}
    return {"class-counts": [sum(column) for column in zip(*counts, strict=True)]}  # type: ignore[arg-type]


def _without_path(value: str) -> str:
    """Return `kind:/a/b` as `kind:b`: a card leaves the house, the place of its data need not."""
    kind, colon, path = value.partition(":")
    return f"{kind}:{Path(path).name}" if colon else value


# Files ----------------------------------------------------------------------------------------------------------------


def write(file: Path, facts: Card) -> Card:
    """Write a file's card. facts: without what is known of the file itself. Returns the card."""
    card = {"file": file.name, "sha256": sha256_of(file), "bytes": file.stat().st_size, **facts}
    card[_OWN] = _own_hash(card)
    publish_text(beside(file), _text(card))
    return card


def read(file: Path) -> Card:
    """Read and check a file's card, and the file. Raises UserError naming what is missing or is not what was written."""
    path = beside(file)
    for needed in (file, path):
        if not needed.is_file():
            raise UserError(
                f"{needed}: no such file" + (f"; {file.name} needs its card beside it" if needed is path else "")
            )
    card: Card = {}
    try:
        text = path.read_text(encoding="utf-8")
        card = json.loads(text)
        intact = isinstance(card, dict) and text == _text(card) and card[_OWN] == _own_hash(card)
    except (OSError, ValueError, KeyError, RecursionError):
        intact = False
    if not intact:
        raise UserError(f"{path} is not the card that was written: it has changed, or is no card")
    if card["format"] != FORMAT:
        raise UserError(f"{path} was written by {card['made-by']}, whose cards this version does not read")
    if (sha256 := sha256_of(file)) != card["sha256"]:
        raise UserError(
            f"{file} is not what was exported: its sha256 is {sha256} ({file.stat().st_size} bytes), its card says "
            f"{card['sha256']} ({card['bytes']} bytes)"
        )
    return card


def _own_hash(card: Card) -> str:
    return hashlib.sha256(_text({name: value for name, value in card.items() if name != _OWN}).encode()).hexdigest()


def _text(card: Card) -> str:
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in card.items()) + "\n}\n"
