"""The error types meant for users: their messages are shown as they are, without a traceback; and how messages list things."""

from __future__ import annotations

_MAX_LISTED = 5
_CONTROL = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)])  # C0, DEL, C1


class UserError(ValueError):
    """Bad input: the message names the thing, the rule and the value, and fits on one screen."""


class RunFailed(RuntimeError):
    """A run that was started did not finish; the message says what is known of why."""


class Diverged(UserError):
    """Training ended in numbers beyond all bounds."""


def diverged(what: str, value: float, learning_rate: float) -> Diverged:
    """Return what is said of a training that ended in numbers beyond all bounds. what: one of them."""
    return Diverged(f"training diverged: its {what} is {value:.4g} (learning-rate {learning_rate:g})")


def listed(names: list[str], separator: str = ", ") -> str:
    """Return the first few names as an error prints them."""
    more = f"{separator}and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return separator.join(names[:_MAX_LISTED]) + more


def describe(error: BaseException) -> str:
    """Return an exception's type and message."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def plain(text: str) -> str:
    """Return a text without control characters and lone surrogates: what clients wrote goes to terminals, files and pages."""
    return text.translate(_CONTROL).encode("utf-8", "replace").decode("utf-8")
