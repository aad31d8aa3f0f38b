"""`python -m tests.deploy.promises`: write the promises of promises.toml into docs/security.md."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "security.md"
BEGIN, END = "<!-- promises: made by python -m tests.deploy.promises -->", "<!-- end of promises -->"


class Promise(NamedTuple):
    """A promise, the functions and files that keep it, and its tests: a file of tests, or one test of it (`file::test`)."""

    promise: str
    door: str
    tests: list[str]


PROMISES = {
    subject: [Promise(**row) for row in rows]
    for subject, rows in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items()
}
"""By subject."""


def listed() -> str:
    """Return the promises in Markdown."""
    return "\n\n".join(
        "\n".join([f"**{subject}**", "", *(f"- {one.promise}" for one in group)]) for subject, group in PROMISES.items()
    )


def parts() -> tuple[str, str, str]:
    """Return the page before the promises, the promises, and the page after them."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    inside, _, after = rest.partition(END)
    return before, inside, after


def main() -> None:
    """Rewrite the page between its marks."""
    before, _, after = parts()
    PAGE.write_text(f"{before}{BEGIN}\n{listed()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
