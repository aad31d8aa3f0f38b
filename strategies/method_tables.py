"""Tables of the built-in methods side by side, from the overview that each method declares.

`corolla methods --table` prints the whole, and the cited systems that are not here. `corolla reference` writes the tables into
README.md and docs/methods/.
"""

from __future__ import annotations

from collections.abc import Iterable

from fl_app.errors import MethodError
from strategies import METHODS
from strategies.base import Overview

COLUMNS = {
    "travels": "travels",
    "stays": "stays on the client",
    "server": "server keeps",
    "disk": "client's disk",
    "epochs": "epochs",
    "unseen": "a client that never trains gets",
    "use": "when to use it",
}
"""The headings of the columns, by the names of an Overview's fields."""
ABSENT = (
    (
        "FedVKD (Tao et al., 2022)",
        "FedDAC",
        "Neither its text nor its authors' code was found. The repository `lmtyy/FedVKD` is another, later method.",
    ),
    (
        "PSPFL (Zhou et al., IEEE TMC 2024)",
        "FedOBP",
        "Its text was not found; `hfut701/PSPFL` is another method. Its score, as FedOBP prints it (Eq. 5), is "
        "`fedobp.score = gradient`.",
    ),
    ("pFedGF (Wu et al., IPDPS 2022)", "FedCAC", "Neither its text nor its code was found."),
)
"""The systems that are cited and not here: the system, the paper that cites it, and why."""
_COSTS = ("travels", "stays", "server", "disk", "epochs", "use")


def groups() -> dict[str, list[str]]:
    """Return the methods by group, groups and methods in the registry's order, those that share nothing first."""
    found: dict[str, list[str]] = {of("local").group: []}
    for name in METHODS:
        found.setdefault(of(name).group, []).append(name)
    return found


def of(method: str) -> Overview:
    """Return a built-in method's overview. Raises UserError if it declares none."""
    overview = METHODS[method].overview
    if overview is None:
        raise MethodError(
            key=f"method {method}", rule="a built-in method's METHOD must have overview=Overview(...), got none"
        )
    return overview


def cost_table(method: str) -> str:
    """Return one method's costs, and when to use it, as a Markdown table."""
    overview = of(method)
    return _markdown([[COLUMNS[name] for name in _COSTS], [getattr(overview, name) for name in _COSTS]])


def names_table(form: str) -> str:
    """Return the methods' names by group as a Markdown table. form: how a cell shows a name, as in "[{0}]({0}.md)"."""
    rows = [[group, ", ".join(form.format(name) for name in names)] for group, names in groups().items()]
    return _markdown([["shared", "methods"], *rows])


def methods_table() -> str:
    """Return all overviews as a Markdown table, a line per method, in the order of `groups`."""
    lines = [["method", *COLUMNS.values()]]
    for name in (name for names in groups().values() for name in names):
        lines.append([f"`{name}`", *(getattr(of(name), column) for column in COLUMNS)])
    return _markdown(lines)


def absent_table() -> str:
    """Return the cited systems that are not here as a Markdown table, a line per system."""
    return _markdown([["system", "cited by", "why it is not here"], *ABSENT])


def _markdown(lines: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table; the first line has the headings."""
    head, *rows = [list(line) for line in lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))
