"""What a site notes for good, in its own directory (fl_app/site.py): answers to private rounds, and what records have spent.

- `runs/<experiment>/client-<id>/<attempt>.answered`: a private round that a client has answered.
- `runs/<experiment>/client-<id>/budget.json`: the trainings of one run on data that anybody may have, and in simulations.
- `data/<hash>.json`: the trainings of all runs on the site's own data, by the path of the data.
- `spending/<run>-<client>`: the experiment that a run of a deployment spends in.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fl_app.config import RunConfig
from fl_app.data.prepared import absolute
from fl_app.errors import UserError
from fl_app.files import lock, make_directory, opener, publish_text, sync
from fl_app.sources import NODE, path_in

_RUNS, _DATA, _SPENDING, _ANSWERED = "runs", "data", "spending", ".answered"


class Training(NamedTuple):
    """A training that was noted: in which experiment, its name there, noise multiplier, sampling rate, steps."""

    experiment: str
    name: str
    noise: float
    rate: float
    steps: int


@dataclass(frozen=True)
class OwnData:
    """A site's own data. client: whose part of them it is, None for all."""

    path: Path
    client: int | None

    @classmethod
    def of(cls, config: RunConfig, data_path: str, client_id: int) -> OwnData | None:
        """Return what a run reads on a node, None if it is no path of the node's. data_path: the node's own data.

        Data that the run names are the client's part of them, unless they are the node's own.
        """
        site = absolute(data_path) if data_path else None
        if config.dataset == NODE:
            return cls(site, None) if site else None
        if not (named := path_in("dataset", config.dataset)):
            return None
        path = absolute(named)
        return cls(path, None if site and _overlap(path, site) else client_id)

    def shares(self, other: OwnData) -> bool:
        """Tell whether both may have a record in common: one path is the other or lies in it, and so with the parts."""
        return _overlap(self.path, other.path) and (None in (self.client, other.client) or self.client == other.client)

    @property
    def file(self) -> str:
        """The name of the file in which its trainings are noted."""
        whose = "" if self.client is None else f" client {self.client}"
        return hashlib.sha256(f"{self.path}{whose}".encode()).hexdigest()[:32] + ".json"


def _overlap(a: Path, b: Path) -> bool:
    return a.is_relative_to(b) or b.is_relative_to(a)


@dataclass(frozen=True)
class Notes:
    """What a site has noted of one client in one experiment.

    site: the site's own directory. run: Flower's number of the run. simulated: all clients are on one machine and their keys follow
    from the seed, so that nobody is protected by it. own: the site's own data that the client trains on, None if it has none.
    """

    site: Path
    experiment: str
    client_id: int
    run: int = 0
    simulated: bool = False
    own: OwnData | None = None

    def __post_init__(self) -> None:
        """Raise UserError for a name that is no experiment's."""
        if not re.fullmatch(r"[\w-]{1,64}", self.experiment):
            raise UserError(f"client {self.client_id}: malformed experiment id {self.experiment[:80]!r}")

    @property
    def directory(self) -> Path:
        """Where the notes of this client in this experiment are."""
        return self.site / _RUNS / self.experiment / f"client-{self.client_id:04d}"

    @property
    def budget(self) -> Path:
        """The file in which this client's trainings are noted."""
        if self.own and not self.simulated:
            return self.site / _DATA / self.own.file
        return self.directory / "budget.json"

    def claim(self, version: str) -> None:
        """Note that an attempt at a private round is being answered. Raises UserError if it has been before.

        A second answer under the same masks would tell the difference of the two.
        """
        path = self.directory / f"{version}{_ANSWERED}"
        try:
            make_directory(self.directory)
            os.close(opener(str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            sync(self.directory)
        except FileExistsError:
            raise UserError(
                f"client {self.client_id}: private: attempt {version} was answered before, and is not again"
            ) from None
        except OSError as error:
            raise UserError(f"client {self.client_id}: cannot note its answer in {path}: {error.strerror}") from None

    def trainings(self) -> list[Training]:
        """Return all trainings that may have used a record of this client's. Raises UserError if they cannot be read."""
        if self.own is None or self.simulated:
            return _read(self.budget)[1]
        found = map(_read, sorted((self.site / _DATA).glob("*.json")))
        return [training for own, noted in found if own is None or own.shares(self.own) for training in noted]

    def note(self, training: Training) -> None:
        """Note a training before it takes place. Raises OSError; `alone` keeps others from doing so at the same time."""
        _, noted = _read(self.budget)
        own = None if self.own is None or self.simulated else [str(self.own.path), self.own.client]
        publish_text(self.budget, json.dumps({"data": own, "trainings": [*noted, training]}) + "\n")

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other messages from spending at the same time, and a run from a second experiment, whose budget is whole.

        Raises OSError, and UserError for a run that has spent in another experiment.
        """
        make_directory(self.budget.parent)
        with lock(self.budget.parent / ".lock", wait=True):
            if not self.simulated and self.own is None:
                self._bind_run()
            yield

    def _bind_run(self) -> None:
        make_directory(self.site / _SPENDING)
        with lock(self.site / _SPENDING / f"{self.run}-{self.directory.name}", wait=True) as file:
            file.seek(0)
            if (bound := file.read().decode() or self.experiment) != self.experiment:
                raise UserError(
                    f"dp-epsilon: this run spends in experiment {bound}, and not in {self.experiment} as well"
                )
            file.truncate(0)
            file.write(self.experiment.encode())

    def forget(self) -> None:
        """Delete the notes of a finished simulation. Others stay: whoever names the experiment again must find them."""
        if self.simulated:
            shutil.rmtree(self.directory, ignore_errors=True)
            with contextlib.suppress(OSError):
                self.directory.parent.rmdir()


def _read(path: Path) -> tuple[OwnData | None, list[Training]]:
    """Read a file of trainings and whose data they used; nothing if it is not there. Raises UserError if it is not readable."""
    try:
        noted = json.loads(path.read_text(encoding="utf-8"))
        own = noted["data"] and OwnData(Path(noted["data"][0]), noted["data"][1])
        trainings = [
            Training(str(experiment), str(name), float(noise), float(rate), int(steps))
            for experiment, name, noise, rate, steps in noted["trainings"]
        ]
    except FileNotFoundError:
        return None, []
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise UserError(f"dp-epsilon: what was spent cannot be read from {path} ({error}); nothing more is") from None
    return own or None, trainings
