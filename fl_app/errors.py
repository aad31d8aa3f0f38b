"""The one error type meant for users: its message is shown as it is, without a traceback."""

from __future__ import annotations


class UserError(ValueError):
    """Bad input: the message names the thing, the rule and the value, and fits on one screen."""
