"""Tables as LaTeX, in the style of booktabs."""

from __future__ import annotations

from collections.abc import Sequence

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


def tabular(lines: Sequence[Sequence[str]], caption: str = "") -> str:
    """Return a table as LaTeX. lines: header first. caption: explanation of the figures, written as comments."""
    header, *body = lines
    aligned = "".join("r" if k and _is_numbers([row[k] for row in body]) else "l" for k in range(len(header)))
    return "\n".join(
        [
            "% needs \\usepackage{booktabs}",
            *(f"% {line}" for line in caption.splitlines()),
            f"\\begin{{tabular}}{{{aligned}}}",
            "\\toprule",
            _row(header),
            "\\midrule",
            *map(_row, body),
            "\\bottomrule",
            "\\end{tabular}",
            "",
        ]
    )


def _row(cells: Sequence[str]) -> str:
    return " & ".join(map(escaped, cells)) + r" \\"


def _is_numbers(cells: Sequence[str]) -> bool:
    told = [cell for cell in cells if cell not in ("", "–", "n/a")]
    return bool(told) and all(cell.lstrip("+-")[:1].isdigit() for cell in told)
