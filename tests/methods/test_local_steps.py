"""`local-steps`: so many batches a round and client, in every method; and what cannot count them is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_app import weights
from fl_app.errors import UserError
from tests.client_app.test_train import bits, mlp, trainer
from tests.conftest import IN_TWO_ROUNDS, Run, config, of_each_kind
from tests.methods.federation import Federation

# their parts train for epochs in turn
IN_TURN = ("fedrep", "flute", "fedselect")


@pytest.mark.parametrize("steps", [1, 3, 8, 20])
def test_steps_go_on_over_epochs(steps: int) -> None:
    """Batches of 4 of 30 samples: eight in an epoch."""
    own = trainer(batch_size=4, local_steps=steps, local_epochs=1, momentum=0.9)
    after = own.train(weights.read(mlp()))
    assert own.steps == steps and own.epoch == -(-steps // 8)
    longer = trainer(batch_size=4, local_epochs=1, momentum=0.9)
    assert bits(after) == bits(longer.train(weights.read(mlp()), max_batches=steps))
    # what is asked for in epochs stays so: fine-tuning
    own.train(weights.read(mlp()), epochs=2, purpose="finetune")
    assert own.steps == 16


@pytest.mark.parametrize("method", of_each_kind(*IN_TURN))
def test_one_step_is_one_epoch_of_one_batch(tmp_path: Path, method: str) -> None:
    whole = {"batch_size": 1000, **IN_TWO_ROUNDS.get(method, {})}
    ends = []
    for name, keys in (("epoch", {"local_epochs": 1}), ("step", {"local_steps": 1, "local_epochs": 3})):
        federation = Federation(tmp_path / name, method, **{**whole, **keys})
        for _ in range(2):
            federation.round()
        ends.append(federation.models)
    np.testing.assert_array_equal(*ends)


@pytest.mark.parametrize(
    "keys",
    [
        {"dp_epsilon": 8.0},
        {"method": "pfedgate", "pfedgate": {"alternate": True}},
        *({"method": method} for method in IN_TURN),
    ],
)
def test_what_counts_in_epochs_refuses_steps(keys: dict[str, Any]) -> None:
    with pytest.raises(UserError) as caught:
        config(local_steps=2, **keys)
    assert caught.value.key == "local-steps"
    config(method="pfedgate", local_steps=2)


def test_scaffold_counts_them(run: Run) -> None:
    run(method="scaffold", local_steps=7, num_server_rounds=2)
