"""Texts in AG News' form: a folder with train.csv and test.csv, whose rows are class, title, description.

Classes are counted from 1. classes.txt, if it is there, has their names, one a line. A text becomes the numbers of its
first LENGTH words and marks, in lower case: 0 where the text has ended, 1 for a word that is not among the most frequent
of the training texts. AG News: Zhang et al. 2015, "Character-level Convolutional Networks for Text Classification".
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fl_app.data.prepared import DataRequest, Labels, Prepared, at_least_two, open_or_convert, save
from fl_app.errors import DataError
from fl_app.known_names import VOCABULARY

LENGTH = 64
"""Tokens of a text: longer texts are cut."""
AG_NEWS = ("World", "Sports", "Business", "Sci/Tech")
FILES = ("train.csv", "test.csv")
_WORD = re.compile(r"\w+|[^\w\s]")
# numbers of what is no word, and of unknown words
_RESERVED = 2
# version of the rules that make tokens
_RULES = 1


def prepare(request: DataRequest) -> Prepared:
    """Open `ag-news:/path`. Raises UserError naming the file, the line and the rule."""
    files = [request.path / name for name in FILES]
    for path in files:
        if not path.is_file():
            raise DataError(f"dataset: {request.path} must hold train.csv and test.csv: no {path}")
    told = request.path / "classes.txt"
    stats = [(path.stat().st_mtime_ns, path.stat().st_size) for path in (*files, told) if path.is_file()]

    def convert(directory: Path) -> Sequence[str]:
        named = told.read_text(encoding="utf-8").split("\n") if told.is_file() else []
        names = request.classes or tuple(filter(None, map(str.strip, named))) or AG_NEWS
        (train, y_train), (test, y_test) = (_read(path, len(at_least_two(names, told))) for path in files)
        counts = Counter(word for words in train for word in words)
        most = sorted(counts, key=lambda word: (-counts[word], word))[: VOCABULARY - _RESERVED]
        numbers = {word: k for k, word in enumerate(most, _RESERVED)}
        save(directory, (tokens(train, numbers), y_train, tokens(test, numbers), y_test))
        return names

    parts = [str(request.path), stats, request.classes, {"rules": _RULES}]
    return open_or_convert(request, f"ag-news-{request.path.name}", parts, convert)


def _read(path: Path, classes: int) -> tuple[list[list[str]], Labels]:
    """Return the words of each text in a file, and its labels from 0, int64 [n]."""
    texts, labels = [], []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.reader(file, strict=True)
            for row in reader:
                where = f"dataset: {path}, line {reader.line_num}"
                if len(row) != 3:
                    raise DataError(f"{where}: must have a class, a title and a description, got {len(row)} columns")
                if not re.fullmatch(r"[0-9]{1,9}", row[0].strip()) or not 1 <= int(row[0]) <= classes:
                    raise DataError(f"{where}: the class must be 1 to {classes}, got {row[0][:80]!r}")
                labels.append(int(row[0]) - 1)
                texts.append(_WORD.findall(f"{row[1]} {row[2]}".lower())[:LENGTH])
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"dataset: {path} must be CSV in UTF-8: {error}") from None
    if not texts:
        raise DataError(f"dataset: {path} has no rows")
    return texts, np.array(labels, np.int64)


def tokens(texts: Sequence[Sequence[str]], numbers: dict[str, int]) -> NDArray[np.int64]:
    """Return texts as the numbers of their words, [n, LENGTH], with 0 at their ends and 1 for unknown words."""
    found = np.zeros((len(texts), LENGTH), np.int64)
    for row, words in zip(found, texts, strict=True):
        row[: len(words)] = [numbers.get(word, 1) for word in words]
    return found
