"""The process that counts a site's samples for its gate: the same number, and nothing that a site's files can do to the gate."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from client_app.counting import train_samples
from deploy import bubblewrap, confine, sample_counting
from deploy.confine import Confinement
from fl_app.config import RunConfig, parse
from fl_app.data import open_data, trained_on
from fl_app.errors import UserError
from fl_app.files import lock
from fl_app.keys import Scalar, specs
from strategies import METHOD_PARAMS, METHODS
from tests.client_app.test_train import data_of, trainer

pytestmark = pytest.mark.timeout(120)

needs_bubblewrap = pytest.mark.skipif(
    bubblewrap.find() is None, reason=bubblewrap.why_not() or "bubblewrap makes its walls here"
)
DIGITS: dict[str, Scalar] = {"dataset": "digits", "train-samples": 30, "test-samples": 10, "method": "fedavg"}


def saying(code: str) -> sample_counting.Start:
    """A process that runs this code in place of the count; `say(bytes)` answers."""
    head = "import os, sys, time\ndef say(text): os.write(int(sys.argv[1]), text)\nwhile os.read(int(sys.argv[1]), 9999): pass\n"

    def start(command: Sequence[str], file: int) -> sample_counting.CountingProcess:
        return sample_counting.Unconfined([sys.executable, "-c", head + code, str(file)], file)

    return start


def test_the_process_counts_as_the_client_does() -> None:
    assert sample_counting.count(DIGITS, 0, 4, "") == train_samples(DIGITS, 0, 4, "") == 30


def test_a_sample_counts_once_however_often_a_partition_names_it(tmp_path: Path) -> None:
    """In the count of `min-samples`, and for the noise of a budget, which is that of one record."""
    rows = [[7, 3, 7] * 10, [*range(30)]]
    np.savez(tmp_path / "p.npz", train_idx=rows, test_idx=[[0], [1]])
    named = DIGITS | {"partition": f"file:{tmp_path / 'p.npz'}", "num-clients": 2, "data-dir": str(tmp_path / "data")}
    assert [train_samples(named, client, 2, "") for client in (0, 1)] == [2, 30]
    for promise, samples in ({}, 30), ({"dp-epsilon": 3.0}, 2):
        opened = open_data(parse({**named, **promise}, METHOD_PARAMS))
        assert [len(opened.client(client).y_train) for client in (0, 1)] == [samples, 30]


def test_its_error_is_the_error(tmp_path: Path) -> None:
    texts = set()
    for count in (sample_counting.count, train_samples):
        with pytest.raises(UserError) as raised:
            count({"dataset": "node"}, 0, 4, str(tmp_path / "none.npz"))
        texts.add(str(raised.value))
    assert len(texts) == 1


@pytest.mark.parametrize(
    "code",
    [
        "say(b'')",
        "say(b'-1')",
        "say(b'12x')",
        "say(b'1\\n')",
        "say('٣'.encode())",
        "say(b'9' * 16)",
        "sys.exit(1)",
        "1 / 0",
    ],
)
def test_anything_but_a_number_is_refused(code: str) -> None:
    with pytest.raises(UserError, match="failed"):
        sample_counting.count(DIGITS, 0, 4, "", saying(code))


def test_an_endless_answer_is_refused() -> None:
    with pytest.raises(UserError, match=str(1 << 16)):
        sample_counting.count(DIGITS, 0, 4, "", saying("while True: say(b'1' * 60000)"))


@pytest.mark.parametrize(
    "code", ["time.sleep(600)", "while True:\n say(b'1'); time.sleep(0.05)", "os.fork(); time.sleep(600)"]
)
def test_the_gate_waits_no_longer_than_its_time(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(sample_counting, "SECONDS", 0.5)
    begun = time.monotonic()
    with pytest.raises(UserError, match=r"0\.5 seconds"):
        sample_counting.count(DIGITS, 0, 4, "", saying(code))
    assert time.monotonic() - begun < 30


def test_a_lock_that_an_application_holds_ends_the_count_and_not_the_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COROLLA_DATA_DIR", str(tmp_path))
    assert train_samples(DIGITS, 0, 4, "") == 30
    (locked,) = (tmp_path / "datasets").glob(".*.lock")
    shutil.rmtree(locked.with_name(locked.stem[1:]))
    monkeypatch.setattr(sample_counting, "SECONDS", 3.0)
    with lock(locked, wait=False), pytest.raises(UserError, match="3 seconds"):
        sample_counting.count(DIGITS, 0, 4, "")


def test_a_process_that_cannot_start_is_no_answer() -> None:
    def start(command: Sequence[str], file: int) -> sample_counting.CountingProcess:
        raise OSError("confine: a named path leads elsewhere")

    with pytest.raises(UserError, match="named path"):
        sample_counting.count(DIGITS, 0, 4, "", start)


@needs_bubblewrap
def test_it_counts_behind_the_walls_of_applications(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the data is reached, and a file of the account that code in the data asks for is not there."""
    walls = bubblewrap.find()
    assert walls is not None
    x, y = np.zeros((20, 3), np.float32), np.arange(20) % 2
    np.savez(tmp_path / "own.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    secret = str(tmp_path / "secret")
    Path(secret).write_text("secret")
    for name in ("site", "data"):
        (tmp_path / name).mkdir()
    writable = {"COROLLA_SITE_DIR": str(tmp_path / "site"), "COROLLA_DATA_DIR": str(tmp_path / "data")}
    inside = Confinement((*confine.installation(), str(tmp_path / "own.npz")), tuple(writable.values()), ())

    def starting(change: Callable[[Sequence[str]], Sequence[str]]) -> sample_counting.Start:
        def start(command: Sequence[str], file: int) -> sample_counting.CountingProcess:
            environment = confine.cleaned(os.environ) | writable
            return walls.start(inside, change(command), str(tmp_path / "data"), environment, [file])

        return start

    config: dict[str, Scalar] = {"dataset": "node", "classes": "0,1"}
    count = functools.partial(sample_counting.count, config, 0, 1, str(tmp_path / "own.npz"))
    assert count(starting(lambda command: command)) == 20
    tries = f"import os, sys; n = int(sys.argv[1]); os.read(n, 9999); os.write(n, b'%d' % os.path.exists({secret!r}))"
    assert count(starting(lambda command: [sys.executable, "-c", tries, command[-1]])) == 0


def test_a_method_that_trains_on_some_samples_declares_the_key_that_says_on_which() -> None:
    """A site counts what any key can reduce training to: each use of these two has such a key."""
    for name in METHODS:
        source = Path(sys.modules[METHOD_PARAMS[name].__module__].__file__ or "")
        text = source.read_text(encoding="utf-8")
        limits = "max_batches=" in text or "leave_out(" in text
        assert limits == any(spec.trains_on for spec in specs(METHOD_PARAMS[name])), name


def test_a_key_that_keeps_samples_out_of_a_rounds_batches_declares_it() -> None:
    """Each key of a run that is a number or a switch, in real trainings of 30 samples: as many are seen as are counted."""
    found = set()
    for spec in (spec for spec in specs(RunConfig) if spec.type in (bool, int)):
        for size in (1, 4, 29):
            keys = {"local_epochs": 1, "batch_size": size, spec.field: not spec.default if spec.type is bool else 1}
            # keys that need others
            with contextlib.suppress(UserError):
                own = trainer(**keys)
                seen = {int(i) for _ in own.batches() for i in own.indices}
                assert trained_on(own.config, data_of(30)) == len(seen), keys
                found |= {spec.name} if len(seen) < 30 else set()
    assert found == {spec.name for spec in specs(RunConfig) if spec.trains_on}


@pytest.mark.parametrize("steps, samples", [(1, 1), (29, 29), (31, 30)])
def test_steps_of_one_sample_are_as_many_samples(steps: int, samples: int) -> None:
    given = DIGITS | {"local-steps": steps, "batch-size": 1}
    assert train_samples(given, 0, 4, "") == samples


def test_a_socket_is_not_left_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    sample_counting.count(DIGITS, 0, 4, "", saying("say(b'3')"))
    assert len(os.listdir("/proc/self/fd")) == before
