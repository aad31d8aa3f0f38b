"""What the twelve newest methods' kernels and settings refuse; what they compute is in test_references.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fl_app.errors import ConfigurationError, MethodError
from strategies import METHODS
from strategies.baselines.apple import mix
from strategies.baselines.fedma import match
from strategies.baselines.fedpac import head_weights
from strategies.baselines.perfedavg import step
from strategies.baselines.pfedsim import PFedSimParams, similarity
from tests.conftest import config
from tests.facts import rejected

ONE = np.ones(1)


def stepped(variant: str) -> Any:
    return step(
        lambda w, x, y: x * (w - y), 3 * ONE, 2 * ONE, ONE, 3 * ONE, -ONE, alpha=0.25, beta=0.5, variant=variant
    )


@pytest.mark.parametrize(
    ("call", "kind", "key", "rule"),
    [
        (lambda: mix(np.ones((4, 6)), np.ones(3)), ValueError, "", ("[N, d] and p [N]", "got [4, 6] and [3]")),
        (
            lambda: METHODS["favor"].check(config(method="favor", report_accuracy=False)),
            ConfigurationError,
            "report-accuracy",
            ("true for favor",),
        ),
        (lambda: match([np.ones((3, 2)), np.ones((2, 2))]), ValueError, "", ("weights", "arrays")),
        *(
            (lambda v=v: head_weights(np.ones((2, 3)), v), ValueError, "", ("2 numbers >= 0", "many as S", "clients"))
            for v in ([1.0], [1.0, -1], [1.0, np.nan])
        ),
        (lambda: stepped("exact"), MethodError, "perfedavg.variant", ("must be one",)),
        (lambda: similarity(np.ones(3)), ValueError, "", ("heads", "[N, h]", "got [3]")),
    ],
)
def test_it_is_refused(call: Callable[[], Any], kind: type[Exception], key: str, rule: tuple[str, ...]) -> None:
    with rejected(kind, key, *rule):
        call()


def test_names_of_the_paper_are_names_too() -> None:
    assert stepped("FO") == stepped("first-order") != stepped("hessian-free") == stepped("HF")


def test_a_share_of_warmup_rounds_is_rounded_down() -> None:
    assert [PFedSimParams(warmup=part).warmup_rounds(10) for part in (0, 0.29, 0.3, 1)] == [0, 2, 3, 10]
