"""Counts of words that make sentences hard to read: `python -m tests.language`, with a path for one package or page.

`python -m tests.language --messages` lists every text that the program shows: errors, log lines, help, and keys' sentences.
The counts are per 1,000 words. CONTRIBUTING.md has the rules they stand for.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("fl_app", "strategies", "client_app", "deploy", "corolla")
PAGES = ("README.md", "CONTRIBUTING.md", "docs/*.md", "docs/methods/*.md", "docs/tutorials/*.md", "docs/gallery/*.md")


GROUPS = {
    "what": re.compile(r"\bwhat\b", re.IGNORECASE),
    "tell, say": re.compile(r"\b(?:tells?|told|telling|says?|said|saying)\b", re.IGNORECASE),
    "who, whom, whose": re.compile(r"\b(?:who|whom|whose)\b", re.IGNORECASE),
}
# functions and methods whose texts users see
SHOWING = frozenset(
    (
        "debug",
        "info",
        "warning",
        "error",
        "exception",
        "critical",
        "warn",
        "print",
        "echo",
        "step",
        "key",
        "Option",
        "Argument",
    )
)
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
_TARGET = re.compile(r"\]\([^)]*\)")
_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of a Python file: module, classes, functions, and strings below an assignment."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for statement in body:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                if isinstance(statement.value.value, str):
                    yield statement.value.value


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the texts that a Python file may show to users, each with its line number.

    These are the texts of raised errors, log lines, printed lines, help and `key(...)`. A value in a text is {}.
    """
    calls = (
        node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Raise | ast.Call)
    )
    for node in sorted(calls, key=lambda call: call.lineno):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            shown = node.exc.args
        elif isinstance(node, ast.Call) and _called(node.func) in SHOWING:
            shown = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "help")]
        else:
            continue
        for text in filter(None, map(_text, shown)):
            # a single word is a name or a format
            if len(_WORD.findall(text)) > 1:
                yield node.lineno, " ".join(text.split())


def _called(function: ast.expr) -> str:
    """Return the last name of what is called: `info` of log.info."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _text(node: ast.expr) -> str:
    """Return a string's text, with {} for each value in it; "" for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "{}" for part in node.values)
    if isinstance(node, ast.Call):
        return " ".join(filter(None, map(_text, node.args)))
    return ""


def prose(path: Path) -> Iterator[str]:
    """Yield a Markdown page's text without its blocks of code and the targets of its links."""
    yield _TARGET.sub("]", _FENCE.sub("", path.read_text(encoding="utf-8")))


def counts(texts: Iterable[str]) -> tuple[int, Counter[str]]:
    """Return the number of words of texts, and of each group's words among them."""
    words, found = 0, Counter[str]()
    for text in texts:
        words += len(_WORD.findall(text))
        for name, pattern in GROUPS.items():
            found[name] += len(pattern.findall(text))
    return words, found


def rates(texts: Iterable[str]) -> dict[str, float]:
    """Return how many of 1,000 words are of each group."""
    words, found = counts(texts)
    return {name: 1000 * found[name] / max(words, 1) for name in GROUPS}


def package_texts(package: str) -> list[str]:
    """Return all docstrings of a package."""
    return [text for path in sorted((ROOT / package).rglob("*.py")) for text in docstrings(path)]


def package_messages(package: str) -> list[tuple[Path, int, str]]:
    """Return all texts that a package may show, with file and line."""
    return [(path, *found) for path in sorted((ROOT / package).rglob("*.py")) for found in messages(path)]


def page_texts() -> list[str]:
    """Return the prose of all pages."""
    return [text for pattern in PAGES for path in sorted(ROOT.glob(pattern)) for text in prose(path)]


def main(paths: list[str]) -> None:
    """Print the counts, or with `--messages` the texts."""
    if paths[:1] == ["--messages"]:
        for package in paths[1:] or PACKAGES:
            for path, line, text in package_messages(package):
                print(f"{path.relative_to(ROOT)}:{line}: {text}")
        return
    wanted: dict[str, list[str]] = {}
    if paths:
        for name in paths:
            path = ROOT / name
            if path.suffix == ".md":
                wanted[name] = list(prose(path))
            elif path.suffix == ".py":
                wanted[name] = list(docstrings(path))
            else:
                wanted[name] = package_texts(name)
    else:
        wanted = {package: package_texts(package) for package in PACKAGES} | {"README.md, docs": page_texts()}
        wanted["messages"] = [text for package in PACKAGES for *_, text in package_messages(package)]
    print(f"{'':24}" + "".join(f"{name:>20}" for name in GROUPS) + f"{'words':>10}")
    for name, texts in wanted.items():
        print(f"{name:24}" + "".join(f"{rate:20.2f}" for rate in rates(texts).values()) + f"{counts(texts)[0]:10,}")


if __name__ == "__main__":
    main(sys.argv[1:])
