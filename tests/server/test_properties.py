"""Properties of a client that lies: any JSON is read or refused, and nothing else is raised."""

from __future__ import annotations

import base64
import dataclasses
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fl_app import software
from fl_app.data.encoding import NUMBER, Encoding
from fl_app.data.moments import MomentSums, added
from fl_app.known_names import SCALING
from fl_app.server.properties import LIST, ClientReport, input_facts, normalization
from fl_app.server.run_folder import class_names_of
from tests.facts import rejected

ENCODING = {"column": "a", "kind": "number", "words": [], "fill": None, "own_fill": False}
HONEST: dict[str, dict[str, Any]] = {
    "input": {"dtype": "float32", "encodings": [ENCODING], "others": ["b"]},
    "normalization": {name: [1.0] for name in SCALING},
    "sums": {"count": 3, "unit": 1, "totals": [[3, 0]], "squares": [[5, 0]]},
    "software": {"corolla": "0.1.0"},
}

leaves = (
    st.none()
    | st.booleans()
    | st.text(max_size=5)
    | st.floats()
    | st.integers()
    | st.sampled_from([10**400, -(10**400), 1599])
)
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner), max_leaves=5
)


@st.composite
def lies(draw: st.DrawFn, honest: dict[str, Any]) -> object:
    """An honest table with any value in one place, or any value."""
    if draw(st.booleans()):
        return draw(values)
    told: Any = json.loads(json.dumps(honest))
    place = told
    while True:
        at = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[at], (dict, list)) or not place[at] or draw(st.booleans()):
            place[at] = draw(values)
            return told
        place = place[at]


@given(lies(HONEST["input"]))
def test_any_facts_about_inputs_are_read_or_refused(told: object) -> None:
    found = input_facts(json.dumps(told))
    assert found is None or all(isinstance(name, str) for each in found["encodings"] for name in each["words"])


@given(lies(HONEST["normalization"]))
@example(HONEST["normalization"] | {"mean": [10**400]})
def test_any_normalization_is_read_or_refused(told: object) -> None:
    normalization(json.dumps(told))


@given(lies(HONEST["sums"]))
def test_sums_that_are_read_can_be_added_and_used(told: object) -> None:
    try:
        found = MomentSums.from_json(json.dumps(told))
    except ValueError:
        return
    assert added([found, found, found]).scaling


@given(lies(HONEST["software"]))
def test_any_software_and_names_are_read_or_refused(told: object) -> None:
    text = json.dumps(told)
    software.told(text)
    class_names_of({"class-names": text, "num-classes": 1})
    assert ClientReport({"class-names": text, "features": text}).names.features is None or isinstance(told, list)


@pytest.mark.parametrize("told", ["[" * 100_000, "9" * 5000, '{"encodings": "\ud800"}'])
def test_texts_that_are_no_json_are_refused(told: str) -> None:
    assert input_facts(told) is normalization(told) is None and software.told(told) == {}
    with pytest.raises(ValueError):
        MomentSums.from_json(told)


def test_honest_tables_are_read() -> None:
    assert input_facts(json.dumps(HONEST["input"])) == HONEST["input"] | {
        "encodings": [dataclasses.asdict(Encoding("a", NUMBER))]
    }
    assert normalization(json.dumps(HONEST["normalization"])) == HONEST["normalization"]
    assert MomentSums.from_json(json.dumps(HONEST["sums"])).scaling.mean == (1.0,)


def test_squares_that_no_float32_has_are_refused() -> None:
    """Two sites' deviations, each below a float64's largest, may be above it together."""
    for power, fits in ((256, True), (700, False), (1599, False)):
        told = json.dumps({"count": 1, "unit": 1, "totals": [[0, 0]], "squares": [[1, power]]})
        if fits:
            assert MomentSums.from_json(told).scaling
        else:
            with rejected(ValueError, "", "larger than those", "numbers"):
                MomentSums.from_json(told)


def test_a_key_list_that_all_clients_send_is_read_once() -> None:
    text, other = (base64.b64encode(bytes([k]) * 128).decode() for k in (1, 2))
    first, second, third = (ClientReport({LIST: sent}) for sent in (text, text, other))
    assert first.keys is not None and first.keys is second.keys and first.key_list != third.key_list
    assert ClientReport({LIST: "?"}).key_list is None and ClientReport({}).key_list is None
