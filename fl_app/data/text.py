"""Texts as token ids: a column of texts with the user's tokenizer, and texts in AG News' form.

`ag-news:/path` is a folder with train.csv and test.csv, whose rows are class, title, description. Classes are counted from
1. classes.txt, if it is there, has their names, one a line. A text becomes the numbers of its first LENGTH words and marks,
in lower case: 0 where the text has ended, 1 for a word that is not among the most frequent of the training texts. AG News:
Zhang et al. 2015, "Character-level Convolutional Networks for Text Classification".

With the key `tokenizer`, a column of texts becomes the ids that this tokenizer.json gives. The package tokenizers is imported
only to make them.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fl_app import extras
from fl_app.data.encoding import TEXT, Encoding
from fl_app.data.prepared import DataRequest, Facts, Labels, Prepared, at_least_two, open_or_convert, save
from fl_app.errors import DataError, describe
from fl_app.files import no_such
from fl_app.known_names import VOCABULARY

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LENGTH = 64
"""Tokens of a text: longer texts are cut."""
COLUMN = "text"
"""The column of a table with new texts for a model of `ag-news:`: title, blank, description."""
AG_NEWS = ("World", "Sports", "Business", "Sci/Tech")
FILES = ("train.csv", "test.csv")
_WORD = re.compile(r"\w+|[^\w\s]")
# numbers of what is no word, and of unknown words
_RESERVED = 2
# version of the rules that make tokens
_RULES = 3
_PADDING = ("[PAD]", "<pad>", "<PAD>", "<|pad|>")


def prepare(request: DataRequest) -> Prepared:
    """Open `ag-news:/path`. Raises UserError naming the file, the line and the rule."""
    files = [request.path / name for name in FILES]
    for path in files:
        if not path.is_file():
            raise DataError(key="dataset", rule=f"{request.path} must hold train.csv and test.csv: no {path}")
    told = request.path / "classes.txt"
    stats = [(path.stat().st_mtime_ns, path.stat().st_size) for path in (*files, told) if path.is_file()]

    def convert(directory: Path) -> Sequence[str]:
        named = told.read_text(encoding="utf-8").split("\n") if told.is_file() else []
        names = request.classes or tuple(filter(None, map(str.strip, named))) or AG_NEWS
        (train, y_train), (test, y_test) = (_read(path, len(at_least_two(names, told))) for path in files)
        counts = Counter(word for text in train for word in _words(text))
        most = sorted(counts, key=lambda word: (-counts[word], word))[: VOCABULARY - _RESERVED]
        encoding = Encoding(COLUMN, TEXT, tuple(most), length=LENGTH)
        uses = ((COLUMN, "feature", f"text, as its first {LENGTH} words and marks"),)
        facts = Facts(tuple(encoding.names), uses, encodings=(encoding,), tokens=VOCABULARY)
        save(directory, (token_ids(encoding, train), y_train, token_ids(encoding, test), y_test), facts=facts)
        return names

    parts = [str(request.path), stats, request.classes, {"rules": _RULES}]
    return open_or_convert(request, f"ag-news-{request.path.name}", parts, convert)


def _read(path: Path, classes: int) -> tuple[list[str], Labels]:
    """Return the texts in a file, and their labels from 0, int64 [n]."""
    texts, labels = [], []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.reader(file, strict=True)
            for row in reader:
                where = f"dataset: {path}, line {reader.line_num}"
                if len(row) != 3:
                    raise DataError(
                        key=where, rule="must have a class, a title and a description", value=len(row), hint=" columns"
                    )
                if not re.fullmatch(r"[0-9]{1,9}", row[0].strip()) or not 1 <= int(row[0]) <= classes:
                    raise DataError(key=where, rule=f"the class must be 1 to {classes}", value=row[0][:80])
                labels.append(int(row[0]) - 1)
                texts.append(f"{row[1]} {row[2]}")
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(key="dataset", rule=f"{path} must be CSV in UTF-8: {error}") from None
    if not texts:
        raise DataError(key="dataset", rule=f"{path} has no rows")
    return texts, np.array(labels, np.int64)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())[:LENGTH]


# A column of texts ----------------------------------------------------------------------------------------------------


def encoding_of(column: str, path: Path) -> tuple[Encoding, int]:
    """Return the encoding of a column of texts by a tokenizer's file, and the number of its token ids.

    path: of a tokenizer.json. Its truncation gives the length, else LENGTH; its padding gives the id after a text's end, else
    its token for padding, else 0. Raises UserError if tokenizers is not installed or cannot read the file.
    """
    extras.require("tokenizers", f"tokenizer: {path}")
    if not path.is_file():
        raise DataError(key="tokenizer", rule=no_such(path))
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(key="tokenizer", rule=f"{path} cannot be read ({describe(error)})") from None
    found = _tokenizer(content, f"tokenizer: {path}")
    cut, pad, ids = found.truncation or {}, found.padding or {}, found.get_vocab()
    if not ids:
        raise DataError(key="tokenizer", rule=f"{path} has no tokens")
    own = next((ids[name] for name in _PADDING if name in ids), 0)
    length, padding = cut.get("max_length", LENGTH), pad.get("pad_id", own)
    # without the blanks that people indent it with
    encoding = Encoding(column, TEXT, tokenizer=json.dumps(json.loads(content)), length=length, padding=padding)
    return encoding, max(*ids.values(), padding) + 1


def _tokenizer(content: str, where: str) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(content)
    except Exception as error:  # tokenizers raises Exception itself
        raise DataError(f"{where} is no tokenizer.json ({describe(error)})") from None


def token_ids(encoding: Encoding, texts: Sequence[str]) -> NDArray[np.int64]:
    """Return texts as token ids [n, encoding.length], with encoding.padding after their ends.

    Raises UserError if tokenizers, which the encoding needs, is not installed.
    """
    if encoding.tokenizer:
        extras.require("tokenizers", f"column {encoding.column}")
        tokenizer = _tokenizer(encoding.tokenizer, f"column {encoding.column}: its tokenizer")
        tokenizer.no_padding()
        tokenizer.enable_truncation(encoding.length)
        ids = [found.ids for found in tokenizer.encode_batch(list(texts))]
    else:
        numbers = {word: k for k, word in enumerate(encoding.words, _RESERVED)}
        ids = [[numbers.get(word, 1) for word in _words(text)] for text in texts]
    out = np.full((len(texts), encoding.length), encoding.padding, np.int64)
    for row, of_text in zip(out, ids, strict=True):
        row[: len(of_text)] = of_text
    return out
