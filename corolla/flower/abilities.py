"""The methods that a Flower app of a user's own can run, and the lines that their training loops need: found by trying each."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from corolla.flower.client_mod import App, ClientTurn
from corolla.flower.method_strategy import name_of, strategy_class
from corolla.flower.training_loop import (
    BEYOND_APP,
    LACKS_LINE,
    LOOP_FACTS,
    computes_with_steps,
    current_wishes,
    judges_models,
)
from fl_app.errors import UserError
from fl_app.transport.flower import ArrayRecord, ClientApp, Context, Message, MetricRecord, RecordDict
from fl_app.transport.inprocess import InProcessGrid
from fl_app.transport.wire import named_record
from strategies import METHODS

_ROUNDS, _CLIENTS, _SAMPLES = 3, 3, 10
_NONE = "none"


@dataclass(frozen=True)
class Ability:
    """What a method needs of an app.

    lines: functions that its training loop calls. beyond: why no app can run it, or "". facts: arguments that say
    what the app has. judges: its evaluate function reports a loss. others: models besides the first that are given.
    """

    lines: frozenset[str] = frozenset()
    beyond: str = ""
    facts: tuple[str, ...] = ()
    judges: bool = False
    others: int = 0


@functools.cache
def ability(method: str) -> Ability:
    """Return what a method with default keys needs, found by running it with a model of two layers."""
    lines, facts = frozenset[str](), _facts(method)
    while True:
        error = _tried(method, lines, facts)
        if error is None:
            others = len(facts.get("other_arrays", ()))
            return Ability(lines, facts=tuple(facts), judges=judges_models(METHODS[method]), others=others)
        if error.rule == BEYOND_APP:
            return Ability(lines, str(error.value))
        lines |= {error.key}


def table() -> str:
    """Return a Markdown table: what methods need of the training loop, with the classes of these methods."""
    rows: dict[str, list[str]] = {}
    for method in METHODS:
        found = ability(method)
        lines = ", ".join(f"`{line}`" for line in sorted(found.lines, reverse=True))
        needs = f"{_NONE}: the method {found.beyond}" if found.beyond else f"calls {lines}" if lines else "any"
        if found.facts:
            needs += f"; arguments {', '.join(f'`{name}`' for name in found.facts)}"
        if found.judges:
            needs += "; the evaluate function reports its loss"
        rows.setdefault(needs, []).append(f"`{name_of(method)}`")
    possible = sorted(rows.items(), key=lambda row: row[0].startswith(_NONE))
    body = [f"| {needs} | {', '.join(names)} |" for needs, names in possible]
    return "\n".join(["| training loop | classes |", "|---|---|", *body])


def _facts(method: str) -> dict[str, Any]:
    """Return the arguments that a method needs, with values for an app that takes one step on all samples."""
    registered = METHODS[method]
    if computes_with_steps(registered):
        return dict.fromkeys(LOOP_FACTS, 1) | {"batch_size": _SAMPLES}
    params = registered.params()
    if registered.side_by_side:
        return {"other_arrays": [_model(k) for k in range(1, registered.side_by_side(params))]}
    # the data of an app's evaluate function are held out already
    return {"validation_ratio": 0.0} if judges_models(registered) and hasattr(params, "validation_ratio") else {}


def _tried(method: str, lines: frozenset[str], facts: Mapping[str, Any]) -> UserError | None:
    """Run a method with an app whose loop calls these functions, and takes one step on all samples.

    Return the client's error that every client would have.
    """
    errors: list[UserError] = []

    def mod(message: Message, context: Context, call_next: App) -> Message:
        try:
            return ClientTurn(message, context, call_next).answer()
        except UserError as error:
            errors.append(error)
            raise

    app = ClientApp(mods=[mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        wishes = current_wishes()
        assert wishes is not None
        wishes.asked |= lines
        wishes.steps = 1
        draw = np.random.default_rng(context.node_id)
        arrays = {name: array.numpy() for name, array in message.content["arrays"].items()}  # type: ignore[union-attr]
        moved = {name: (array + draw.normal(size=array.shape)).astype(np.float32) for name, array in arrays.items()}
        metrics = MetricRecord({"num-examples": _SAMPLES})
        return Message(RecordDict({"arrays": named_record(moved), "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": _SAMPLES, "eval_loss": 1.0})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    with _silence():
        try:
            strategy_class(name_of(method))(**facts).start(InProcessGrid(app, {}, _CLIENTS), _model(0), _ROUNDS)
        except UserError as error:
            errors.append(error)
    if errors and errors[0].rule not in (BEYOND_APP, LACKS_LINE):
        raise errors[0]
    return errors[0] if errors else None


def _model(seed: int) -> ArrayRecord:
    draw = np.random.default_rng(seed)
    shapes = {
        "body.weight": (4, 6),
        "body.bias": (4,),
        "norm.weight": (4,),
        "norm.running_mean": (4,),
        "head.weight": (3, 4),
        "head.bias": (3,),
    }
    return named_record({name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()})


@contextmanager
def _silence() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
