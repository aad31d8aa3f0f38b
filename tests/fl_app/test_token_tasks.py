"""The example of tasks over tokens, on adapters of frozen networks: a language model, and a class per token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_app.server.run_folder import read_metrics, read_summary
from tests import examples
from tests.conftest import Run


@pytest.fixture
def example() -> Iterator[Any]:
    """Return examples/lora_tokens.py as a module."""
    with examples.example("lora_tokens:tagger", "peft") as module:
        yield module


@pytest.mark.parametrize("method", ["fedavg", "fedcac"])
@pytest.mark.parametrize("kind", ["language", "tags"])
def test_a_run_learns(
    run: Run, example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, kind: str
) -> None:
    monkeypatch.chdir(examples.EXAMPLES)
    folder = run(method=method, **example.settings(tmp_path, kind))
    first, *_ = read_metrics(folder.path)
    summary = read_summary(folder.path)
    assert summary["failures"] == 0
    if kind == "language":
        # a guess among all tokens has a perplexity of IDS
        assert first["perplexity-before"] > 0.8 * example.IDS and summary["final-perplexity"] < example.IDS / 3
    else:
        assert first["token-accuracy-before"] < 0.6 and summary["final-token-accuracy"] > 0.9
    trained = {"language": example.LanguageModel, "tags": example.Tagger}[kind]()
    whole = 4 * sum(parameter.numel() for parameter in trained.parameters())
    assert 0 < max(client["upload-bytes"] for client in first["clients"].values()) < whole / 3


def test_padding_counts_neither_in_the_loss_nor_in_the_accuracy(example: Any) -> None:
    task, draw = example.Tags(), torch.Generator().manual_seed(0)
    outputs = torch.randn(2, 3 * example.TAGS, generator=draw, requires_grad=True)
    y = torch.eye(example.TAGS)[torch.tensor([[0, 2, 1], [1, 0, 0]])].flatten(1)
    y[1, example.TAGS :] = 0
    tokens = outputs.reshape(-1, example.TAGS)[:4]
    expected = torch.nn.functional.cross_entropy(tokens, torch.tensor([0, 2, 1, 1]))
    loss = task.loss(outputs, y)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert outputs.grad is not None and not outputs.grad[1, example.TAGS :].any() and outputs.grad[0].all()
    found = task.measure(outputs, y, ["token-accuracy"])["token-accuracy"]
    assert found == (tokens.argmax(1) == torch.tensor([0, 2, 1, 1])).double().mean()
