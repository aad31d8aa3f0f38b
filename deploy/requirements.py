"""Some packages with their hashes: `python deploy/requirements.py LOCK NAMES [--no-torch]` prints a file for pip.

LOCK: all packages of one version of Flower, such as constraints/flwr-1.39.txt. NAMES: those wanted, one a line:
constraints/image.txt for the container image, constraints/run.txt for `make run`.
Only Python's standard library is used, because nothing is installed yet.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Container
from pathlib import Path

# packages of a torch build, which another one replaces
_TORCH = re.compile(r"torch|torchvision|triton|nvidia-.*|cuda-.*")


def chosen(lock: str, names: Container[str], torch: bool = True) -> str:
    """Return the requirements of a lock file with these names, and all lines of each.

    torch: whether those of PyTorch's build are among them.
    """
    blocks = re.split(r"^(?=[a-z0-9])", lock, flags=re.MULTILINE)
    wanted = []
    for block in blocks:
        name = re.split(r"[ =;\[]", block, maxsplit=1)[0]
        if name in names and (torch or not _TORCH.fullmatch(name)):
            wanted.append(block)
    return "".join(wanted)


def main() -> None:
    """Print the file."""
    lock, names = (Path(path).read_text(encoding="utf-8") for path in sys.argv[1:3])
    print(chosen(lock, set(names.split()), "--no-torch" not in sys.argv[3:]), end="")


if __name__ == "__main__":
    main()
