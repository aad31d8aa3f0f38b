"""The key `discover`: clients say who they are before the first round, or each when it is first drawn or evaluated."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from client_app.client_app import app
from fl_app.errors import UserError
from fl_app.server.run_folder import CLIENTS, RunFolder, read_clients, read_metrics, read_summary
from fl_app.transport import client_registry
from tests.conftest import IN_TWO_ROUNDS, Run, config, of_each_kind
from tests.facts import mentions, rejected
from tests.server.fake_grid import SILENT, FakeGrid, exchange, three

N = 6
DRAWN: dict[str, Any] = {"num_clients": N, "fraction_train": 0.4, "discover": "sampled"}


class Heard(ClientApp):
    """The ClientApp, and what it was asked: kinds of messages with client ids. broken: clients that cannot say who they are."""

    def __init__(self, broken: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.broken, self.messages = broken, list[tuple[str, int]]()

    def __call__(self, message: Message, context: Context) -> Message:
        kind, client_id = message.metadata.message_type, int(str(context.node_config["partition-id"]))
        self.messages.append((kind, client_id))
        if kind == "get_properties" and client_id in self.broken:
            raise RuntimeError("no data here")
        return app(message, context)

    @property
    def asked_before_training(self) -> list[int]:
        first = [kind for kind, _ in self.messages].index("train")
        return [client_id for _, client_id in self.messages[:first]]

    def of(self, kind: str) -> list[int]:
        return [client_id for name, client_id in self.messages if name == kind]


def digest(folder: RunFolder) -> str:
    found: str = read_summary(folder.path)["digest"]
    assert found
    return found


def test_a_client_says_who_it_is_when_it_is_first_drawn(run: Run) -> None:
    heard = Heard()
    folder = run(heard, **DRAWN, num_server_rounds=3)
    kinds = [kind for kind, _ in heard.messages]
    last = len(kinds) - kinds[::-1].index("train")
    by_round = [sorted(map(int, record["clients"])) for record in read_metrics(folder.path)]
    # client 0 says what data all have
    assert set(heard.asked_before_training) == {0, *by_round[0]}
    asked = {client_id for kind, client_id in heard.messages[:last] if kind == "get_properties"}
    assert asked == {0, *by_round[0], *by_round[1], *by_round[2]} and len(asked) < N
    # each once, those never drawn before the evaluation
    assert sorted(heard.of("get_properties")) == list(range(N))


def test_all_is_learned_of_all_in_the_end(run: Run) -> None:
    drawn, asked = run(**DRAWN, run_name="drawn"), run(**DRAWN | {"discover": "all"}, run_name="all")
    assert digest(drawn) == digest(asked)
    assert read_clients(drawn.path) == read_clients(asked.path) and len(read_clients(drawn.path)) == N
    assert (drawn.path / CLIENTS).read_text() == (asked.path / CLIENTS).read_text()
    about = [json.loads((folder.path / "run.json").read_text()) for folder in (drawn, asked)]
    assert about[0]["data"] == about[1]["data"] and about[0]["classes"] == about[1]["classes"]


@pytest.mark.parametrize("method", of_each_kind())
def test_no_method_computes_anything_else(method: str, run: Run) -> None:
    more: dict[str, Any] = dict(IN_TWO_ROUNDS.get(method, {}))
    shared = {
        "method": method,
        "num_clients": 5,
        "fraction_train": 0.5,
        "num_server_rounds": 2,
        "local_epochs": 1,
        **more,
    }
    folders = [run(discover=how, run_name=how, **shared) for how in ("all", "sampled")]
    assert digest(folders[0]) == digest(folders[1])
    records = [[record["clients"].keys() for record in read_metrics(folder.path)] for folder in folders]
    assert records[0] == records[1]


def test_holdout_clients_are_met_when_they_are_evaluated(run: Run) -> None:
    more = {"holdout_clients": 0.3, "num_clients": N}
    folders = [run(discover=how, run_name=how, **more) for how in ("all", "sampled")]
    assert digest(folders[0]) == digest(folders[1])


def test_who_cannot_take_part_ends_the_run_by_name_where_all_are_needed(run: Run) -> None:
    with pytest.raises(UserError) as info:
        run(Heard(broken=(3,)), **DRAWN)
    assert str(info.value).startswith("clients that cannot take part:\n") and "no data here" in str(info.value)


@pytest.mark.parametrize("broken", [0, 3])
def test_who_cannot_take_part_is_left_out_where_fewer_are_enough(
    broken: int, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    heard = Heard(broken=(broken,))
    with caplog.at_level("WARNING", "corolla"):
        folder = run(heard, **DRAWN, min_available_clients=2, num_server_rounds=2)
    assert "cannot take part" in caplog.text
    *_, last = read_metrics(folder.path)
    assert set(map(int, last["evaluation"]["clients"])) == set(range(N)) - {broken}
    assert broken not in heard.of("train") and len(last["clients"]) == 2
    # a node that crashes is asked again
    assert heard.of("get_properties").count(broken) == 3


def test_a_run_that_is_resumed_meets_those_it_draws(run: Run) -> None:
    whole = run(**DRAWN, num_server_rounds=3, run_name="whole", keep_state=True)
    half = run(**DRAWN, num_server_rounds=2, run_name="half", keep_state=True)
    assert read_clients(half.path).keys() == set(map(str, range(N)))
    heard = Heard()
    resumed = run(heard, **DRAWN, num_server_rounds=3, run_name="half", keep_state=True, resume=str(half.path))
    assert digest(resumed) == digest(whole)
    assert len(heard.asked_before_training) < N


def test_above_1000_clients_of_one_process_each_is_asked_when_it_is_drawn(
    run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client_registry.FEW == 1000
    monkeypatch.setattr(client_registry, "FEW", N - 1)
    heard = Heard()
    with caplog.at_level("INFO", "corolla"):
        run(heard, num_clients=N, fraction_train=0.4)
    assert mentions(caplog.messages, "discover = sampled", f"each of {N}", "sampled or evaluated")
    assert len(heard.asked_before_training) < N


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"private": True, "fraction_train": 1.0}, "a private run needs the keys of all clients"),
        (
            {"method": "fedconcat", "fedconcat": {"encoder_rounds": 1}},
            "fedconcat puts clients into clusters by their label counts",
        ),
    ],
)
def test_all_are_asked_first_where_all_are_needed(
    changes: dict[str, Any], why: str, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    heard = Heard()
    method = {"method": "fedavg"} | changes
    with caplog.at_level("INFO", "corolla"):
        run(heard, **DRAWN | method)
    assert mentions(caplog.messages, "discover = all", "every client is", "first round", f"because {why}")
    assert heard.messages[:N] == [("get_properties", k) for k in range(N)]


def test_sites_data_are_compared_before_the_first_round(caplog: pytest.LogCaptureFixture) -> None:
    e = exchange(three())
    parsed = config(discover="sampled", dataset="node", classes="0,1")
    with caplog.at_level("INFO", "corolla"):
        assert client_registry.clients_to_meet(e.grid, parsed) == {}
    assert mentions(caplog.text, "because the sites'", "data", "compared")


def test_a_deployment_asks_all_as_nobody_knows_which_node_is_which_client(caplog: pytest.LogCaptureFixture) -> None:
    grid = FakeGrid(three())
    with caplog.at_level("INFO", "corolla"):
        assert client_registry.clients_to_meet(grid, config(discover="sampled", num_clients=3)) == {}
    assert mentions(caplog.text, "because only their", "node", "client")
    caplog.clear()
    with caplog.at_level("INFO", "corolla"):
        assert client_registry.clients_to_meet(grid, config(num_clients=3)) == {}
    assert not caplog.text


def test_a_node_that_says_it_is_another_client_is_refused() -> None:
    e = exchange(three())
    # nodes 50, 77 and 91 are clients 2, 0 and 1
    e.registry.expect({0: 77, 1: 50, 2: 91})
    with rejected(UserError, "", "client 2", "node is another", "client's"):
        e.registry.wait()
        e.registry.query([1])


def test_a_silent_client_is_left_out_by_name_and_waited_for_once(caplog: pytest.LogCaptureFixture) -> None:
    e = exchange(three() | {50: SILENT}, available_timeout=0.2, round_timeout=60.0, min_available_clients=1)
    # nodes 50, 77 and 91 are clients 2, 0 and 1
    e.registry.expect({0: 77, 1: 91, 2: 50})
    with caplog.at_level("WARNING", "corolla"):
        e.registry.wait()
        assert not e.registry.query([0, 2])
    assert e.registry.client_ids == [0, 1]
    assert mentions(caplog.messages[-1], "client 2 has not", "answered within 0 s", "run goes", "without it")
    caplog.clear()
    started = time.monotonic()
    assert e.registry.query([0, 1])
    assert time.monotonic() - started < 0.15 and not caplog.messages
