"""The run folder: config.toml, metrics.jsonl (one line per round), summary.json and the final models."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import logging
import lzma
import os
import shutil
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from fl_app import plugins, software, tasks
from fl_app.checksums import HASHES, DataHashes, shown, told_hashes
from fl_app.config import RunConfig
from fl_app.config.earlier_keys import current
from fl_app.config.rules import split_names
from fl_app.errors import MALFORMED, UserError, counted, listed, plain, with_name
from fl_app.figures import Figure, from_json, to_json
from fl_app.files import FILE_MODE, explain_full_disk, lock, make_directory, opener, publish_text
from fl_app.keys import Scalar, own, show, table_of
from fl_app.known_names import CLIENT_NAME
from fl_app.layout import Layout, Model
from fl_app.machine import made_with
from fl_app.paths import anchored, path_of
from fl_app.run_secret import experiment_of
from fl_app.server import arrivals, client_rows, disk, kept_uploads, matrices
from fl_app.server.client_rows import EVALUATION, TRAINING, RowFiles, RowWriter
from fl_app.sources import NODE, path_in
from fl_app.toml import flatten, parse_toml, to_toml
from fl_app.weight_files import hash_of

log = logging.getLogger("corolla")

CONFIG = "config.toml"
LOCK = ".lock"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
RUN = "run.json"
CLIENTS = "clients.json"
# A run that finds this file ends after its round.
STOP = "stop"
# Key of a round's record that is kept in arrivals.jsonl.
ARRIVALS = "arrivals"
# copies of the user's own files that the run uses
PLUGINS = "plugins"
MODELS = "models"
# Keys of run.json.
STATE_REMOVED, SHAPE, FROZEN, TESTED, MADE_WITH = "state-removed", "shape", "frozen-sha256", "tested", "made-with"
# Key of run.json: the names of the data's features and outputs, by which `initial-weights` was read.
INITIAL = "initial-names"
SPLIT = "split"
# Key of run.json: the run that it goes on from.
FROM = "from"
# Key of the entries of `made-with`.
FROM_ROUND = "from-round"
# Key of run.json: the path of the SuperLink's database.
DATABASE = "superlink-database"
# The file of the run's secret: clients hand the state that they keep only to a server that sends it.
SECRET = "secret"
DATA = "data"
# Keys that name a file: run.json has its hash, under the key with this ending.
HASHED = "-sha256"
# Keys of the table `data`. It has hashes only of shared data: clients.json has those of clients with their own data.
DATA_HASH, PARTITION_HASH, NORMALIZED_BY, READ_BY = "sha256", "partition-sha256", "normalization", "input"
# Keys of clients.json.
CLIENT_HASH, NAME = HASHES[0], "name"
ROUNDS, NORMALIZED_OVER = "num-server-rounds", "normalize-over"
# instead of config.toml, run.json and metrics.jsonl in a collected run (corolla/experiments/collect.py)
PACKED = "run.tar.xz"
MOST_UNPACKED = 10**9
"""Most bytes to which a compressed file of a run folder may unpack."""
# Most characters in the name of a class or a client.
LONGEST_NAME = 200


class RunFolder:
    """One run's folder. Files are replaced atomically.

    metrics.jsonl grows by a line per round. A crash can leave half a line, which readers skip.

    starts: how often the run was resumed. num_clients: clients of the run. Above `client_rows.MOST`, their rows are not
    in metrics.jsonl (see client_rows). figures: the figures that the method declares.
    """

    def __init__(
        self, path: Path, secret: str, starts: int = 0, num_clients: int = 0, figures: Sequence[Figure] = ()
    ) -> None:
        self.path = path
        self.secret, self.experiment = secret, experiment_of(secret)
        self.starts = starts
        self.figures = tuple(figures)
        self._too_large: set[str] = set()
        self._rows = RowWriter(path) if num_clients > client_rows.MOST else None

    @classmethod
    def create(
        cls, config: RunConfig, secret: str, figures: Sequence[Figure] = (), facts: Mapping[str, Any] | None = None
    ) -> RunFolder:
        """Create `output-dir/<run-name>`.

        figures: the figures that the method declares. run.json keeps them, so that reports do not need the method.
        facts: further entries of run.json.

        Raises UserError if the folder exists and must not be overwritten, or if it cannot be created.
        """
        files = plugins.read(config.plugins)
        if config.overwrite:
            check_free(config)
        with _replaced(config):
            for name in folder_names(config):
                path = folder_of(config, name)
                try:
                    make_directory(path, exist_ok=False)
                    break
                except FileExistsError:
                    continue
                except OSError as error:
                    raise UserError(key="output-dir", rule=f"cannot create {path}: {error.strerror}") from None
            else:
                raise _taken(path)
            folder = cls(path, secret, num_clients=config.num_clients, figures=figures)
            with explain_full_disk("output-dir", path):
                folder.lock()
                publish_text(path / SECRET, f"{secret}\n")
                plugins.write(files, path / PLUGINS)
                if folder._rows:
                    folder._rows.begin()
            folder.write_config(config, {"run-name": name, "overwrite": False})
        about = {
            "experiment": folder.experiment,
            "starts": 0,
            MADE_WITH: [_software() | {FROM_ROUND: 1}],
            "figures": to_json(figures),
            **_database(),
            **(facts or {}),
        }
        about |= {f"{key}{HASHED}": hash_of(path) for key, path in _files_of(config).items()}
        folder.write(
            RUN, json.dumps({**about, "metrics": [metric.declared for metric in tasks.measured(config)]}) + "\n"
        )
        return folder

    @classmethod
    def resume(cls, config: RunConfig) -> RunFolder:
        """Open a run's folder to continue it. The folder does not change before `continue_with`.

        Raises UserError if it is no run folder, if the run cannot be continued, or if another process runs it. Raises
        UserError also if a key differs that must not change.
        """
        path = Path(config.resume)
        check_state(path)
        check_unchanged(path, config)
        plugins.read(config.plugins)
        try:
            run = json.loads((path / RUN).read_text(encoding="utf-8"))
            figures = from_json(run.get("figures", []))
            folder = cls(path, secret_of(path, "resume"), int(run["starts"]) + 1, config.num_clients, figures)
            experiment = str(run["experiment"])
        except (OSError, *MALFORMED) as error:
            raise UserError(key="resume", rule=f"{path / RUN} cannot be read: {error!r}") from None
        if folder.experiment != experiment:
            raise UserError(
                key="resume", rule=f"{path / SECRET} is not the secret of experiment {experiment}, the run's own"
            )
        folder.lock()
        return folder

    def lock(self) -> None:
        """Lock the folder for this process. Raises UserError if another process still runs it."""
        self._lock = _held(self.path)

    def close(self) -> None:
        """Unlock the folder, and remove a request to stop."""
        self.forget_stop()
        self._lock.close()

    def asked_to_stop(self) -> bool:
        """Return whether the run is to end after this round (see `ask_to_stop`)."""
        return (self.path / STOP).is_file()

    def forget_stop(self) -> None:
        """Remove a request to stop."""
        with contextlib.suppress(OSError):
            (self.path / STOP).unlink()

    def continue_with(self, config: RunConfig, done: int) -> None:
        """Record a resumed start: the changed keys, and this machine's software and CPU if they changed.

        done: the number of rounds before it.
        """
        self.forget_stop()
        made, now = read_about(self.path)[MADE_WITH], _software()
        same = {**made[-1], FROM_ROUND: 0} == {**now, FROM_ROUND: 0}
        made = made if same else [*made, now | {FROM_ROUND: done + 1}]
        self.note(experiment=self.experiment, starts=self.starts, **{MADE_WITH: made}, **_database())
        self.write_config(
            config,
            {
                "output-dir": str(self.path.parent),
                "run-name": self.path.name,
                "resume": "",
                "strict": False,
                "overwrite": False,
            },
        )

    def write_config(self, config: RunConfig, places: Mapping[str, Scalar]) -> None:
        """Write config.toml: the keys that affect the run, without other methods' tables.

        places: keys that name this folder.
        """
        self.write(CONFIG, to_toml(own({**config.resolved, **places}, config.method)))

    def rewind(self, round: int, record: Mapping[str, Any]) -> None:
        """Delete the records after a round, and the summary.

        record: the record of that round, empty for round 0. It replaces the round's line in metrics.jsonl.
        """
        (self.path / SUMMARY).unlink(missing_ok=True)
        line, parts = self._parted(record)
        lines = [json.dumps(r, allow_nan=False) for r in _read_lines(self.path) if r["round"] < round]
        lines += [json.dumps(line, allow_nan=False)] if line else []
        with explain_full_disk("output-dir", self.path):
            matrices.cut(self.path, round)
            arrivals.cut(self.path, round - 1)
            if ARRIVALS in record:
                arrivals.append(self.path, {"round": round, **record[ARRIVALS]})
            kept_uploads.cut(self.path, round)
            if self._rows:
                self._rows.cut(round, parts)
        self.write(METRICS, "".join(line + "\n" for line in lines))

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a round to metrics.jsonl. What is kept elsewhere, arrivals and many clients' rows, is written first."""
        line, parts = self._parted(record)
        text = json.dumps(line, allow_nan=False) + "\n"
        with explain_full_disk("output-dir", self.path):
            if ARRIVALS in record:
                arrivals.append(self.path, {"round": record["round"], **record[ARRIVALS]})
            if self._rows:
                self._rows.append(int(record["round"]), parts)
            with open(self.path / METRICS, "a", encoding="utf-8", opener=opener) as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())

    def keep_matrices(self, round: int, ids: Sequence[int], found: Mapping[str, matrices.Between]) -> None:
        """Write the matrices between clients that the round's method noted.

        A matrix that is too large is left out, and logged once by name. ids: the round's clients in order. The round's
        checkpoint must be written later: a resumed run does not write these matrices again.
        """
        with explain_full_disk("output-dir", self.path):
            larger = matrices.save(self.path, round, ids, found)
        for name in larger:
            if name not in self._too_large:
                self._too_large.add(name)
                size = " x ".join(map(str, found[name].values.shape))
                log.info("%s of %s clients is not recorded: the limit is %d numbers", name, size, matrices.LARGEST)

    def _parted(self, record: Mapping[str, Any]) -> tuple[dict[str, Any], client_rows.Parts]:
        """Return a round's line of metrics.jsonl, and the clients' rows that are kept elsewhere."""
        record = {name: value for name, value in record.items() if name != ARRIVALS}
        if not self._rows or not record:
            return record, {}
        parts = {TRAINING: record["clients"]}
        line = {name: value for name, value in record.items() if name != "clients"}
        if "evaluation" in line:
            parts[EVALUATION] = line["evaluation"]["clients"]
            line["evaluation"] = {name: value for name, value in line["evaluation"].items() if name != "clients"}
        return line, parts

    def write_clients(self, properties: Mapping[int, Mapping[str, Scalar]]) -> None:
        """Write clients.json: each client's sample counts, and its name and class counts if it sends them.

        Clients that are absent from `properties` keep their earlier entries. The classes' names go into run.json.
        """
        about = read_about(self.path)
        every = (tuple(class_names_of(properties[i])) for i in sorted(properties))
        counted = Counter(names for names in every if names)
        # the names that most clients send; in a tie, those that come first
        names = list(counted.most_common(1)[0][0]) if counted else about.get("classes")
        if names != about.get("classes"):
            self.note(classes=names)
        known = read_clients(self.path) | {str(i): client_facts(i, p) for i, p in properties.items()}
        rows = (f"{json.dumps(i)}: {json.dumps(known[i])}" for i in sorted(known, key=int))
        self.write(CLIENTS, "{\n" + ",\n".join(rows) + "\n}\n")

    def write(self, name: str, text: str) -> None:
        """Write a text file atomically."""
        with explain_full_disk("output-dir", self.path):
            publish_text(self.path / name, text)

    def note(self, **facts: Any) -> None:
        """Add facts to run.json, or replace them."""
        self.write(RUN, json.dumps({**read_about(self.path), **facts}) + "\n")

    def save_model(self, name: str, layout: Layout, model: Model) -> None:
        """Write models/<name>.safetensors."""
        from fl_app.weights import save_safetensors

        directory = self.path / MODELS
        with explain_full_disk("output-dir", self.path):
            make_directory(directory)
            save_safetensors(directory / f"{name}.safetensors", layout, model)


def _software() -> dict[str, Any]:
    """Return an entry of `made-with`, without its round."""
    return {**made_with(), software.CODE: software.code_hash()}


def _database() -> dict[str, str]:
    path = disk.database()
    return {DATABASE: str(path)} if path else {}


def ended_by_full_disk(run: Path) -> str:
    """Return the line about a full disk under the database that a run's SuperLink uses, "" if there is none."""
    path = read_about(run).get(DATABASE)
    return disk.full_database(Path(path)) if isinstance(path, str) else ""


def ask_to_stop(run: Path) -> bool:
    """Ask a run to end after its round. Return False if its folder is not on this machine or cannot be written to."""
    try:
        if not (run / RUN).is_file():
            return False
        (run / STOP).touch(FILE_MODE)
    except OSError:
        return False
    return True


def folder_of(config: RunConfig, name: str) -> Path:
    """Return the path of the folder of a run with this name."""
    return Path(config.output_dir).expanduser().resolve() / name


def check_free(config: RunConfig) -> None:
    """Raise UserError if the run's folder exists, unless it may be overwritten. Call this on the server's machine.

    `overwrite` needs a `run-name`. A folder is never overwritten if it is no run folder, if a process runs it, or if it
    holds an input of the new run.
    """
    if config.overwrite and not config.run_name:
        raise UserError(key="overwrite", rule="needs the run-name of the run to remove")
    path = folder_of(config, config.run_name)
    root = folder_of(config, "")
    # False also below a directory that this account must not enter
    place = next(each for each in (root, *root.parents) if os.path.exists(each))
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        rule = f"{place} is {'a directory that this account cannot write' if place.is_dir() else 'no directory'}"
        raise UserError(key="output-dir", rule=rule, value=config.output_dir)
    if not config.run_name or not path.exists() and not path.is_symlink():
        return
    if not config.overwrite:
        raise _taken(path)
    # a run wrote it, and it holds no other runs
    is_whole_run = is_run(path) and "experiment" in read_about(path) and not any(map(is_run, path.glob("*/")))
    if path.is_symlink() or not is_whole_run:
        raise UserError(
            key="overwrite", rule=f"{path} is no run folder; choose another run-name, or remove it yourself"
        )
    for key, value in anchored(config.resolved, Path()).items():
        where = path_of(key, value)
        if where and Path(str(where)).is_relative_to(path):
            raise UserError(key="overwrite", rule=f"{key} lies in {path}, which would be removed: {where}")
    _held(path).close()


def secret_of(path: Path, key: str) -> str:
    """Return a run's secret. key: for the error. Raises UserError if it cannot be read."""
    try:
        return (path / SECRET).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            key=key, rule=f"{path / SECRET} cannot be read: clients keep their state for its owner"
        ) from error


def _held(path: Path) -> IO[bytes]:
    """Lock a run folder until the result is closed. Raises UserError if another process runs it."""
    try:
        return lock(path / LOCK, wait=False)
    except BlockingIOError:
        raise UserError(f"{path} is still being run by another process; end that first") from None


@contextmanager
def _replaced(config: RunConfig) -> Iterator[None]:
    """Move the run to be overwritten aside. Delete it at the end of the block, or put it back after an error."""
    path = folder_of(config, config.run_name)
    if not config.overwrite or not path.exists():
        yield
        return
    aside = path.with_name(f".{path.name}.overwritten-{os.getpid()}")
    # a run that was not finished has left its clients' state
    left = "" if (path / SUMMARY).is_file() else str(read_about(path).get("experiment", ""))
    with _held(path):
        path.rename(aside)
        try:
            yield
        except RunExists:
            raise UserError(
                key="run-name",
                rule=f"another process has made {path} meanwhile; the run that it should replace is in {aside}",
            ) from None
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            aside.rename(path)
            raise
        shutil.rmtree(aside, ignore_errors=True)
    state = f"; `corolla state remove {left}` removes what its clients kept" if left else ""
    log.info("%s was overwritten: the earlier run is removed%s", path, state)


class RunExists(UserError):
    """A run of this name exists."""


def _taken(path: Path) -> RunExists:
    return RunExists(
        f"run-name: {path} exists already; choose another name or remove it; overwrite = true replaces it (--overwrite)"
    )


def folder_names(config: RunConfig) -> Iterator[str]:
    """Yield the possible names of a run's folder: `run-name`, or else time, method, data set and seed.

    Without `run-name`, a number from 2 is added if the name is taken.
    """
    if config.run_name:
        yield config.run_name
        return
    first = (
        f"{time.strftime('%Y%m%d-%H%M%S')}-{table_of(config.method)}-{config.dataset.split(':')[0]}-seed{config.seed}"
    )
    yield from itertools.chain([first], (f"{first}-{k}" for k in range(2, 1000)))


# Reading --------------------------------------------------------------------------------------------------------------


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run's, as the run wrote it or as it was collected."""
    return any((folder / name).is_file() for name in (CONFIG, PACKED))


@contextmanager
def open_file(run: Path, name: str) -> Iterator[IO[bytes]]:
    """Open a file of a run folder for reading, whether it is plain or compressed in a collected run.

    Raises FileNotFoundError if the run has no such file. Raises ValueError, also during reading, if the compressed file
    is damaged or ends early. Everything before the damage can be read.
    """
    plain, archive = run / name, run / PACKED
    try:
        if plain.exists():
            with open(plain, "rb") as file:
                yield file
        elif archive.exists():
            content, damage = io.BytesIO(), None
            with lzma.open(archive) as packed:
                try:
                    while piece := packed.read1(1 << 20):
                        content.write(piece)
                        # run folders are passed on, and a small file can unpack to any size
                        if content.tell() > MOST_UNPACKED:
                            most = MOST_UNPACKED / 1e9
                            raise ValueError(f"{archive} must unpack to at most {most:.3g} GB, got more")
                except (EOFError, lzma.LZMAError) as error:
                    damage = error
            content.seek(0)
            with tarfile.open(fileobj=content, mode="r:") as members:
                yield _member(members, name, damage)
        else:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(plain))
    except (EOFError, lzma.LZMAError, tarfile.TarError) as error:
        raise ValueError(f"{name} in {run} is damaged: {error}") from None


def _member(archive: tarfile.TarFile, name: str, damage: Exception | None) -> IO[bytes]:
    """Return a file of an archive. Raises FileNotFoundError if the archive has none of that name, ValueError for no file.

    The members are tried in turn. A look-up by name would fail if the archive's end is missing, which is the damage.
    """
    for member in archive:
        if member.name == name:
            # the holes of a sparse file are not among the bytes that are counted
            file = None if member.issparse() else archive.extractfile(member)
            if file is None:
                raise ValueError(f"{name} must be a plain file in {PACKED}")
            return file
    raise damage or FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)


def read_file(run: Path, name: str) -> bytes:
    """Return the content of a file of a run folder. Raises as `open_file` does."""
    with open_file(run, name) as file:
        return file.read()


def read_config(run: Path) -> dict[str, Scalar]:
    """Return a run folder's resolved config, flat. Raises UserError if there is none.

    Configs of earlier versions are converted. Their key `tensorboard` becomes part of `track`. Their `normalize-over`
    is `sites` if clients shared a data set, and `site` if each had its own. Their files also hold the tables of other
    methods.
    """
    try:
        saved: dict[str, Scalar] = current(flatten(parse_toml(read_file(run, CONFIG), run / CONFIG)))
    except OSError as error:
        raise UserError(f"{run} is not a run folder: {run / CONFIG}: {error.strerror}") from None
    except (UserError, ValueError) as error:
        raise UserError(f"{run} is not a run folder: {error}") from None
    if saved.pop("tensorboard", False):
        trackers = split_names(str(saved.get("track", "")))
        saved["track"] = ",".join(dict.fromkeys((*trackers, "tensorboard")))
    if saved.get("normalize") == "mean-std" and NORMALIZED_OVER not in saved:
        hidden = saved.get("private") or saved.get("dp-epsilon")
        before, now = ("site" if saved["dataset"] == NODE else "sites"), ("site" if hidden else "sites")
        # set only if the default would change the run
        saved |= {NORMALIZED_OVER: before} if before != now else {}
    return saved


def refuse_fewer_rounds(config: RunConfig, done: int, may_be_equal: bool = True) -> None:
    """Raise UserError if a run has more rounds than `num-server-rounds`. may_be_equal: accept as many rounds."""
    if done > config.num_server_rounds or (done == config.num_server_rounds and not may_be_equal):
        raise UserError(
            key="num-server-rounds",
            rule=f"the run has {counted(done, 'round')} already",
            value=config.num_server_rounds,
        )


def check_unchanged(run: Path, config: RunConfig) -> None:
    """Raise UserError if `run` is no run folder, or if a key differs that must not change on resume.

    The number of rounds must not change if the meaning of a key depends on it: a cosine schedule, a privacy budget. The
    content of the files `initial-weights` and `speeds` must not change either.
    """
    saved = read_config(run)
    changed = changed_keys(saved, config)
    before, now = {**config.defaults, **saved}.get(ROUNDS), config.num_server_rounds
    if before != now and (spanning := [f"{key.name} = {show(value)}" for key, value in config.spanning_keys()]):
        changed.append(
            f"  {ROUNDS}: {before!r} in the run, now {now!r}; {listed(spanning)} was meant for {before} rounds"
        )
    if changed:
        raise UserError(key="resume", rule="these keys must not change:\n" + "\n".join(changed))
    for key, path in _files_of(config).items():
        began = read_about(run).get(f"{key}{HASHED}")
        if began and path.exists() and (now_is := hash_of(path)) != began:
            raise UserError(
                key=key,
                rule=f"{path} has changed since the run started: {shown(now_is, began)}; put the old file back, "
                "or start a new run",
            )


def changed_keys(saved: Mapping[str, Any], config: RunConfig) -> list[str]:
    """Return a line for each key that must not change on resume and has another value than in a run's saved config."""
    # a key that is newer than the run had its default value
    before = {**config.defaults, **saved}
    return [
        f"  {key.name}: {before.get(key.name)!r} in the run, now {value!r}"
        for key, value in config.own_keys()
        if not key.may_change_on_resume and before.get(key.name) != value
    ]


def check_state(run: Path) -> None:
    """Raise UserError if a finished run cannot continue.

    That is so if its clients removed their state, or if its privacy budget was planned for its rounds.
    """
    if read_config(run).get("dp-epsilon") and (run / SUMMARY).exists():
        raise UserError(key="resume", rule=f"{run} is finished, and its dp-epsilon was planned for no more rounds")
    if read_about(run).get(STATE_REMOVED):
        raise UserError(
            key="resume",
            rule=f"the clients of {run} removed their state when it ended; only a run started with "
            "keep-state = true can be continued",
        )


def _files_of(config: RunConfig) -> dict[str, Path]:
    """Return the files that a run reads at its start and at each resume, by key."""
    found = {"initial-weights": config.initial_weights, "speeds": path_in("speeds", config.speeds)}
    return {key: Path(path) for key, path in found.items() if path}


def check_data(run: Path, found: DataHashes, config: RunConfig) -> None:
    """Raise UserError if the data that all clients share differ from those that the run started with."""
    began = read_hashes(run).get(None, found)
    if differs := found.difference(began):
        key, value = ("partition", config.partition) if found.data == began.data else ("dataset", config.dataset)
        raise UserError(
            key="resume",
            rule=f"{path_in(key, value) or value}: its {differs} has changed since the run started; put "
            "the old data back, or start a new run",
        )


def read_hashes(run: Path) -> dict[int | None, DataHashes]:
    """Return the hashes of the data that a run started with.

    The keys are the ids of clients with their own data. The hash of shared data is under None.
    """
    data = read_about(run).get(DATA, {})
    found: dict[int | None, DataHashes] = {
        int(i): DataHashes(str(facts[CLIENT_HASH]), "")
        for i, facts in read_clients(run).items()
        if CLIENT_HASH in facts
    }
    if DATA_HASH in data:
        found[None] = DataHashes(str(data[DATA_HASH]), str(data.get(PARTITION_HASH, "")))
    return found


def read_metrics(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the rounds of a run folder. Other lines, such as half a line after a crash, are skipped and logged.

    Clients' rows in separate files (client_rows) are read on first access. `clients` is then a mapping that raises
    UserError if they are damaged.
    """
    files = RowFiles(run)
    apart = files.exist
    for record in _read_lines(run):
        if apart:
            for part, table in ((TRAINING, record), (EVALUATION, record.get("evaluation"))):
                if table is not None and "clients" not in table:
                    table["clients"] = files.of(record["round"], part)
        yield record


def new_records(path: Path, position: int) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of metrics.jsonl from a byte position on. `position` in a record is the next line's start.

    Raises ValueError if the file has no line's start there.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        file.seek(position)
        for line in file:
            if not line.endswith(b"\n"):
                return
            position += len(line)
            yield {**json.loads(line), "position": position}


def _read_lines(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the rounds of metrics.jsonl, without rows from separate files."""
    for number, line in enumerate(_lines(run, METRICS), 1):
        try:
            record = json.loads(line.decode("utf-8", "replace"))
        except MALFORMED:
            record = None
        if _is_record(record):
            yield record
        else:
            log.warning("%s: line %d is not a round's record; skipped", run / METRICS, number)


def _lines(run: Path, name: str) -> Iterator[bytes]:
    """Yield the lines of a file of a run folder, as far as it can be read; none if there is no file."""
    try:
        with open_file(run, name) as file:
            yield from file
    except FileNotFoundError:
        return
    except ValueError as error:
        log.warning("%s cannot be read to its end: %s", run / name, error)


_PARTS: dict[str, type] = {
    "clients": dict,
    "seconds": dict,
    "failures": list,
    "evaluation": dict,
    "upload-bytes": int,
    "download-bytes": int,
}


def _is_record(record: Any) -> bool:
    """Return whether a line of metrics.jsonl is a round's record, as far as readers rely on it.

    Any part may be missing.
    """
    if not isinstance(record, dict) or type(record.get("round")) is not int or record["round"] < 1:
        return False
    if not all(isinstance(record[name], kind) for name, kind in _PARTS.items() if name in record):
        return False
    read = [value for name, value in record.items() if name.endswith(("-before", "-before-pooled"))]
    if not all(isinstance(value, (int, float, type(None))) for value in read):
        return False
    tables = [record.get("clients", {}), record.get("evaluation", {}).get("clients", {})]
    if not all(isinstance(table, dict) for table in tables):
        return False
    rows = [*record.get("failures", []), *(row for table in tables for row in table.values())]
    return all(isinstance(row, dict) for row in rows)


def client_facts(client_id: int, properties: Mapping[str, Scalar]) -> dict[str, Any]:
    """Return a client's entry in clients.json. Malformed class counts are dropped and logged."""
    facts: dict[str, Any] = {name: properties.get(name) for name in ("train-samples", "test-samples")}
    if name := name_of(properties):
        facts[NAME] = name
    if (hashes := told_hashes(properties)) and not hashes.partition:
        facts[CLIENT_HASH] = hashes.data
    text = str(properties.get("class-counts", ""))
    counts = [int(word) for word in text.split(",") if word.isascii() and word.isdecimal()]
    if text and (len(counts) != text.count(",") + 1 or len(counts) != properties.get("num-classes")):
        log.warning(
            "client %d: class-counts must be %s counts, got %.80r", client_id, properties.get("num-classes"), text
        )
    elif text:
        facts["class-counts"] = counts
    return facts


def name_of(properties: Mapping[str, Scalar]) -> str:
    """Return a client's name from its properties, "" if it has none."""
    return plain(str(properties.get(CLIENT_NAME, ""))).strip()[:LONGEST_NAME]


def called(client_id: int, properties: Mapping[int, Mapping[str, Scalar]]) -> str:
    """Return a client's number, with its name if it has one: `3 (Bern)`. properties: of all clients, by id."""
    return with_name(client_id, name_of(properties.get(client_id, {})))


def called_in(run: Path) -> Callable[[int | str], str]:
    """Return what gives a client's number by its id, with its name if clients.json has one: `3 (Bern)`."""
    names = {int(i): {CLIENT_NAME: facts.get(NAME, "")} for i, facts in read_clients(run).items()}
    return lambda client_id: called(int(client_id), names)


def class_names_of(properties: Mapping[str, Scalar]) -> list[str]:
    """Return the names of the classes from a client's properties, [] unless there is one for each class."""
    try:
        names = json.loads(str(properties.get("class-names", "[]")))
    except MALFORMED:
        names = None
    fits = (
        isinstance(names, list)
        and len(names) == properties.get("num-classes")
        and all(isinstance(n, str) for n in names)
    )
    return [plain(name)[:LONGEST_NAME] for name in names] if fits else []


def _json_of(run: Path, name: str) -> dict[str, Any]:
    """Return the object in a JSON file of a run folder, {} if it is missing or cannot be read."""
    try:
        found = json.loads(read_file(run, name))
    except (OSError, *MALFORMED):
        return {}
    return found if isinstance(found, dict) else {}


def read_clients(run: Path) -> dict[str, dict[str, Any]]:
    """Return clients.json, facts by client id; {} if it is missing or cannot be read."""
    clients = _json_of(run, CLIENTS)
    return clients if all(isinstance(facts, dict) for facts in clients.values()) else {}


def read_about(run: Path) -> dict[str, Any]:
    """Return run.json, {} if it cannot be read.

    It holds the experiment's id, the number of resumed starts, software versions and CPU, the method's figures, the
    metrics, and the classes' names. It describes the model: its arguments (`shape`), the hash of its frozen tensors,
    and a note on which models were tested, where this is needed. It also holds hashes of data and initial weights, and
    the normalization of inputs.
    """
    return _json_of(run, RUN)


def read_summary(run: Path) -> dict[str, Any]:
    """Return summary.json. Raises UserError if the run is not complete."""
    try:
        result = json.loads((run / SUMMARY).read_text(encoding="utf-8"))
    except FileNotFoundError:
        why = "the run did not finish" if is_run(run) else "not a run folder, or the run did not finish"
        raise UserError(f"{run} has no {SUMMARY}: {why}") from None
    except (OSError, *MALFORMED) as error:
        raise UserError(f"{run / SUMMARY} cannot be read: {error}") from None
    if not isinstance(result, dict):
        raise UserError(f"{run / SUMMARY} cannot be read: must hold a table, got {type(result).__name__}")
    return result
