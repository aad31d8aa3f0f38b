"""What uploads count is said in one hook, `weights`, and is right in plain and in private runs, or refused before they start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_origin

import numpy as np
import pytest

from fl_app.errors import MethodError
from strategies import METHODS
from strategies.base import Uploads
from strategies.fedcac import FedCAC
from tests.conftest import Run, config
from tests.facts import rejected
from tests.privacy.runs import PRIVATE, rounds
from tests.privacy.test_private_runs import global_model

UNEQUAL = {"partition": "dirichlet", "min_samples": 4, "num_clients": 5, "num_server_rounds": 1}
Weights = Callable[[Any, Uploads], Any]


def root(server: FedCAC, uploads: Uploads) -> Any:
    """The square roots of samples, which FedCAC does not know."""
    return np.sqrt(uploads.sizes)


@pytest.mark.parametrize("method", ["fedcac", "fedavg", "pfedme"])
@pytest.mark.parametrize("bound", [0.0, 1.0], ids=["unbound", "max-size-weight"])
def test_another_weighting_is_one_hook_and_right_in_private_runs(
    run: Run, monkeypatch: pytest.MonkeyPatch, method: str, bound: float
) -> None:
    own = {"fedcac": {"collaboration": "none"}} if method == "fedcac" else {}
    settings = {"method": method, "max_update_norm": 0, "max_size_weight": bound, **own, **UNEQUAL}
    before = global_model(run(run_name="before", **settings))
    half = METHODS[method].strategy
    monkeypatch.setattr(get_origin(half) or half, "weights", root)
    plain = global_model(run(run_name="plain", **settings))
    hidden = run(run_name="hidden", private=True, **settings)
    np.testing.assert_allclose(global_model(hidden), plain, rtol=1e-6, atol=2.0**-22)
    assert np.abs(plain - before).max() > 1e-4
    assert all((row["train-samples"] > 1) is bool(bound) for row in rounds(hidden)[0]["clients"].values())


def test_a_plug_in_may_weight_by_root(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its author writes it: a subclass and a METHOD, and nothing else."""
    (tmp_path / "rooted.py").write_text(
        "import numpy as np\n"
        "from fl_app.keys import NoParams\n"
        "from strategies.base import LocalUpdate, Method, all_tensors\n"
        "from strategies.baselines.fedavg import FedAvg\n"
        "class Rooted(FedAvg):\n"
        "    def weights(self, uploads):\n"
        "        return np.sqrt(uploads.sizes)\n"
        "METHOD = Method('rooted', NoParams, Rooted, LocalUpdate, all_tensors, sums=True)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    settings = {"method": "rooted:METHOD", "max_update_norm": 0, **UNEQUAL}
    plain, hidden = (run(run_name=str(private), private=private, **settings) for private in (False, True))
    np.testing.assert_allclose(global_model(hidden), global_model(plain), rtol=1e-6, atol=2.0**-22)


def test_a_plug_in_that_says_it_as_nothing_asks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "alike.py").write_text(
        "from fl_app.keys import NoParams\n"
        "from strategies.base import LocalUpdate, Method, all_tensors\n"
        "from strategies.baselines.fedavg import FedAvg\n"
        "class Alike(FedAvg):\n"
        "    @classmethod\n"
        "    def counts_alike(cls, params):\n"
        "        return True\n"
        "METHOD = Method('alike', NoParams, Alike, LocalUpdate, all_tensors, sums=True)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with rejected(MethodError, "method alike:METHOD", "strategy", "counts_alike is never", "called"):
        config(method="alike:METHOD")


REFUSED: dict[str, tuple[Weights, str]] = {
    "models": (lambda self, uploads: np.abs(uploads.W).sum(axis=1), "its weights need the uploads' W"),
    "metrics": (lambda self, uploads: [m["loss"] for m in uploads.metrics], "its weights need the uploads' metrics"),
    "rounds": (
        lambda self, uploads: uploads.sizes**self.round,
        "'FedCAC' object has no attribute 'state'",
    ),
    "others": (lambda self, uploads: uploads.sizes + uploads.sizes.sum(), "depends on the other clients"),
    "ids": (lambda self, uploads: np.ones(len(uploads.ids)), "a positive number for each of the 1 uploads' sizes, got"),
    "negative": (lambda self, uploads: -uploads.sizes, "must be a positive number for each of the 4 uploads' sizes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_sums_cannot_honour_is_refused_by_name_before_anything_is_sent(case: str) -> None:
    weights, words = REFUSED[case]
    weighted = replace(METHODS["fedcac"], strategy=type("FedCAC", (FedCAC,), {"weights": weights}))
    weighted.check(config(method="fedcac", num_clients=5))
    with rejected(MethodError, "private", "method fedcac", words):
        weighted.check(config(method="fedcac", **PRIVATE))
