"""Exit codes of the `corolla` command and of the processes that it starts, and the occasions of each."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping

from fl_app.errors import UserError

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

OCCASIONS: Mapping[int, tuple[str, ...]] = {
    DONE: ("The command did its work. `sweep`: all runs are finished.",),
    FAILED: (
        "`run`, `demo`: the run started and failed. Its log is in the run folder.",
        "`sweep`: at least one run failed; the others are finished.",
        "Your own model, method or task raised an exception; the file and line are named.",
        "`compare --paper`: no run has a published counterpart.",
        "`cluster status`: a process is not running, healthy and connected, a site is not connected, or a key is nobody's.",
        "`cluster down`, `cluster revoke`: part of the work could not be done on a host that is named.",
        "`node audit`: the audit was changed, or lacks the expected hash.",
        "`audit join`: the server's trail and a site's audit differ.",
        "An error in Corolla itself: its traceback is printed.",
    ),
    BAD_INPUT: (
        "An option, a key, a value or a file is wrong, damaged or missing. The message names it and the rule. "
        "A run may find this only after its start.",
        "A command or option that does not exist, or no command.",
        "Something prevents the command: a run of this name exists, a cluster is running, a package is missing.",
    ),
    INTERRUPTED: ("Ctrl-C, SIGTERM or SIGHUP. A run's last line is the command that resumes it.",),
}
"""Each exit code and the occasions on which a command ends with it, in Markdown."""


@contextlib.contextmanager
def ending_on_bad_input() -> Iterator[None]:
    """End this process with one line and BAD_INPUT if the block raises UserError."""
    try:
        yield
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(BAD_INPUT) from None
