"""Texts in AG News' form, as tokens, and the transformer that learns them."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import tokenizers
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from tokenizers import normalizers, pre_tokenizers, processors
from tokenizers.models import WordLevel

import corolla
from corolla.experiments.exported.export import export
from corolla.experiments.runs import RecordedRun
from fl_app import data, model_card, models
from fl_app.config import RunConfig
from fl_app.data.encoding import Encoding
from fl_app.data.table import prepare_saved
from fl_app.data.text import AG_NEWS, LENGTH, token_ids
from fl_app.errors import DataError, UserError
from fl_app.tasks import normalization
from strategies import METHODS
from tests.conftest import SMALL, Command, Run, config, flat
from tests.facts import mentions, rejected

ROOT = Path(__file__).resolve().parents[2]


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
    with rejected(DataError, "dataset", "hold train.csv", "test.csv"):
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


# Texts of a column, with the user's tokenizer -------------------------------------------------------------------------

TEXTS = ["The goal of 3", "the bank said", "war", "a chip, a chip and a goal"]


def tokenizer(path: Path, padding: str = "[PAD]", length: int = 0) -> Path:
    """A tokenizer.json that knows the words of TEXTS. padding: its token 7. length: of its truncation, if it has one."""
    known = ["[UNK]", "[CLS]", "the", "goal", "bank", "war", "chip", padding, "of", "said"]
    made = tokenizers.Tokenizer(WordLevel({word: k for k, word in enumerate(known)}, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 1)])
    if length:
        made.enable_truncation(length)
    made.save(str(path))
    return path


def saved(path: Path, **more: list[Any]) -> Path:
    """A DatasetDict with a column of texts, labels and other columns."""
    labels = Features({"text": Value("string"), "label": ClassLabel(names=["no", "yes"])})
    each = {"text": [*TEXTS, None] * 8, "label": [0, 1] * 20}
    part = Dataset.from_dict(each, labels)
    for name, values in more.items():
        part = part.add_column(name, values)
    DatasetDict(train=part, test=part.select(range(6))).save_to_disk(str(path))
    return path


def keys(tmp_path: Path, **more: object) -> dict[str, Any]:
    path, file = tmp_path / "saved", tmp_path / "tokenizer.json"
    if not path.exists():
        saved(path)
        tokenizer(file)
    found = {"dataset": f"hf:{path}", "target": "label", "tokenizer": str(file), "data_dir": str(tmp_path / "data")}
    return found | {"model": "transformer"} | more


def test_a_column_of_texts_becomes_the_tokenizers_ids(tmp_path: Path) -> None:
    settings = config(**keys(tmp_path))
    found = data.prepare_for(settings)
    # [CLS] the goal of [UNK], then padding
    assert found.x_train[0].tolist() == [1, 2, 3, 8, 0] + [7] * (LENGTH - 5)
    assert found.x_train[4].tolist() == [1] + [7] * (LENGTH - 1)
    assert (found.x_test == found.x_train[:6]).all()
    assert found.info.classes == ("no", "yes") and found.info.in_channels == 10
    assert normalization(settings, found.x_train.dtype) == "unit"
    # padding is the same in every text, but no feature of its own
    assert not any("constant" in line for line in found.info.remarks)
    assert any(mentions(line, "missing in 9 of 46", "rows") for line in found.info.remarks)


def test_a_tokenizers_own_length_counts_and_a_changed_file_is_read_again(tmp_path: Path) -> None:
    settings = config(**keys(tmp_path))
    assert data.prepare_for(settings).x_train.shape[1] == LENGTH
    tokenizer(tmp_path / "tokenizer.json", padding="none", length=4)
    found = data.prepare_for(settings)
    # without a token for padding it is 0
    assert found.x_train[:2].tolist() == [[1, 2, 3, 8], [1, 2, 4, 9]] and found.x_train[2].tolist() == [1, 5, 0, 0]


def test_one_column_alone_holds_texts(tmp_path: Path) -> None:
    saved(tmp_path / "saved", number=[0.5 * k for k in range(40)])
    tokenizer(tmp_path / "tokenizer.json")
    with rejected(DataError, "dataset", "text", "only feature"):
        data.prepare_for(config(**keys(tmp_path)))
    assert data.prepare_for(config(**keys(tmp_path, exclude="number"))).x_train.dtype == np.int64


def test_a_site_that_hides_its_values_has_the_same_tokens(tmp_path: Path) -> None:
    request = data.DataRequest.of(config(**keys(tmp_path)))
    hidden = replace(request, hides=True, public=True, classes=("no", "yes"))
    assert (prepare_saved(hidden).x_train == prepare_saved(request).x_train).all()


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"tokenizer": "/nowhere/tokenizer.json"}, "tokenizer: "),
        ({"tokenizer": __file__}, "tokenizer: .* is no tokenizer.json"),
        ({"tokenizer": ""}, "column text must hold numbers"),
        ({"dataset": "digits", "target": ""}, "tokenizer: digits has no columns"),
    ],
    ids=["no file", "no tokenizer", "no key", "no column"],
)
def test_what_gives_no_tokens_is_named(tmp_path: Path, change: dict[str, str], key: str) -> None:
    with pytest.raises(UserError, match=key):
        data.prepare_for(config(**keys(tmp_path) | change))


def test_a_site_of_its_own_reads_no_texts(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        config(dataset="node", classes="a,b", tokenizer=str(tmp_path / "tokenizer.json"))
    assert refused.value.key == "tokenizer"


def test_a_client_imports_no_tokenizers(tmp_path: Path) -> None:
    settings = keys(tmp_path)
    data.prepare_for(config(**settings))
    code = (
        "import sys; from fl_app import data; from fl_app.config import parse; from strategies import METHOD_PARAMS\n"
    )
    line = (
        f"{code}data.prepare_for(parse({SMALL | flat(settings)!r}, METHOD_PARAMS)); print('tokenizers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("source", ["hf", "ag-news"])
def test_a_trained_model_answers_raw_texts(command: Command, run: Run, tmp_path: Path, source: str) -> None:
    asked = ["the goal of 3", "war", "42", "", 'a "chip", NA'] if source == "hf" else ["goal 3 the goal of 7", "chip 4"]
    settings = {"dataset": f"ag-news:{folder(tmp_path / 'texts')}", "model": "transformer", "partition": "iid"}
    if source == "hf":
        settings = keys(tmp_path, partition="iid")
    settings.pop("data_dir", None)
    found = run(**settings, method="fedavg", train_samples=20, test_samples=3, num_clients=2, num_server_rounds=1)
    file, _ = export(found.path, METHODS, output=tmp_path / "model.pt")
    pandas.DataFrame({"text": asked}).to_csv(tmp_path / "new.csv", index=False, quoting=csv.QUOTE_ALL)
    told = json.loads(command("predict", str(file), str(tmp_path / "new.csv"), "--json")[1])
    model = corolla.Run(found.path).model()
    # as ids, by the rules that the training rows had
    encoding = model_card.read(file)["table"]["encodings"][0]
    ids = token_ids(Encoding.from_json(encoding), asked)
    expected = model.probabilities(ids)
    shown = [list(row["probabilities"].values()) for row in told["predictions"]]
    assert np.allclose(shown, expected, atol=1e-6) and len({tuple(row) for row in ids}) == len(asked)
    assert np.allclose(model.probabilities(pandas.DataFrame({"text": asked})), expected, atol=1e-6)


def test_a_run_learns_texts_with_a_tokenizer(run: Run, tmp_path: Path) -> None:
    settings = keys(tmp_path, partition="iid")
    settings.pop("data_dir", None)
    known = {"text": ["the goal", "a war said", "goal", "bank war"] * 10, "label": [0, 1, 0, 1] * 10}
    part = Dataset.from_dict(known)
    DatasetDict(train=part, test=part).save_to_disk(str(tmp_path / "known"))
    settings |= {"dataset": f"hf:{tmp_path / 'known'}", "optimizer": "adam", "learning_rate": 0.01, "local_epochs": 5}
    found = run(**settings, train_samples=20, test_samples=20, num_clients=2, num_server_rounds=2, method="fedper")
    assert RecordedRun(found.path).summary["final-accuracy"] > 0.9


def test_no_run_starts_from_a_model_of_another_tokenizer(run: Run, tmp_path: Path) -> None:
    """The ids of one tokenizer are other words by another one, also if the column has the same name."""
    settings = keys(tmp_path, partition="iid", train_samples=8, test_samples=3, num_clients=2, num_server_rounds=1)
    june = run(**settings, run_name="june")
    file, card = export(june.path, METHODS, None, tmp_path / "june.pt")
    ways = {"initial_weights": str(file)}, {"from_run": str(june.path)}
    for k, way in enumerate(ways):
        run(**settings, **way, run_name=f"same-{k}")
    tokenizer(tmp_path / "other.json", length=64)
    text = (tmp_path / "other.json").read_text()
    (tmp_path / "other.json").write_text(text.replace('"goal":3', '"bank":3').replace('"bank":4', '"goal":4'))
    for way in ways:
        with pytest.raises(UserError, match="text "):
            run(**settings | {"tokenizer": str(tmp_path / "other.json")}, **way, run_name="other")
    assert not (june.path.parent / "other").exists() and card["features"][0].startswith("text ")
