"""corolla.testing: what a method's author writes two lines for."""

from __future__ import annotations

import numpy as np
import pytest

from corolla.testing import federation
from fl_app.errors import UserError
from strategies import METHODS
from tests.facts import rejected

W = np.array([range(8), range(8, 16), range(16, 24)], np.float32)


def test_a_round_of_arrays_is_averaged() -> None:
    fed = federation("fedavg", clients=3, d=8)
    uploads = fed.round(W)
    assert uploads.W.tolist() == W.tolist() and uploads.sizes.tolist() == [12] * 3
    # equal sizes: the plain mean
    assert fed.server.global_model.params.tolist() == list(range(8, 16))
    assert fed.models.tolist() == [list(range(8, 16))] * 3


def test_what_does_not_travel_stays_with_its_client() -> None:
    fed = federation("local")
    fed.round(W)
    assert fed.models.tolist() == W.tolist()
    fed = federation("fedper")
    fed.round(W)
    # features: the mean; the classifier's 4 parameters: each client's own
    assert fed.models[:, :4].tolist() == [[8, 9, 10, 11]] * 3 and fed.models[:, 4:].tolist() == W[:, 4:].tolist()


def test_some_clients_take_part_and_parameters_are_the_methods() -> None:
    fed = federation(METHODS["ditto"], clients=4, d=9, ditto={"proximal_weight": 0.0}, local_epochs=2)
    assert fed.config.params.proximal_weight == 0.0 and fed.config.local_epochs == 2
    fed.round(np.zeros((2, 9)), ids=[1, 3])
    assert not fed.server.global_model.params.any() and fed.rounds == 1


def test_without_arrays_clients_train() -> None:
    fed, again = federation("fedavg"), federation("fedavg")
    before = fed.models
    for _ in range(2):
        fed.round()
        again.round()
    assert (fed.models != before).any() and fed.models.tobytes() == again.models.tobytes()


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"pfedgate"}))
def test_every_method_has_rounds(name: str) -> None:
    fed = federation(name, num_server_rounds=30)
    fed.round()
    fed.round()
    assert fed.models.shape == (3, len(fed.initial.params)) and np.isfinite(fed.models).all()


def test_what_cannot_be_is_refused() -> None:
    with rejected(UserError, "W", "must be [3, 8]", "row per client", value=[2, 8]):
        federation("fedavg").round(W[:2])
    with rejected(UserError, "", "least 1 client and 6", "parameters", "got clients=3", "d=2"):
        federation("fedavg", d=2)
    with pytest.raises(UserError, match="fedavg.beta"):
        federation("fedavg", fedavg={"beta": 1})
