"""What a pass changes in a network beside its tensors: it is taken back, and named once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fl_app import models, plugins
from fl_app.contents import Contents, Effects, trial
from fl_app.server.run_folder import read_summary
from tests.conftest import Run
from tests.facts import mentions


class Keeping(nn.Module):
    """A network that keeps something of a pass, in one way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.way, self.cache, self.count, self.seen, self.by_name = way, None, 0, [0], {"last": 0}
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)[:, :4]
        weight: torch.Tensor = self.base.weight
        if self.way == "cache":
            if self.cache is None:
                self.cache = weight.detach().clone()
            weight = self.cache
        elif self.way == "count":
            self.count += 1
        elif self.way == "seen":
            self.seen.append(len(x))
        elif self.way == "by_name":
            self.by_name["last"] = len(x)
        elif self.way == "mean":
            self.mean = self.mean + x.detach().mean() + 1
        elif self.way == "base.last":
            self.base.last = x
        out: torch.Tensor = self.head(x @ weight.T)
        return out


WAYS = ("cache", "count", "seen", "by_name", "mean", "base.last")


def made(way: str, monkeypatch: pytest.MonkeyPatch) -> Keeping:
    def factory(**_: int) -> nn.Module:
        return Keeping(way)

    monkeypatch.setattr(plugins, "load", lambda *_: factory)
    module = models.build("own:keeping", in_channels=1, num_classes=3, image_size=2)
    assert isinstance(module, Keeping)
    return module


@pytest.mark.parametrize("way", WAYS)
def test_what_a_pass_changes_is_named(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Effects.of(made(way, monkeypatch)).changed == {way}
    assert Effects.of(nn.Sequential(made(way, monkeypatch))).changed == {f"0.{way}"}
    assert Effects.of(made("", monkeypatch)) == Effects()


@pytest.mark.parametrize("way", ["cache", "count", "by_name", "mean", "base.last"])
def test_a_trial_leaves_no_attribute_changed(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # the first network of a factory is tried, and another one only passed
    for _ in range(2):
        module = made(way, monkeypatch)
        assert module.cache is None and module.count == 0 and module.by_name == {"last": 0} and not module.mean
        assert not hasattr(module.base, "last")


def test_what_a_pass_makes_stays() -> None:
    module = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3))
    with trial(module):
        module(torch.zeros(2, 5))
        module[1].count = 1  # type: ignore[assignment]
    assert type(module[0]) is nn.Linear and module[0].weight.shape == (3, 5) and module[1].count == 1


def test_what_cannot_be_looked_into_is_not_restorable() -> None:
    module = nn.Linear(2, 2)
    module.kept = iter([1])  # type: ignore[assignment]
    assert Contents(module).is_restorable and not Contents(module, opaque=lambda _: object()).is_restorable


def test_a_run_starts_from_its_file_in_spite_of_a_cache(run: Run, tmp_path: Path) -> None:
    digests = set()
    for factor in (1, 2):
        file = tmp_path / f"{factor}.pt"
        torch.save({name: factor * torch.ones_like(one) for name, one in keeping(10).state_dict().items()}, file)
        folder = run(
            model="tests.fl_app.test_contents:cached",
            train="head.*",
            initial_weights=str(file),
            num_server_rounds=1,
            run_name=f"times-{factor}",
        )
        log = (folder.path / "log.txt").read_text()
        assert log.count("a pass changes") == 1 and mentions(log, "model tests.fl_app.test_contents:cached", "cache")
        digests.add(read_summary(folder.path)["digest"])
    assert len(digests) == 2


def keeping(outputs: int) -> nn.Module:
    module = Keeping("cache")
    module.head = nn.Linear(4, outputs)
    return module


def cached(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    return keeping(num_classes)
