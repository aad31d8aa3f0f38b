"""Functions shared by the benchmark scripts: interleaved timing, peak memory, JSON output, checked ratios."""

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

# a short run fails only beyond this multiple of the target
SLACK = 2.0


def interleaved(
    cases: Mapping[str, Callable[[], object]],
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
    *,
    short: bool = False,
) -> dict[str, float]:
    """Return the median seconds of each case, measured in turns so that a slow moment hits all cases.

    clock: time.process_time for single-threaded cases, which ignores other work on the machine. short: return the
    quickest of the few repeats, which a busy machine delays least.
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
    """Return the number of bytes by which a call raises the process's peak resident memory (Linux)."""

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
    """Return a description of this machine and its software."""
    return {**made_with(), "peak-rss": resource_peak()}


def resource_peak() -> int:
    """Return the peak resident bytes of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def finish(results: dict[str, Any], targets: dict[str, float], options: argparse.Namespace) -> None:
    """Print results as JSON, then each ratio beside its target.

    With --short, exit with code 1 if a ratio is beyond SLACK times its target.
    """
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
    """Return a parser with the option that every benchmark has."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="small sizes; fail beyond twice a target (for CI)")
    return parser


def write_app(directory: Path, module: str, code: str, config: str) -> None:
    """Write an app of Flower: one module with `server` and `client`. config: its run config with defaults, lines of TOML."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{module}.py").write_text(code)
    (directory / "pyproject.toml").write_text(
        f"""
[project]
name = "{module.replace("_", "-")}"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "corolla"
fab-include = ["*.py"]
[tool.flwr.app.components]
serverapp = "{module}:server"
clientapp = "{module}:client"
[tool.flwr.app.config]
{config}
"""
    )
