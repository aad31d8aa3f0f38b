"""Cards of exported models: a card of any other form is one clear error, whatever it holds."""

from __future__ import annotations

import copy
import json
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
from strategies import METHODS
from tests.conftest import Command, Run
from tests.experiments.test_predict_rows import patients

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=5), inside, max_size=3),
    max_leaves=4,
)
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


def test_any_json_is_a_card_or_one_clear_error(asked: tuple[Path, Path], command: Command) -> None:
    file, samples = asked
    sound = json.loads(model_card.beside(file).read_text())
    assert command("verify", str(file))[0] == 0 and command("predict", str(file), str(samples))[0] == 0

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.one_of(JSON, st.tuples(st.sampled_from(list(places(sound))), JSON, st.booleans())))
    def attempt(drawn: Any) -> None:
        card = changed(sound, drawn[0], drawn[1], remove=drawn[2]) if isinstance(drawn, tuple) else drawn
        seal(file, card)
        try:
            model_card.read(file)
        except UserError as error:
            assert str(error).startswith(str(file))
            return
        assert command("verify", str(file))[0] == 0
        code, _, said = command("predict", str(file), str(samples))
        assert code in (0, 2), said

    attempt()


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
