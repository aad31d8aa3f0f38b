"""The page that grows with a run (`corolla run --open`): `corolla watch` in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

# seconds for the pages' last answers
_ENDING = 15.0


def begin(folder: Path, say: Callable[[str], None]) -> Callable[[], None]:
    """Open the page of a run, and return the function that ends its server. say: prints a line, from another thread."""
    if not folder.is_dir():
        say(f"--open: the run folder is on the SuperLink's machine; there: corolla watch {folder}")
        return lambda: None
    command = [sys.executable, "-m", "corolla", "watch", str(folder), "--open", "--until-input-ends"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdin and process.stdout
    asking, output = process.stdin, process.stdout

    def tell() -> None:
        if address := output.readline().strip():
            say(f"this run's page: {address}")

    telling = threading.Thread(target=tell, daemon=True)
    telling.start()

    def end() -> None:
        asking.close()
        try:
            process.wait(_ENDING)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        telling.join()
        output.close()

    return end
