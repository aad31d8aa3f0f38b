"""How methods look, on light and dark paper."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from corolla.report.theme import COLOURS, DARK_PAPER, ON_DARK, Look, bytes_of, looks, of_method
from strategies import METHODS

# Machado, Oliveira, Fernandes (2009), severity 1, linear RGB
CONES = {
    "all": np.eye(3),
    "deutan": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "protan": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
}
OKLAB = (
    np.array(
        [
            [0.4122214708, 0.5363325363, 0.0514459929],
            [0.2119034982, 0.6806995451, 0.1073969566],
            [0.0883024619, 0.2817188376, 0.6299787005],
        ]
    ),
    np.array(
        [
            [0.2104542553, 0.7936177850, -0.0040720468],
            [1.9779984951, -2.4285922050, 0.4505937099],
            [0.0259040371, 0.7827717662, -0.8086757660],
        ]
    ),
)


def linear(colour: str) -> np.ndarray:
    c = np.array([*bytes_of(colour)]) / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def seen(colour: str, eyes: str) -> np.ndarray:
    return OKLAB[1] @ np.cbrt(OKLAB[0] @ np.clip(CONES[eyes] @ linear(colour), 0, 1))


def contrast(a: str, b: str) -> float:
    light, dark = sorted((float(np.array([0.2126, 0.7152, 0.0722]) @ linear(c)) for c in (a, b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize(("palette", "paper"), [(COLOURS, "#ffffff"), (tuple(ON_DARK[c] for c in COLOURS), DARK_PAPER)])
def test_colours_differ_for_all_eyes_and_from_the_paper(palette: tuple[str, ...], paper: str) -> None:
    for eyes in CONES:
        for a, b in combinations(palette, 2):
            assert np.linalg.norm(seen(a, eyes) - seen(b, eyes)) > 0.07, f"{a} and {b} for {eyes}"
    assert all(contrast(colour, paper) > 2.2 for colour in palette)


def test_no_two_methods_look_the_same() -> None:
    places = [of_method(name) for name in METHODS]
    assert len(set(places)) == len(places)
    # most methods have a colour and a line, or a colour and a marker, of their own; 45 pairs of colour and line exist
    for kind in (slice(0, 2), slice(0, 3, 2)):
        assert len({place[kind] for place in places}) >= 0.75 * len(places)
    mains = ("fedavg", "local", "fedcac", "feddac", "fedpake", "fedobp")
    assert len({of_method(name)[0] for name in mains}) == len(mains)


def test_a_methods_colour_depends_on_its_name_alone() -> None:
    alone, together = looks(["fedcac"]), looks(["a-stranger", "local", "fedcac", "fedcac"])
    assert alone[0].colour == together[2].colour == together[3].colour and alone[0].on(False) == together[2].on(False)
    assert (together[2].line, together[2].marker) == (alone[0].line, alone[0].marker)
    assert together[3].line != alone[0].line and together[3].marker != alone[0].marker
    assert together[3].on(False) != alone[0].on(False)


def test_shades_of_black_stay_visible() -> None:
    for shade in (0.4, -0.35):
        assert contrast(Look("#000000", [1, 0], "circle", shade).on(False), "#ffffff") > 2
        assert contrast(Look("#000000", [1, 0], "circle", shade).on(True), DARK_PAPER) > 2
