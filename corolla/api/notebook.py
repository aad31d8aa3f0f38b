"""A live panel in a notebook's output cell."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
import threading
from typing import Any

from rich.console import Console, RenderableType

WIDTH = 100
_SECONDS = 0.5  # between two drawings
_PAGE = (
    "<pre style=\"white-space: pre; overflow-x: auto; line-height: normal; font-family: 'DejaVu Sans Mono', Menlo, Consolas, "
    'monospace">{code}</pre>'
)


def is_here() -> bool:
    """Return whether this process is a notebook's kernel."""
    if "IPython" not in sys.modules:
        return False
    return hasattr(sys.modules["IPython"].get_ipython(), "kernel")


class Drawing:
    """A rich renderable as notebook output: HTML, with plain text as a fallback."""

    def __init__(self, what: RenderableType) -> None:
        self._console = Console(file=io.StringIO(), record=True, width=WIDTH, force_jupyter=False, force_terminal=True)
        self._console.print(what)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        text = self._console.export_text(clear=False)
        html = self._console.export_html(clear=False, inline_styles=True, code_format=_PAGE)
        return {"text/html": html, "text/plain": text}


class OutputCell:
    """Redraws a renderable in one output cell while it changes, as rich's Live does on a terminal.

    transient: whether it is removed at the end.
    """

    def __init__(self, what: RenderableType) -> None:
        self.transient = False
        self._what = what
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        """Show it."""
        ipython: Any = importlib.import_module("IPython.display")
        self._shown = ipython.display(Drawing(self._what), display_id=True)
        self._thread.start()

    def stop(self) -> None:
        """Leave the last drawing, or nothing if transient."""
        self._ended.set()
        self._thread.join()
        self._shown.update(Drawing("") if self.transient else Drawing(self._what))

    def _watch(self) -> None:
        while not self._ended.wait(_SECONDS):
            # the renderable may change while it is drawn
            with contextlib.suppress(RuntimeError):
                self._shown.update(Drawing(self._what))
