"""The nightly matrix itself: it passes what is right, and finds what is not."""

from __future__ import annotations

import pytest

from tests import matrix
from tests.facts import mentions
from tests.matrix import Feature


def test_a_method_that_is_as_it_should_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert matrix.main(["--methods", "moon", "--features", "again,half,private,train-biases"]) == 0
    cells = capsys.readouterr().out.splitlines()[1].split()
    assert cells == ["moon", "ok", "ok", "ok", "ok"]


def test_a_digest_that_moves_and_a_client_that_fails_are_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = {**matrix.FEATURES, "moved": Feature({"seed": 1}, same=True)}
    monkeypatch.setattr(matrix, "FEATURES", moved)
    assert matrix.main(["--methods", "local", "--features", "moved"]) == 1
    assert mentions(capsys.readouterr().out, "local", "moved")


def test_an_unforeseen_exception_is_no_refusal() -> None:
    assert matrix.EXCEPTION.search("round 1 failed in 2 attempts client 0: RuntimeError: shape")
    assert not matrix.EXCEPTION.search("dp-epsilon: method moon cannot run with differential privacy")
    with pytest.raises(SystemExit, match="--methods: no fedav"):
        matrix.main(["--methods", "fedav"])
