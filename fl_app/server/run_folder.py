"""The run folder: config.toml, metrics.jsonl (one line per round), summary.json and the final models."""

from __future__ import annotations

import contextlib
import errno
import gzip
import itertools
import json
import logging
import lzma
import os
import tarfile
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from fl_app import plugins, tasks
from fl_app.checksums import HASHES, DataHashes, sha256_of, shown, told_hashes
from fl_app.config import RunConfig, scheduled
from fl_app.config.rules import split_names
from fl_app.errors import UserError, listed, plain
from fl_app.figures import Figure, to_json
from fl_app.files import FILE_MODE, explain_full_disk, lock, make_directory, opener, publish_text
from fl_app.keys import Scalar, own, show, table_of
from fl_app.layout import Layout, Model
from fl_app.machine import made_with
from fl_app.toml import flatten, parse_toml, to_toml

log = logging.getLogger("corolla")

CONFIG = "config.toml"
LOCK = ".lock"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
RUN = "run.json"
CLIENTS = "clients.json"
# This file asks the run to end after its round.
STOP = "stop"
# copies of the user's own files that the run uses
PLUGINS = "plugins"
MODELS = "models"
# Keys of run.json.
STATE_REMOVED, SHAPE, FROZEN, TESTED, MADE_WITH = "state-removed", "shape", "frozen-sha256", "tested", "made-with"
DATA, INITIAL_WEIGHTS = "data", "initial-weights-sha256"
# Of data that all clients of a run share; a client that holds its own has its hash in clients.json.
DATA_HASH, PARTITION_HASH, NORMALIZED_BY = "sha256", "partition-sha256", "normalization"
# of clients.json
CLIENT_HASH = HASHES[0]
ROUNDS, TUNING_RATE = "num-server-rounds", "finetune-learning-rate"
# instead of config.toml, run.json and metrics.jsonl in a collected run (corolla/experiments/collect.py)
PACKED = "run.tar.xz"
# characters of a class's name
LONGEST_NAME = 200


class RunFolder:
    """One run's folder; every write is whole or not at all. starts: how often the run was resumed."""

    def __init__(self, path: Path, experiment: str, starts: int = 0) -> None:
        self.path = path
        self.experiment = experiment
        self.starts = starts

    @classmethod
    def create(
        cls, config: RunConfig, experiment: str, figures: Sequence[Figure] = (), facts: Mapping[str, Any] | None = None
    ) -> RunFolder:
        """Create `output-dir/<run-name>`. figures: what the method declares, for reports, which need no method then; facts: more
        that run.json tells.

        Raises UserError if it exists already or cannot be created.
        """
        files = plugins.read(config.plugins)
        for name in folder_names(config):
            path = folder_of(config, name)
            try:
                make_directory(path, exist_ok=False)
                break
            except FileExistsError:
                continue
            except OSError as error:
                raise UserError(f"output-dir: cannot create {path}: {error.strerror}") from None
        else:
            raise _taken(path)
        folder = cls(path, experiment)
        with explain_full_disk("output-dir", path):
            folder.lock()
            plugins.write(files, path / PLUGINS)
        folder.write_config(config, {"run-name": name})
        about = {
            "experiment": experiment,
            "starts": 0,
            MADE_WITH: [made_with()],
            "figures": to_json(figures),
            **(facts or {}),
        }
        if config.initial_weights:
            about[INITIAL_WEIGHTS] = sha256_of(Path(config.initial_weights))
        folder.write(
            RUN, json.dumps({**about, "metrics": [metric.declared for metric in tasks.measured(config)]}) + "\n"
        )
        return folder

    @classmethod
    def resume(cls, config: RunConfig) -> RunFolder:
        """Open the folder of a run to continue it; nothing is changed before `continue_with`.

        Raises UserError if it is no run folder, or if a key differs that must not change.
        """
        path = Path(config.resume)
        check_state(path)
        check_unchanged(path, config)
        plugins.read(config.plugins)
        try:
            run = json.loads((path / RUN).read_text(encoding="utf-8"))
            folder = cls(path, str(run["experiment"]), int(run["starts"]) + 1)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"resume: {path / RUN} cannot be read: {error!r}") from None
        folder.lock()
        return folder

    def lock(self) -> None:
        """Hold the folder for this process. Raises UserError if another one still runs it."""
        try:
            self._lock = lock(self.path / LOCK, wait=False)
        except BlockingIOError:
            raise UserError(f"{self.path} is still being run by another process; end that first") from None

    def close(self) -> None:
        """Let others have the folder."""
        self.forget_stop()
        self._lock.close()

    def asked_to_stop(self) -> bool:
        """Tell whether somebody wants the run to end after this round (see `ask_to_stop`)."""
        return (self.path / STOP).is_file()

    def forget_stop(self) -> None:
        """Remove what asks the run to stop: it has stopped, or goes on."""
        with contextlib.suppress(OSError):
            (self.path / STOP).unlink()

    def continue_with(self, config: RunConfig) -> None:
        """Record a resumed start, the keys that changed, and with what it goes on if that is something else."""
        self.forget_stop()
        # older runs: {}, nobody knows
        made, now = read_about(self.path).get(MADE_WITH, [{}]), made_with()
        made = made if made[-1] == now else [*made, now]
        self.note(experiment=self.experiment, starts=self.starts, **{MADE_WITH: made})
        self.write_config(config, {"output-dir": str(self.path.parent), "run-name": self.path.name, "resume": ""})

    def write_config(self, config: RunConfig, places: Mapping[str, Scalar]) -> None:
        """Write config.toml: the keys that bear on the run, none of other methods' tables. places: keys about this folder."""
        self.write(CONFIG, to_toml(own({**config.resolved, **places}, config.method)))

    def rewind(self, round: int, record: Mapping[str, Any]) -> None:
        """Cut metrics.jsonl after a round, whose line is `record` (empty for round 0); the run is not complete any more."""
        (self.path / SUMMARY).unlink(missing_ok=True)
        lines = [json.dumps(r, allow_nan=False) for r in read_metrics(self.path) if r["round"] < round]
        lines += [json.dumps(record, allow_nan=False)] if record else []
        self.write(METRICS, "".join(line + "\n" for line in lines))

    def append(self, record: Mapping[str, Any]) -> None:
        """Append one round to metrics.jsonl."""
        line = json.dumps(record, allow_nan=False) + "\n"
        with explain_full_disk("output-dir", self.path):
            with open(self.path / METRICS, "a", encoding="utf-8", opener=opener) as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())

    def write_clients(self, properties: Mapping[int, Mapping[str, Scalar]]) -> None:
        """Write clients.json, per client its training and test samples, and its class counts if it tells them.

        Clients known from before and absent from `properties` stay. The classes' names go into run.json.
        """
        about = read_about(self.path)
        every = (tuple(class_names_of(properties[i])) for i in sorted(properties))
        counted = Counter(names for names in every if names)
        # what most clients say; of several that as many say, the first
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

    def note_state_removed(self) -> None:
        """Note that the clients' state is removed now: the run cannot be continued any more."""
        self.note(**{STATE_REMOVED: True})

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json; its presence says that the run is complete."""
        self.write(SUMMARY, json.dumps(summary, indent=2, allow_nan=False) + "\n")

    def save_model(self, name: str, layout: Layout, model: Model) -> None:
        """Write models/<name>.safetensors."""
        from fl_app.weights import save_safetensors

        directory = self.path / MODELS
        with explain_full_disk("output-dir", self.path):
            make_directory(directory)
            save_safetensors(directory / f"{name}.safetensors", layout, model)


def ask_to_stop(run: Path) -> bool:
    """Ask whoever runs this folder to end after its round; tell whether the folder is on this machine."""
    try:
        if not (run / RUN).is_file():
            return False
        (run / STOP).touch(FILE_MODE)
    except OSError:
        return False
    return True


def folder_of(config: RunConfig, name: str) -> Path:
    """Where the folder of a run of this name lies."""
    return Path(config.output_dir).expanduser().resolve() / name


def check_free(config: RunConfig) -> None:
    """Raise UserError if a run's folder is there already; for the server's own machine, before anything is started."""
    if config.run_name and (path := folder_of(config, config.run_name)).exists():
        raise _taken(path)


def _taken(path: Path) -> UserError:
    return UserError(f"run-name: {path} exists already; choose another name or remove it")


def folder_names(config: RunConfig) -> Iterator[str]:
    """Yield the names a run's folder may have: `run-name`, or time, method and data set, with a number if others started then."""
    if config.run_name:
        yield config.run_name
        return
    first = (
        f"{time.strftime('%Y%m%d-%H%M%S')}-{table_of(config.method)}-{config.dataset.split(':')[0]}-seed{config.seed}"
    )
    yield from itertools.chain([first], (f"{first}-{k}" for k in range(2, 1000)))


# Reading --------------------------------------------------------------------------------------------------------------


def is_run(folder: Path) -> bool:
    """Tell whether a folder is a run's, as the run wrote it or as it was collected."""
    return any((folder / name).is_file() for name in (CONFIG, PACKED))


@contextmanager
def open_file(run: Path, name: str) -> Iterator[IO[bytes]]:
    """Open a file of a run folder for reading, wherever it is: by itself, or compressed in a collected run.

    Raises FileNotFoundError if the run has no such file, and ValueError, also while it is read, if what it is compressed in is
    damaged or ends early; whatever comes before that can be read.
    """
    plain, archive, compressed = run / name, run / PACKED, run / f"{name}.gz"
    try:
        if plain.exists():
            with open(plain, "rb") as file:
                yield file
        elif archive.exists():
            with tarfile.open(archive, "r:xz") as members:
                yield _member(members, name)
        elif compressed.exists():
            with gzip.open(compressed) as unpacked:
                yield cast(IO[bytes], unpacked)
        else:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(plain))
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, tarfile.TarError, zlib.error) as error:
        raise ValueError(f"{name} in {run} is damaged: {error}") from None


def _member(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    """Return a file of an archive. Raises FileNotFoundError if there is none of that name.

    Members are asked one after the other: a look-up by name reads the whole archive first, which fails if its end is missing.
    """
    for member in archive:
        file = archive.extractfile(member) if member.name == name else None
        if file is not None:
            return file
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)


def read_file(run: Path, name: str) -> bytes:
    """Read a file of a run folder; raises as `open_file` does."""
    with open_file(run, name) as file:
        return file.read()


def read_config(run: Path) -> dict[str, Scalar]:
    """Read a run folder's resolved config, flat. Raises UserError if there is none.

    Folders of earlier versions also hold the tables of other methods, and the key `tensorboard`; here it is part of `track`. Such
    runs fine-tuned at the round's learning rate: their `finetune-learning-rate` is that of the last round.
    """
    try:
        saved: dict[str, Scalar] = flatten(parse_toml(read_file(run, CONFIG), run / CONFIG))
    except OSError as error:
        raise UserError(f"{run} is not a run folder: {run / CONFIG}: {error.strerror}") from None
    except (UserError, ValueError) as error:
        raise UserError(f"{run} is not a run folder: {error}") from None
    if saved.pop("tensorboard", False):
        trackers = split_names(str(saved.get("track", "")))
        saved["track"] = ",".join(dict.fromkeys((*trackers, "tensorboard")))
    if saved.get("finetune-epochs") and TUNING_RATE not in saved:
        saved[TUNING_RATE] = _tuning_rate_before(saved)
    return saved


def _tuning_rate_before(saved: Mapping[str, Any]) -> float:
    """Return the learning rate of the last evaluation's fine-tuning in a run without the key; 0, the default, if undecayed."""
    rounds = saved[ROUNDS]
    factor = scheduled(saved.get("schedule", "constant"), saved.get("learning-rate-decay", 1.0), rounds, rounds)
    return 0.0 if factor == 1 else float(saved["learning-rate"] * factor)


def check_unchanged(run: Path, config: RunConfig) -> None:
    """Raise UserError if `run` is no run folder, or if a key differs from it that must not change on resume.

    The number of rounds is one of these where a key's meaning depends on it: a cosine schedule, a budget of privacy. The content
    of the file of `initial-weights` must not change either.
    """
    # a key newer than the run had its default
    saved = {**config.defaults, **read_config(run)}
    changed = [
        f"  {key.name}: {saved.get(key.name)!r} in the run, now {value!r}"
        for key, value in config.own_keys()
        if not key.may_change_on_resume and saved.get(key.name) != value
    ]
    before, now = saved.get(ROUNDS), config.num_server_rounds
    if before != now and (spanning := [f"{key.name} = {show(value)}" for key, value in config.spanning_keys()]):
        changed.append(
            f"  {ROUNDS}: {before!r} in the run, now {now!r}; {listed(spanning)} was meant for {before} rounds"
        )
    if changed:
        raise UserError("resume: these keys must not change:\n" + "\n".join(changed))
    _check_weights(run, config)


def check_state(run: Path) -> None:
    """Raise UserError if a finished run is to be continued whose clients removed their state, or planned a budget for it."""
    if read_config(run).get("dp-epsilon") and (run / SUMMARY).exists():
        raise UserError(f"resume: {run} is finished: dp-epsilon was planned for its rounds")
    if read_about(run).get(STATE_REMOVED):
        raise UserError(
            f"resume: the clients of {run} removed their state when it ended, so that it cannot be continued; "
            "a run started with keep-state = true can"
        )


def _check_weights(run: Path, config: RunConfig) -> None:
    """Raise UserError if the file of `initial-weights` has changed since a run started."""
    began, path = read_about(run).get(INITIAL_WEIGHTS), Path(config.initial_weights)
    if began and config.initial_weights and path.is_file() and (now := sha256_of(path)) != began:
        raise UserError(
            f"initial-weights: {config.initial_weights} has changed since the run started: {shown(now, began)}; put the old file "
            "back, or start a new run"
        )


def check_data(run: Path, found: DataHashes) -> None:
    """Raise UserError if the data that all clients share are not those that a run started with."""
    if differs := found.difference(read_hashes(run).get(None, found)):
        raise UserError(
            f"resume: since the run started its {differs} has changed; put the old data back, or start a new run"
        )


def read_hashes(run: Path) -> dict[int | None, DataHashes]:
    """Read the hashes of the data that a run started with: by client where each holds its own, else under None."""
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
    """Yield the rounds of a run folder; lines that are none, such as half a line after a crash, are skipped and logged."""
    for number, line in enumerate(_lines(run, METRICS), 1):
        try:
            record = json.loads(line.decode("utf-8", "replace"))
        except ValueError:
            record = None
        if _is_record(record):
            yield record
        else:
            log.warning("%s: line %d is not a round's record; skipped", run / METRICS, number)


def _lines(run: Path, name: str) -> Iterator[bytes]:
    """Yield the lines of a file of a run folder, none if there is none, as far as it can be read."""
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
    """Tell whether a line of metrics.jsonl is a round's, as far as its readers rely on it; any part may be missing."""
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
    """What clients.json keeps of a client's properties; malformed class counts are dropped and logged."""
    facts: dict[str, Any] = {name: properties.get(name) for name in ("train-samples", "test-samples")}
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


def class_names_of(properties: Mapping[str, Scalar]) -> list[str]:
    """Read the names of the classes from a client's properties; empty if there is not one for each."""
    try:
        names = json.loads(str(properties.get("class-names", "[]")))
    except (ValueError, RecursionError):
        names = None
    fits = (
        isinstance(names, list)
        and len(names) == properties.get("num-classes")
        and all(isinstance(n, str) for n in names)
    )
    return [plain(name)[:LONGEST_NAME] for name in names] if fits else []


def read_clients(run: Path) -> dict[str, dict[str, Any]]:
    """Read clients.json, facts by client id; empty if the run has none that can be read."""
    try:
        clients: dict[str, dict[str, Any]] = json.loads((run / CLIENTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return clients


def read_about(run: Path) -> dict[str, Any]:
    """Read run.json; empty if it cannot be read.

    It holds the experiment's id, how often it was resumed, what it was made with, its method's figures, its metrics, the classes'
    names, what its model was built with (`shape`), the hash of what of it does not train, hashes of its data and initial weights,
    what normalised its inputs, and which models were tested if that needs saying.
    """
    try:
        about = json.loads(read_file(run, RUN))
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def read_summary(run: Path) -> dict[str, Any]:
    """Read summary.json. Raises UserError if the run is not complete."""
    try:
        result = json.loads((run / SUMMARY).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{run} has no {SUMMARY}: not a run folder, or the run did not finish") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{run / SUMMARY} cannot be read: {error}") from None
    if not isinstance(result, dict):
        raise UserError(f"{run / SUMMARY} cannot be read: must hold a table, got {type(result).__name__}")
    return result
