"""A site's permanent notes on spent privacy budgets, in its own directory (fl_app/site_directory.py).

- `runs/<experiment>/client-<id>/budget.json`: the trainings of one run on data that come with a Python package, and in
  simulations.
- `data/<hash>.json`: the trainings of all runs on one client's records. The first line names the
  data, so that a message reads no further in files of data that have no record in common with its own.
- `spending/<run>-<client>`: the experiment in which a run of a deployment spends.

Each training is noted with the budget that its run promised. No later run may break that promise, whatever its own
budget.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from fl_app.checksums import Stamp, stamp_of
from fl_app.data import OpenedData, data_root
from fl_app.data.prepared import absolute
from fl_app.errors import UserError
from fl_app.files import lock, make_directory, publish_text
from fl_app.sources import path_in, source_of

_RUNS, _DATA, _SPENDING = "runs", "data", "spending"


class Training(NamedTuple):
    """Noted trainings of one kind: experiment, noise multiplier, sampling rate, steps.

    epsilon, delta: the budget that the run promised for the records. name: names one training in a simulation, where it
    may be repeated. Elsewhere equal trainings are one entry, without a name.
    """

    experiment: str
    name: str
    noise: float
    rate: float
    steps: int
    epsilon: float
    delta: float


_OVERLAPPING = "overlapping"
"""Partition in which clients may have a record in common."""


@dataclass(frozen=True)
class OwnData:
    """The records of a site that one client reads, identified where they were opened.

    path: of the data; content: their hash. client: the client that reads them. partition: hash of the division of which
    the client has a part, "" for all of the node's own data.
    """

    path: Path
    client: int | None
    content: str = ""
    partition: str = ""

    @classmethod
    def of(cls, opened: OpenedData, data_path: str, client_id: int) -> OwnData | None:
        """Return the records that a client reads, or None if they come with a Python package.

        data_path: the node's own data. Benchmarks are read from a directory, which a run may name, so they count too.
        """
        config = opened.config
        if source_of(config.dataset).installed:
            return None
        if opened.partition is None:
            return cls(absolute(data_path), client_id, opened.hashes.data)
        named = path_in("dataset", config.dataset)
        division = opened.hashes.partition if opened.partition.is_disjoint else _OVERLAPPING
        return cls(absolute(named) if named else data_root(config), client_id, opened.hashes.data, division)

    def shares(self, other: OwnData) -> bool:
        """Return whether both may have a record in common. They have none in one case only.

        Two clients have parts of one division of the same contents. Otherwise the records may be the same under any
        name, in any format, order, selection or division.
        """
        if self.client == other.client or self.partition in ("", _OVERLAPPING):
            return True
        return dataclasses.replace(self, client=None) != dataclasses.replace(other, client=None)

    @property
    def file(self) -> str:
        """The name of the file with the trainings on these data."""
        return hashlib.sha256(json.dumps(self.header).encode()).hexdigest()[:32] + ".json"

    @property
    def header(self) -> list[str | int | None]:
        """The contents of that file's first line."""
        return [str(self.path), self.client, self.content, self.partition]


@dataclass(frozen=True)
class Notes:
    """A site's notes on one client in one experiment.

    site: the site's own directory. run: Flower's number of the run. simulated: all clients are on one machine and their
    keys follow from the seed, so the notes protect nobody. own: the site's own data that the client trains on, or None.
    """

    site: Path
    experiment: str
    client_id: int
    run: int = 0
    simulated: bool = False
    own: OwnData | None = None
    # kept during one message: the contents of files, and whether their data share records with `own`
    _read: dict[Path, tuple[Stamp | None, list[Training]]] = field(default_factory=dict, compare=False, repr=False)
    _shared: dict[Path, bool] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Raise UserError for a malformed experiment id."""
        if not re.fullmatch(r"[\w-]{1,64}", self.experiment):
            raise UserError(key=f"client {self.client_id}", rule=f"malformed experiment id {self.experiment[:80]!r}")

    @property
    def directory(self) -> Path:
        """The directory with the notes on this client in this experiment."""
        return self.site / _RUNS / self.experiment / f"client-{self.client_id:04d}"

    @property
    def budget(self) -> Path:
        """The file with this client's trainings."""
        if self.own and not self.simulated:
            return self.site / _DATA / self.own.file
        return self.directory / "budget.json"

    def trainings(self) -> list[Training]:
        """Return all trainings that may have used one of this client's records. Raises UserError if unreadable."""
        if self.own is None or self.simulated:
            return self._trainings_in(self.budget)
        return [t for path in _files_on(self.site, self.own, self._shared) for t in self._trainings_in(path)]

    def _trainings_in(self, path: Path) -> list[Training]:
        """Read a file, unless it was read before and has not changed since."""
        stamp = stamp_of(path)
        if path not in self._read or self._read[path][0] != stamp:
            self._read[path] = stamp, read_notes(path)
        return self._read[path][1]

    def note(self, training: Training) -> None:
        """Note a training before it takes place. Raises OSError. Call it inside `alone`."""
        noted = self._trainings_in(self.budget)
        if self.simulated:
            noted = [*noted, training]
        else:
            training = training._replace(name="")
            alike = [t for t in noted if t._replace(steps=training.steps) == training]
            steps = sum(t.steps for t in alike) + training.steps
            noted = [*(t for t in noted if t not in alike), training._replace(steps=steps)]
        header = self.own.header if self.own and not self.simulated else None
        publish_text(self.budget, f"{json.dumps(header)}\n{json.dumps(noted)}\n")

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Exclude other messages from spending at the same time, and this run from spending in a second experiment.

        A second experiment would have its whole budget left. Raises OSError, and UserError for a run that spent in
        another experiment.
        """
        make_directory(self.budget.parent)
        with lock(self.budget.parent / ".lock", wait=True):
            if not self.simulated and self.own is None:
                make_directory(self.site / _SPENDING)
                with lock(self.site / _SPENDING / f"{self.run}-{self.directory.name}", wait=True) as file:
                    file.seek(0)
                    if (bound := file.read().decode() or self.experiment) != self.experiment:
                        rule = f"this run spends in experiment {bound}, so it cannot spend in {self.experiment}"
                        raise UserError(key="dp-epsilon", rule=rule)
                    file.truncate(0)
                    file.write(self.experiment.encode())
            yield

    def forget(self) -> None:
        """Delete the notes of a finished simulation. Others stay: a later run of the same experiment must find them."""
        if self.simulated:
            shutil.rmtree(self.directory, ignore_errors=True)
            with contextlib.suppress(OSError):
                self.directory.parent.rmdir()


def spent_on(site: Path, own: OwnData) -> list[Training]:
    """Return the trainings of all runs of a deployment on a site's own data. Raises UserError if unreadable."""
    return [training for path in _files_on(site, own, {}) for training in read_notes(path)]


def _files_on(site: Path, own: OwnData, shared: dict[Path, bool]) -> list[Path]:
    """Return the files of trainings that may have used a record of these data, by their first lines. Raises UserError.

    shared: the answers known so far, by file. A file's first line never changes, because the file's name follows from
    it.
    """
    paths = sorted((site / _DATA).glob("*.json"))
    for path in paths:
        if path not in shared:
            with _readable(path), path.open(encoding="utf-8") as file:
                name, client, content, partition = json.loads(file.readline())
                shared[path] = own.shares(OwnData(Path(name), client, content, partition))
    return [path for path in paths if shared[path]]


def read_notes(path: Path) -> list[Training]:
    """Read a file of trainings; [] if there is no file. Raises UserError if it cannot be read."""
    if not path.exists():
        return []
    with _readable(path):
        _, noted = path.read_text(encoding="utf-8").splitlines()
        return [
            Training(str(experiment), str(name), float(noise), float(rate), int(steps), float(epsilon), float(delta))
            for experiment, name, noise, rate, steps, epsilon, delta in json.loads(noted)
        ]


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raise UserError for errors in reading a file of trainings.

    An unreadable file must not count as no spending.
    """
    try:
        yield
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise UserError(
            key="dp-epsilon", rule=f"the spent budget cannot be read from {path} ({error}), so nothing more is spent"
        ) from None
