"""The federation of corolla.testing around the small image model of the methods' tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from corolla import testing
from fl_app.data import DatasetInfo
from tests.conftest import SMALL as SMALL_RUN
from tests.conftest import flat
from tests.methods.one_client import samples, small

SMALL = {"batch_size": 4, "local_epochs": 2, "learning_rate": 0.1, "finetune_epochs": 0}


class Federation(testing.Federation):
    """Clients with samples of their own, 2 x 2 pixels and 3 classes, around one server."""

    def __init__(
        self,
        folder: Path,
        method: str,
        *,
        sizes: Iterable[int] = (10, 6, 8),
        network: Callable[[], nn.Module] = small,
        **changes: Any,
    ) -> None:
        data = [samples(n, seed=i) for i, n in enumerate(sizes)]
        info = DatasetInfo(1, 2, ("a", "b", "c"), len(data[0][1]), len(data[0][1]), (0.0,), (1.0,))
        super().__init__(method, data, info, network, SMALL_RUN | flat({**SMALL, **changes}), folder)


def close(a: np.ndarray, b: np.ndarray, atol: float = 1e-6) -> None:
    np.testing.assert_allclose(a, b, rtol=0, atol=atol)
