"""Mutants: small faults put into the product, to see whether the unit tests catch them. Run by hand: it takes an hour.

python -m tests.mutants draw > tests/mutants.txt     # needs `pip install cosmic-ray`, here and below
python -m tests.mutants try [--tree DIRECTORY] [--jobs 2] [--python PYTHON] < tests/mutants.txt

`draw` prints a seeded sample of mutants, as many of each: kernels, engine, wire, data, configuration. A line has the
file, cosmic-ray's operator, its occurrence, and the code. A mutant that changes only annotations is none. `try` puts
each into a copy of a tree and runs the test files that import its module, one after the other, those of fewest lines
first, then those that import its package, until a test fails or `SECONDS` of processor time are over. It prints the fate
of each, and the share that was caught. Nothing in the tree itself changes. The tests of each mutant run in a fork of a
process that has imported the libraries of the tests, but nothing of the tree.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
COUNT, SEED, SECONDS = 400, 1, 30
# pytest's exit status if a test failed, and if none could be collected, because the product could not be imported
FAILED = (1, 2)
PLACES = ("strategies/kernels", "strategies/engine", "fl_app/transport/wire.py", "fl_app/data", "fl_app/config")
BINARY = ("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mul", "Mod_Mul", "BitAnd_BitOr", "BitXor_BitAnd")
OPERATORS = (
    "NumberReplacer",
    "ReplaceTrueWithFalse",
    "ReplaceFalseWithTrue",
    "ReplaceAndWithOr",
    "ReplaceOrWithAnd",
    "AddNot",
    "ZeroIterationForLoop",
    "ReplaceBreakWithContinue",
    "ReplaceContinueWithBreak",
    "ReplaceUnaryOperator_USub_UAdd",
    "ReplaceUnaryOperator_Delete_Not",
    *(f"ReplaceBinaryOperator_{pair}" for pair in BINARY),
    *(
        f"ReplaceComparisonOperator_{pair}"
        for pair in ("Eq_NotEq", "NotEq_Eq", "Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt", "Is_IsNot", "IsNot_Is")
    ),
)


class Mutant(NamedTuple):
    """A fault: the file, the operator's name, which of its occurrences, and the line as it is without the fault."""

    path: str
    operator: str
    occurrence: int
    line: str


def mutated(source: str, operator: str, occurrence: int) -> str | None:
    """Return a file's text with the fault; None if there is no such occurrence."""
    from cosmic_ray import mutating, plugins

    changed: str | None = mutating.mutate_code(source, plugins.get_operator(f"core/{operator}")(), occurrence)
    return changed


def meaning(source: str) -> str:
    """Return what a module does, as text: without annotations. "": it is no valid Python."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ""
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            if getattr(node, name, None) is not None:
                setattr(node, name, ast.Constant(None))
    return ast.dump(tree)


def mutants(root: Path, place: str) -> Iterator[Mutant]:
    """Yield every mutant of a file or a directory's files. place: below the root. Some are no faults (`is_fault`)."""
    from cosmic_ray import ast as parsed
    from cosmic_ray import plugins

    for path in [root / place] if place.endswith(".py") else sorted((root / place).rglob("*.py")):
        source = path.read_text("utf-8")
        lines, nodes = source.splitlines(), list(parsed.ast_nodes(parsed.get_ast(source)))
        for name in OPERATORS:
            operator = plugins.get_operator(f"core/{name}")()
            starts = [start for node in nodes for start, _ in operator.mutation_positions(node)]
            for occurrence, (line, _) in enumerate(starts):
                yield Mutant(path.relative_to(root).as_posix(), name, occurrence, lines[line - 1].strip())


def is_fault(root: Path, mutant: Mutant) -> bool:
    """Return whether a mutant is valid Python and changes more than annotations."""
    source = (root / mutant.path).read_text("utf-8")
    changed = mutated(source, mutant.operator, mutant.occurrence)
    return changed is not None and meaning(changed) not in ("", meaning(source))


def importers(tree: Path, module: str) -> list[str]:
    """Return the unit test files that import a module or its package, those of the module and of fewest lines first."""
    package = module.rpartition(".")[0]
    found = []
    for path in (tree / "tests").rglob("test_*.py"):
        text = path.read_text("utf-8")
        if "e2e" in path.parts or "pytest.mark.e2e" in text:
            continue
        imported = imports_of(text)
        direct = module in imported or any(each.startswith(f"{module}.") for each in imported)
        if direct or any(each == package or each.startswith(f"{package}.") for each in imported):
            found.append((not direct, text.count("\n"), path.relative_to(tree).as_posix()))
    return [path for *_, path in sorted(found)]


def imports_of(text: str) -> set[str]:
    """Return the dotted names that a file imports: modules, and what it takes from them."""
    found = set[str]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
    return found


class Tests:
    """A process that runs test files of a tree, each call in a fork of its own."""

    def __init__(self, tree: Path, python: str) -> None:
        """Start the process. tree: a copy that may be changed between calls; python: the interpreter of the tests."""
        self.tree = tree
        self.process = subprocess.Popen(
            [python, __file__, "serve"], cwd=tree, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def pass_within(self, files: Sequence[str], seconds: float) -> bool:
        """Return whether no test fails in these seconds."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(seconds, *files, file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline()) not in FAILED

    def end(self) -> None:
        """End the process."""
        self.process.communicate()


def libraries() -> list[str]:
    """Return the modules that the tests' fixtures import, in order, without those of the tree in the working directory."""
    script = "import sys, tests.conftest; print(*(name for name, module in sys.modules.items() if getattr(module, '__spec__', 0)))"
    named = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    own = {path.stem for path in Path.cwd().iterdir()} | {"__main__"}
    return [name for name in named if name.partition(".")[0] not in own]


def serve() -> None:
    """Run pytest on the files of each line of the standard input, and print its exit status; negative if it took too long."""
    sys.path[0] = os.getcwd()
    for name in libraries():
        # some modules exist only while another one is imported
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    for line in sys.stdin:
        seconds, *files = line.split()
        child = os.fork()
        if not child:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds)))
            nothing = os.open(os.devnull, os.O_RDWR)
            for descriptor in range(3):
                os.dup2(nothing, descriptor)
            pytest = importlib.import_module("pytest")
            # a file at a time: the collection of all would take the seconds
            statuses = (int(pytest.main(["-xq", "-n0", "-p", "no:cacheprovider", file])) for file in files)
            os._exit(next((status for status in statuses if status in FAILED), 0))
        # for tests that wait for ever
        timer = threading.Timer(10 * float(seconds), os.killpg, (child, signal.SIGKILL))
        timer.start()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        timer.cancel()
        # what the tests started and left
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        print(status, flush=True)


def fate(tests: Tests, mutant: Mutant) -> str:
    """Return "caught", "survived" or "gone" (its line is no longer there), after trying a mutant."""
    path = tests.tree / mutant.path
    source = path.read_text("utf-8") if path.exists() else ""
    changed = mutated(source, mutant.operator, mutant.occurrence) if source else None
    if changed is None or mutant.line not in source:
        return "gone"
    times = path.stat()
    module = mutant.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    try:
        path.write_text(changed, "utf-8")
        return "survived" if tests.pass_within(importers(tests.tree, module), SECONDS) else "caught"
    finally:
        path.write_text(source, "utf-8")
        # the compiled file is valid again
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def copied(tree: Path, directory: Path) -> Path:
    """Return a copy of a tree's tracked files."""
    names = subprocess.run(["git", "ls-files"], cwd=tree, check=True, capture_output=True, text=True).stdout
    for name in names.splitlines():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(tree / name, directory / name)
    return directory


def main() -> None:
    """Draw a sample, or try one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("draw", "try", "serve"))
    parser.add_argument("--tree", type=Path, default=ROOT, help="whose code and tests (default: this one)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at once (default: 2)")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the tests (default: this one)")
    given = parser.parse_args()
    if given.what == "serve":
        serve()
        return
    if given.what == "draw":
        for place in PLACES:
            every = list(mutants(given.tree, place))
            random.Random(SEED).shuffle(every)
            for mutant in sorted(islice((m for m in every if is_fault(given.tree, m)), COUNT // len(PLACES))):
                print(*mutant, sep="\t")
        return
    sample = [Mutant(path, operator, int(k), line) for path, operator, k, line in map(fields, sys.stdin)]
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(given.jobs) as pool:
        trees = [copied(given.tree, Path(scratch, str(k))) for k in range(given.jobs)]
        free = [Tests(tree, given.python) for tree in trees]
        fates: Counter[str] = Counter()

        def tried(mutant: Mutant) -> str:
            tests = free.pop()
            begun = time.monotonic()
            try:
                return f"{fate(tests, mutant)}\t{time.monotonic() - begun:.0f} s"
            finally:
                free.append(tests)

        for mutant, said in zip(sample, pool.map(tried, sample), strict=True):
            fates[said.partition("\t")[0]] += 1
            print(said, *mutant, sep="\t", flush=True)
        for tests in free:
            tests.end()
    print(f"{fates['caught']} of {fates['caught'] + fates['survived']} caught, {fates['gone']} gone")


def fields(line: str) -> list[str]:
    """Return the four fields of a line of a sample."""
    return line.rstrip("\n").split("\t")


if __name__ == "__main__":
    main()
