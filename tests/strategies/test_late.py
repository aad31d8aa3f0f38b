"""Rounds that close before all clients have answered: late uploads, their weights, and the time of a round."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Error, Message

from client_app.client_app import app
from corolla.testing import Federation, federation
from fl_app import server_app
from fl_app.config import parse
from fl_app.errors import MethodError, UserError
from fl_app.layout import Model
from fl_app.server import arrivals, checkpoint, client_arrays
from fl_app.server.events import Round
from fl_app.server.run_folder import RunFolder, read_metrics, read_summary
from fl_app.transport.inprocess import InProcessGrid
from fl_app.transport.wire import Upload
from strategies import METHOD_PARAMS, METHODS
from strategies.base.state import Sent
from strategies.engine import late, steps
from strategies.engine.attempt import RoundAttempt
from strategies.engine.late import PendingUpload
from strategies.engine.plain import PlainRounds
from tests.conftest import IN_TWO_ROUNDS, Run, config, flat, of_each_kind
from tests.facts import mentions, rejected
from tests.methods.runs import timeless
from tests.server.test_run_misbehaving import corrupting, raising, replaced

LATE: dict[str, Any] = {"quorum": 0.6, "staleness": 3, "staleness-decay": 0.5}
HEADER = "client,compute,down,up\n"


def slow(directory: Path, *factors: float) -> str:
    """Return `speeds` of clients that are so many times as slow as the first."""
    path = directory / "speeds.csv"
    path.write_text(HEADER + "".join(f"{i},{1e8 / f},{4e6 / f},{1e6 / f}\n" for i, f in enumerate(factors)))
    return f"file:{path}"


def rounds(folder: RunFolder) -> list[dict[str, Any]]:
    return list(read_metrics(folder.path))


def digest(folder: RunFolder) -> str:
    return str(read_summary(folder.path)["digest"])


# weights


@pytest.mark.parametrize("method", ["fedavg", "pfedme", "fedper", "perfedavg", "adabest", "heterofl"])
def test_weights_of_ages_0_1_and_2(tmp_path: Path, method: str) -> None:
    """Clients with 4, 8 and 12 samples that are 0, 1 and 2 rounds late count 4, 8/2 and 12/4; others' 1, 1/2 and 1/4."""
    uploads = taken_in(tmp_path, method, [0, 1, 2], np.eye(3, 8), sizes=[4, 8, 12])
    once = np.array([1, 1 / 2, 1 / 4])
    np.testing.assert_array_equal(uploads.once, once)
    np.testing.assert_array_equal(uploads.sizes, [4, 4, 3])
    fed = federation(METHODS[method], clients=3, d=8)
    np.testing.assert_array_equal(fed.server.weights(uploads), [4, 4, 3] if method in ("fedavg", "fedper") else once)


@pytest.mark.parametrize("rule", ["decay", "fedbuff"])
def test_the_servers_optimizer_moves_by_the_mean_with_late_uploads(tmp_path: Path, rule: str) -> None:
    """Momentum 1/2 of an old m = w, plus the way to the mean: (4 x0 + 4 x1 + 3 x2) / 11, or that of shortened moves."""
    keys = {**LATE, "staleness-rule": rule, "server-optimizer": "momentum", "server-beta1": 0.5}
    fed = federation(METHODS["fedavg"], clients=3, d=8, **keys)
    w, after = np.ones(8, np.float32), np.eye(3, 8)
    fed.server.global_model = Model(w, np.zeros(0, np.float32))
    fed.server.memory["server-optimizer.m"] = w
    uploads = taken_in(tmp_path, "fedavg", [0, 1, 2], after, sizes=[4, 8, 12], starts=[w, w, w], fed=fed)
    target = np.average(after, axis=0, weights=[4, 4, 3])
    if rule == "fedbuff":
        target = np.average(w + (1 + np.arange(3)[:, None]) ** -0.5 * (after - w), axis=0, weights=[4, 8, 12])
    before = fed.server.state
    fed.server.personalize(4, uploads)
    (move,) = steps.after(fed.config)
    np.testing.assert_allclose(move(before, fed.server.state).model.params, w + 0.5 * w + target - w, rtol=1e-5)


def test_fedbuff_s_rule_on_a_toy(tmp_path: Path) -> None:
    """Nguyen et al., Algorithm 1 with eta_g = 1: w + (1/K) sum_i (1 + age_i) ** -1/2 Delta_i, for clients of one size."""
    w = np.arange(8, dtype=np.float32)
    generator = np.random.default_rng(0)
    ages, starts = [0, 1, 3], [w, w - 1, w + generator.standard_normal(8)]
    deltas = generator.standard_normal((3, 8))
    after = np.stack([start + delta for start, delta in zip(starts, deltas, strict=True)])
    fed = federation(METHODS["fedavg"], clients=3, d=8, **{"quorum": 0.6, "staleness": 3, "staleness-rule": "fedbuff"})
    fed.server.global_model = Model(w, np.zeros(0, np.float32))
    uploads = taken_in(tmp_path, "fedavg", ages, after, sizes=[5, 5, 5], starts=starts, fed=fed)
    fed.server.personalize(4, uploads)
    expected = w + ((1 + np.array(ages))[:, None] ** -0.5 * deltas).mean(axis=0)
    np.testing.assert_allclose(fed.server.global_model.params, expected, atol=1e-5)


def test_feddyn_adds_up_whole_updates(tmp_path: Path) -> None:
    """h moves by the mean of the clients' own differences, from whatever model each of them started."""
    w, ages = np.arange(8, dtype=np.float32), [0, 2]
    starts, deltas = [w, w - 5], np.stack([np.full(8, 0.5), np.full(8, -0.25)])
    fed = federation(METHODS["feddyn"], clients=2, d=8, quorum=0.6, staleness=2)
    fed.server.global_model = Model(w, np.zeros(0, np.float32))
    after = np.stack([start + delta for start, delta in zip(starts, deltas, strict=True)])
    fed.server.personalize(3, taken_in(tmp_path, "feddyn", ages, after, sizes=[5, 5], starts=starts, fed=fed))
    np.testing.assert_allclose(fed.server.memory["h"], np.full(8, 0.125), atol=1e-6)


def taken_in(
    directory: Path,
    method: str,
    ages: list[int],
    after: Any,
    *,
    sizes: list[int],
    starts: list[Any] | None = None,
    fed: Federation | None = None,
) -> Any:
    """Return the uploads that `personalize` gets: client i's row of `after` is ages[i] rounds late."""
    fed = fed or federation(
        METHODS[method], clients=len(ages), d=8, **{"quorum": 0.6, "staleness": 3, "staleness-decay": 0.5}
    )
    server, protocol, none = fed.server, PlainRounds(fed.server), np.zeros(0, np.float32)
    attempt = RoundAttempt(server.config, 4)
    server.begin(attempt)
    attempt.sent = dict.fromkeys(range(len(ages)), 0)
    attempt.buffer = protocol.open(attempt, list(attempt.sent))
    for i, age in enumerate(ages):
        start = np.zeros(8) if starts is None else starts[i]
        work = PendingUpload(i, 4 - age, "", Sent(Model(np.asarray(start, np.float32), none), {}))
        upload = Upload(Model(np.asarray(after[i], np.float32), none), num_examples=sizes[i])
        if age:
            upload, attempt.buffer.factors[i] = late.discounted(server, attempt, work, upload, age)
        attempt.buffer.add(i, upload, {}, 0)
    return protocol.screen(attempt)


# rounds


def test_a_slow_client_does_not_hold_rounds_up(run: Run, tmp_path: Path) -> None:
    """One of four clients is five times as slow: ten rounds take at most half of the time, and two runs have the same bits."""
    keys = {"num_clients": 4, "num_server_rounds": 10, "speeds": slow(tmp_path, 1, 1, 1, 5), "train_samples": 8}
    waiting = run(run_name="waiting", **keys)
    early = {**keys, "quorum": 0.7, "staleness": 2}
    first, second = run(run_name="first", **early), run(run_name="second", **early)
    assert digest(first) == digest(second) != digest(waiting)
    times = [sum(record["virtual-seconds"] for record in rounds(folder)) for folder in (first, waiting)]
    assert times[0] <= 0.5 * times[1]
    assert rounds(first)[0]["working"] == [3]
    # it needs five rounds: more than it may be late
    causes = [failure["cause"] for record in rounds(first) for failure in record["failures"]]
    assert causes and all("5 rounds late, 2 allowed" in cause or "4 rounds late" in cause for cause in causes), causes


@pytest.mark.parametrize("method", of_each_kind())
def test_rounds_that_wait_for_everyone_change_no_bits(run: Run, method: str) -> None:
    """Quorum 1 and no deadline, and rounds that may close early but need all three clients, in simulated time."""
    keys: dict[str, Any] = {"method": method, "train_samples": 8} | dict(IN_TWO_ROUNDS.get(method, {}))
    late_allowed = not METHODS[method].strategy.late.never
    plain = run(run_name="plain", **keys)
    waiting = run(run_name="waiting", quorum=1.0, round_deadline=0.0, speeds="lognormal:1", **keys)
    needed = run(run_name="needed", quorum=0.99, staleness=int(late_allowed), speeds="lognormal:1", **keys)
    assert digest(plain) == digest(waiting) == digest(needed)


def test_a_late_upload_is_used_by_a_later_round(run: Run, tmp_path: Path) -> None:
    """Client 2 needs one round and a half."""
    keys = {"num_server_rounds": 3, "quorum": 0.6, "staleness": 1, "staleness_decay": 0.5}
    folder = run(speeds=slow(tmp_path, 1, 1, 1.5), **keys)
    first, second, third = rounds(folder)
    assert first["working"] == [2] and list(first["clients"]) == ["0", "1"] and not first["failures"]
    assert second["clients"]["2"]["age"] == 1 and "age" not in second["clients"]["0"] and second["working"] == []
    assert second["clients"]["2"]["download-bytes"] == 0 < second["clients"]["2"]["upload-bytes"]
    assert third["working"] == [2]
    told = [Round.of(record, 3) for record in (first, second)]
    assert mentions(told[0].sentence, "simulated time", "1 still working") and [event.working for event in told] == [
        1,
        0,
    ]
    assert "simulated time" in told[1].sentence and "working" not in told[1].sentence


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"method": "scaffold"}, "staleness: method scaffold cannot do this: a control variate's change"),
        ({"method": "fedamp", "staleness_decay": 0.5}, "staleness-decay: method fedamp cannot do this"),
        ({"method": "feddyn", "staleness_rule": "fedbuff"}, "staleness-rule: method feddyn cannot do this"),
        ({"robust": "median", "staleness_decay": 0.5}, "staleness-decay: .*every client counts once"),
    ],
)
def test_methods_that_refuse_late_uploads(changes: dict[str, Any], error: str) -> None:
    asked = config(quorum=0.6, staleness=1, speeds="lognormal:1", **changes)
    with pytest.raises(UserError, match=error):
        METHODS[asked.method].check(asked)


@pytest.mark.parametrize(("method", "more"), [("ifca", "another model"), ("pfedfda", "covariance, means")])
def test_uploads_that_fedbuff_cannot_move(run: Run, tmp_path: Path, method: str, more: str) -> None:
    """The run is refused before its folder exists."""
    with pytest.raises(UserError, match=f"staleness-rule: method {method} uploads {more}"):
        run(method=method, speeds="lognormal:1", quorum=0.6, staleness=1, staleness_rule="fedbuff")
    assert not (tmp_path / "runs").exists()


def test_a_simulation_needs_speeds_to_know_who_is_late(run: Run) -> None:
    with rejected(UserError, "quorum", "who answers", "key speeds"):
        run(quorum=0.7)


@pytest.mark.parametrize(
    "keys",
    [
        {"method": "fedcac"},
        {"method": "fedper", "staleness_decay": 0.5},
        {"method": "cfl", "staleness_rule": "fedbuff", "model": "tests.small_models:batchnorm"},
        {"method": "feddwa", "feddwa": {"guidance": "extrapolated"}},
    ],
    ids=lambda keys: str(keys["method"]),
)
def test_a_run_that_is_resumed_while_clients_are_late(run: Run, tmp_path: Path, keys: dict[str, Any]) -> None:
    """Its server died after round 2, with a held upload and a clock in the checkpoint, and clients ahead of it."""
    always = {"num_server_rounds": 3, "checkpoint_every": 1, "keep_state": True, "quorum": 0.5, "staleness": 2}
    folder = run(speeds=slow(tmp_path, 1, 1, 1.5, 2.5), num_clients=4, **always, **keys)
    before, ended = timeless(folder), digest(folder)
    ages = [row["age"] for record in rounds(folder) for row in record["clients"].values() if "age" in row]
    assert sorted(ages) == [1, 2] and rounds(folder)[0]["working"] == [2, 3]
    assert rounds(folder)[1]["working"] == [3]
    for file in (folder.path / checkpoint.DIRECTORY).glob("round-000003.*"):
        file.unlink()
    resumed = run(speeds=slow(tmp_path, 1, 1, 1.5, 2.5), num_clients=4, resume=str(folder.path), **always, **keys)
    assert digest(resumed) == ended and timeless(resumed) == before


def test_the_arrivals_of_a_run_are_repeated(run: Run, tmp_path: Path) -> None:
    """A replay knows no speeds. It takes in each upload in the round in which it arrived, and ends with the same bits."""
    keys = {
        "num_server_rounds": 4,
        "num_clients": 5,
        "quorum": 0.6,
        "staleness": 1,
        "staleness_decay": 0.5,
        "min_results": 0.1,
    }
    first = run(run_name="first", speeds="lognormal:1", drop_rate=0.2, availability=0.8, day_length=5.0, **keys)
    lines = arrivals.read(first.path)
    fates = {end["fate"] for line in lines for end in line["ends"]}
    assert [line["round"] for line in lines] == [1, 2, 3, 4] and fates >= {"used", "failed"}, fates
    second = run(run_name="second", replay=str(first.path), **keys)
    assert digest(second) == digest(first)
    assert [record["working"] for record in rounds(second)] == [record["working"] for record in rounds(first)]
    assert not (second.path / arrivals.FILE).exists()


class Late(InProcessGrid):
    """A deployment's grid. Client 2 answers a message of a round only after others have answered in the next round."""

    useful_messages = math.inf
    answered = 0
    # the node that fails in a round
    fails = 0, 0

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Answer one message that is due."""
        due = [name for name in message_ids if name in self._pending and self._is_due(self._pending[name])][:1]
        of = self._pending[due[0]].metadata if due else None
        if of and (of.dst_node_id, of.group_id) == (self.fails[0], str(self.fails[1])) and of.message_type == "train":
            return [Message(Error(0, "it was killed"), reply_to=self._pending.pop(due[0]))]
        replies = list(super().pull_messages(due))
        for reply in replies:
            if reply.metadata.message_type == "train":
                self.answered = max(self.answered, int(reply.metadata.group_id))
        return replies

    def _is_due(self, message: Message) -> bool:
        of = message.metadata
        return of.message_type != "train" or of.dst_node_id != 3 or self.answered > int(of.group_id)


@pytest.mark.parametrize("keys", [{"staleness": 1, "method": "fedcac"}, {"staleness": 0}], ids=["used", "thrown-away"])
def test_a_deployment_that_does_not_wait(raw_config: dict[str, Any], run: Run, keys: dict[str, Any]) -> None:
    """A client is late in every round that asks it; the replay of the arrivals ends with the same bits."""
    keys = {"quorum": 0.6, "num_server_rounds": 5, "num_clients": 3, **keys}
    raw = raw_config | flat({**keys, "run_name": "real"})
    parsed = parse(raw, METHOD_PARAMS)
    real = server_app.run(Late(app, raw, 3), parsed, lambda *_: None, math.inf, hears=False)
    lines = arrivals.read(real.path)
    assert [line["asked"] for line in lines] == [[0, 1, 2], [0, 1], [0, 1, 2], [0, 1], [0, 1, 2]]
    fate = "used" if keys["staleness"] else "thrown-away"
    late = [[(end["age"], end["fate"]) for end in line["ends"] if end["client"] == 2] for line in lines]
    assert late == [[], [(1, fate)], [], [(1, fate)], []]
    again = run(run_name="again", replay=str(real.path), **keys)
    assert digest(again) == digest(real)


def test_a_silent_client_is_not_waited_for_when_others_fail(raw_config: dict[str, Any]) -> None:
    """Client 1 fails in round 1, and client 2 is silent until round 2: client 0 is half of the two that have not failed."""
    keys: dict[str, Any] = {"quorum": 0.5, "min_results": 0.3, "num_server_rounds": 2, "num_clients": 3}
    raw = raw_config | flat({**keys, "staleness": 1})
    grid = Late(app, raw, 3)
    grid.fails = 2, 1
    folder = server_app.run(grid, parse(raw, METHOD_PARAMS), lambda *_: None, math.inf, hears=False)
    first, second = rounds(folder)
    assert list(first["clients"]) == ["0"] and first["working"] == [2]
    assert [failure["client"] for failure in first["failures"]] == [1] and second["failures"] == []


def test_a_deployment_whose_server_restarts_while_a_client_is_late(raw_config: dict[str, Any], run: Run) -> None:
    """The client's reply is lost with the server. Client 1 fails in round 4. The replay ends with the same bits."""
    keys: dict[str, Any] = {"quorum": 0.6, "num_clients": 3, "staleness": 1, "method": "fedper", "keep_state": True}
    raw = raw_config | flat({**keys, "run_name": "real", "num_server_rounds": 3})
    first = server_app.run(Late(app, raw, 3), parse(raw, METHOD_PARAMS), lambda *_: None, math.inf, hears=False)
    assert rounds(first)[-1]["working"] == [2]
    raw |= {"num-server-rounds": 5, "resume": str(first.path)}
    grid = Late(app, raw, 3)
    grid.fails = 2, 4
    real = server_app.run(grid, parse(raw, METHOD_PARAMS), lambda *_: None, math.inf, hears=False)
    lines = arrivals.read(real.path)
    failed = [[end["client"] for end in line["ends"] if end["fate"] == "failed"] for line in lines]
    assert failed == [[], [], [], [2, 1], []]
    assert mentions(rounds(real)[3]["failures"][0]["cause"], "lost when", "server restarted")
    again = run(run_name="again", replay=str(real.path), **keys, num_server_rounds=5)
    assert digest(again) == digest(real)


def test_a_late_upload_of_another_form_is_thrown_away(run: Run, tmp_path: Path) -> None:
    """FedConcat's clients upload encoders in round 1, and a classifier from then on."""
    keys = {"method": "fedconcat", "fedconcat": {"encoder_rounds": 1}, "quorum": 0.6, "staleness": 1}
    _, second = rounds(run(speeds=slow(tmp_path, 1, 1, 1.5), **keys))
    assert mentions(second["failures"][0]["cause"], "method's uploads", "another form now")


@pytest.mark.parametrize("method", ["apple", "fedpac", "fedproto"])
def test_a_late_upload_is_compared_with_what_its_client_was_sent(run: Run, tmp_path: Path, method: str) -> None:
    """These send arrays beside the model, or compare others than they send; in round 1 there are no prototypes to send."""
    keys: dict[str, Any] = {"method": method, "quorum": 0.6, "staleness": 1, "speeds": slow(tmp_path, 1, 1, 1.5)}
    assert [record["clients"].get("2", {}).get("age") for record in rounds(run(**keys))] == [None, 1]


@pytest.mark.nightly
@pytest.mark.parametrize("method", [*METHODS])
def test_every_method_uses_late_uploads_or_refuses_them(run: Run, tmp_path: Path, method: str) -> None:
    """Client 2 is late in every round that asks it. Two runs have equal bits."""
    keys: dict[str, Any] = {"method": method, "quorum": 0.6, "num_server_rounds": 5}
    if method == "fedconcat":
        keys["fedconcat"] = {"encoder_rounds": 4}
    if method == "heterofl":
        # a narrow client would send fewer bytes, and be in time
        keys["heterofl"] = {"rates": "0.5"}
    keys |= {"speeds": slow(tmp_path, 1, 1, 1.5), "staleness": 1}
    if METHODS[method].strategy.late.never:
        with rejected(MethodError, "staleness", f"method {method}", "cannot do this"):
            run(**keys)
        return
    first, second = run(run_name="first", **keys), run(run_name="second", **keys)
    assert digest(first) == digest(second)
    assert [record["clients"].get("2", {}).get("age") for record in rounds(first)] == [None, 1, None, 1, None]


def test_methods_refuse_late_uploads_that_they_cannot_use_by_name() -> None:
    keys: dict[str, Any] = {"quorum": 0.6, "staleness": 1}
    for name in ("fedma", "favor"):
        with rejected(MethodError, "staleness", f"method {name} cannot do", "got 1"):
            METHODS[name].check(config(method=name, **keys))
    for name in ("apple", "fedpac", "pfedhn", "pfedla", "pfedsim"):
        METHODS[name].check(config(method=name, **keys))
        both = "" if name in ("apple", "fedpac") else ", or staleness-rule = fedbuff,"
        with rejected(MethodError, "staleness-decay", f"method {name} cannot do", f"1{both} is possible"):
            METHODS[name].check(config(method=name, **keys, staleness_decay=0.5))
    with rejected(MethodError, "staleness-rule", "method heterofl cannot", "clients upload parts", "model"):
        METHODS["heterofl"].check(config(method="heterofl", **keys, staleness_rule="fedbuff"))
    for name in ("adabest", "fedproto", "fedrod", "heterofl", "perfedavg"):
        METHODS[name].check(config(method=name, **keys, staleness_decay=0.5))


def test_uploads_of_another_form_than_the_model_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for method, rule, error in (
        ("pfedla", "decay", "staleness: method pfedla uploads another model .* no difference to it; leave it 0, got 1"),
        ("fedavg", "fedbuff", "staleness-rule: method fedavg uploads another model .* no update; set decay"),
    ):
        server = federation(method, quorum=0.6, staleness=1, staleness_rule=rule).server
        late.check_forms(server)
        other = dataclasses.replace(server.form(server.state, server.attempt), d=7)
        monkeypatch.setattr(server, "form", lambda state, turn, other=other: other)
        with pytest.raises(UserError, match=error):
            late.check_forms(server)


def test_a_liar_that_is_always_late_gains_nothing(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its upload is dropped by name when it arrives, and the others' models are those of a run in which it fails."""
    keys = {"num_clients": 6, "num_server_rounds": 4, "quorum": 0.8, "staleness": 1, "max_update_norm": 3.0}
    keys |= {"speeds": slow(tmp_path, 1, 1, 1, 1, 1, 1.5)}

    def far(upload: Upload) -> Upload:
        return replaced(upload, model=Model(upload.model.params + np.float32(5), upload.model.buffers))

    with monkeypatch.context() as patch:
        patch.setattr("client_app.client.CorollaClient._train", corrupting(5, far))
        lying = run(run_name="lying", **keys)
    named = [(record["round"], failure["client"]) for record in rounds(lying) for failure in record["failures"]]
    assert named == [(2, 5), (4, 5)]
    assert all(mentions(record["failures"][0]["cause"], "times as far") for record in rounds(lying)[1::2])
    monkeypatch.setattr("client_app.client.CorollaClient._train", corrupting(5, raising))
    assert digest(lying) == digest(run(run_name="failing", **keys))


def test_uploads_are_held_on_the_disk_beyond_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three models of 32 bytes, of which two may be in memory."""
    monkeypatch.setattr(late, "SMALL", 0)
    upload = Upload(Model(np.arange(8, dtype=np.float32), np.zeros(0, np.float32)), num_examples=3)
    assert late.held(upload, 32, 64, tmp_path) is upload and late.held(upload, 10**9, 0, tmp_path) is upload
    moved = late.held(upload, 33, 64, tmp_path)
    assert client_arrays.on_disk(moved.model.params) and moved.num_examples == 3
    np.testing.assert_array_equal(moved.model.params, upload.model.params)


def test_a_run_does_not_go_on_with_other_speeds(run: Run, tmp_path: Path) -> None:
    keys = {"run_name": "one", "keep_state": True}
    folder = run(speeds=slow(tmp_path, 1, 1, 1), num_server_rounds=1, **keys)
    speeds = slow(tmp_path, 1, 1, 2)
    with rejected(UserError, "speeds", "/speeds.csv has changed", "run started"):
        run(speeds=speeds, resume=str(folder.path), num_server_rounds=2, **keys)
