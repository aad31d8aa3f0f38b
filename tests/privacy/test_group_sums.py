"""What the sums of a whole private run reveal together: single models, unless clients are drawn and stay away in groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_app.client import CorollaClient
from fl_app.errors import UserError
from fl_app.server.run_folder import RunFolder
from fl_app.transport.wire import OPEN, Download
from strategies.base import LocalUpdate
from strategies.engine import group_store
from strategies.engine.group_store import GroupStore
from strategies.engine.private import PrivateRounds
from strategies.fedcac import FedCACUpdate
from tests.conftest import Run
from tests.facts import mentions
from tests.privacy.attack import Attack, Sum, sums_seen
from tests.privacy.runs import rounds
from tests.privacy.test_private_liars import run_without

CLIENTS = 12
SETTINGS: dict[str, Any] = {
    "method": "fedavg",
    "num_clients": CLIENTS,
    "num_server_rounds": 12,
    "train_samples": 20,
    "partition": "dirichlet",
    "dirichlet_alpha": 0.1,
    "min_samples": 4,
    "max_update_norm": 0,
    "keep_state": True,
}
GROUPED: dict[str, Any] = {"method": "fedcac", "fedcac": {"beta": 12, "tau": 0.3}, "private_regroup": 1}
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
def test_sums_of_clients_drawn_one_by_one_would_tell_models_and_those_of_groups_do_not(
    run: Run, models: Models, sums: list[Sum], bound: float
) -> None:
    settings = {**SETTINGS, "fraction_train": 0.3, "max_size_weight": bound}
    plain = Attack(asked(run(run_name="plain", **settings)), models, CLIENTS)
    found = np.mean([plain.place(i, plain.truth) for i in plain.truth])
    print(f"own model's place where clients are drawn one by one: {found:.2f}")
    # what private runs would tell if they drew like plain ones
    assert plain.rank > CLIENTS - 3 and found < 0.25
    models.clear()
    folder = run(private=True, run_name="private", **settings)
    assert [set(own) for _, own in sums] == [set(own) for _, own in asked(folder)] and set(sizes(sums, *range(13))) == {
        3
    }
    hidden = Attack(sums, models, CLIENTS)
    assert hidden.rank <= CLIENTS // 3 and all(len(hidden.alike(i)) >= 3 for i in range(CLIENTS))


@pytest.mark.parametrize("absent", ["client", "group"])
def test_who_is_away_is_told_from_the_difference_unless_its_group_goes_with_it(
    raw_config: dict[str, Any], models: Models, sums: list[Sum], absent: str
) -> None:
    folder = run_without(
        raw_config, (4, 0, 5), (7, 0, 2), **{**SETTINGS, "num_server_rounds": 9}, private_left_out=absent
    )
    attack = Attack(sums, models, CLIENTS)
    assert [(f["client"], f.get("attempt")) for r in rounds(folder) for f in r["failures"]] == [(5, None), (2, None)]
    assert sizes(sums, 4, 7, 8) == ([11, 11, 12] if absent == "client" else [9, 9, 12])
    alike = {i: attack.alike(i) for i in range(CLIENTS)}
    if absent == "client":
        assert alike[5] == [5] and alike[2] == [2]
        # the nearest of all: the attack works
        assert attack.place(5, attack.truth) == 0
    else:
        assert alike[5] == [0, 1, 5] and alike[2] == [2, 3, 4] and all(len(own) >= 3 for own in alike.values())


@pytest.mark.parametrize("absent", ["client", "group"])
def test_of_a_drawn_group_with_one_away_nobody_is_summed_up_and_another_is_asked(
    raw_config: dict[str, Any], models: Models, sums: list[Sum], absent: str
) -> None:
    gone = [(round, 0, i) for round in (2, 5) for i in range(0, CLIENTS, 3)]
    run_without(raw_config, *gone, fraction_train=0.3, private_left_out=absent, **SETTINGS)
    assert {round for round, _ in sums} == set(range(1, 13))
    attack = Attack(sums, models, CLIENTS)
    assert all(len(attack.alike(i)) >= 3 for i in range(CLIENTS))


@pytest.mark.parametrize("absent", ["client", "group"])
def test_fedcac_with_groups_that_change_and_clients_that_drop_out(
    raw_config: dict[str, Any], models: Models, sums: list[Sum], absent: str
) -> None:
    gone = [(3, 0, 0), (3, 0, 1), (5, 0, 7), (8, 0, 3)]
    settings = SETTINGS | GROUPED | {"num_server_rounds": 9}
    folder = run_without(raw_config, *gone, **settings, private_left_out=absent, min_results=0.3)
    assert len(rounds(folder)) == 9 and min(sizes(sums, *range(13))) >= 3
    assert len([1 for round, _ in sums if round == 3]) > 1  # it has groups
    attack = Attack(sums, models, CLIENTS)
    if absent == "group":
        assert all(len(attack.alike(i)) >= 3 for i in range(CLIENTS))
    else:
        assert attack.alike(7) == [7]


def test_a_group_that_cannot_be_left_out_ends_the_run(raw_config: dict[str, Any]) -> None:
    rule = r"a round needs 3 clients of an aggregation group, with no member away \(private-left-out\)"
    lines = rf"client 2: error 0: gone\n  private: {rule}"
    with pytest.raises(UserError, match=lines):
        run_without(raw_config, (1, 0, 2), private_left_out="group")


def crashed_after(round: int, raw: dict[str, Any], *missing: tuple[int, int, int], **settings: Any) -> Path:
    """The folder of a run that ends once a round's sums are used, without a checkpoint of it."""
    update = PrivateRounds.update

    def crashing(self: Any, attempt: Any, accepted: Any) -> Any:
        state = update(self, attempt, accepted)
        if attempt.round == round:
            raise KeyboardInterrupt
        return state

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrivateRounds, "update", crashing)
        with pytest.raises(KeyboardInterrupt):
            run_without(raw, *missing, **settings, checkpoint_every=10, run_name="a")
    (store,) = Path(str(raw["output-dir"])).glob(f"*/{group_store.FILE}")
    return store.parent


def parts(folder: Path) -> list[set[int]]:
    return [set(own) for own in group_store.members(GroupStore(folder, np.empty(0)).groups)]


def test_a_run_that_goes_on_from_before_a_drop_out_splits_groups_as_it_did(
    raw_config: dict[str, Any], models: Models, sums: list[Sum]
) -> None:
    settings = {**SETTINGS, "private_left_out": "group", "num_server_rounds": 6}
    folder = crashed_after(4, raw_config, (2, 0, 5), **settings)
    run_without(raw_config, (2, 100, 6), **settings, checkpoint_every=10, resume=str(folder))
    attack = Attack(sums, models, CLIENTS)
    assert sizes(sums, 2) == [9, 9] and all(len(attack.alike(i)) >= 3 for i in range(CLIENTS))


def test_a_run_that_goes_on_knows_groups_and_what_clients_count_of_after_its_checkpoint(
    raw_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, sums: list[Sum]
) -> None:
    settings = {**SETTINGS, **GROUPED, "num_server_rounds": 4, "max_size_weight": 1.0}
    folder = crashed_after(3, raw_config, **settings)
    before, counted = parts(folder), dict(sums[0][1])
    assert len(before) > 1 and len(set(counted.values())) > 1
    honest = CorollaClient._claim_attempt
    monkeypatch.setattr(
        CorollaClient,
        "_claim_attempt",
        lambda self, download, samples: honest(self, download, samples * (1 + self.client_id)),
    )
    run_without(raw_config, **settings, checkpoint_every=10, resume=str(folder))
    assert all(any(own <= former for former in before) for own in parts(folder))
    # beside the others, what it counted at first
    for _, counts in sums:
        assert len({round(count / counted[i], 9) for i, count in counts.items()}) == 1


def test_drawn_groups_are_the_same_whatever_a_runs_seed(run: Run) -> None:
    settings = {**SETTINGS, "private": True, "fraction_train": 0.3, "num_server_rounds": 1}
    first, second = (parts(run(run_name=f"seed-{seed}", seed=seed, **settings).path) for seed in (0, 1))
    assert first == second and len(first) == 4


def test_of_a_group_that_has_answered_a_repetition_asks_all_or_nobody(
    raw_config: dict[str, Any],
    models: Models,
    sums: list[Sum],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clients 4 and 10 spoil the first attempt: one drops out, and one goes away before their group's sum is opened.

    The sum of 6's group was opened then. It drops out of the second attempt.
    """
    honest = CorollaClient._answered

    def gone(self: CorollaClient, question: Download) -> Any:
        if self.client_id == 10 and (question.task, question.round, question.attempt) == (OPEN, 3, 0):
            raise UserError("gone")
        return honest(self, question)

    monkeypatch.setattr(CorollaClient, "_answered", gone)
    settings = {
        **SETTINGS,
        **GROUPED,
        "num_clients": 16,
        "num_server_rounds": 4,
        "round_retries": 2,
        "min_results": 0.1,
    }
    with caplog.at_level("INFO", "corolla"):
        folder = run_without(raw_config, (3, 0, 4), (3, 1, 6), **settings)
    repeated = [set(own) for round, own in sums if round == 3]
    # its group's sum is known, once
    assert sum(6 in own for own in repeated) == 1 and len(repeated) == 3
    assert all(a == b or a.isdisjoint(b) for a in repeated for b in repeated)
    record = rounds(folder)[2]
    assert [(f["client"], f.get("attempt")) for f in record["failures"]] == [(4, 1), (10, 1), (6, None)]
    (of_six,) = [own for own in repeated if 6 in own]
    assert of_six.isdisjoint(map(int, record["clients"]))
    assert mentions(caplog.text, f"clients {sorted(of_six - {6})} are left", "others of their", "groups are away")
    attack = Attack(sums, models, 16)
    assert len(attack.alike(6)) >= 3
