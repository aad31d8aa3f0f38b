"""The size of the product: `python -m benchmarks.size [--files] [PATH ...]` counts lines, statements, functions and dense forms.

A statement is a node `ast.stmt`, so a long line and a split one count the same. Dense forms are comprehensions,
generator expressions, conditional expressions and assignment expressions, per 1,000 statements: fewer statements with
more of them are no gain. Without paths the five packages of the product are counted.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("fl_app", "strategies", "client_app", "deploy", "corolla")
DENSE = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.IfExp, ast.NamedExpr)


class Size(NamedTuple):
    """The numbers of files, lines, statements, functions and dense forms."""

    files: int
    lines: int
    statements: int
    functions: int
    dense: int

    @property
    def density(self) -> float:
        """Dense forms per 1,000 statements; 0 without statements."""
        return 1000 * self.dense / self.statements if self.statements else 0.0


def size_of(text: str) -> Size:
    """Return the size of a file with this text."""
    nodes = list(ast.walk(ast.parse(text)))

    def number(kinds: type[ast.AST] | tuple[type[ast.AST], ...]) -> int:
        return sum(isinstance(node, kinds) for node in nodes)

    functions = number((ast.FunctionDef, ast.AsyncFunctionDef))
    return Size(1, len(text.splitlines()), number(ast.stmt), functions, number(DENSE))


def files_of(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the Python files at and under these paths, sorted."""
    for path in paths:
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


def total(sizes: Iterable[Size]) -> Size:
    """Return the sum of sizes."""
    return Size(*map(sum, zip(*sizes, Size(0, 0, 0, 0, 0), strict=True)))


def table(sizes: Mapping[str, Size]) -> list[str]:
    """Return a line for each name, and one for the sum."""
    rows = [*sizes.items(), ("all", total(sizes.values()))]
    lines = [f"{'files':>6} {'lines':>7} {'statements':>10} {'functions':>9} {'dense':>6}"]
    return lines + [
        f"{own.files:6} {own.lines:7} {own.statements:10} {own.functions:9} {own.density:6.1f} {name}"
        for name, own in rows
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, default=[ROOT / name for name in PACKAGES], metavar="PATH")
    parser.add_argument("--files", action="store_true", help="print a line for each file")
    options = parser.parse_args(arguments)
    groups = files_of(options.paths) if options.files else options.paths
    found = {str(group): total(size_of(path.read_text("utf-8")) for path in files_of([group])) for group in groups}
    print("\n".join(table({name.removeprefix(f"{ROOT}/"): own for name, own in found.items()})))


if __name__ == "__main__":
    main()
