"""Tables as LaTeX, in the style of booktabs: methods under their papers' names, the best figures and significance marked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from corolla.experiments import significance
from corolla.experiments.compare import references
from corolla.experiments.result_table import Row, columns, summary_name
from corolla.experiments.runs import RecordedRun

BEST, SECOND, DIFFERS = r"\textbf{%s}", r"\underline{%s}", "%s$^{*}$"
MARKS = """\
bold: the best of the rows with the same data; underlined: the second best
*: better or worse than the first of these rows (three or more seeds, both intervals on one side of 0, after Holm's correction)"""

_ESCAPED = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    "±": r"$\pm$",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
    "–": "--",
    "−": "$-$",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}


def escaped(text: str) -> str:
    """Return a text with all of LaTeX's special characters escaped."""
    return "".join(_ESCAPED.get(letter, letter) for letter in " ".join(text.split()))


def results(
    groups: Sequence[Sequence[RecordedRun]], rows: Sequence[Row], lines: Sequence[Sequence[str]], caption: str
) -> str:
    """Return a table of results as LaTeX: the best figures bold, the second underlined, significance marked.

    rows: of the groups. lines: the rows as text, header first, with the figures last.
    """
    start = len(lines[0]) - len(columns(rows))
    looks: dict[tuple[int, int], list[str]] = {}
    for row, column, look in _marks(groups, rows):
        looks.setdefault((row, start + column), []).append(look)
    return tabular(lines, f"{caption}\n{MARKS}" if looks else caption, looks)


def _marks(groups: Sequence[Sequence[RecordedRun]], rows: Sequence[Row]) -> Iterator[tuple[int, int, str]]:
    """Yield (row, column of a figure, look). Rows of unfinished runs have none."""
    ended = [k for k, runs in enumerate(groups) if all(run.finished for run in runs)]
    of = dict(zip(ended, references([groups[k] for k in ended]), strict=True))
    differs = dict(zip(ended, significance.compared([groups[k] for k in ended]), strict=True))
    for column, (name, metric) in enumerate(columns(rows).items()):
        means = {k: rows[k].by_name[name][0] for k in ended if name in rows[k].by_name}
        for part in dict.fromkeys(of.values()):
            own = sorted((k for k in means if of[k] == part), key=means.__getitem__, reverse=metric.higher_is_better)
            # equal figures are those that print alike
            places = list(dict.fromkeys(metric.text(means[k]) for k in own))
            if len(places) > 1:
                for text, look in zip(places, (BEST, SECOND), strict=False):
                    yield from ((k, column, look) for k in own if metric.text(means[k]) == text)
        for k, one in differs.items():
            if one and one.verdict in ("better", "worse") and name == summary_name("final", one.metric):
                yield k, column, DIFFERS


def tabular(
    lines: Sequence[Sequence[str]], caption: str = "", looks: Mapping[tuple[int, int], Sequence[str]] | None = None
) -> str:
    """Return a table as LaTeX. lines: header first. caption: explanation of the figures, written as comments.

    looks: commands around a cell, by its (row, column) below the header.
    """
    header, *body = lines
    aligned = "".join("r" if k and _is_numbers([row[k] for row in body]) else "l" for k in range(len(header)))
    return "\n".join(
        [
            "% needs \\usepackage{booktabs}",
            *(f"% {line}" for line in caption.splitlines()),
            f"\\begin{{tabular}}{{{aligned}}}",
            "\\toprule",
            _row(map(escaped, header)),
            "\\midrule",
            *(_row(_with_looks(k, row, looks or {})) for k, row in enumerate(body)),
            "\\bottomrule",
            "\\end{tabular}",
            "",
        ]
    )


def _with_looks(k: int, row: Sequence[str], looks: Mapping[tuple[int, int], Sequence[str]]) -> Iterator[str]:
    for column, cell in enumerate(row):
        text = escaped(cell)
        for look in looks.get((k, column), ()):
            text = look % text
        yield text


def titled(lines: Sequence[Sequence[str]], title: Callable[[str], str]) -> list[list[str]]:
    """Return a table with its methods' names, also those that begin a column's heading, as `title` writes them."""
    header, *body = lines
    named = [
        [title(cell) if name == "method" else cell for name, cell in zip(header, row, strict=True)] for row in body
    ]
    return [[by_paper(name, title) for name in header], *named]


def by_paper(name: str, title: Callable[[str], str]) -> str:
    """Return the name of a row, which may begin with its method, with this method as `title` writes it."""
    method, *rest = name.split(", ")
    return ", ".join([title(method), *rest])


def _row(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"


def _is_numbers(cells: Sequence[str]) -> bool:
    told = [cell for cell in cells if cell not in ("", "–", "n/a")]
    return bool(told) and all(cell.lstrip("+-")[:1].isdigit() for cell in told)
