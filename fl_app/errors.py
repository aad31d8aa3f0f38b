"""Errors for users, shown as their message without a traceback, and helpers that format messages."""

from __future__ import annotations

from typing import Any

DIVERGED = "training diverged"
_MAX_LISTED = 5
# C0, DEL and C1; then marks that change the direction of text or end a line
_CONTROL = dict.fromkeys(
    [*range(0x20), *range(0x7F, 0xA0), 0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)]
)


# what Python raises where a text of unknown origin, such as another party's JSON, has not the form that its reader expects
MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class UserError(ValueError):
    """Bad input. The message names the key or thing, the rule and the value, and fits on one screen.

    code, key and rule: parts that may leave a site, if fl_app/reasons.py lists them. value: it never leaves a
    site. Without a message, the message is made of key, rule and value.
    """

    def __init__(self, message: str = "", *, code: str = "", key: str = "", rule: str = "", value: object = "") -> None:
        self.code, self.key, self.rule, self.value = code, key, rule, value
        super().__init__(message or _sentence(key, rule, value))

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the parts of a copy in another process."""
        return _again, (type(self), str(self), self.__dict__)


def _sentence(key: str, rule: str, value: object) -> str:
    """Return `key: rule, got value`, without the parts that are empty."""
    got = "" if value == "" else f", got {value if isinstance(value, str) else repr(value)}"
    return (f"{key}: " if key else "") + rule + got


def _again(kind: type[UserError], message: str, fields: dict[str, Any]) -> UserError:
    error = kind(message)
    error.__dict__.update(fields)
    return error


class RunFailed(RuntimeError):
    """A started run did not finish. The message states the known reason."""


class RoundFailed(UserError):
    """A round failed in every attempt. The message gives each client's reason."""


class MethodFault(UserError):
    """A method's server half failed. No client is to blame."""


class Diverged(UserError):
    """Training ended with numbers beyond all bounds."""


def diverged(what: str, value: float, learning_rate: float) -> Diverged:
    """Return the error of a diverged training. what: the name of the number with this value."""
    return Diverged(f"{DIVERGED}: its {what} is {value:.4g} (learning-rate {learning_rate:g})")


def listed(names: list[str], separator: str = ", ", most: int = _MAX_LISTED) -> str:
    """Return the first `most` names as an error prints them, and the number of the others."""
    more = f"{separator}and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more


def counted(number: int, noun: str, nouns: str = "") -> str:
    """Return a number with its noun: `1 client`, `2 clients`. nouns: an irregular plural."""
    return f"{number} {noun if number == 1 else nouns or noun + 's'}"


def describe(error: BaseException) -> str:
    """Return an exception's type and message."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def plain(text: str) -> str:
    """Return a text without control characters and lone surrogates, safe for terminals and files.

    Marks that reverse the text behind them, and Unicode's line ends, count as control characters.
    """
    return text.translate(_CONTROL).encode("utf-8", "replace").decode("utf-8")


def plain_lines(text: str) -> str:
    """Return a text as `plain` does, but keep line ends. A tab becomes a space."""
    return "\n".join(plain(line.replace("\t", " ")) for line in text.split("\n"))
