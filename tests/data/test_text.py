"""Texts in AG News' form, as tokens, and the transformer that learns them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from corolla.experiments.runs import RecordedRun
from fl_app import data, models
from fl_app.config import RunConfig
from fl_app.data.text import AG_NEWS, LENGTH
from fl_app.errors import UserError
from fl_app.tasks import normalization
from tests.conftest import Run, config


def folder(path: Path, train: str = "", test: str = "", classes: str = "") -> Path:
    """A folder in AG News' form with `train` and `test` as given, else a few rows of texts that tell their class."""
    path.mkdir()
    draw = np.random.default_rng(0)

    def rows(count: int) -> str:
        words = ["war", "goal", "bank", "chip"]
        return "".join(
            f'"{k % 4 + 1}","{words[k % 4]} {draw.integers(30)}","the {words[k % 4]} of {draw.integers(30)}"\n'
            for k in range(count)
        )

    (path / "train.csv").write_text(train or rows(160))
    (path / "test.csv").write_text(test or rows(80))
    if classes:
        (path / "classes.txt").write_text(classes)
    return path


def opened(path: Path, tmp_path: Path, **more: object) -> tuple[RunConfig, data.Prepared]:
    found = config(dataset=f"ag-news:{path}", model="transformer", data_dir=str(tmp_path / "data"), **more)
    return found, data.prepare_for(found)


def test_tokens_by_hand(tmp_path: Path) -> None:
    train = '"2","The end, the start","a ""b"""\n"4","start","New\nthe"\n'
    settings, found = opened(folder(tmp_path / "texts", train, '"1","the new","Unseen!"\n'), tmp_path)
    # by number of occurrences, then by letters: the 3, start and " 2, then , a b end new
    numbers = {word: k for k, word in enumerate(["the", '"', "start", ",", "a", "b", "end", "new"], 2)}
    first = [numbers[word] for word in ["the", "end", ",", "the", "start", "a", '"', "b", '"']]
    assert found.x_train[0].tolist() == first + [0] * (LENGTH - len(first))
    assert found.x_train[1, :4].tolist() == [numbers[word] for word in ["start", "new", "the"]] + [0]
    # words that only test texts have are unknown
    assert found.x_test[0, :5].tolist() == [numbers["the"], numbers["new"], 1, 1, 0]
    assert (found.y_train.tolist(), found.y_test.tolist()) == ([1, 3], [0])
    assert found.x_train.dtype == np.int64 and found.info.classes == AG_NEWS
    assert normalization(settings, found.x_train.dtype) == "unit"


def test_long_texts_are_cut_and_classes_named_by_their_file(tmp_path: Path) -> None:
    long = " ".join(f"w{k}" for k in range(2 * LENGTH))
    train, test = f'"1","{long}","x"\n"2","y","z"\n', '"2","y","z"\n'
    _, found = opened(folder(tmp_path / "texts", train, test, classes="no\nyes\n"), tmp_path)
    assert found.x_train.shape == (2, LENGTH) and (found.x_train[0] > 1).all()
    assert found.info.classes == ("no", "yes")


@pytest.mark.parametrize(
    ("train", "why"),
    [
        ('"1","a"\n', "line 1: must have a class, a title and a description, got 2 columns"),
        ('"1","a","b"\n"5","a","b"\n', "line 2: the class must be 1 to 4, got '5'"),
        ('"Class Index","Title","Description"\n', "line 1: the class must be 1 to 4, got 'Class Index'"),
        ("\n", "got 0 columns"),
        ('"1","a","b"x\n', "must be CSV in UTF-8"),
    ],
    ids=["columns", "class", "header", "empty", "quotes"],
)
def test_what_is_no_text_is_named_with_its_line(tmp_path: Path, train: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        opened(folder(tmp_path / "texts", train), tmp_path)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    path = folder(tmp_path / "texts")
    (path / "test.csv").unlink()
    with pytest.raises(UserError, match="must hold train.csv and test.csv"):
        opened(path, tmp_path)


def test_the_transformer_looks_at_words_alone() -> None:
    module = models.build("transformer", in_channels=6, num_classes=3, image_size=1, input_shape=(6,)).eval()
    longer = models.build("transformer", in_channels=9, num_classes=3, image_size=1, input_shape=(9,)).eval()
    state = module.state_dict()
    state["places.weight"] = torch.cat([state["places.weight"], torch.zeros(3, 64)])
    longer.load_state_dict(state)
    texts = torch.tensor([[5, 7, 19_999, 0, 0, 0], [0] * 6])
    with torch.no_grad():
        short = module(texts.float())
        assert torch.allclose(short, longer(torch.nn.functional.pad(texts, (0, 3))), atol=1e-6)
        assert not torch.allclose(short[0], module(texts[:, [1, 0, 2, 3, 4, 5]])[0])
    assert torch.isfinite(short).all()


def test_the_transformer_takes_tokens_alone() -> None:
    with pytest.raises(UserError, match=r"transformer: needs tokens \[T\]"):
        models.build("transformer", in_channels=1, num_classes=3, image_size=8)


def test_a_run_learns_texts(run: Run, tmp_path: Path) -> None:
    settings = {"dataset": f"ag-news:{folder(tmp_path / 'texts')}", "model": "transformer", "partition": "iid"}
    sizes = {"train_samples": 50, "test_samples": 20, "num_clients": 2}
    folder_of_run = run(
        **settings, **sizes, method="fedper", optimizer="adam", learning_rate=0.003, local_epochs=3, num_server_rounds=2
    )
    assert RecordedRun(folder_of_run.path).summary["final-accuracy"] > 0.9
