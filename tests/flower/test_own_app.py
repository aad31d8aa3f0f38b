"""A method in a user's own app: what clients keep, who is sent what, bad replies, and a state to go on from."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord
from flwr.client.mod import secaggplus_mod
from flwr.clientapp.mod import LocalDpMod
from flwr.clientapp.typing import ClientAppCallable
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, Strategy
from flwr.serverapp.strategy import FedAvg as FlowersFedAvg

from corolla.flower import FedAvg, FedBN, FedCAC, FedDAC, FedDWA, FedPer, Local, personalize
from corolla.flower.messages import HEADER, INITIAL, AppForm
from fl_app.errors import UserError
from fl_app.transport import wire
from fl_app.transport.inprocess import InProcessGrid
from tests.facts import mentions
from tests.flower.apps import Arrays, app_of, drift, grid_of, initial, read, record_of

HEAD = {"head.weight", "head.bias"}


class Seen:
    """A mod outside of `personalize`: it notes what messages bring, and may change replies."""

    def __init__(self, change: Any = None) -> None:
        self.received: list[tuple[int, str, dict[str, set[str]]]] = []
        self.change = change

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        records = {name: set(record) for name, record in message.content.items()}
        client = int(context.node_config["partition-id"])  # type: ignore[arg-type]
        self.received.append((client, message.metadata.message_type, records))
        reply = call_next(message, context)
        if self.change and message.metadata.message_type == "train":
            self.change(client, reply)
        return reply


def same(left: ArrayRecord, right: ArrayRecord) -> bool:
    return {k: v.tobytes() for k, v in read(left).items()} == {k: v.tobytes() for k, v in read(right).items()}


def test_it_is_a_strategy_with_the_arguments_of_fedavg_and_of_the_method() -> None:
    strategy: Any = FedCAC(tau=0.3, fraction_train=0.5, min_train_nodes=1, server_memory_limit=0.5)
    assert issubclass(FedCAC, Strategy) and issubclass(FedCAC, FlowersFedAvg)
    assert strategy.fraction_train == 0.5 and strategy.keys == {"fedcac.tau": 0.3, "server-memory-limit": 0.5}


@pytest.mark.parametrize("arguments", [{"taus": 1}, {"tau": 2.0}, {"server_optimizer": "adam"}, {"robust": "mead"}])
def test_arguments_that_the_method_does_not_have_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(arguments)).replace("_", "-")):
        FedCAC(**arguments)


def test_fedavg_is_flowers() -> None:
    """With floats of 32 bits throughout, Flower's own FedAvg has the same mean up to rounding."""
    start = {name: array.astype(np.float32) for name, array in initial().items() if name != "bn.num_batches_tracked"}
    ours = FedAvg().start(grid_of(app_of()), record_of(start), 3)
    theirs = FlowersFedAvg().start(grid_of(app_of(mods=())), record_of(start), 3)
    for name, array in read(ours.arrays).items():
        np.testing.assert_allclose(array, read(theirs.arrays)[name], rtol=1e-5)
    assert ours.train_metrics_clientapp[3]["loss"] == pytest.approx(theirs.train_metrics_clientapp[3]["loss"])
    assert ours.evaluate_metrics_clientapp[3] == theirs.evaluate_metrics_clientapp[3]


def test_the_server_s_optimizer_moves_the_mean() -> None:
    plain, moved = (
        FedAvg(**keys).start(grid_of(app_of()), record_of(initial()), 2).arrays
        for keys in ({}, {"server_optimizer": "momentum", "server_learning_rate": 0.5})
    )
    assert not same(plain, moved)


@pytest.mark.parametrize(("cls", "stays"), [(FedPer, HEAD), (FedBN, {"bn.weight", "bn.running_var"}), (Local, None)])
def test_what_stays_on_a_client_is_sent_until_it_has_answered(cls: Any, stays: set[str] | None) -> None:
    app, seen = app_of(mods=[outside := Seen(), personalize]), outside
    cls().start(grid_of(app, 3), record_of(initial()), 2)
    floats = set(initial()) - {"bn.num_batches_tracked"}
    stays = stays or floats
    first, later = seen.received[:3], seen.received[3:]
    assert all(records[INITIAL] == stays for _, _, records in first)
    assert all(INITIAL not in records and not stays & records["arrays"] for _, _, records in later)
    assert all("bn.num_batches_tracked" in records["arrays"] for _, _, records in seen.received)
    # what a client evaluates: where nothing was sent, its own after two rounds of training
    own = initial()
    for round in (1, 2):
        own = drift({name: array.astype(np.float32).astype(array.dtype) for name, array in own.items()}, 1, round)
    assert set(app.seen[1]) == set(initial())
    for name in stays:
        assert np.allclose(app.seen[1][name], own[name], rtol=1e-6)
        assert not np.array_equal(app.seen[0][name], app.seen[1][name])


def test_the_user_s_functions_see_the_message_that_flower_s_fedavg_sends() -> None:
    inside = Seen()
    app = app_of(mods=[personalize, inside])
    FedDAC().start(grid_of(app), record_of(initial()), 1, train_config=ConfigRecord({"lr": 0.1}))
    assert inside.received[0] == (0, "train", {"arrays": set(initial()), "config": {"lr", "server-round"}})
    assert inside.received[-1] == (3, "evaluate", {"arrays": set(initial()), "config": {"server-round"}})


def test_a_function_may_take_the_arrays_out_of_its_message() -> None:
    """As `to_torch_state_dict(keep_input=False)` does. FedDWA calls the function twice."""

    def emptied(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        reply = call_next(message, context)
        message.content["arrays"].clear()
        return reply

    plain, taking = (FedDWA() for _ in range(2))
    plain.start(grid_of(app_of()), record_of(initial()), 2)
    taking.start(grid_of(app_of(mods=[personalize, emptied])), record_of(initial()), 2)
    assert all(same(plain.personal_arrays(node), taking.personal_arrays(node)) for node in range(1, 5))


def test_a_mod_without_its_strategy_changes_nothing() -> None:
    inside, outside = Seen(), Seen()
    FlowersFedAvg().start(grid_of(app_of(mods=[outside, personalize, inside])), record_of(initial()), 1)
    assert inside.received == outside.received


def test_clients_that_were_not_drawn_are_sent_what_the_method_says() -> None:
    app = app_of()
    strategy = FedCAC(fraction_train=0.5, beta=1, min_train_nodes=1)
    strategy.start(grid_of(app), record_of(initial()), 1)
    drawn = set(strategy.server.state.clients)
    assert len(drawn) == 2
    for node in range(1, 5):
        is_global = same(strategy.personal_arrays(node), strategy._record(strategy.server.state.model))
        assert is_global == (node - 1 not in drawn)


def test_a_state_goes_on_where_it_was_left() -> None:
    def run(*parts: int) -> tuple[ArrayRecord, dict[int, Arrays]]:
        app = app_of(lambda arrays, client, round: drift(arrays, client, 0))
        grid, state = grid_of(app), None
        for rounds in parts:
            strategy = FedCAC(beta=3, max_update_norm=50.0)
            if state is not None:
                strategy.load_state_dict(pickle.loads(pickle.dumps(state)))
            strategy.start(grid, record_of(initial()), rounds)
            state = strategy.state_dict()
        assert strategy.server.state.round == 4
        return strategy.personal_arrays(2), app.seen

    (whole, seen), (parts, seen_in_parts) = run(4), run(2, 2)
    assert same(whole, parts)
    assert all(same(record_of(seen[client]), record_of(seen_in_parts[client])) for client in range(4))
    with pytest.raises(UserError):
        FedDAC().load_state_dict({"method": "fedcac"})


def broken(what: str) -> Any:
    """A train function of which client 1 replies with something else."""

    def train(arrays: Arrays, client: int, round: int) -> Arrays:
        trained = drift(arrays, client, round)
        if client != 1:
            return trained
        if what == "nan":
            trained["body.weight"] = trained["body.weight"] * np.float32(np.nan)
        elif what == "missing":
            del trained["head.bias"]
        elif what == "shape":
            trained["head.bias"] = np.zeros(3, np.float32)
        return trained

    return train


@pytest.mark.parametrize("what", ["nan", "missing", "shape"])
def test_a_bad_reply_is_dropped_by_name_and_the_round_goes_on(what: str) -> None:
    app = app_of(broken(what))
    strategy = FedPer()
    strategy.start(grid_of(app), record_of(initial()), 2)
    assert strategy.server.state.round == 2
    # the client has kept nothing of it
    for name in HEAD:
        assert (app.seen[1][name] == initial()[name].astype(np.float32)).all(), name


@pytest.mark.parametrize("count", [0, -3])
def test_a_reply_without_samples_is_dropped(count: int) -> None:
    strategy = FedCAC()
    strategy.start(grid_of(app_of(samples=lambda client: count if client == 1 else 5)), record_of(initial()), 1)
    assert sorted(strategy.server.state.clients) == [0, 2, 3]


@pytest.mark.parametrize("count", [float("nan"), float("inf"), 2**70, [1, 2]])
def test_a_number_of_samples_that_is_none_drops_its_reply(count: Any, caplog: pytest.LogCaptureFixture) -> None:
    strategy = FedCAC()
    strategy.start(grid_of(app_of(samples=lambda client: count if client == 1 else 5)), record_of(initial()), 1)
    assert sorted(strategy.server.state.clients) == [0, 2, 3] and "num-examples" in caplog.text


def masks_of(client: int, reply: Message, bits: int) -> None:
    record: Any = reply.content["fitres.parameters"]
    if client == 1:
        (name,) = record
        mask = np.zeros(len(np.frombuffer(record[name].data, np.uint8)) - 128, np.uint8)
        mask[0] = bits
        record[name] = wire.named_record({name: mask})[name]


@pytest.mark.parametrize("bits", [0, 255])
def test_a_wrong_mask_is_dropped(bits: int) -> None:
    outside = Seen(lambda client, reply: masks_of(client, reply, bits))
    strategy = FedCAC()
    strategy.start(grid_of(app_of(mods=[outside, personalize])), record_of(initial()), 1)
    assert sorted(strategy.server.state.clients) == [0, 2, 3]


CHANGED: dict[str, Callable[[Arrays], object]] = {
    "nan": lambda arrays: arrays.update({"body.weight": np.full((3, 4), np.nan, np.float32)}),
    "beyond float32": lambda arrays: arrays.update({"head.weight": np.full((2, 3), 1e300)}),
    "missing": lambda arrays: arrays.pop("head.bias"),
    "shape": lambda arrays: arrays.update({"head.bias": np.zeros((2, 1), np.float32)}),
    "text": lambda arrays: arrays.update({"head.bias": np.array(["a", "b"])}),
    "variance": lambda arrays: arrays.update({"bn.running_var": np.full(3, -1, np.float32)}),
}


@pytest.mark.parametrize("cls", [FedCAC, FedDAC])
@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED)
def test_a_model_that_was_changed_behind_the_mod_is_dropped(cls: Any, change: Callable[[Arrays], object]) -> None:
    """The trained model is in the app's own record, which the server checks as it checks Corolla's uploads."""

    def changing(client: int, reply: Message) -> None:
        if client == 1:
            arrays = read(reply.content["arrays"])
            change(arrays)
            reply.content["arrays"] = record_of(arrays)

    strategy = cls()
    strategy.start(grid_of(app_of(mods=[Seen(changing), personalize])), record_of(initial()), 1)
    assert sorted(strategy.server.state.clients) == [0, 2, 3]


class Reordered(InProcessGrid):
    """A grid whose replies come in another order, without those of some nodes."""

    lost: frozenset[int] = frozenset()

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        replies = list(super().send_and_receive(messages))[::-1]
        return [reply for reply in replies if reply.metadata.src_node_id not in self.lost]


@pytest.mark.parametrize("cls", [FedAvg, FedCAC])
@pytest.mark.parametrize("lost", [(), (1,), (2, 4)])
def test_the_order_of_replies_changes_no_bit(cls: Any, lost: tuple[int, ...]) -> None:
    def left(messages: Iterable[Message]) -> list[Message]:
        return [message for message in messages if message.metadata.dst_node_id not in lost]

    class Fewer(InProcessGrid):
        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
            return super().send_and_receive(left(messages))

    one, other = Fewer(app_of(), {}, 4), Reordered(app_of(), {}, 4)
    other.lost = frozenset(lost)
    ours, theirs = (cls().start(grid, record_of(initial()), 3).arrays for grid in (one, other))
    assert same(ours, theirs)


def test_an_app_without_the_mod_is_named_with_the_line_to_add() -> None:
    for cls in (FedCAC, FedPer):
        with pytest.raises(UserError, match=r"mods=\[personalize\]") as error:
            cls().start(grid_of(app_of(mods=())), record_of(initial()), 2)
        assert error.value.key == "client app"


@pytest.mark.parametrize("samples", [0, -1])
def test_a_first_round_without_usable_replies_does_not_blame_a_mod_that_is_there(samples: int) -> None:
    with pytest.raises(UserError) as error:
        FedCAC().start(grid_of(app_of(samples=lambda client: samples)), record_of(initial()), 1)
    assert error.value.key == "client app" and "mods=" not in str(error.value)


ODD: dict[str, Any] = {
    "nan": np.array([1, np.nan], np.float32),
    "beyond float32": np.array([1e300]),
    "complex": np.zeros(2, np.complex64),
    "text": np.array(["a"]),
}


@pytest.mark.parametrize("what", ODD)
def test_arrays_that_nothing_can_be_computed_with_are_named(what: str) -> None:
    with pytest.raises(UserError) as error:
        FedAvg().start(grid_of(app_of()), record_of({**initial(), "odd": ODD[what]}), 1)
    assert "odd" in error.value.key


def test_a_dtype_that_numpy_does_not_have_is_named() -> None:
    """bfloat16, as JAX has it."""
    record = ArrayRecord({"odd": Array("bfloat16", (2,), "numpy.ndarray", b"")})
    with pytest.raises(UserError) as error:
        FedAvg().start(grid_of(app_of()), record, 1)
    assert (error.value.key, error.value.value) == ("odd", "bfloat16")


@pytest.mark.parametrize("arrays", [{}, {"whole": np.arange(3)}, {"empty": np.zeros((0, 3), np.float32)}])
def test_a_model_without_parameters_is_refused(arrays: Arrays) -> None:
    with pytest.raises(UserError) as error:
        FedAvg().start(grid_of(app_of()), record_of(arrays), 1)
    assert error.value.key == "initial_arrays"


def test_empty_arrays_travel_beside_others() -> None:
    app = app_of()
    result = FedCAC().start(grid_of(app), record_of({**initial(), "empty": np.zeros((0, 3), np.float32)}), 2)
    assert result.arrays["empty"].numpy().shape == app.seen[0]["empty"].shape == (0, 3)


def test_strategies_of_one_app_keep_their_clients_apart() -> None:
    app = app_of()
    grid, seen = grid_of(app), []
    first, between, second = FedPer(), FedBN(), FedPer()
    for strategy in (first, between, second):
        strategy.start(grid, record_of(initial()), 2)
        seen.append(app.seen[1])
    assert same(record_of(seen[0]), record_of(seen[2]))
    # the first one goes on where it was
    first.start(grid, record_of(initial()), 1)
    assert first.state_dict()["with-state"] == [0, 1, 2, 3] and first.server.state.round == 3
    assert not same(record_of(app.seen[1]), record_of(seen[0]))


class Moving(InProcessGrid):
    """A grid whose connected nodes are chosen."""

    connected: tuple[int, ...] = ()

    def get_node_ids(self) -> list[int]:
        return list(self.connected)


@pytest.mark.parametrize("cls", [FedCAC, FedDAC, FedPer, Local])
def test_a_resumed_strategy_goes_on_with_other_nodes(cls: Any) -> None:
    grid = Moving(app_of(), {}, 6)
    strategy = cls()
    for nodes in ((1, 2, 3, 4), (2, 3, 4, 5), (5, 6), (1, 6)):
        grid.connected = nodes
        strategy.start(grid, record_of(initial()), 2)
        state = strategy.state_dict()
        strategy = cls()
        strategy.load_state_dict(pickle.loads(pickle.dumps(state)))
        assert strategy.state_dict()["round"] == state["round"]
    assert state["round"] == 8 and state["with-state"] == list(range(6)) == sorted(state["nodes"].values())


@pytest.mark.parametrize("state", [{}, {"method": "feddac"}])
def test_a_state_that_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(UserError) as error:
        FedCAC().load_state_dict(state)
    assert error.value.key == "state"


def test_a_state_of_another_model_is_refused() -> None:
    strategy = FedCAC()
    strategy.start(grid_of(app_of()), record_of(initial()), 1)
    with pytest.raises(UserError) as error:
        strategy.start(grid_of(app_of()), record_of({"head.weight": np.zeros((2, 3))}), 1)
    assert error.value.key == "state"


def test_a_client_that_lost_its_state_gets_its_first_model_again() -> None:
    app = app_of()
    grid = grid_of(app)
    strategy = FedPer()
    strategy.start(grid, record_of(initial()), 1)
    del grid._context(2).state[HEADER]
    strategy.start(grid, record_of(initial()), 1)
    assert strategy.state_dict()["with-state"] == [0, 2, 3]
    strategy.start(grid, record_of(initial()), 1)
    assert strategy.state_dict()["with-state"] == [0, 1, 2, 3]


def test_a_strategy_around_it_is_refused() -> None:
    around = DifferentialPrivacyServerSideFixedClipping(FedCAC(), 1.0, 1.0, 4)
    with pytest.raises(UserError, match="differential"):
        around.start(grid_of(app_of()), record_of(initial()), 1)


@pytest.mark.parametrize("mods", [[secaggplus_mod, personalize], [personalize, secaggplus_mod]])
def test_secure_aggregation_is_refused_by_name(mods: list[Any]) -> None:
    with pytest.raises(UserError, match="secure aggregation"):
        FedCAC().start(grid_of(app_of(mods=mods)), record_of(initial()), 1)


def test_a_user_s_own_privacy_mod_sees_flower_s_messages() -> None:
    floats = {name: array for name, array in initial().items() if array.dtype.kind == "f"}
    noisy = LocalDpMod(0.001, 0.0, 1.0, 0.1)
    app, strategy = app_of(train_mods=[noisy]), FedCAC()
    strategy.start(grid_of(app), record_of(floats), 1)
    assert len(strategy.server.state.clients) == 4
    moved = strategy.server.state.model.params - strategy.server.layout.model(floats).params
    assert 0 < np.linalg.norm(moved) <= 0.0011


def test_an_error_of_the_superlink_names_its_client(caplog: pytest.LogCaptureFixture) -> None:
    """A SuperNode that is gone: the SuperLink answers in its place, with another node's id."""

    def lost(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if context.node_id != 3 or message.metadata.message_type != "train":
            return call_next(message, context)
        reply = Message(Error(5, "Node Unavailable"), reply_to=message)
        reply.metadata.__dict__["_src_node_id"] = 99
        return reply

    FedCAC().start(grid_of(app_of(mods=[lost, personalize])), record_of(initial()), 1)
    assert mentions(caplog.text, "client 2 (node 3)", "dropped", "Node Unavailable")


def test_nodes_may_come_later() -> None:
    app, strategy = app_of(), FedCAC()
    strategy.start(grid_of(app, 2), record_of(initial()), 1)
    strategy.start(grid_of(app, 4), record_of(initial()), 1)
    assert sorted(strategy.server.state.clients) == [0, 1, 2, 3] and strategy.config.num_clients == 4


def test_without_a_classifier_by_name_it_must_be_given() -> None:
    plain = {"W": np.zeros((2, 3)), "b": np.zeros(2, np.float32)}
    with pytest.raises(UserError, match="classifier"):
        FedPer().start(grid_of(app_of()), record_of({**plain, "V": np.zeros((4, 2))}), 1)
    app, strategy = app_of(), FedPer(classifier=["V"])
    strategy.start(grid_of(app), record_of({**plain, "V": np.zeros((4, 2))}), 1)
    assert set(strategy.personal_arrays(1)) == {"W", "b"}
    with pytest.raises(UserError, match="classifier"):
        FedPer(classifier="X*").start(grid_of(app), record_of(plain), 1)


@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_are_read_in_every_layout(order: Any) -> None:
    array = np.asarray(np.arange(12.0).reshape(3, 4), order=order)
    record = record_of({"W": array, "scalar": np.array(2.5, np.float32)})
    assert (wire.viewed(record["W"]) == array).all() and wire.viewed(record["scalar"]).shape == ()
    assert wire.named_record({"scalar": np.array(2.5)})["scalar"].numpy() == 2.5


def test_a_form_survives_its_json() -> None:
    form = AppForm.of(record_of(initial()))
    assert form.layout.classifier == HEAD and form.layout.batchnorm == {"bn.weight", "bn.running_var"}
    assert [slot.name for slot in form.layout.buffers] == ["bn.running_var"]
    assert AppForm.from_json(form.to_json()).layout.params == form.layout.params
    assert AppForm.from_json(form.to_json()).layout.classifier == HEAD


def test_arrays_of_numpy_need_no_torch() -> None:
    code = """
import sys
from tests.flower.apps import app_of, grid_of, initial, record_of
from corolla.flower import FedCAC
FedCAC().start(grid_of(app_of()), record_of(initial()), 2)
assert "torch" not in sys.modules and "ray" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    "keys",
    [
        {"method": "leaves_a_trace:METHOD"},
        {"method": "leaves_a_trace"},
        {"method": "fedavg", "model": "leaves_a_trace:net"},
        {"method": "fedavg", "task": "leaves_a_trace:TASK"},
        {"method": "fedavg", "callbacks": "leaves_a_trace:Callback"},
        {"method": "fedavg", "initial-weights": "/etc/passwd"},
        {"method": "fedavg", "fedcac.tau": 0.5},
    ],
)
def test_no_message_names_a_module_or_a_file_of_the_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, str]
) -> None:
    """The server's messages, not the listed application, say which method runs."""
    (tmp_path / "leaves_a_trace.py").write_text(f"open({str(tmp_path / 'trace')!r}, 'w')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    told: list[str] = []

    def lying(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        header: Any = message.content[HEADER]
        said = json.loads(header["run"])
        said["keys"] = {"num-clients": 4, "num-server-rounds": 1, **keys}
        header["run"] = json.dumps(said)
        reply = call_next(message, context)
        told.append(wire.error_in(dict(reply.content[wire.RESULT])))  # type: ignore[arg-type]
        return reply

    with pytest.raises(UserError):
        FedAvg().start(grid_of(app_of(mods=(lying, personalize))), record_of(initial()), 1)
    strange = next(name for name in reversed(keys))
    assert told and all(text.startswith(strange) for text in told) and not (tmp_path / "trace").exists()


def of_user(reply: Message) -> Any:
    """The user's own metrics in a reply."""
    return next(r for name, r in reply.content.items() if isinstance(r, MetricRecord) and not name.startswith("fitres"))


Lie = Callable[[Message], object]
LIES: dict[str, Lie] = {
    "without a weight": lambda reply: of_user(reply).pop("num-examples"),
    "a list for the weight": lambda reply: of_user(reply).update({"num-examples": [1.0, 2.0]}),
    "a negative weight": lambda reply: of_user(reply).update({"num-examples": -5}),
    "no number": lambda reply: of_user(reply).update({"num-examples": float("nan")}),
    "a list for a metric": lambda reply: of_user(reply).update(
        dict.fromkeys({*of_user(reply)} - {"num-examples"}, [1.0, 2.0])
    ),
    "one metric more": lambda reply: of_user(reply).update({"more": 1.0}),
    "one record more": lambda reply: reply.content.update({"again": MetricRecord({"x": 1.0})}),
    "no record": lambda reply: [
        reply.content.pop(name) for name, record in [*reply.content.items()] if record is of_user(reply)
    ],
}


@pytest.mark.parametrize("kind", ["train", "evaluate"])
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_no_metrics_of_one_reply_end_a_run_or_stand_for_others(kind: str, lie: Lie) -> None:
    def lying(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        reply = call_next(message, context)
        if message.metadata.message_type == kind and context.node_config["partition-id"] == 1:
            lie(reply)
        return reply

    def metrics(mods: Any) -> list[set[str]]:
        found = FedAvg().start(grid_of(app_of(mods=mods)), record_of(initial()), 2)
        told = found.train_metrics_clientapp if kind == "train" else found.evaluate_metrics_clientapp
        assert all(0 <= value <= 1.0001 for record in told.values() for value in record.values())  # type: ignore[operator]
        return [set(record) for record in told.values()]

    assert metrics((lying, personalize)) == metrics((personalize,)) != []
