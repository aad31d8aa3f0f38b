"""What arrives at the server of a private run."""

from __future__ import annotations

from typing import Any

import pytest

from fl_app import wire


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
