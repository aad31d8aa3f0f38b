"""A client answers Flower's own ClientApp, as a NumPyClient, with the same bits as Corolla's."""

from __future__ import annotations

from typing import Any

import pytest
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

from client_app.client import CorollaClient
from client_app.client_app import client_fn
from fl_app.server.run_folder import read_metrics
from tests.conftest import Run


def told(run: Run, name: str, **changes: Any) -> list[Any]:
    """Run two rounds, and return what each evaluation records of client 0, but times."""
    folder = run(run_name=name, num_server_rounds=2, **changes)
    return [
        {key: value for key, value in record["evaluation"]["clients"]["0"].items() if "seconds" not in key}
        for record in read_metrics(folder.path)
        if "evaluation" in record
    ]


@pytest.mark.parametrize("method", ["fedcac", "fedper"])
def test_flowers_own_app_gets_the_same_answers(run: Run, method: str) -> None:
    assert issubclass(CorollaClient, NumPyClient)
    own = told(run, "own", method=method, evaluate_every=1)
    assert len(own) == 2 and own == told(run, "flowers", method=method, evaluate_every=1, app=ClientApp(client_fn))


def test_a_client_that_cannot_take_part_says_so_in_flowers_own_app(run: Run) -> None:
    with pytest.raises(Exception, match="no-such-file"):
        run(
            dataset="node",
            classes="no,yes",
            app=ClientApp(client_fn),
            node_configs={k: {"data-path": "no-such-file"} for k in range(4)},
        )
