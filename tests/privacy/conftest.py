"""What arrives at the server of a private run, and an accountant that is quick."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from opacus.accountants import RDPAccountant

from fl_app.transport import wire

ALL_ORDERS = RDPAccountant.DEFAULT_ALPHAS


@pytest.fixture(autouse=True, scope="module")
def few_orders() -> Iterator[None]:
    """Let the accountant minimize over whole orders alone: still a bound, in a thirtieth of the time for a large rate."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RDPAccountant, "DEFAULT_ALPHAS", list(range(2, 64)))
        yield


@pytest.fixture
def all_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the accountant minimize over all of Opacus's orders, as a user's does."""
    monkeypatch.setattr(RDPAccountant, "DEFAULT_ALPHAS", ALL_ORDERS)


@pytest.fixture
def arriving(monkeypatch: pytest.MonkeyPatch) -> list[tuple[wire.Upload, wire.Expected]]:
    """Everything the server decodes, in order."""
    seen: list[tuple[wire.Upload, wire.Expected]] = []
    decode = wire.decode_upload

    def spy(content: Any, expected: Any) -> Any:
        upload = decode(content, expected)
        seen.append((upload, expected))
        return upload

    monkeypatch.setattr(wire, "decode_upload", spy)
    return seen
