"""Differential privacy of records: the plan, the steps, the budget, and whole runs in one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from client_app.batches import SecretDraws
from client_app.dp import Budget, NoisyTrainer, Plan, Spent, epsilon_of, replace_epsilon_of
from client_app.notes import Notes, OwnData, read_notes
from client_app.stored_state import StateStore, StoredState
from client_app.trainer import LocalTrainer
from fl_app import models, weights
from fl_app.config import RunConfig
from fl_app.errors import UserError
from fl_app.files import make_directory
from fl_app.layout import Layout, Model
from strategies import METHODS
from strategies.engine.plain import privacy_budget
from tests.client_app.test_train import CLASSES, SIDE, data_of, with_batchnorm, with_dropout
from tests.conftest import config
from tests.facts import mentions, rejected

ABLE = tuple(sorted(name for name, method in METHODS.items() if method.dp_epochs))


def test_the_documentation_names_the_methods() -> None:
    text = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text()
    assert f"steps alone: {', '.join(ABLE)}." in " ".join(text.split())


# the plan


@pytest.mark.usefixtures("all_orders")
@pytest.mark.parametrize(
    ("samples", "batch", "rounds", "epochs", "epsilon", "noise"),
    [(500, 100, 500, 5, 8.0, 14.3), (10_000, 100, 50, 1, 8.0, 0.79), (50_000, 250, 50, 1, 8.0, 0.68)],
)
def test_the_noise_is_what_the_accountant_asks_for(
    samples: int, batch: int, rounds: int, epochs: int, epsilon: float, noise: float
) -> None:
    wanted = config(dp_epsilon=epsilon, batch_size=batch, num_server_rounds=rounds)
    plan = Plan.of(wanted, samples, epochs)
    assert (plan.rate, plan.steps) == (batch / samples, samples // batch)
    assert plan.noise == pytest.approx(noise, rel=0.02)
    whole = {(plan.noise, plan.rate): plan.steps * epochs * rounds}
    assert 0.998 * epsilon < epsilon_of(whole, wanted.dp_delta) <= epsilon


def test_a_replaced_record_costs_more_than_twice_as_much() -> None:
    """500 records, 500 rounds of 5 epochs: for replacing, no epsilon below 16.97 holds at the same delta."""
    steps = {(14.297, 0.2): 5 * 500 * 5}
    added, replaced = epsilon_of(steps, 1e-5), replace_epsilon_of(steps, 1e-5)
    assert added == pytest.approx(8.0, rel=0.02)
    assert max(16.97, 2 * added) < replaced < 21
    assert replace_epsilon_of({}, 1e-5) == 0


@pytest.mark.parametrize(("noise", "steps"), [(5.0, 1), (5.0, 10), (40.0, 100), (2.0, 4)])
def test_the_bound_for_a_replaced_record_holds_and_is_near(noise: float, steps: int) -> None:
    """Without sampling the exact epsilon is known: a replaced record moves the sum by two clipping norms (Balle and Wang, 2018)."""
    mu, bound = 2 * math.sqrt(steps) / noise, replace_epsilon_of({(noise, 1.0): steps}, 1e-5)

    def delta(epsilon: float) -> float:
        low, high = norm.cdf(mu / 2 - epsilon / mu), norm.cdf(-mu / 2 - epsilon / mu)
        return float(low - math.exp(epsilon) * high)

    assert delta(bound) <= 1e-5 < delta(0.85 * bound)


def test_both_notions_are_printed_at_the_start() -> None:
    (line,) = privacy_budget(config(dp_epsilon=8.0, dp_delta=1e-5))
    assert "(8, 1e-05)" in line and "(16, 0.0298)" in line
    assert "(2000, 1)" in privacy_budget(config(dp_epsilon=1000.0))[0]


def test_a_budget_that_no_noise_keeps_is_refused() -> None:
    with rejected(UserError, "dp-epsilon", "no noise keeps 30", "within 0.01"):
        Plan.of(config(dp_epsilon=0.01), 30, 1)
    with rejected(UserError, "dp-delta", "below 1 / 30", "got 0.05"):
        Plan.of(config(dp_epsilon=8.0, dp_delta=0.05), 30, 1)


def test_few_records_are_all_in_every_batch() -> None:
    plan = Plan.of(config(dp_epsilon=8.0, batch_size=50), 30, 1)
    assert (plan.rate, plan.steps) == (1.0, 1)


# the budget


def notes(site: Path, **changes: Any) -> Notes:
    return Notes(**{"site": site, "experiment": "abc", "client_id": 1, **changes})


def budget_of(site: Path, wanted: RunConfig, **changes: Any) -> Budget:
    return Budget(notes(site, **changes), wanted)


@pytest.mark.usefixtures("all_orders")
def test_what_is_spent_stays_spent(tmp_path: Path) -> None:
    wanted = config(dp_epsilon=2.0, num_server_rounds=3)
    plan = Plan.of(wanted, 100, 1)
    budget = budget_of(tmp_path, wanted)
    spent = [budget.spend(f"{round}-1-train", plan, plan.steps) for round in (1, 2, 2)]  # round 2 is repeated
    assert 0 < spent[0] < spent[1] < spent[2] <= 2.0
    again = budget_of(tmp_path, wanted, run=2)
    with rejected(UserError, "dp-epsilon", "2 of 2", "13 steps", "it 2."):
        again.spend("3-1-train", plan, plan.steps)
    # equal trainings are one entry, and what was refused is not noted
    assert [t.steps for t in again.notes.trainings()] == [3 * plan.steps]


def test_a_repetition_with_the_same_noise_costs_nothing(tmp_path: Path) -> None:
    wanted = config(dp_epsilon=2.0, num_server_rounds=3)
    plan, budget = Plan.of(wanted, 100, 1), budget_of(tmp_path, wanted, simulated=True)
    once = budget.spend("1-1-train", plan, plan.steps)
    assert budget.spend("1-1-train", plan, plan.steps) == once
    assert budget.spend("1-2-train", plan, plan.steps) > once


@pytest.mark.parametrize(
    "content", ["", "[[1]]", "{}x", "[1]", "{}", '{"data": 1, "trainings": []}', "[1, 2, 3]\n[[1]]"]
)
@pytest.mark.parametrize("own", [None, OwnData(Path("/data"), None)])
def test_a_damaged_budget_stops_everything(tmp_path: Path, content: str, own: OwnData | None) -> None:
    budget = budget_of(tmp_path, config(dp_epsilon=2.0), own=own)
    make_directory(budget.notes.budget.parent)
    budget.notes.budget.write_text(content)
    with rejected(UserError, "dp-epsilon", "spent budget cannot", "be read"):
        budget.spend("1", Plan(0.1, 10, 1.0), 10)


def test_a_run_has_one_budget(tmp_path: Path) -> None:
    """A server that names another experiment in every message would otherwise begin anew with each."""
    wanted = config(dp_epsilon=2.0, num_server_rounds=3)
    plan = Plan.of(wanted, 100, 1)

    def spend(experiment: str, run: int, client: int = 1) -> float:
        return budget_of(tmp_path, wanted, experiment=experiment, client_id=client, run=run).spend(
            "1", plan, plan.steps
        )

    spent = spend("first", 7)
    for _ in range(2):
        with rejected(UserError, "dp-epsilon", "run spends", "experiment first", "cannot spend"):
            spend("second", 7)
    assert not notes(tmp_path, experiment="second").budget.exists()
    assert spend("first", 8) > spent  # a resumed run
    assert spend("second", 9) == spend("first", 9, 2) == spent


def test_all_runs_on_a_clients_records_spend_from_one_budget(tmp_path: Path) -> None:
    wanted = config(dp_epsilon=4.0, num_server_rounds=5)
    plan = Plan.of(wanted, 100, 1)

    def spend(own: OwnData, experiment: str, **more: Any) -> float:
        return budget_of(tmp_path, wanted, experiment=experiment, own=own, **more).spend("1", plan, plan.steps)

    node = OwnData(Path("/a"), 1, "x")
    # a link, another format, a part of it by name, and another division of that
    same = [node, OwnData(Path("/c"), 1, "z"), OwnData(Path("/c"), 1, "z", "p"), OwnData(Path("/c"), 1, "z", "q")]
    spent = [spend(own, f"run-{k}") for k, own in enumerate(same)]
    assert spent == sorted(set(spent))
    with rejected(UserError, "dp-epsilon", "of 4 is spent"):
        for own in same:
            spend(own, "more")
    # a simulation protects nobody, and a repeated experiment has a whole budget
    assert spend(node, "fifth", simulated=True) == spend(node, "sixth", simulated=True) == spent[0]


@pytest.mark.parametrize(
    "one, two, shared",
    [
        # a copy in another file, in another order, with a row more, or opened with other keys
        (("/a", 1, "x"), ("/b", 2, "y"), True),
        (("/a", 1, "x"), ("/b", 2, "x"), True),
        (("/a", 1, "x", "p"), ("/a", 2, "x", "p"), False),
        (("/a", 1, "x", "p"), ("/b", 2, "x", "p"), True),
        (("/a", 1, "x", "p"), ("/a", 2, "x", "q"), True),
        (("/a", 1, "x", "p"), ("/a", 2, "y", "p"), True),
        (("/a", 1, "x", "overlapping"), ("/a", 2, "x", "overlapping"), True),
        (("/a", 1, "x", "p"), ("/b", 2, "y"), True),
        (("/a", 1, "x", "p"), ("/b", 1, "y", "q"), True),
        (("/a", 1, "x"), ("/b", 1, "y"), True),
    ],
)
def test_records_of_two_clients_differ_if_their_site_can_know_it(
    one: tuple[Any, ...], two: tuple[Any, ...], shared: bool
) -> None:
    first, second = (OwnData(Path(path), *rest) for path, *rest in (one, two))
    assert first.shares(second) == second.shares(first) == shared


def test_a_plan_leaves_room_for_what_other_runs_have_spent(tmp_path: Path) -> None:
    first, second = (config(dp_epsilon=4.0, num_server_rounds=rounds) for rounds in (9, 3))
    own = OwnData(Path("/a"), None)
    budget = budget_of(tmp_path, first, own=own)
    plan = Plan.of(first, 100, 1)
    for round in (1, 2, 3):
        budget.spend(f"{round}", plan, plan.steps)
    later = budget_of(tmp_path, second, experiment="later", own=own)
    alone, beside = Plan.of(second, 100, 1), Plan.of(second, 100, 1, later.before())
    assert beside.noise > alone.noise * 1.05
    spent = [later.spend(f"{round}", beside, beside.steps) for round in (1, 2, 3)]
    # the plan is of what is left, after its first round too
    assert Plan.of(second, 100, 1, later.before()) == beside
    assert spent[2] == pytest.approx(4.0, rel=0.002) and spent[2] <= 4.0
    last = budget_of(tmp_path, second, experiment="last", own=own)
    with pytest.raises(UserError, match=r"100 samples within 3.9 .*; other runs have spent (3\.99\d|4) "):
        Plan.of(config(dp_epsilon=3.9), 100, 1, last.before())


def test_no_later_run_breaks_what_an_earlier_one_promised(tmp_path: Path) -> None:
    """A larger delta makes less of what was spent, and a larger epsilon makes room: neither is the later run's to choose."""
    own, first = OwnData(Path("/a"), None), config(dp_epsilon=3.0, dp_delta=1e-5, num_server_rounds=2)
    plan, budget = Plan.of(first, 100, 1), budget_of(tmp_path, first, own=own)
    spent = [budget.spend(f"{round}", plan, plan.steps) for round in (1, 2)]
    assert 2.99 < spent[1] <= 3.0
    for changes in ({"dp_delta": 1e-3}, {"dp_epsilon": 30.0}, {"dp_epsilon": 30.0, "dp_delta": 1e-3}):
        wanted = config(**{"dp_epsilon": 3.0, "dp_delta": 1e-5, "num_server_rounds": 2, **changes})
        # in the run itself too, whose config its server may change
        for experiment in ("abc", "later"):
            later = budget_of(tmp_path, wanted, own=own, experiment=experiment)
            with pytest.raises(
                UserError, match=r"\d of 3 is spent, promised before; this run's are (3|30) and (1e-05|0.001)"
            ):
                later.spend("1", plan, plan.steps)
        # what is left is planned for as that of the promise
        try:
            left = Plan.of(wanted, 100, 1, later.before()).noise
        except UserError as error:
            assert mentions(str(error), "within 3 (dp-delta 1e-05, promised", "before")
        else:
            assert left > 5 * plan.noise
    # a smaller delta is a promise of its own, by which more is spent already
    strict = config(dp_epsilon=3.0, dp_delta=1e-7)
    with rejected(UserError, "dp-epsilon", "3 (dp-delta 1e-07)", "other runs", "of it"):
        Plan.of(strict, 100, 1, Spent.of(budget.notes.trainings()))


def part(client: int) -> OwnData:
    """Return a client's part of a divided data set."""
    return OwnData(Path("/a"), client, "x", "p")


def test_a_message_reads_its_own_data_s_notes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = config(dp_epsilon=4.0, num_server_rounds=5)
    plan = Plan.of(wanted, 100, 1)
    for client in range(6):
        budget = budget_of(tmp_path, wanted, own=part(client))
        for round in (1, 2, 3):
            budget.spend(f"{round}", plan, plan.steps)
    read: list[Path] = []
    monkeypatch.setattr("client_app.notes.read_notes", lambda path, whole=read_notes: read.append(path) or whole(path))
    before = budget_of(tmp_path, wanted, own=part(3))
    assert before.before().steps == {}
    before.spend("4", plan, plan.steps)
    assert read == [before.notes.budget]
    # another message has noted more since
    budget_of(tmp_path, wanted, own=part(3)).spend("5", plan, plan.steps)
    assert [t.steps for t in before.notes.trainings()] == [5 * plan.steps]
    assert len(before.notes.budget.read_text().splitlines()) == 2


def test_a_budget_outlasts_the_state_and_what_a_simulation_noted_does_not(tmp_path: Path) -> None:
    wanted = config(dp_epsilon=2.0, num_server_rounds=3)
    plan = Plan.of(wanted, 100, 1)
    for changes in ({}, {"own": OwnData(Path("/a"), None)}, {"simulated": True, "experiment": "simulated"}):
        budget = budget_of(tmp_path, wanted, **changes)
        budget.spend("1", plan, plan.steps)
        budget.notes.forget()
        assert len(budget.notes.trainings()) == (0 if "simulated" in changes else 1)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["abc"]


def test_state_that_was_trained_without_a_budget_is_not_used(tmp_path: Path) -> None:
    """Not even if other trainings of the experiment had one."""
    noisy, plain = (StateStore(tmp_path / "state", "abc", 1, budget) for budget in (True, False))
    state = StoredState({"personal": np.zeros(3, np.float32)})
    first, second = noisy.save(state, 1, 0), plain.save(state, 2, 0)
    assert list(noisy.load(first).arrays) == list(plain.load(first).arrays) == ["personal"]
    with pytest.raises(UserError, match="without a budget"):
        noisy.load(second)


# the steps


def mlp() -> nn.Module:
    return models.build("mlp", in_channels=1, num_classes=CLASSES, image_size=SIDE)


def convolution() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, CLASSES))


def noisy(tmp_path: Path, make: Callable[[], nn.Module], plan: Plan, n: int = 12, **changes: Any) -> NoisyTrainer:
    wanted = config(dp_epsilon=1e40, learning_rate=0.5, **{"batch_size": n, **changes})
    budget = budget_of(tmp_path, wanted, simulated=True)
    trainer = NoisyTrainer(LocalTrainer(make(), wanted, data_of(n), 1, 0), budget=budget, epochs=1)
    trainer.plan = plan
    return trainer


@pytest.mark.parametrize("make", [mlp, convolution])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("clip", [0.05, 1e6])
def test_a_step_is_the_mean_of_clipped_gradients(
    tmp_path: Path, make: Callable[[], nn.Module], frozen: bool, clip: float
) -> None:
    trainer = noisy(tmp_path, make, Plan(1.0, 1, 1e-13), dp_clip=clip)
    module = make()
    start, layout = weights.read(module), Layout.of(module)
    still = layout.classifier if frozen else frozenset()
    after = trainer.train(start, epochs=1, frozen=still)

    x, y = trainer._local.data.chosen(torch.arange(12))
    parameters = {name: p.detach() for name, p in module.named_parameters()}

    def loss(values: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(functional_call(module, values, (x[None],)), y[None])

    each = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x, y)
    rows = torch.cat([each[s.name].reshape(12, -1) * (s.name not in still) for s in layout.params], dim=1)
    factor = (clip / rows.norm(dim=1)).clamp(max=1)
    assert (factor < 1).all() if clip < 1 else (factor == 1).all()
    step = (rows * factor[:, None]).mean(0).numpy()
    np.testing.assert_allclose(start.params - after.params, 0.5 * step, atol=2e-6)


@pytest.mark.parametrize("clip", [0.05, 0.003])
def test_bfloat16_gradients_are_clipped_in_float32(tmp_path: Path, clip: float) -> None:
    """A norm of 8 bits is off by up to 0.4 %, and what is cut by it longer than the noise is for."""
    trainer = noisy(tmp_path, mlp, Plan(1.0, 1, 1e-13), n=1, dp_clip=clip, precision="bfloat16")
    start = weights.read(mlp())
    moved = (start.params - trainer.train(start, epochs=1).params).astype(np.float64) / 0.5
    assert np.linalg.norm(moved) == pytest.approx(clip, rel=1e-4)


def test_the_noise_has_the_size_it_should(tmp_path: Path) -> None:
    trainer = noisy(tmp_path, mlp, Plan(1.0, 1, 3.0), dp_clip=0.5)
    start = weights.read(mlp())
    moved = (trainer.train(start, epochs=1).params - start.params) / 0.5
    # the gradients themselves are of norm 0.5 at most
    assert moved.std() == pytest.approx(3.0 * 0.5 / 12, rel=0.02)


def test_batches_are_drawn_and_may_be_empty(tmp_path: Path) -> None:
    trainer = noisy(tmp_path, convolution, Plan(0.02, 400, 1.0))
    seen: list[int] = []
    inputs = trainer._local.data.inputs
    trainer._local.data.inputs = lambda images: seen.append(len(images)) or inputs(images)  # type: ignore[func-returns-value,method-assign]
    start = weights.read(convolution())
    after = trainer.train(start, epochs=1)
    # made up, to see whether the model keeps records apart
    assert seen[:1] == [2]
    del seen[:1]
    assert len(seen) == 400 and 0 in seen
    assert sum(seen) == pytest.approx(400 * 12 * 0.02, abs=4 * math.sqrt(400 * 12 * 0.02))
    assert np.isfinite(after.params).all()


def test_secret_noise_is_another_every_time(tmp_path: Path) -> None:
    start = weights.read(mlp())
    results = []
    for repeatable in (True, True, False, False):
        trainer = noisy(tmp_path, mlp, Plan(1.0, 1, 1.0))
        trainer.budget.repeatable = repeatable
        results.append(trainer.train(start, epochs=1).params)
    assert np.array_equal(results[0], results[1])
    assert not np.array_equal(results[2], results[3]) and not np.array_equal(results[0], results[2])


def test_noise_and_batches_come_from_the_secure_stream_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's generator keeps 32 bits of a seed: a core tries them all in an hour, and subtracts the noise."""
    keys: list[bytes] = []
    monkeypatch.setattr("fl_app.privacy.secure_random.secret", lambda nbytes=32: keys[-1])
    for name in ("normal", "rand", "randint", "randperm", "randn", "bernoulli"):
        monkeypatch.setattr(torch, name, None)
    start, results = weights.read(mlp()), []
    first = bytes(32)
    # keys that agree in their first or last 124 bits and more
    for key in (first, first, bytes(31) + b"\1", b"\x80" + bytes(31), bytes(15) + b"\1" + bytes(16)):
        keys.append(key)
        trainer = noisy(tmp_path, mlp, Plan(0.5, 4, 5.0), augment="crop-flip-rotate")
        trainer.budget.repeatable = False
        results.append(trainer.train(start, epochs=1).params - start.params)
    assert np.array_equal(results[0], results[1])
    for other in results[2:]:
        assert abs(np.corrcoef(results[0], other)[0, 1]) < 0.2


@pytest.mark.parametrize("far", [32, 40, 62])
def test_a_simulations_noise_follows_from_the_whole_seed(tmp_path: Path, far: int) -> None:
    start = weights.read(mlp())
    results = []
    for seed in (3, 3, 3 + 2**far):
        trainer = noisy(tmp_path, mlp, Plan(1.0, 1, 50.0), seed=seed)
        results.append(trainer.train(start, epochs=1).params - start.params)
    assert np.array_equal(results[0], results[1])
    assert abs(np.corrcoef(results[0], results[2])[0, 1]) < 0.1


def test_a_record_whose_gradient_is_no_number_counts_nothing(tmp_path: Path) -> None:
    """A server could send weights that overflow for some records alone: a step that fails would tell that one of them is here."""
    results = []
    for broken in (True, False):
        trainer = noisy(tmp_path, mlp, Plan(1.0, 1, 1e-13))
        inputs = trainer._local.data.inputs

        def fourth(images: torch.Tensor, inputs: Any = inputs, broken: bool = broken) -> torch.Tensor:
            x = inputs(images).clone()
            x[3:4] = torch.inf if broken else 0.0
            return x

        trainer._local.data.inputs = fourth  # type: ignore[method-assign]
        results.append(trainer.train(weights.read(mlp()), epochs=1).params - weights.read(mlp()).params)
    assert np.isfinite(results[0]).all()
    assert 0 < np.linalg.norm(results[0] - results[1]) <= 0.5 * 1.0 / 12 + 1e-5  # rate, clip, records


@pytest.mark.parametrize("repeatable", [True, False])
def test_what_befalls_a_record_is_as_secret_as_who_is_in_a_batch(tmp_path: Path, repeatable: bool) -> None:
    """Who knows what the third image of a batch is turned by would see the others move up when one is missing."""
    torch.manual_seed(0)
    seen: list[list[tuple[bytes, float]]] = [[], []]
    for run in seen:
        trainer = noisy(tmp_path, mlp, Plan(1.0, 1, 1.0), augment="crop-flip")
        trainer.budget.repeatable = repeatable
        trainer._local.data.poisson = 1.0, 1, SecretDraws(trainer._stream("train"))
        run.extend(
            (batch.x.numpy().tobytes(), float(torch.rand(()))) for batch in trainer._local.data.epochs(1, "train")
        )
    (images, dropout), (images_again, dropout_again) = seen[0][0], seen[1][0]
    assert (images == images_again) is (dropout == dropout_again) is repeatable


def test_records_are_looked_at_by_steps_alone(tmp_path: Path) -> None:
    trainer = noisy(tmp_path, mlp, Plan(1.0, 1, 1.0))
    start = weights.read(mlp())
    looks: list[Callable[[], Any]] = [
        lambda: trainer.class_counts,
        lambda: trainer.fisher(start),
        lambda: trainer.features(start),
        lambda: trainer.sample_losses(start),
        lambda: trainer.loss_gradient(start),
        lambda: trainer.samples(np.arange(2)),
        lambda: trainer.indices,
        lambda: trainer.leave_out(np.arange(2)),
        lambda: trainer.alternate(start, {}),
        lambda: trainer.step(),
        lambda: trainer.train(start, objective=lambda module, x, y: module(x).sum()),
        lambda: next(iter(trainer.batches())),
        lambda: trainer.differentiate(*trainer._local.data.chosen(torch.arange(2))),
    ]
    for look in looks:
        with rejected(UserError, "dp-epsilon", "method fedavg reads", "records"):
            look()


class Centred(nn.Module):
    """What no layer shows: the mean over the batch is taken from each record."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIDE * SIDE, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(1)
        logits: torch.Tensor = self.linear(flat - flat.mean(0))
        return logits


def test_a_model_that_mixes_records_by_hand_is_named(tmp_path: Path) -> None:
    trainer = noisy(tmp_path, Centred, Plan(1.0, 1, 1.0))
    with rejected(UserError, "dp-epsilon", "does not keep", "records apart", "changes with others"):
        trainer.train(weights.read(Centred()), epochs=1)


def untracked() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(SIDE * SIDE, affine=False), nn.Linear(SIDE * SIDE, CLASSES))


def tracked() -> nn.Module:
    norm = nn.InstanceNorm2d(1, track_running_stats=True)
    return nn.Sequential(norm, nn.Flatten(), nn.Linear(SIDE * SIDE, CLASSES))


@pytest.mark.parametrize("make", [Centred, untracked])
def test_no_weights_of_a_server_hide_that_a_model_mixes_records(tmp_path: Path, make: Callable[[], nn.Module]) -> None:
    start = weights.read(make())
    for value, bias in ((0.0, 0.0), (0.0, 1e6)):
        params = np.full_like(start.params, value)
        params[-CLASSES:] = bias
        with rejected(UserError, "dp-epsilon", "does not keep", "records apart"):
            noisy(tmp_path, make, Plan(1.0, 1, 1.0)).train(Model(params, start.buffers), epochs=1)


def test_no_running_statistic_of_records_leaves_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = weights.read(tracked())
    assert start.buffers.size
    with rejected(UserError, "dp-epsilon", "does not keep", "records apart", "forward pass changes"):
        noisy(tmp_path, tracked, Plan(1.0, 1, 1.0)).train(start, epochs=1)
    # a model that hides it from the check
    monkeypatch.setattr(NoisyTrainer, "_check_records_are_apart", lambda self: None)
    trained = noisy(tmp_path, tracked, Plan(1.0, 1, 1.0)).train(start, epochs=1)
    assert trained.buffers.tobytes() == start.buffers.tobytes() and trained.params.tobytes() != start.params.tobytes()


def test_dropout_keeps_records_apart(tmp_path: Path) -> None:
    start = weights.read(with_dropout())
    assert np.isfinite(noisy(tmp_path, with_dropout, Plan(1.0, 1, 1.0)).train(start, epochs=1).params).all()


def test_a_model_that_mixes_records_is_named(tmp_path: Path) -> None:
    trainer = noisy(tmp_path, with_batchnorm, Plan(1.0, 1, 1.0))
    with rejected(UserError, "dp-epsilon", "model mlp", "not keep records", "apart", "BatchNorm"):
        trainer.train(weights.read(with_batchnorm()), epochs=1)
