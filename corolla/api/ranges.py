"""Numbers in a range, as options of a command or as Python keywords take them. A refusal states the rule and the value."""

from __future__ import annotations

import math
from typing import Any

import click


def _told(message: str, kind: click.IntRange | click.FloatRange, value: object) -> str:
    """Return a refusal in words. message: click's own, for a range that has an open or an upper end."""
    if kind.max is not None or kind.min_open or kind.min is None:
        return message
    number = "a whole number" if isinstance(kind, click.IntRange) else "a number"
    return f"must be {number} >= {kind.min}, got {_shown(value)}"


def _shown(value: object) -> str:
    """Return a number as the user wrote it, anything else in quotation marks."""
    try:
        float(str(value))
    except ValueError:
        return repr(value)
    return str(value)


class _InWords(click.ParamType[Any]):
    """A range whose refusals state the rule and the value. It stands before one of click's ranges."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number. Raises click.BadParameter for anything else."""
        try:
            number = super().convert(value, param, ctx)
            # no comparison with NaN fails
            if isinstance(number, float) and not math.isfinite(number):
                self.fail(f"{value} is not finite", param, ctx)
            return number
        except click.BadParameter as error:
            assert isinstance(self, click.IntRange | click.FloatRange)
            self.fail(_told(error.message, self, value), param, ctx)


class Whole(_InWords, click.IntRange):
    """Whole numbers from `min` on."""


class Number(_InWords, click.FloatRange):
    """Numbers from `min` on."""


def in_words(parameter: click.Parameter) -> None:
    """Let a parameter with one of click's ranges refuse numbers in words."""
    kind = parameter.type
    if type(kind) is click.IntRange:
        parameter.type = Whole(kind.min, kind.max, kind.min_open, kind.max_open, kind.clamp)
    elif type(kind) is click.FloatRange:
        parameter.type = Number(kind.min, kind.max, kind.min_open, kind.max_open, kind.clamp)
