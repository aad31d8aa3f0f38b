"""What a method's hooks return: a wrong result ends in one error, with the names of the method and of its hook."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_app.client_app import app
from corolla.testing import federation
from fl_app import server_app
from fl_app.config import parse
from fl_app.errors import MethodFault, RoundFailed, UserError
from fl_app.keys import Scalar
from fl_app.layout import Model
from fl_app.server.checkpoint import load_latest
from fl_app.server.run_folder import read_metrics
from fl_app.transport.inprocess import InProcessGrid
from strategies import METHOD_PARAMS, METHODS
from strategies.base import AGE, LATE, OWN_MODEL, Late, LocalUpdate, Means, State, Sums, Turn, hooks
from strategies.base.server_half import ServerHalf
from strategies.base.state import Uploads
from strategies.baselines.fedavg import FedAvg
from tests.conftest import config
from tests.facts import mentions, rejected

METHODS_FILE = """
import collections, dataclasses, functools
import numpy as np
from corolla.method import FedAvg, LocalUpdate, Method, Model, NoParams, all_tensors

class Server(FedAvg):
    {server}

class Client(LocalUpdate):
    {client}

METHOD = Method("own", NoParams, Server, Client, {shared})
"""
PERSONALIZE = "def personalize(self, round, uploads):\n        super().personalize(round, uploads); "


def started(here: Path, raw: dict[str, Scalar], server: str = "", client: str = "", shared: str = "all_tensors") -> Any:
    """Run a method whose halves have these lines, and return the folder."""
    text = METHODS_FILE.replace("{server}", server or "pass").replace("{client}", client or "pass")
    (here / "own.py").write_text(text.replace("{shared}", shared))
    raw = {**raw, "method": "own:METHOD", "num-server-rounds": 1}
    return server_app.run(InProcessGrid(app, raw, 3), parse(raw, METHOD_PARAMS), lambda *_: None)


@pytest.mark.parametrize(
    ("server", "why"),
    [
        (
            "def sample(self, client_ids, round): return [99]",
            r"sample\(\) must return .* clients 0, 1, 2, .* got \[99\]",
        ),
        ("def sample(self, client_ids, round): return []", r"sample\(\) must return some of .* got \[\]"),
        ("def sample(self, client_ids, round): return [1, 1]", r"sample\(\) must return .* each once, got \[1, 1\]"),
        ("def sample(self, client_ids, round): return [0.5]", r"sample\(\) must return .* got \[0.5\]"),
        ("def sample(self, client_ids, round): return [True]", r"sample\(\) must return .* got \[True\]"),
        ("def sample(self, client_ids, round): pass", r"sample\(\) must return .* got None"),
        (
            "def weights(self, uploads): return -uploads.sizes",
            r"weights\(\) must return a number >= 0 for each of the 3",
        ),
        ("def weights(self, uploads): return uploads.sizes[1:]", r"weights\(\) must return a number >= 0 .* got \["),
        ("def weights(self, uploads): return 0 * uploads.sizes", r"weights\(\) .* positive sum, got \[0.0, 0.0, 0.0\]"),
        ("def weights(self, uploads): return 'size'", r"weights\(\) must return .* got 'size'"),
        (
            "streams = True\n    def weights(self, uploads): return -uploads.sizes",
            r"weights\(\) must return .* the 1 upl",
        ),
        ("def download_extras(self, client_id): return {'w': [1]}", r"download_extras\(\) .* got {'w': \[1\]}"),
        ("def download_extras(self, client_id): return {'a,b': np.ones(1)}", r"download_extras\(\) .* got 'a,b'"),
        ("def model_for(self, client_id): pass", r"model_for\(\) must return a Model, got None"),
        ("def expected(self): pass", r"expected\(\) must return an Expected, got None"),
        ("def form(self, state, turn): pass", r"form\(\) must return an Expected, got None"),
        ("def update(self, state, uploads, turn): pass", r"update\(\) must return a State, got None"),
        (
            "def download(self, state, client_id, turn): return state.model",
            r"download\(\) must return a Sent .*, got params",
        ),
        (
            "def sample_clients(self, state, client_ids, turn): return [99]",
            r"sample_clients\(\) must return some of .* got \[99\]",
        ),
        (PERSONALIZE + "self.note_round('x', self)", r"note_round\('x', ...\) needs a number, .* got <"),
        (PERSONALIZE + "self.note(0, 'x', {1.5: 2})", r"note\('x', ...\) needs texts or integers .* got 1.5"),
        (PERSONALIZE + "self.note_round(3, 2)", r"note_round\(3, ...\) needs a text as its name, got 3"),
        (
            PERSONALIZE + "self.memory['x'] = np.array(['a'])",
            r"memory\['x'\] must be a NumPy array of numbers, got <U1",
        ),
        (PERSONALIZE + "self.keep_for(2, x=[1])", r"personal\[2\]\['x'\] must be a NumPy array of numbers, got list"),
    ],
)
def test_a_wrong_result_of_the_server_half_is_named(
    here: Path, raw_config: dict[str, Scalar], server: str, why: str
) -> None:
    with pytest.raises(MethodFault, match=f"^method own:METHOD: {why}"):
        started(here, raw_config, server)


@pytest.mark.parametrize(
    ("client", "why"),
    [
        ("def train(self, start, state, ctx): pass", r"train\(\) must return a Model of float32 \[17226\] .* got None"),
        (
            "def train(self, start, state, ctx): return Model(start.params[1:], start.buffers)",
            r"train\(\) must return a Model of float32 \[17226\] and \[0\], got params float32 \[17225\], buffers \[\]",
        ),
        ("def merge(self, received, state, ctx): return received.params", r"merge\(\) .* got float32 \[17226\]"),
        ("def personal(self, model, state, ctx): pass", r"personal\(\) must return a Model"),
        ("def upload(self, before, after, state, ctx): return after", r"upload\(\) must return an Upload with a Model"),
        (
            "def upload(self, *given): return dataclasses.replace(super().upload(*given), extras={'x': 1})",
            r"upload\(\) must return an Upload whose extras are NumPy arrays of numbers by name, got {'x': 1}",
        ),
        (
            "def upload(self, *given): return dataclasses.replace(super().upload(*given), metrics={'x': None})",
            r"upload\(\) must return an Upload whose metrics are numbers or texts by name, got {'x': None}",
        ),
        (
            "def keep_local(self, after, state, ctx): state.arrays['x'] = 'text'",
            r"state.arrays\['x'\] must be a NumPy array of numbers, got str",
        ),
        (
            "def keep_local(self, after, state, ctx): state.arrays['x'] = list(ctx.trainer.module.parameters())[0]",
            r"state.arrays\['x'\] must be a NumPy array of numbers, got Parameter",
        ),
    ],
)
def test_a_wrong_result_of_the_client_half_is_named(
    here: Path, raw_config: dict[str, Scalar], client: str, why: str
) -> None:
    with pytest.raises(RoundFailed, match=f"method own:METHOD: {why}"):
        started(here, raw_config, client=client)


@pytest.mark.parametrize(
    ("shared", "got"),
    [
        ('lambda layout, params: {"nosuch"}', "'nosuch'"),
        ('lambda layout, params: "fc1.bias"', "'fc1.bias'"),
        ("lambda layout, params: None", "None"),
    ],
)
def test_shared_tensors_are_the_models(here: Path, raw_config: dict[str, Scalar], shared: str, got: str) -> None:
    with rejected(MethodFault, "method own:METHOD", "shared()", "must return names", "fc1.bias", f"got {got}"):
        started(here, raw_config, shared=shared)


def test_a_network_around_the_model_is_a_module(here: Path, raw_config: dict[str, Scalar]) -> None:
    with rejected(MethodFault, "method own:METHOD", "wrap()", "torch.nn.Module", "got None"):
        started(here, raw_config, shared="all_tensors, wrap=lambda module, params, seed: None")


def test_numpys_numbers_are_numbers(here: Path, raw_config: dict[str, Scalar]) -> None:
    server = (
        "def sample(self, client_ids, round): return np.array([2, 0])\n    "
        + PERSONALIZE
        + "self.note_round('x', np.float32(0.5)); self.note(0, 'y', {np.int64(2): [np.int64(3)]}); "
        + "self.note_round('z', np.arange(2))"
    )
    keep = "def keep_local(self, after, state, ctx): state.arrays['x'] = 0.5"
    (record,) = read_metrics(started(here, raw_config, server, keep).path)
    assert list(record["clients"]) == ["0", "2"]
    assert record["x"] == 0.5 and record["z"] == [0, 1] and record["clients"]["0"]["y"] == {"2": [3]}
    json.dumps(record)


def test_an_exception_in_a_hook_stays_as_it_is(here: Path, raw_config: dict[str, Scalar]) -> None:
    with pytest.raises(ZeroDivisionError) as error:
        started(here, raw_config, "def sample(self, client_ids, round): return 1 / 0")
    assert Path(error.traceback[-1].path).name == "own.py"


def test_a_methods_own_calls_are_checked_too() -> None:
    class Own(FedAvg[Any]):
        def weights(self, uploads: Uploads) -> Any:
            return uploads.sizes - 1e9

    fed = federation("fedavg")
    server = fed.server
    fed.server = Own(server.config, server.params, fed.layout, fed.initial, fed.shared, server.folder)
    with rejected(MethodFault, "method fedavg", "weights()", "return a number >= 0", "each", "3"):
        fed.round(np.ones((3, 8)))


class Mixin:
    """Not a half itself."""

    def weights(self, uploads: Uploads) -> Any:
        return "rubbish"


class Mixed(Mixin, FedAvg[Any]):
    """A half with the mixin's hook."""


class Below(Mixed):
    """It inherits the hook, which is checked once."""


def test_hooks_of_a_mixin_are_checked() -> None:
    fed = federation("fedavg")
    server = fed.server
    own = Below(server.config, server.params, fed.layout, fed.initial, fed.shared, server.folder)
    with rejected(MethodFault, "method fedavg", "weights()", "return a number >= 0", "1 upl"):
        own.weights(Uploads([0], np.zeros((1, 8)), np.zeros((1, 0)), np.ones(1), None, {}, []))
    assert "weights" not in vars(Below)


@pytest.mark.parametrize("kind", [staticmethod, lambda hook: functools.partial(hook)])
def test_a_hook_may_do_without_self(kind: Any) -> None:
    def sample(client_ids: list[int], round: int) -> list[int]:
        return client_ids[:round]

    own = type("Own", (FedAvg,), {"sample": kind(sample)})
    fed = federation("fedavg")
    server = fed.server
    half = own(server.config, server.params, fed.layout, fed.initial, fed.shared, server.folder)
    assert half.sample([4, 7, 9], 2) == [4, 7]
    with rejected(MethodFault, "method fedavg", "return some", "clients 4", "7", "each once", "got []"):
        half.sample([4, 7], 0)


def test_a_half_without_a_config_is_named_by_its_class() -> None:
    class Bare:
        def sample(self, client_ids: list[int], round: int) -> list[int]:
            return [3]

    hooks.checked(Bare, Bare, hooks.SERVER)
    with rejected(MethodFault, "method class Bare", "sample()", "must return some"):
        Bare().sample([0, 1], 1)


def test_earlier_names_of_hooks_work_and_are_told(
    here: Path, raw_config: dict[str, Scalar], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "corolla")
    lines = PERSONALIZE + "self.memory['seen'] = np.array(uploads.ids)"
    folder = started(
        here, raw_config, f"{lines}\n    def model_for(self, client_id): return self.last_personal(client_id)"
    )
    assert [name for name in ("personalize", "model_for", "expected") if any(name in m for m in caplog.messages)] == [
        "personalize",
        "model_for",
    ]
    assert load_latest(folder.path).arrays["memory.seen"].tolist() == [0, 1, 2]


def test_an_earlier_personalize_gets_the_sums_of_a_private_round() -> None:
    class Own(FedAvg[Any]):
        def personalize(self, round: int, uploads: Uploads) -> None:
            super().personalize(round, uploads)
            self.memory["seen"] = np.array([round, *uploads.ids])

        def model_for(self, client_id: int) -> Model:
            return self.global_model

    server = federation(dataclasses.replace(METHODS["fedavg"], name="own", strategy=Own)).server
    mean = Model(np.full(8, 2, np.float32), np.zeros(0, np.float32))
    state = server.update_sums(
        server.state, Sums([0, 1, 2], {0: [0, 1, 2]}, {0: mean}, mean, None, 0), Turn(server.config, 3)
    )
    assert (state.model.params == 2).all() and state.memory["seen"].tolist() == [3]
    # the server keeps a model for each client, as far as it can be known
    assert Own.holds.models and not FedAvg.holds.models


def test_earlier_flags_are_declarations() -> None:
    """Each counts for the class that has it, and one that overrides `update` says anew that uploads may be added up."""

    class Own(FedAvg[Any]):
        robust = frozenset({"median"})
        not_late = {LATE: "never here", AGE: "nor later"}  # noqa: RUF012
        spread = 2.0
        reads_moves = True

        def update(self, state: State, uploads: Uploads, turn: Turn) -> State:
            return state

    class Update(LocalUpdate[Any]):
        reports = ("drift",)
        local_from_file = False

        @classmethod
        def tested(cls, params: Any) -> str:
            return "another model"

    own = dataclasses.replace(METHODS["fedavg"], strategy=Own, local_update=Update)
    assert Own.means == Means(frozenset({"median"})) and Own.outliers.tolerance == 2
    assert Own.late == Late(never="never here", aged="nor later", reads_moves=True)
    assert (own.reports, own.local_from_file, own.tested_in(config())) == (("drift",), False, "another model")


@pytest.mark.parametrize(("half", "name"), [(FedAvg, "compared"), (FedAvg, "held_by"), (LocalUpdate, "export")])
def test_a_hook_that_no_declaration_can_replace_is_named(half: Any, name: str) -> None:
    with pytest.raises(UserError, match=f"method class Own: {name}: "):
        own = type("Own", (half,), {name: lambda self: None})
        dataclasses.replace(METHODS["fedavg"], local_update=own)


def test_a_method_has_sixteen_functions_and_four_flags_at_most() -> None:
    """Whatever a method overrides of its halves is in the tables of docs/methods-howto.md."""
    functions: set[str] = set()
    flags: set[str] = set()
    for method in METHODS.values():
        for cls, half in ((method.strategy, ServerHalf), (method.local_update, LocalUpdate)):
            for each in getattr(cls, "__origin__", cls).__mro__:
                if each.__module__.startswith("strategies.") and ".base." not in each.__module__:
                    own = {name for name in vars(each) if hasattr(half, name) and not name.startswith("_")}
                    callables = {name for name in own if callable(vars(each)[name])}
                    functions |= callables
                    flags |= own - callables
    assert flags == {"means", "late", "outliers", "holds"}
    page = (Path(__file__).parents[2] / "docs" / "methods-howto.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\| hook \|.*\n(?:\|.*\n)+", page, re.M)
    assert functions == set(re.findall(r"^\| `(\w+)\(", "".join(tables), re.M)) and len(functions) <= 16


@pytest.mark.parametrize(
    ("client", "server", "said"),
    [
        (
            "def train(self, start, state, ctx):\n        self.seen = 1; return super().train(start, state, ctx)",
            "",
            "train() sets self.seen",
        ),
        (
            "seen = []\n    def upload(self, before, after, state, ctx):\n        self.seen.append(1)\n"
            "        return super().upload(before, after, state, ctx)",
            "",
            "upload() sets Client.seen",
        ),
        (
            "",
            "count = 0\n    def update(self, state, uploads, turn):\n        Server.count += 1; return state",
            "update() sets Server.count",
        ),
        (
            "",
            "def __init__(self, *given):\n        super().__init__(*given); self.past = {'w': [np.zeros(3)]}\n"
            "    def weights(self, uploads):\n        self.past['w'][0][1] += 1; return uploads.sizes",
            "weights() sets self.past",
        ),
        (
            "def train(self, start, state, ctx):\n        setattr(self, 'se' + 'en', start)\n"
            "        return super().train(start, state, ctx)",
            "",
            "train() sets self.seen",
        ),
        (
            "",
            "def update(self, state, uploads, turn):\n        remember(uploads.W.mean()); return state\n"
            "PAST = []\ndef remember(mean): PAST.append(mean)",
            "update() sets own.PAST",
        ),
        (
            "",
            "past = collections.deque()\n    def update(self, state, uploads, turn):\n        self.past.append(1); return state",
            "update() sets Server.past",
        ),
        (
            "",
            "def __init__(self, *given):\n        super().__init__(*given); self.draws = np.random.default_rng(0)\n"
            "    def weights(self, uploads):\n        self.draws.random(); return uploads.sizes",
            "weights() sets self.draws",
        ),
        (
            "",
            "def __init__(self, *given):\n        super().__init__(*given); self.past = Slots()\n"
            "    def weights(self, uploads):\n        self.past.seen += 1; return uploads.sizes\n"
            "class Slots:\n    __slots__ = ('seen',)\n    def __init__(self): self.seen = 0",
            "weights() sets self.past",
        ),
        (
            "",
            "def __init__(self, *given):\n        super().__init__(*given); self.past = Counter()\n"
            "    def weights(self, uploads):\n        self.past(); return uploads.sizes\n"
            "class Counter:\n    seen = 0\n    def __call__(self): self.seen += 1",
            "weights() sets self.past",
        ),
        (
            "def train(self, start, state, ctx, past=[]):\n        past.append(1); return super().train(start, state, ctx)",
            "",
            "train() sets Client.train.past",
        ),
        (
            "",
            "def weights(self, uploads):\n        count(); return uploads.sizes\ndef count(): count.calls += 1\ncount.calls = 0",
            "weights() sets count.calls",
        ),
        (
            "",
            "def weights(self, uploads):\n        count(); return uploads.sizes\n"
            "def counter():\n    calls = [0]\n    def count(): calls[0] += 1\n    return count\ncount = counter()",
            "weights() sets counter.<locals>.count.calls",
        ),
    ],
    ids=[
        "set",
        "list of the class",
        "number of the class",
        "array in a dict",
        "setattr",
        "module",
        "deque",
        "generator",
        "slots",
        "object that is called",
        "parameter",
        "function",
        "closure",
    ],
)
def test_what_a_hook_keeps_in_attributes_is_named_once(
    here: Path, raw_config: dict[str, Scalar], caplog: pytest.LogCaptureFixture, client: str, server: str, said: str
) -> None:
    caplog.set_level(logging.INFO, "corolla")
    started(here, raw_config, server, client)
    lines = [line for line in caplog.messages if "which is lost" in line]
    assert len(lines) == 1 and mentions(lines[0], "method own:METHOD", said, "which is lost")


def test_what_a_hook_computes_and_drops_is_not_named(
    here: Path, raw_config: dict[str, Scalar], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "corolla")
    started(
        here,
        raw_config,
        "@functools.cached_property\n    def scale(self): return 2.0\n"
        "    def weights(self, uploads): return self.scale * uploads.sizes",
        "def train(self, start, state, ctx):\n        state.arrays['n'] = np.ones(1); return super().train(start, state, ctx)",
    )
    assert "which is lost" not in caplog.text


@pytest.mark.parametrize(
    ("client", "tested"),
    [
        ("pass", ""),
        ("def keep_local(self, after, state, ctx): self.keep_personal(after, state)", OWN_MODEL),
        ("def keep_local(self, after, state, ctx): [self.keep_personal(m, state) for m in (after,)]", OWN_MODEL),
        (
            "def keep_local(self, after, state, ctx): keep(self, after, state)\ndef keep(c, m, s): c.keep_personal(m, s)",
            OWN_MODEL,
        ),
        (
            "def keep_local(self, after, state, ctx):\n        own = {'personal.params': after.params}\n"
            "        state.arrays.update({**own, 'personal.buffers': after.buffers})",
            OWN_MODEL,
        ),
        ("def personal(self, model, state, ctx): return ctx.initial()", "personal"),
    ],
)
def test_the_tested_models_follow_from_the_hooks(
    here: Path, raw_config: dict[str, Scalar], client: str, tested: str
) -> None:
    folder = started(here, raw_config, client=client)
    told = json.loads((folder.path / "run.json").read_text()).get("tested", "")
    assert tested in told and bool(tested) == bool(told)


def test_an_array_that_form_does_not_declare_is_named_with_its_line(here: Path, raw_config: dict[str, Scalar]) -> None:
    client = (
        "def upload(self, before, after, state, ctx):\n        plain = super().upload(before, after, state, ctx)\n"
        "        return dataclasses.replace(plain, extras={'counts': np.ones(2)})"
    )
    with rejected(RoundFailed, "", "own.py:10 adds counts", "which form()", "server half"):
        started(here, raw_config, client=client)
