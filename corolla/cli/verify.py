"""`corolla data verify`: checks that prepared files are unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.markup import escape

from corolla.api.console import console
from corolla.api.settings import resolve
from corolla.cli.options import QuietOption, SetOption, parse_set
from fl_app import checksums
from fl_app.errors import UserError, size
from fl_app.paths import anchored


def data_verify(set_: SetOption = None, quiet: QuietOption = False) -> None:
    """Check all prepared data sets and partitions against their checksums. From --set, only data-dir is used."""
    from fl_app.data import data_root

    root = data_root(resolve(anchored(parse_set(set_ or []), Path())))
    damaged: dict[str, str] = {}
    sound = 0
    for directory, nbytes, problems in checked(root):
        sound += not problems
        words = "; ".join(problems) or "sound"
        console.print(escape(f"{directory.relative_to(root)}: {words} ({size(nbytes)})"), soft_wrap=True)
        if problems:
            damaged[str(directory)] = words
    if damaged:
        lines = [f"data-dir: {directory} is damaged: {words}" for directory, words in damaged.items()]
        remedy = "prepare it again by `corolla data prepare --force` with the run's settings, or remove it"
        raise UserError("\n".join([*lines, remedy]))
    console.print(escape(f"{sound} prepared data sets and partitions under {root} are sound"), soft_wrap=True)


def checked(root: Path) -> Iterator[tuple[Path, int, list[str]]]:
    """Yield (directory, bytes, problems as text) for every prepared data set and partition under a data directory."""
    for kind in ("datasets", "partitions"):
        for directory in sorted((root / kind).glob("[!.]*/")):
            nbytes = sum(path.stat().st_size for path in directory.iterdir())
            yield directory, nbytes, checksums.compare(directory, whole=True)
