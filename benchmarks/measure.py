"""What the benchmark scripts share: interleaved timing, peak memory, JSON output, checked ratios."""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fl_app.machine import made_with

# a short run fails only beyond this factor of the target
SLACK = 2.0


def interleaved(
    cases: Mapping[str, Callable[[], object]],
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
    *,
    short: bool = False,
) -> dict[str, float]:
    """Return the median seconds of each case, measured in turn so that a slow moment hits them all.

    clock: time.process_time for what runs on one thread, whatever else the machine does. short: of few repeats the quickest, which
    a busy machine delays least.
    """
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, case in cases.items():
            gc.collect()
            started = clock()
            result = case()
            seconds[name].append(clock() - started)
            del result
    typical = min if short else statistics.median
    return {name: typical(values) for name, values in seconds.items()}


def peak_bytes(case: Callable[[], object]) -> int:
    """Return by how many bytes a call raises the process's peak resident memory (Linux)."""

    def status(field: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
        raise RuntimeError(field)

    gc.collect()
    # the peak starts again from here
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    result = case()
    peak = status("VmHWM")
    del result
    return peak - before


def machine() -> dict[str, Any]:
    """Describe where this ran."""
    return {**made_with(), "peak-rss": resource_peak()}


def resource_peak() -> int:
    """Peak resident bytes of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def finish(results: dict[str, Any], targets: dict[str, float], options: argparse.Namespace) -> None:
    """Print results as JSON and each ratio beside its target; with --short exit 1 on one far beyond it."""
    print(json.dumps({**results, "machine": machine()}, indent=2))
    broken = []
    for name, target in targets.items():
        value = results[name]
        print(f"{name}: {value:.3g}, target at most {target:g}", file=sys.stderr)
        if value > SLACK * target:
            broken.append(name)
    if options.short and broken:
        sys.exit(f"beyond {SLACK:g} times the target: {', '.join(broken)}")


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the option every benchmark has."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="small sizes; fail beyond twice a target (for CI)")
    return parser
