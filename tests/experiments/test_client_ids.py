"""Which client a number or a name means, for `corolla export --client` and `Run.model`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from corolla.experiments.exported.run_models import client_id
from fl_app.errors import UserError
from tests.facts import rejected


def run(*names: str) -> Any:
    """A run whose clients have these names; "" is none."""
    clients = {str(i): {"name": name} if name else {} for i, name in enumerate(names)}
    return SimpleNamespace(settings={"num-clients": len(names)}, clients=clients)


NUMBERED = run("1", "2", "3")
NAMED = run("Bern", "Basel", "")


@pytest.mark.parametrize("given", [1, "1", "id:1", np.int64(1), np.uint8(1), "Basel"])
def test_an_id_or_a_name_means_its_client(given: object) -> None:
    assert client_id(NAMED, given) == 1


def test_an_integer_is_an_id_whatever_the_names_are() -> None:
    assert [client_id(NUMBERED, one) for one in (0, np.int32(1), "id:1", "0", "3")] == [0, 1, 1, 0, 2]


def test_a_client_may_have_its_id_as_its_name() -> None:
    assert [client_id(run("0", "1", "2"), str(i)) for i in range(3)] == [0, 1, 2]


def test_an_id_that_is_another_clients_name_is_refused() -> None:
    with rejected(UserError, "client", "'1'", "name of client 0", "client 1", "write id:0", "id:1"):
        client_id(NUMBERED, "1")


@pytest.mark.parametrize("name", ["0", "id:0", "Bern"])
def test_a_client_cannot_take_anothers_place_by_its_name(name: str) -> None:
    lying = run("Bern", "Basel", "Chur", name)
    assert client_id(lying, 0) == client_id(lying, "id:0") == 0
    if name != "id:0":
        with pytest.raises(
            UserError, match=f"client: '{name}' is the .* of client [03] and the .* of client [03]; write"
        ):
            client_id(lying, name)


@pytest.mark.parametrize("given", [-1, 3, "3", "id:3", True, 1.0, np.float64(1), np.bool_(True), None, "bern", "٣"])
def test_anything_else_is_no_client(given: object) -> None:
    with rejected(UserError, "client", "0 to 2", "Bern", "Basel"):
        client_id(NAMED, given)
