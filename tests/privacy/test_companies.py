"""What the sums of a whole private run tell together: single models, unless clients are drawn and stay away in companies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_app.errors import UserError
from fl_app.server.run_folder import RunFolder
from strategies.base import LocalUpdate
from strategies.base.private import Private
from strategies.fedcac import FedCACUpdate
from tests.conftest import Run
from tests.privacy.attack import Attack, Sum, sums_seen
from tests.privacy.runs import rounds
from tests.privacy.test_private_liars import run_without

CLIENTS = 12
SETTINGS: dict[str, Any] = {
    "method": "fedavg", "num_clients": CLIENTS, "num_server_rounds": 12, "train_samples": 20, "partition": "dirichlet",
    "dirichlet_alpha": 0.1, "min_samples": 4, "max_update_norm": 0, "keep_state": True,
}  # fmt: skip
Models = dict[tuple[int, int], np.ndarray]


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Models:
    """What clients send in a run, by (round, client)."""
    seen: Models = {}
    for half in (LocalUpdate, FedCACUpdate):
        upload = half.upload

        def noted(self: Any, before: Any, after: Any, state: Any, ctx: Any, upload: Any = upload) -> Any:
            made = upload(self, before, after, state, ctx)
            seen[ctx.round, ctx.client_id] = made.model.params.copy()
            return made

        monkeypatch.setattr(half, "upload", noted)
    return seen


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Sum]]:
    with sums_seen(monkeypatch) as seen:
        yield seen


def asked(folder: RunFolder) -> list[Sum]:
    return [(record["round"], dict.fromkeys(map(int, record["clients"]), 1.0)) for record in rounds(folder)]


def sizes(sums: list[Sum], *of: int) -> list[int]:
    return [len(counts) for round, counts in sums if round in of]


@pytest.mark.parametrize("bound", [0.0, 1.0])
def test_sums_of_clients_drawn_one_by_one_would_tell_models_and_those_of_companies_do_not(
    run: Run, models: Models, sums: list[Sum], bound: float
) -> None:
    settings = {**SETTINGS, "fraction_train": 0.3, "max_size_weight": bound}
    plain = Attack(asked(run(run_name="plain", **settings)), models, CLIENTS)
    found = np.mean([plain.place(i, plain.truth) for i in plain.truth])
    print(f"own model's place where clients are drawn one by one: {found:.2f}")
    assert plain.rank > CLIENTS - 3 and found < 0.25  # what private runs would tell if they drew like plain ones
    models.clear()
    folder = run(private=True, run_name="private", **settings)
    assert [set(own) for _, own in sums] == [set(own) for _, own in asked(folder)] and set(sizes(sums, *range(13))) == {3}
    hidden = Attack(sums, models, CLIENTS)
    assert hidden.rank <= CLIENTS // 3 and all(len(hidden.alike(i)) >= 3 for i in range(CLIENTS))


@pytest.mark.parametrize("absent", ["alone", "company"])
def test_who_is_away_is_told_from_the_difference_unless_its_company_goes_with_it(
    raw_config: dict[str, Any], models: Models, sums: list[Sum], absent: str
) -> None:
    folder = run_without(raw_config, (4, 0, 5), (7, 0, 2), **SETTINGS, private_absent=absent)
    attack = Attack(sums, models, CLIENTS)
    assert [(f["client"], f["attempt"]) for r in rounds(folder) for f in r["failures"]] == [(5, 1), (2, 1)]
    assert sizes(sums, 4, 7, 8) == ([11, 11, 12] if absent == "alone" else [9, 9, 12])
    alike = {i: attack.alike(i) for i in range(CLIENTS)}
    if absent == "alone":
        assert alike[5] == [5] and alike[2] == [2]
        assert attack.place(5, attack.truth) == 0  # the nearest of all: the attack works
    else:
        assert alike[5] == [0, 1, 5] and alike[2] == [2, 3, 4] and all(len(own) >= 3 for own in alike.values())


@pytest.mark.parametrize("absent", ["alone", "company"])
def test_of_a_drawn_company_with_one_away_nobody_is_summed_up_and_another_is_asked(
    raw_config: dict[str, Any], models: Models, sums: list[Sum], absent: str
) -> None:
    gone = [(round, 0, i) for round in (2, 5) for i in range(0, CLIENTS, 3)]
    run_without(raw_config, *gone, fraction_train=0.3, private_absent=absent, **SETTINGS)
    assert {round for round, _ in sums} == set(range(1, 13))
    attack = Attack(sums, models, CLIENTS)
    assert all(len(attack.alike(i)) >= 3 for i in range(CLIENTS))


@pytest.mark.parametrize("absent", ["alone", "company"])
def test_fedcac_with_groups_that_change_and_clients_that_drop_out(
    raw_config: dict[str, Any], models: Models, sums: list[Sum], absent: str
) -> None:
    gone = [(3, 0, 0), (3, 0, 1), (5, 0, 7), (8, 0, 3)]
    settings = {**SETTINGS, "method": "fedcac", "fedcac": {"beta": 12, "tau": 0.3}, "private_regroup": 1}
    folder = run_without(raw_config, *gone, **settings, private_absent=absent, min_results=0.3)
    assert len(rounds(folder)) == 12 and min(sizes(sums, *range(13))) >= 3
    assert len([1 for round, _ in sums if round == 3]) > 1  # it has groups
    attack = Attack(sums, models, CLIENTS)
    if absent == "company":
        assert all(len(attack.alike(i)) >= 3 for i in range(CLIENTS))
    else:
        assert attack.alike(7) == [7]


def test_a_company_that_cannot_be_left_out_ends_the_run(raw_config: dict[str, Any]) -> None:
    lines = r"client 2: error 0: gone\n  private: a round needs 3 clients of a company that nobody is away from \(private-absent\)"
    with pytest.raises(UserError, match=lines):
        run_without(raw_config, (1, 0, 2), private_absent="company")


def test_a_run_that_goes_on_from_before_a_drop_out_splits_companies_as_it_did(
    raw_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, models: Models, sums: list[Sum]
) -> None:
    settings = {**SETTINGS, "private_absent": "company", "num_server_rounds": 6, "checkpoint_every": 10, "run_name": "a"}
    use = Private.use

    def crashing(self: Any, round: int, intake: Any) -> None:
        use(self, round, intake)
        if round == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Private, "use", crashing)
        with pytest.raises(KeyboardInterrupt):
            run_without(raw_config, (2, 0, 5), **settings)
    (book,) = Path(str(raw_config["output-dir"])).glob("*/companies.json")
    run_without(raw_config, (2, 100, 6), **settings, resume=str(book.parent))
    attack = Attack(sums, models, CLIENTS)
    assert sizes(sums, 2) == [9, 9] and all(len(attack.alike(i)) >= 3 for i in range(CLIENTS))
