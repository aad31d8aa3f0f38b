"""What the sums of a whole private run tell together: single models, unless clients are drawn and stay away in companies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fl_app.errors import UserError
from fl_app.server.run_folder import RunFolder
from strategies.base import LocalUpdate
from strategies.base.private import Private, Sums
from tests.conftest import Run
from tests.privacy.attack import Attack, Sum
from tests.privacy.runs import rounds
from tests.privacy.test_private_liars import run_without

CLIENTS = 12
SETTINGS: dict[str, Any] = {
    "method": "fedavg", "num_clients": CLIENTS, "num_server_rounds": 12, "train_samples": 20, "partition": "dirichlet",
    "dirichlet_alpha": 0.1, "min_samples": 4, "max_update_norm": 0, "keep_state": True,
}  # fmt: skip


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], np.ndarray]:
    """What clients send in a run, by (round, client)."""
    seen: dict[tuple[int, int], np.ndarray] = {}
    upload = LocalUpdate.upload

    def noted(self: Any, before: Any, after: Any, state: Any, ctx: Any) -> Any:
        made = upload(self, before, after, state, ctx)
        seen[ctx.round, ctx.client_id] = made.model.params.copy()
        return made

    monkeypatch.setattr(LocalUpdate, "upload", noted)
    return seen


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Sum]]:
    """Whom the server summed up, in each round."""
    seen: list[Sum] = []
    personalize = Private.personalize_sums

    def noted(self: Any, round: int, sums: Sums) -> None:
        seen.extend((round, tuple(own)) for own in sums.groups.values())
        personalize(self, round, sums)

    monkeypatch.setattr(Private, "personalize_sums", noted)
    yield seen


def asked(folder: RunFolder) -> list[Sum]:
    return [(record["round"], tuple(map(int, record["clients"]))) for record in rounds(folder)]


def test_sums_of_clients_drawn_one_by_one_would_tell_models_and_those_of_companies_do_not(
    run: Run, models: dict[tuple[int, int], np.ndarray], sums: list[Sum]
) -> None:
    plain = Attack(asked(run(fraction_train=0.3, run_name="plain", **SETTINGS)), models, CLIENTS)
    found = np.mean([plain.place(i, plain.truth) for i in plain.truth])
    assert plain.rank > CLIENTS - 3 and found < 0.25  # what private runs would tell if they drew like plain ones
    models.clear()
    folder = run(fraction_train=0.3, private=True, run_name="private", **SETTINGS)
    assert sums == asked(folder) and {len(ids) for _, ids in sums} == {3}
    hidden = Attack(sums, models, CLIENTS)
    places = [hidden.place(i, hidden.alike(i)) for i in hidden.truth]
    assert hidden.rank <= CLIENTS // 3 and all(len(hidden.alike(i)) >= 3 for i in range(CLIENTS))
    print(f"own model's place: drawn one by one {found:.2f}, in companies {np.mean(places):.2f}")
    assert np.mean(places) == pytest.approx(0.5)


@pytest.mark.parametrize("absent", ["alone", "company"])
def test_who_is_away_is_told_from_the_difference_unless_its_company_goes_with_it(
    raw_config: dict[str, Any], models: dict[tuple[int, int], np.ndarray], sums: list[Sum], absent: str
) -> None:
    folder = run_without(raw_config, (4, 0, 5), (7, 0, 2), **SETTINGS, private_absent=absent, round_retries=1)
    attack = Attack(sums, models, CLIENTS)
    assert [(f["client"], f["attempt"]) for r in rounds(folder) for f in r["failures"]] == [(5, 1), (2, 1)]
    assert [len(ids) for round, ids in sums if round in (4, 7, 8)] == ([11, 11, 12] if absent == "alone" else [9, 9, 12])
    alike = {i: attack.alike(i) for i in range(CLIENTS)}
    if absent == "alone":
        assert alike[5] == [5] and alike[2] == [2]
        assert attack.place(5, attack.truth) == attack.place(2, attack.truth) == 0  # the nearest of all
    else:
        assert alike[5] == [0, 1, 5] and alike[2] == [2, 3, 4] and all(len(own) >= 3 for own in alike.values())


def test_a_company_that_cannot_be_left_out_ends_the_run(raw_config: dict[str, Any]) -> None:
    lines = r"client 2: error 0: gone\n  private: a round needs 3 clients, there are 0, and who is away takes its company along"
    with pytest.raises(UserError, match=lines):
        run_without(raw_config, (1, 0, 2), private_absent="company")


def test_a_resumed_run_keeps_its_companies(raw_config: dict[str, Any], run: Run, sums: list[Sum]) -> None:
    settings = {**SETTINGS, "private": True, "private_absent": "company", "num_server_rounds": 3}
    half = run_without(raw_config, (1, 0, 5), run_name="half", **settings)
    run(run_name="half", resume=str(half.path), **{**settings, "num_server_rounds": 4})
    assert [len(ids) for _, ids in sums] == [9, 12, 12, 12]
