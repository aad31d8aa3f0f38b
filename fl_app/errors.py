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

    key: of a run, or the name of the thing. rule: its condition. value: what it has instead, None if there is none. hint:
    the end of the message. Without a message, the message is made of these. code, key and rule may leave a site if
    fl_app/reasons.py lists them; value never does.
    """

    def __init__(
        self,
        message: str = "",
        *,
        code: str = "",
        key: object = "",
        rule: object = "",
        value: object = None,
        hint: str = "",
    ) -> None:
        self.code, self.key, self.rule, self.value = code, str(key), str(rule), value
        got = "" if value is None else f", got {value!r}"
        super().__init__(message or (f"{self.key}: " if self.key else "") + self.rule + got + hint)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the parts of a copy in another process."""
        return _again, (type(self), str(self), self.__dict__)


def _again(kind: type[UserError], message: str, fields: dict[str, Any]) -> UserError:
    error = kind(message)
    error.__dict__.update(fields)
    return error


class ConfigurationError(UserError):
    """A run's keys have values that the rules do not allow.

    problems: an error for each of them, with its own key, rule and value. Those of the whole are the first one's.
    """

    problems: tuple[UserError, ...] = ()


class DataError(UserError):
    """Data that cannot be read as the run asks, or divided in this way."""


class MethodError(UserError):
    """What a method cannot do: with this model, this task, these keys or this deployment."""


class DeploymentError(UserError):
    """A cluster, a node, its keys or its files that are not as the command needs them."""


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


def with_name(number: int, name: str) -> str:
    """Return a client's number, with its name if it has one: `3 (Bern)`."""
    return f"{number} ({name})" if name else str(number)


def size(nbytes: float) -> str:
    """Return a number of bytes in decimal units."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} GB"


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
