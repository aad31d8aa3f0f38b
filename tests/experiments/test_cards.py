"""Cards of exported models: a card of any other form is one clear error, whatever it holds."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corolla.experiments.exported.export import export
from fl_app import model_card
from fl_app.errors import UserError
from fl_app.model_names import read_card
from strategies import METHODS
from tests.conftest import Command, Run
from tests.experiments.test_predict_rows import patients
from tests.facts import rejected

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=5), inside, max_size=3),
    max_leaves=4,
)
EXAMPLES = int(os.environ.get("COROLLA_CARDS", "20"))
TINY = {"num_server_rounds": 1, "num_clients": 2, "train_samples": 12, "test_samples": 12, "model": "mlp"}


def seal(file: Path, card: Any) -> None:
    """Write any JSON as the card of a file, with the card's own hash if it can hold one."""
    if isinstance(card, dict):
        card = {name: value for name, value in card.items() if name != "card-sha256"}
        card["card-sha256"] = model_card._own_hash(card)
    text = model_card._text(card) if isinstance(card, dict) else json.dumps(card)
    model_card.beside(file).write_text(text, encoding="utf-8")


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in JSON; of a long list only its first two items."""
    if path:
        yield path
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(min(len(value), 2)):
            yield from places(value[key], (*path, key))


def changed(card: Any, path: tuple[Any, ...], value: Any, *, remove: bool = False) -> Any:
    """Return a copy of a card with another value at a path, or without it."""
    card = inner = copy.deepcopy(card)
    for key in path[:-1]:
        inner = inner[key]
    if remove:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return card


@pytest.fixture(params=["pixels", "rows"])
def asked(request: pytest.FixtureRequest, run: Run, tmp_path: Path) -> tuple[Path, Path]:
    """Return an exported model and samples that it takes: of images in an array, or of a table."""
    if request.param == "pixels":
        np.savez(samples := tmp_path / "asked.npz", x=np.zeros((2, 1, 8, 8), np.uint8), y=np.zeros(2, np.int64))
        return export(run(method="fedavg", **TINY).path, METHODS, None, tmp_path / "model.pt")[0], samples
    patients(60).to_csv(table := tmp_path / "patients.csv", index=False)
    folder = run(
        method="fedavg", dataset=f"table:{table}", target="outcome", client="hospital", categorical="ward",
        partition="by-column", model="mlp", num_server_rounds=1, num_clients=3,
    )  # fmt: skip
    return export(folder.path, METHODS, None, tmp_path / "model.pt")[0], table


LONG = "ab" * 3000


def forged(sound: Any, draw: st.DrawFn) -> Any:
    """Return a card that differs in one place from a sound one, or any JSON."""
    everywhere = list(places(sound))
    path = draw(st.sampled_from(everywhere))
    there = at(sound, path)
    match draw(st.sampled_from(["json", "drop", "retype", "lengthen", "shorten", "swap", "add", "word"])):
        case "json":
            return draw(JSON)
        case "drop":
            return changed(sound, path, None, remove=True)
        case "retype":
            return changed(sound, path, draw(JSON))
        case "lengthen":
            longer = {list: lambda: [*there, *there[:1]], str: lambda: there + LONG, int: lambda: there + 1}
            return changed(sound, path, longer.get(type(there), lambda: [there])())
        case "shorten":
            shorter = {list: lambda: there[:-1], str: lambda: there[:-1], dict: lambda: {}}
            return changed(sound, path, shorter.get(type(there), lambda: 0)())
        case "swap":
            alike = [other for other in everywhere if type(at(sound, other)) is type(there)]
            return changed(sound, path, copy.deepcopy(at(sound, draw(st.sampled_from(alike)))))
        case "add":
            where = path if isinstance(there, dict) else path[:1] if isinstance(sound[path[0]], dict) else ()
            return changed(sound, (*where, draw(st.sampled_from(["extra", "norm", "x y", LONG]))), draw(JSON))
        case _:
            words = [
                "no-such",
                "other:module",
                f"{LONG}:x",
                f"{LONG}.py",
                "os:getcwd",
                "..",
                "/",
                "a\0b",
                "\ud800",
                "mlp",
            ]
            return changed(sound, path, draw(st.sampled_from(words)))


def at(card: Any, path: tuple[Any, ...]) -> Any:
    """Return the value at a path."""
    for key in path:
        card = card[key]
    return card


def test_any_json_is_a_card_or_one_clear_error(
    asked: tuple[Path, Path], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, samples = asked
    sound = json.loads(model_card.beside(file).read_text())
    assert command("verify", str(file))[0] == 0 and command("predict", str(file), str(samples))[0] == 0

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def attempt(data: st.DataObject) -> None:
        seal(file, data.draw(st.composite(lambda draw: forged(sound, draw))()))
        try:
            model_card.read(file)
            readable = True
        except UserError as error:
            assert str(error).startswith(str(file))
            readable = False
        code, _, said = command("verify", str(file))
        assert code == (0 if readable else 2), said
        options = data.draw(st.sampled_from([(), ("--on-error", "row"), ("--json",)]))
        code, _, said = command("predict", str(file), str(samples), *options)
        assert code == 2 or (readable and code == 0), said
        # a run that begins with these weights
        try:
            read_card("initial-weights", file)
        except UserError:
            assert not readable

    attempt()


def test_entries_that_do_not_fit_each_other_are_one_error(asked: tuple[Path, Path], command: Command) -> None:
    """Each of these ended `predict` in a traceback."""
    file, samples = asked
    sound = json.loads(model_card.beside(file).read_text())
    cards = {
        "shape": changed(sound, ("shape", "extra"), 1),
        "task": changed(changed(sound, ("task",), "no-such"), ("settings", "task"), "no-such"),
        "plugins": changed(sound, ("settings", "plugins"), f"{LONG}.py:0000000000000000"),
        "model": changed(sound, ("settings", "model"), f"{LONG}:net"),
    }
    if sound["has-classes"]:
        cards["target-shift"] = changed(sound, ("target-shift",), [1.0] * len(sound["classes"]))
    if sound.get("table", {}).get("encodings"):
        cards |= {
            "targets": changed(sound, ("settings", "target"), "outcome,age"),
            "input.shift": changed(sound, ("input", "shift"), None, remove=True),
            "table.encodings": changed(sound, ("table", "encodings"), sound["table"]["encodings"][:-1]),
            "twice": changed(
                sound, ("table", "encodings"), [*sound["table"]["encodings"], *sound["table"]["encodings"]]
            ),
        }
    for name, card in cards.items():
        seal(file, card)
        code, _, said = command("predict", str(file), str(samples))
        assert code == 2 and "Traceback" not in said, (name, said)


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("data", []),
        ("settings", []),
        ("settings", None),
        ("run", None),
        ("classes", "ab"),
        ("shape", {}),
        ("format", "1"),
    ],
)
def test_malformed_entries_are_named(run: Run, tmp_path: Path, command: Command, entry: str, value: Any) -> None:
    file, sound = export(run(method="fedavg", **TINY).path, METHODS, None, tmp_path / "model.pt")
    for card in (changed(sound, (entry,), value), changed(sound, (entry,), None, remove=True)):
        seal(file, card)
        for words in (("verify", str(file)), ("predict", str(file), str(tmp_path))):
            code, _, said = command(*words)
            assert code == 2 and entry in said and "Traceback" not in said


def test_a_card_of_another_file_is_refused(run: Run, tmp_path: Path, command: Command) -> None:
    file, _ = export(run(method="fedavg", **TINY).path, METHODS, None, tmp_path / "model.pt")
    other = file.rename(tmp_path / "other.pt")
    model_card.beside(file).rename(model_card.beside(other))
    code, _, said = command("verify", str(other))
    assert code == 2 and "model.pt" in said and "other.pt" in said


def test_a_card_without_an_end_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    file.write_bytes(b"weights")
    with model_card.beside(file).open("wb") as card:
        # a sparse file, which takes no room on the disk
        card.truncate(1 << 40)
    with rejected(UserError, "", "model.pt.json", "card"):
        model_card.read(file)
