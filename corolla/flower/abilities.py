"""The methods that a Flower app of a user's own can run, and the lines that their training loops need: found by trying each."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from corolla.flower.client_mod import App, ClientTurn
from corolla.flower.method_strategy import name_of, strategy_class
from corolla.flower.training_loop import BEYOND_APP, LACKS_LINE, LOOP_FACTS, computes_with_steps, current_wishes
from fl_app.errors import UserError
from fl_app.transport.flower import ArrayRecord, ClientApp, Context, Message, MetricRecord, RecordDict
from fl_app.transport.inprocess import InProcessGrid
from fl_app.transport.wire import named_record
from strategies import METHODS

_ROUNDS, _CLIENTS = 3, 3


@dataclass(frozen=True)
class Ability:
    """What a method needs of an app.

    lines: functions that its training loop calls. beyond: why no app can run it, or "". facts: arguments that say
    what the loop has.
    """

    lines: frozenset[str] = frozenset()
    beyond: str = ""
    facts: tuple[str, ...] = ()


@functools.cache
def ability(method: str) -> Ability:
    """Return what a method with default keys needs, found by running it with a model of two layers."""
    lines = frozenset[str]()
    facts = LOOP_FACTS if computes_with_steps(METHODS[method]) else ()
    while True:
        error = _tried(method, lines, facts)
        if error is None:
            return Ability(lines, facts=facts)
        if error.rule == BEYOND_APP:
            return Ability(lines, str(error.value))
        lines |= {error.key}


def table() -> str:
    """Return a Markdown table: what methods need of the training loop, with the classes of these methods."""
    rows: dict[str, list[str]] = {}
    for method in METHODS:
        found = ability(method)
        lines = ", ".join(f"`{line}`" for line in sorted(found.lines, reverse=True))
        needs = "not possible" if found.beyond else f"calls {lines}" if lines else "any"
        if found.facts:
            needs += f"; arguments {', '.join(f'`{name}`' for name in found.facts)}"
        rows.setdefault(needs, []).append(f"`{name_of(method)}`")
    possible = sorted(rows.items(), key=lambda row: row[0].startswith("not possible"))
    body = [f"| {needs} | {', '.join(names)} |" for needs, names in possible]
    return "\n".join(["| training loop | classes |", "|---|---|", *body])


def _tried(method: str, lines: frozenset[str], facts: tuple[str, ...]) -> UserError | None:
    """Run a method with an app whose loop calls these functions, and takes one step on all samples.

    Return the client's error that every client would have.
    """
    errors: list[UserError] = []

    def mod(message: Message, context: Context, call_next: App) -> Message:
        try:
            turn = ClientTurn(message, context, call_next)
            return turn.train() if message.metadata.message_type == "train" else turn.evaluate()
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
        metrics = MetricRecord({"num-examples": 10})
        return Message(RecordDict({"arrays": named_record(moved), "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 10})}), reply_to=message)

    with _silence():
        try:
            said: dict[str, Any] = {name: 10 if name == "batch_size" else 1 for name in facts}
            strategy_class(name_of(method))(**said).start(InProcessGrid(app, {}, _CLIENTS), _model(), _ROUNDS)
        except UserError as error:
            errors.append(error)
    if errors and errors[0].rule not in (BEYOND_APP, LACKS_LINE):
        raise errors[0]
    return errors[0] if errors else None


def _model() -> ArrayRecord:
    draw = np.random.default_rng(0)
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
