"""A network that one part of a process has built and only read, for the next part that needs the same one.

The check before a run, the run's server and, in one process, its clients each need the run's network. Building a large one
takes seconds, and two of them twice the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from torch import nn


class Made(NamedTuple):
    """What a network was built for, and the lines that its making told."""

    wanted: object
    lines: Sequence[str]


_MADE: WeakKeyDictionary[nn.Module, Made] = WeakKeyDictionary()
# at most one
_LEFT: list[nn.Module] = []


def note(module: nn.Module, wanted: object, lines: Sequence[str]) -> None:
    """Note what a new network was built for. wanted: equal for what may share a network."""
    _MADE[module] = Made(wanted, lines)


def leave(module: nn.Module) -> None:
    """Leave a network that was noted, and that nobody uses further, for the next `take`."""
    _LEFT[:] = [module]


def take(wanted: object) -> tuple[nn.Module, Sequence[str]] | None:
    """Return the network that was left, and the lines that its making told, if it is the wanted one. Any other is let go."""
    try:
        module = _LEFT.pop()
    # nothing was left, or another thread has just taken it
    except IndexError:
        return None
    made = _MADE[module]
    return (module, made.lines) if made.wanted == wanted else None


def clear() -> None:
    """Let go of a network that was left."""
    _LEFT.clear()
