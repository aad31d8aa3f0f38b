"""Whole rounds of private runs of ten clients, with a key file each, beside the same runs of another checkout.

python -m benchmarks.private_rounds --beside DIR     # DIR/.venv has the other checkout's packages
python -m benchmarks.private_rounds                  # this checkout alone

All clients and the server are in one process, and train on little. Bytes are those of all objects that would travel.
Seconds are the processor's, of one thread; both checkouts are measured in turns.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from client_app.client_app import app
from fl_app.config import parse
from fl_app.keys import Scalar
from fl_app.privacy import keyring
from fl_app.server_app import run
from fl_app.transport.inprocess import InProcessGrid
from fl_app.transport.wire import PRIVATE_KEYS
from strategies import METHOD_PARAMS

CLIENTS, ROUNDS, REPEATS = 10, 8, 5
MODELS = ("mlp", "resnet8")
# of a round with 64-bit words and double masks, beside one of 75ef101
GOAL = 2.0


class Counting(InProcessGrid):
    """Notes by round when its first download is answered, and the bytes of its messages if `sizes` is set."""

    sizes = False

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.began: dict[str, tuple[float, float]] = {}
        self.bytes: Counter[str] = Counter()

    def _handle(self, message: Message) -> Message:
        round = message.metadata.group_id
        if message.metadata.message_type == "train":
            self.began.setdefault(round, (time.process_time(), time.perf_counter()))
        # before the client takes the arrays out
        self._count(round, message)
        reply = super()._handle(message)
        self._count(round, reply)
        return reply

    def _count(self, round: str, message: Message) -> None:
        if self.sizes:
            self.bytes[round] += sum(len(found.deflate()) for found in get_all_nested_objects(message).values())


def site_keys(directory: Path, n: int) -> list[Path]:
    """Make the keys of n sites. Return their files; the list is beside them."""
    lines, paths = [], []
    for i in range(n):
        path = directory / f"{i}.x25519"
        path.write_bytes(keyring.make_private_key())
        path.chmod(0o600)
        node = ec.generate_private_key(ec.SECP384R1())
        public = (
            node.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()
        )
        lines.append(f"{i} {public} {keyring.KEY_TYPE} {keyring.statement(keyring.read_private_key(path), node)}\n")
        paths.append(path)
    (directory / keyring.PEERS).write_text("".join(lines))
    return paths


def once(model: str, sizes: bool) -> dict[str, float]:
    """Return the mean bytes, or seconds, of all rounds but the first and the last. This runs in any checkout."""
    with tempfile.TemporaryDirectory() as directory:
        os.environ["COROLLA_SITE_DIR"] = f"{directory}/site"
        raw: dict[str, Scalar] = {
            "method": "fedavg",
            "private": True,
            "model": model,
            "num-clients": CLIENTS,
            "num-server-rounds": ROUNDS,
            "train-samples": 20,
            "test-samples": 5,
            "evaluate-every": 0,
            "local-epochs": 1,
            "client-threads": 1,
            "device": "cpu",
            "run-name": "run",
            "output-dir": directory,
            "state-dir": f"{directory}/state",
        }
        nodes = {i: {PRIVATE_KEYS: str(path)} for i, path in enumerate(site_keys(Path(directory), CLIENTS))}
        grid = Counting(app, raw, CLIENTS, nodes)
        grid.sizes = sizes
        run(grid, parse(raw, METHOD_PARAMS), lambda *_: None)
    if sizes:
        return {"bytes": statistics.mean(grid.bytes[str(round)] for round in range(2, ROUNDS))}
    (first, start), (last, end) = grid.began["2"], grid.began[str(ROUNDS)]
    return {"seconds": (last - first) / (ROUNDS - 2), "wall seconds": (end - start) / (ROUNDS - 2)}


def measured(checkout: Path, model: str, sizes: bool) -> dict[str, float]:
    """Return what `once` returns in a checkout, in a process of its own."""
    command = [str(checkout / ".venv/bin/python"), "-P", __file__, "--once", model, *(["--sizes"] if sizes else [])]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    done = subprocess.run(command, cwd=checkout, env={**os.environ, **threads}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Measure, print, check."""
    if "--once" in sys.argv:
        print(json.dumps(once(sys.argv[sys.argv.index("--once") + 1], "--sizes" in sys.argv)))
        return
    # the other checkout may lack it
    from benchmarks.measure import arguments, finish

    parser = arguments(__doc__)
    parser.add_argument("--beside", type=Path, help="another checkout, with its .venv")
    options = parser.parse_args()
    here = Path(__file__).resolve().parents[1]
    checkouts = {"here": here, **({"beside": options.beside.resolve()} if options.beside else {})}
    results: dict[str, Any] = {"clients": CLIENTS}
    for model in MODELS:
        found = {name: measured(path, model, sizes=True) for name, path in checkouts.items()}
        turns = [
            {name: measured(path, model, sizes=False) for name, path in checkouts.items()}
            for _ in range(2 if options.short else REPEATS)
        ]
        for name in checkouts:
            seconds = {what: statistics.median(turn[name][what] for turn in turns) for what in turns[0][name]}
            results[f"{model}, {name}"] = found[name] | seconds
        if options.beside:
            results[f"{model}: bytes"] = found["here"]["bytes"] / found["beside"]["bytes"]
            for what in turns[0]["here"]:
                ratios = [turn["here"][what] / turn["beside"][what] for turn in turns]
                results[f"{model}: {what}"] = statistics.median(ratios)
                results[f"{model}: {what}, from and to"] = [min(ratios), max(ratios)]
    goals = {f"{model}: {what}": GOAL for model in MODELS for what in ("bytes", "seconds")} if options.beside else {}
    finish(results, goals, options)


if __name__ == "__main__":
    main()
