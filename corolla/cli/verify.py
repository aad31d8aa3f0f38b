"""`corolla data verify`: are the prepared files still what was written?"""

from __future__ import annotations

from rich.markup import escape

from corolla.cli.settings import SetOption, absolute_paths, console, parse_set, resolve
from corolla.cli.tables import size
from fl_app.errors import UserError


def data_verify(set_: SetOption = None) -> None:
    """Read all prepared data sets and partitions of the data directory (of --set, only data-dir counts) against their checksums."""
    from fl_app.data import data_root
    from fl_app.data.verify import verify

    root = data_root(resolve(absolute_paths(parse_set(set_ or []))))
    damaged: dict[str, str] = {}
    sound = 0
    for directory, nbytes, problems in verify(root):
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
