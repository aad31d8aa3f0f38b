"""A run whose process ends before any of its writes goes on to the same records, matrices and checkpoint."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fl_app.errors import UserError
from fl_app.figures import Links, Matrix
from fl_app.server import checkpoint, client_rows, kept_uploads, matrices
from fl_app.server.checkpoint import ClientFiles
from fl_app.server.run_folder import RunFolder, read_metrics
from tests.conftest import Run
from tests.facts import mentions, rejected

ROUNDS, EVERY, CLIENTS = 4, 2, 8
FIGURES = (Matrix("overlap", ""), Links("linked", ""))


class Killed(BaseException):
    """The process is gone: nothing that it was to write is written any more."""


@contextmanager
def ending(before: int) -> Iterator[list[str]]:
    """Within it the process ends before that change of the file system; yields the changes that were made."""
    made: list[str] = []
    gone = [False]

    def counted(name: str, change: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            if gone[0] or len(made) == before:
                gone[0] = True
                raise Killed
            made.append(f"{name} {args[0]}")
            return change(*args, **kwargs)

        return called

    with pytest.MonkeyPatch.context() as patch:
        for name in ("replace", "fsync", "unlink", "chmod"):
            patch.setattr(os, name, counted(name, getattr(os, name)))
        patch.setattr(Path, "unlink", counted("unlink", Path.unlink))
        yield made


class Server:
    """What a run's server does with its files, without clients."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.files = folder, checkpoint.client_files_of(folder.path)
        self.personal: dict[int, dict[str, np.ndarray]] = {}
        self.round = 0

    def start(self) -> None:
        self.folder._rows.begin()  # type: ignore[union-attr]
        self.save({})

    def go_on(self) -> None:
        saved = checkpoint.load_latest(self.folder.path)
        for name, array in saved.arrays.items():
            if name.startswith("client."):
                _, client_id, key = name.split(".")
                self.personal.setdefault(int(client_id), {})[key] = array
        self.files.adopt(saved.meta[checkpoint.CLIENTS], self.personal)
        self.round = saved.meta["round"]
        self.folder.rewind(self.round, saved.meta["record"])

    def run(self) -> None:
        while self.round < ROUNDS:
            t = self.round = self.round + 1
            ids = [(t + k) % CLIENTS for k in range(3)]
            for i in ids:
                before = self.personal.get(i, {"w": np.zeros(400)})["w"]
                self.personal[i] = {"w": before * 0.5 + i + t, "same": self.personal.get(i, {}).get("same", np.ones(3))}
            notes = {i: {"linked": ids[:k]} for k, i in enumerate(ids)}
            found = matrices.divided({"overlap": np.eye(3) / t}, notes, ids, FIGURES)
            rows = {str(i): {"loss": t / 3, **found.clients[i]} for i in ids}
            record: dict[str, Any] = {"round": t, "clients": rows}
            if t % 3 == 0:
                record["evaluation"] = {"clients": {str(i): {"accuracy": i / t} for i in range(CLIENTS)}}
            if t % 3 == 0 or t == ROUNDS:
                self.folder.keep_matrices(t, ids, found.between)
            if t % EVERY == 0 or t == ROUNDS:
                self.save(record)
            self.folder.append(record)
        self.folder.write("summary.json", json.dumps({"rounds": self.round}))

    def save(self, record: dict[str, Any]) -> None:
        checkpoint.save(
            self.folder.path, self.round, {"g": np.full(4, self.round)}, {"record": record}, self.personal, self.files
        )


def result(run: Path) -> Any:
    """Everything that a run leaves, as its readers see it."""
    records = []
    for record in read_metrics(run):
        tested = record.get("evaluation")
        records.append(
            {
                **record,
                "clients": dict(record["clients"]),
                "evaluation": tested and {**tested, "clients": dict(tested["clients"])},
            }
        )
    kept = {(t, name): one.values.tolist() for t in matrices.rounds(run) for name, one in matrices.read(run, t).items()}
    saved = checkpoint.load_latest(run)
    arrays = {name: array.tobytes() for name, array in saved.arrays.items()}
    named = {of["file"] for t in checkpoint.rounds(run) for of in _meta(run, t)[checkpoint.CLIENTS]}
    there = {path.name for path in (run / checkpoint.DIRECTORY).glob("clients-*")}
    assert there == named and not list(run.rglob(".*.tmp"))
    return records, kept, arrays, saved.meta["round"]


def _meta(run: Path, round: int) -> dict[str, Any]:
    return checkpoint._meta(run / checkpoint.DIRECTORY / f"round-{round:06d}.json")


def server(path: Path) -> Server:
    path.mkdir(exist_ok=True)
    return Server(RunFolder(path, "abc", num_clients=client_rows.MOST + 1, figures=FIGURES))


def test_killed_at_every_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # durability of what is written is the disk's affair here
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    whole = server(tmp_path / "whole")
    whole.start()
    with ending(before=10_000) as every:
        whole.run()
    expected = result(tmp_path / "whole")
    assert len(expected[0]) == ROUNDS and set(expected[1]) == {(t, n) for t in (3, 4) for n in ("overlap", "linked")}
    assert len(every) > 50
    for before in range(len(every)):
        path = tmp_path / f"killed-{before}"
        killed = server(path)
        killed.start()
        with pytest.raises(Killed), ending(before):
            killed.run()
        again = server(path)
        # and once more while it begins to go on
        with ending(before % 7):
            try:
                again.go_on()
            except Killed:
                again = server(path)
        if not again.round:
            again = server(path)
            again.go_on()
        again.run()
        assert result(path) == expected, (before, every[before])
        shutil.rmtree(path)


def test_arrays_are_written_once_and_old_checkpoints_are_read(tmp_path: Path) -> None:
    personal: dict[int, dict[str, NDArray[Any]]] = {
        i: {"w": np.full(1000, i, np.float32), "b": np.zeros(0), "n": np.array(i)} for i in range(100)
    }
    files = checkpoint.client_files_of(tmp_path)
    written = []

    def save(round: int) -> dict[str, Any]:
        checkpoint.save(tmp_path, round, {}, {"record": {}}, personal, files)
        path = tmp_path / checkpoint.DIRECTORY / f"clients-{round:06d}.safetensors"
        written.append(path.stat().st_size if path.exists() else 0)
        arrays = checkpoint.load_latest(tmp_path).arrays
        assert {name: a.tobytes() for name, a in arrays.items()} == {
            f"client.{i}.{name}": a.tobytes() for i, own in personal.items() for name, a in own.items()
        }
        return arrays

    save(0)
    for round in range(1, 41):
        for i in range(round * 5, round * 5 + 5):
            personal[i % 100] = {**personal[i % 100], "w": np.full(1000, i, np.float32)}
        save(round)
        held = sum(path.stat().st_size for path in (tmp_path / checkpoint.DIRECTORY).glob("clients-*"))
        # two checkpoints of them
        assert held < 3 * 100 * 4300
    assert written[1] < 6 * 4300 and sum(written[1:]) < 3 * 40 * 5 * 4300
    del personal[3], personal[4]["b"]
    save(41)
    before = len(written)
    save(42)
    assert written[before] == 0
    # what a later server finds is not written again
    files, arrays = checkpoint.client_files_of(tmp_path), checkpoint.load_latest(tmp_path)
    for i, own in personal.items():
        personal[i] = {name: arrays.arrays[f"client.{i}.{name}"] for name in own}
    files.adopt(arrays.meta[checkpoint.CLIENTS], personal)
    save(43)
    assert written[-1] == 0
    # of earlier versions: all in one file
    old = tmp_path / "old"
    checkpoint.save(old, 1, {"client.0.w": np.ones(2)}, {"record": {}})
    assert checkpoint.load_latest(old).arrays["client.0.w"].tolist() == [1, 1]


def test_what_was_written_cannot_be_changed_in_place(tmp_path: Path) -> None:
    array = np.zeros(3)
    checkpoint.save(tmp_path, 1, {}, {"record": {}}, {0: {"w": array}}, ClientFiles(tmp_path / checkpoint.DIRECTORY))
    with pytest.raises(ValueError, match="read-only"):
        array += 1


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_damaged_file_of_clients_spoils_its_checkpoint(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    files, personal = checkpoint.client_files_of(tmp_path), {0: {"w": np.zeros(9)}}
    checkpoint.save(tmp_path, 1, {}, {"record": {}}, personal, files)
    personal[0] = {"w": np.ones(9)}
    checkpoint.save(tmp_path, 2, {}, {"record": {}}, personal, files)
    path = tmp_path / checkpoint.DIRECTORY / "clients-000002.safetensors"
    path.write_bytes(path.read_bytes()[:-1]) if damage == "truncated" else path.unlink()
    assert checkpoint.load_latest(tmp_path).arrays["client.0.w"].tolist() == [0] * 9
    assert mentions(caplog.text, "checkpoint of round 2", "damaged")


@pytest.mark.parametrize("name", ["clients-000002.safetensors", "round-000002.safetensors", "round-000002.json"])
def test_a_file_that_cannot_be_read_now_ends_the_resume(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = checkpoint.client_files_of(tmp_path)
    for round in (1, 2):
        checkpoint.save(tmp_path, round, {"a": np.ones(1)}, {"record": {}}, {0: {"w": np.full(9, round)}}, files)
    path, opened = tmp_path / checkpoint.DIRECTORY / name, io.open

    def failing(file: Any, *more: Any, **others: Any) -> Any:
        if Path(file) == path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return opened(file, *more, **others)

    monkeypatch.setattr(io, "open", failing)
    with rejected(UserError, "resume", f"{path} cannot be read", "Input/output error"):
        checkpoint.load_latest(tmp_path)


def test_a_killed_run_of_many_clients_ends_with_the_same_bits(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rows and files as those of hundreds of clients."""
    monkeypatch.setattr(client_rows, "MOST", 11)
    settings = {
        "method": "fedcac",
        "fedcac": {"beta": 3},
        "num_clients": 12,
        "fraction_train": 0.25,
        "train_samples": 8,
    }
    settings |= {"test_samples": 4, "record_matrices": 2, "num_server_rounds": 6, "keep_uploads": "every 1"}
    settings |= {"checkpoint_every": 2, "evaluate_every": 3}
    whole, killed = run(run_name="whole", **settings).path, tmp_path / "runs" / "killed"
    append = RunFolder.append

    def until_the_fifth(folder: RunFolder, record: dict[str, Any]) -> None:
        append(folder, record)
        if record["round"] == 5:
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(RunFolder, "append", until_the_fifth)
        run(run_name="killed", **settings)
    assert not (killed / "summary.json").exists()
    run(run_name="killed", resume=str(killed), **settings)

    def read(folder: Path) -> Any:
        rounds = []
        for record in read_metrics(folder):
            rows = {i: {**row, "seconds": 0} for i, row in record["clients"].items()}
            tested = {**record.get("evaluation", {}), "clients": dict(record.get("evaluation", {}).get("clients", {}))}
            rounds.append({**record, "seconds": 0, "clients": rows, "evaluation": tested})
        places = [folder / matrices.DIRECTORY, folder / kept_uploads.DIRECTORY]
        files = {(at.name, path.name): path.read_bytes() for at in places for path in at.iterdir()}
        return rounds, files

    assert read(killed) == read(whole)
    assert matrices.rounds(killed) == [2, 4, 6] and (killed / client_rows.DIRECTORY).is_dir()
    assert (killed / "metrics.jsonl").stat().st_size < 20_000


def test_files_of_a_checkpoint_that_cannot_be_read_now_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, read = ClientFiles(tmp_path / checkpoint.DIRECTORY), checkpoint._meta
    one = {0: {"w": np.ones(3)}}
    checkpoint.save(tmp_path, 1, {}, {"record": {}}, one, files)

    def failing(path: Path) -> dict[str, Any]:
        if path.name == "round-000001.json":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(path)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_meta", failing)
        checkpoint.save(tmp_path, 2, {}, {"record": {}}, {0: {"w": np.zeros(3)}}, files)
    # the newest is damaged: the one before is whole
    (tmp_path / checkpoint.DIRECTORY / "round-000002.json").write_text("")
    assert checkpoint.load_latest(tmp_path).arrays["client.0.w"].tolist() == [1, 1, 1]
