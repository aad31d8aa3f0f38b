"""The start of a client behind a site's walls, beside a start without walls: by Landlock alone, and by bubblewrap.

python -m benchmarks.confine [--short]

A process is confined as a SuperNode confines SuperExec, and starts a client, which imports what clients import. A node
makes its walls once, so the first part comes once per node, and the second with every client. The ways take turns, and the
fastest start of each is compared with the fastest without walls: other work on the machine lengthens the others. Of clients,
processor time is compared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.measure import arguments, finish
from deploy import bubblewrap, confine
from deploy.confine import Confinement

# it notes when it starts, and a client's processor seconds
WORK = """
import json, resource, subprocess, sys, time
started = time.monotonic()
subprocess.run([sys.executable, "-c", "import torch, client_app.client_app"], check=True)
client = resource.getrusage(resource.RUSAGE_CHILDREN)
json.dump([started, client.ru_utime + client.ru_stime], open(sys.argv[1], "w"))
"""
PARTS = ("seconds until a process starts", "processor seconds of a client's imports")
TARGET = 0.2
"""The most by which each part may be longer."""
Start = Callable[[], int]


def ways(home: str) -> dict[str, Start]:
    """Return the ways in which this machine can start WORK in a directory. Each returns the exit code."""
    environment = confine.cleaned(os.environ) | {"TMPDIR": home}
    command = [sys.executable, "-c", WORK, f"{home}/seconds.json"]
    rules = Confinement(confine.installation(), (home,), ())
    confined = confine.confined_command(rules, command)
    found: dict[str, Start] = {"open": lambda: subprocess.run(command, env=environment).returncode}
    if confine.landlock_version():
        found["Landlock"] = lambda: bubblewrap.Inside(confined, environment).wait()
    if walls := bubblewrap.find():
        found["bubblewrap"] = lambda: walls.start(rules, command, home, environment).wait()
    return found


def more(turns: int) -> dict[str, dict[str, float]]:
    """Return, by way and part, the seconds of the fastest turn beyond those of the fastest without walls."""
    with tempfile.TemporaryDirectory(prefix="corolla-confine-") as home:
        note = Path(home) / "seconds.json"

        def parts(start: Start) -> list[float]:
            before = time.monotonic()
            if start():
                sys.exit("the process behind the walls failed")
            started, client = json.loads(note.read_text())
            note.unlink()
            return [started - before, client]

        found = ways(home)
        # the first turn fills the file cache
        times = [{way: parts(start) for way, start in found.items()} for _ in range(turns + 1)][1:]
    fastest = {way: [min(turn[way][k] for turn in times) for k in range(len(PARTS))] for way in found}
    return {
        way: {part: fastest[way][k] - fastest["open"][k] for k, part in enumerate(PARTS)}
        for way in found.keys() - {"open"}
    }


def main() -> None:
    """Measure, print, check."""
    options = arguments(__doc__).parse_args()
    results = {
        f"more {part}, {way}": value
        for way, parts in more(3 if options.short else 10).items()
        for part, value in parts.items()
    }
    finish(dict(results), dict.fromkeys(results, TARGET), options)


if __name__ == "__main__":
    main()
