"""How many threads BLAS has while kernels work."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

COUNTS = """
import json
from threadpoolctl import threadpool_info
from strategies.kernels.blocks import one_thread

def counts():
    return {library["filepath"]: library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}

with one_thread(LIBRARY):
    inside = counts()
print(json.dumps([inside, counts()]))
"""


@pytest.mark.parametrize(("library", "fewest"), [("numpy", 1), ("scipy.linalg", 2)])
def test_blas_has_one_thread_though_nobody_imported_it_before(library: str, fewest: int) -> None:
    if len(os.sched_getaffinity(0) if sys.platform == "linux" else range(os.cpu_count() or 1)) == 1:
        pytest.skip("one core has one thread anyway")
    code = COUNTS.replace("LIBRARY", repr(library))
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "2"}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    inside, after = json.loads(found.stdout)
    if len(inside) < fewest:
        pytest.skip("NumPy and SciPy share a BLAS here")
    assert set(inside.values()) == {1} and set(after.values()) == {2}
