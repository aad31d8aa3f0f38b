"""What every function for callers does: errors without Corolla's internal frames, and Python's generator left as it was."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from fl_app import debugging
from fl_app.errors import RunFailed, UserError

P = ParamSpec("P")
T = TypeVar("T")


def brief(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that its errors end at the caller's line, and the caller's `random` stays as it is.

    Libraries draw from `random` while they are imported, as rich does, which a first call may do.

    Errors in the caller's own code keep their frames. With `verbose=True` the function's errors keep all frames and
    their causes.
    """

    @functools.wraps(function)
    def called(*arguments: P.args, **keywords: P.kwargs) -> T:
        state = random.getstate()
        try:
            return function(*arguments, **keywords)
        except (UserError, RunFailed) as error:
            if keywords.get("verbose") is True:
                raise
            raise error.with_traceback(None) from None
        except Exception as error:
            own = debugging.from_users_frame(error)
            if own is not None and keywords.get("verbose") is not True:
                error.__traceback__ = own
            raise
        finally:
            random.setstate(state)

    return called
