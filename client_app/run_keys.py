"""A client's keys for one run, and its permanent notes on what it has answered under them.

- `keys/<hash>/private`: the keys, from the first question of a run until its last message. The hash is of the run's number
  and of the site's public half, so that the notes belong to the key and not to the client's number.
- `keys/<hash>/<round>-<attempt>.answered`: an attempt that was answered under them, with the means to open its sum.
  `keys/<hash>/<round>-<attempt>.<hash>.opened`: the members whose sum the client helps to open.
  `keys/<hash>/experiment`: the one experiment that they serve. `keys/<hash>/start`: a hash of the names of the model that
  the run starts from. `keys/<hash>/ended`: they are deleted, and no new ones made.
- `runs/<experiment>/sums-<hash of the public half>.json`: the client's aggregation group in the experiment, the splits that it has
  signed, and its sample count.
- `runs/<experiment>/clipped-<hash>`: a value of the client was beyond `private-range`.

In a simulation keys follow from the seed, and all notes are in `runs/<experiment>/client-<id>`.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fl_app.config import RunConfig
from fl_app.errors import UserError
from fl_app.files import lock, make_directory, opener, publish_text, sync
from fl_app.privacy import aggregation_groups, pins
from fl_app.privacy.aggregation_groups import GroupSplit, Membership, parts_of, threshold
from fl_app.privacy.keyring import PEERS, Keyring, RunKeys, drawn_run_keys, open_keyring, run_keys_from_seed, text_of
from fl_app.privacy.transcript import config_hash
from fl_app.transport.wire import SEED_KEYS, state_version

_KEYS, _RUNS, _PRIVATE, _EXPERIMENT, _ENDED = "keys", "runs", "private", "experiment", "ended"
_ANSWERED, _OPENED, _START = ".answered", ".opened", "start"
# Keys of a run whose last message never came are deleted after this many days without use.
_DAYS = 30


@dataclass(frozen=True)
class SiteKeys:
    """A client's keys for a run, in its site's own directory.

    simulated: all clients are on one machine, and the keys follow from the seed. config: the run's.
    """

    keys: RunKeys
    site: Path
    simulated: bool
    config: RunConfig

    @classmethod
    def open(cls, site: Path, where: str, config: RunConfig, client_id: int, run: int) -> SiteKeys:
        """Return the client's keys for a run; draw them if there are none. Raises UserError naming what is wrong.

        where: the file of the client's private key, or SEED_KEYS.
        """
        ring, of_config = open_keyring(where, config.seed, client_id, config.num_clients), config_hash(config)
        if where == SEED_KEYS:
            return cls(run_keys_from_seed(ring, config.seed, run, of_config), site, True, config)
        pins.require(site, ring.own, Path(where).parent / PEERS)
        return cls(_kept(_directory(site, ring, run), ring, run, of_config), site, False, config)

    def _directory(self, experiment: str) -> Path:
        """The directory with the notes on the keys."""
        if self.simulated:
            return _run(self.site, experiment) / f"client-{self.keys.ring.client_id:04d}"
        return _directory(self.site, self.keys.ring, self.keys.run)

    def _noted_in(self, experiment: str, name: str, ending: str = "") -> Path:
        """A file with notes on the experiment, which outlast its runs and their keys."""
        if self.simulated:
            return self._directory(experiment) / f"{name}{ending}"
        return _run(self.site, experiment) / f"{name}-{self.keys.ring.own}{ending}"

    def claim(
        self, experiment: str, round: int, attempt: int, members: Collection[int], splits: Iterable[GroupSplit] = ()
    ) -> None:
        """Note that an attempt at a sum is being answered. Raises UserError if it must not be.

        It must not be if it was answered before, if the round has been answered `round-retries` + 1 times, or if the keys
        serve another experiment. members: those that are sent the same, who must be the client's whole aggregation group
        or more. splits: of this group so far.
        """
        version = state_version(round, attempt)
        with self._noting(experiment) as directory:
            tried = [path.name for path in directory.glob(f"{round:06d}-*{_ANSWERED}")]
            if f"{version}{_ANSWERED}" in tried:
                raise self._refusal(f"attempt {version} was answered before, and is answered only once")
            if len(tried) > self.config.round_retries and not self.simulated:
                raise self._refusal(
                    f"it has answered {len(tried)} attempts at round {round}, and answers no more (round-retries)"
                )
            self._require_group(experiment, members, splits)
            if not (directory / _EXPERIMENT).exists():
                publish_text(directory / _EXPERIMENT, experiment)
            self._mark(directory / f"{version}{_ANSWERED}")

    def note_answer(self, experiment: str, round: int, attempt: int, facts: Mapping[str, object]) -> None:
        """Note the means to open the sum of an attempt: its `members`, their signed `keys`, the `label` of its masks.

        Without this note, as after a crash, the client helps to open no sum of the attempt.
        """
        path = self._directory(experiment) / f"{state_version(round, attempt)}{_ANSWERED}"
        path.write_text(json.dumps(facts), encoding="utf-8")

    def help_open(
        self,
        experiment: str,
        round: int,
        attempt: int,
        survivors: Collection[int],
        splits: Iterable[GroupSplit] = (),
    ) -> dict[str, Any]:
        """Note the survivors whose sum the client helps to open. Return the notes on the attempt (`note_answer`).

        Raises UserError if the client has not answered the attempt, if they are no members, if it helped to open another
        sum of the attempt, if they are too few, or if they are not its whole aggregation group. splits: of this group so
        far.
        """
        version, asked = state_version(round, attempt), sorted(survivors)
        with self._noting(experiment) as directory:
            path = directory / f"{version}{_ANSWERED}"
            noted: dict[str, Any] = {}
            with contextlib.suppress(FileNotFoundError, ValueError):
                noted = dict(json.loads(path.read_text(encoding="utf-8")))
            if not set(asked) <= set(noted.get("members", ())):
                raise self._refusal(f"it has not answered attempt {version} with these members")
            mark = directory / f"{version}.{hashlib.sha256(repr(asked).encode()).hexdigest()}{_OPENED}"
            before = [*directory.glob(f"{version}.*{_OPENED}")]
            if before not in ([], [mark]):
                raise self._refusal(f"another sum of attempt {version} was opened before")
            if len(asked) < (needed := threshold(len(noted["members"]))):
                raise self._refusal(f"a sum needs {needed} of its members", value=len(asked))
            self._require_group(experiment, asked, splits)
            if not before:
                self._mark(mark)
        return noted

    def _mark(self, path: Path) -> None:
        """Create an empty note for good. Where keys follow from the seed, it need not outlive a crash of the machine."""
        os.close(opener(str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        if not self.simulated:
            sync(path.parent)

    def require_start(self, experiment: str, names: str) -> None:
        """Note the names of the model that the run starts from. Raises UserError if they were others before.

        A client compares them with its own columns, so each list of names would be a guess that it answers.
        """
        with self._noting(experiment) as directory:
            path, asked = directory / _START, hashlib.sha256(names.encode()).hexdigest()
            if not path.exists():
                publish_text(path, asked)
            elif path.read_text(encoding="utf-8") != asked:
                raise self._refusal("the run's first model had other names before")

    def sign_split(self, experiment: str, splits: Sequence[GroupSplit]) -> str:
        """Return the client's signature of the last of these splits. Raises UserError if it must not sign it.

        The others are the splits of its aggregation group so far.
        """
        with self._noting(experiment), self._noting_group(experiment):
            *before, asked = splits
            self._note_group(experiment, self._membership(experiment, before).signing(asked.parts))
        return self.keys.sign_split(experiment, asked.parts)

    def _require_group(self, experiment: str, members: Collection[int], splits: Iterable[GroupSplit]) -> None:
        """Note splits of the client's aggregation group. Raises UserError unless the whole group is among these members."""
        if self.config.private_left_out != "group":
            return
        with self._noting_group(experiment):
            known = self._membership(experiment, splits)
            self._note_group(experiment, known)
            if away := [i for i in known.members if i not in members]:
                raise ValueError(
                    f"a sum over clients {sorted(members)} splits an aggregation group: it needs clients {away}"
                )

    @contextlib.contextmanager
    def _alone(self, experiment: str) -> Iterator[None]:
        """Exclude other messages that change the notes on the experiment, also those of its other runs."""
        path = self._noted_in(experiment, "sums", ".json")
        make_directory(path.parent)
        with lock(path.with_suffix(".lock"), wait=True):
            yield

    @contextlib.contextmanager
    def _noting_group(self, experiment: str) -> Iterator[None]:
        """Do the same for notes on the client's aggregation group. A ValueError inside becomes a UserError."""
        try:
            with self._alone(experiment):
                yield
        except ValueError as error:
            raise self._refusal(str(error)) from None

    def _refusal(self, rule: str, value: object = None) -> UserError:
        return UserError(key=f"client {self.keys.ring.client_id}", rule=f"private: {rule}", value=value)

    @property
    def _first(self) -> list[object]:
        """The facts on which aggregation groups of an experiment rest: its list of keys, and its first aggregation groups."""
        whole = json.dumps(parts_of(aggregation_groups.first(self.config)))
        return [self.keys.ring.fingerprint, hashlib.sha256(whole.encode()).hexdigest()]

    def _membership(self, experiment: str, splits: Iterable[GroupSplit]) -> Membership:
        """Return the client's aggregation group after splits.

        Raises ValueError if it has none, or if the experiment began otherwise.
        """
        known, me = self._known(experiment), self.keys.ring.client_id
        if known.get("first", self._first) != self._first:
            raise ValueError("this experiment began with other aggregation groups, or another list of keys")
        own = known.get("group") or next((of for of in aggregation_groups.first(self.config) if me in of), [])
        if me not in own:
            raise ValueError("this client trains in no aggregation group")
        found = Membership(me, tuple(own), tuple(map(parts_of, known.get("signed", []))))
        return found.after(splits, functools.partial(self.keys.has_signed_split, experiment))

    def _note_group(self, experiment: str, found: Membership) -> None:
        signed = [[list(own) for own in parts] for parts in found.signed]
        self._note(experiment, first=self._first, group=list(found.members), signed=signed)

    def count(self, experiment: str, samples: int, most: float) -> float:
        """Return the sample count that the client counts with in all sums of an experiment, at most `most` if that is not 0.

        It is the one that it had first. Raises UserError if the bound is another than at first.
        """
        with self._alone(experiment):
            known = {"count": samples, "most": most} | self._known(experiment)
            self._note(experiment, count=known["count"], most=known["most"])
        if known["most"] != most:
            raise self._refusal("the bound on sample counts has changed")
        count = float(known["count"])
        return max(1.0, min(count, most) if most else count)

    def note_clipped(self, experiment: str) -> None:
        """Note that a value was clipped to its range."""
        path = self._noted_in(experiment, "clipped")
        make_directory(path.parent)
        path.touch(0o600)

    def forget(self, experiment: str) -> bool:
        """Delete the keys of a finished run for good. Return whether a value of the client was ever clipped to its range."""
        if not self.simulated:
            with self._noting(experiment, served=False) as directory:
                _end(directory)
        return self._noted_in(experiment, "clipped").exists()

    # Notes

    @contextlib.contextmanager
    def _noting(self, experiment: str, served: bool = True) -> Iterator[Path]:
        """Return the directory of the notes, while no other message writes there. Raises UserError if it cannot be written.

        It raises one also if the keys serve another experiment, unless `served` is False: that one's notes on sums would not
        be those of this one.
        """
        directory = self._directory(experiment)
        try:
            make_directory(directory)
            with lock(directory / ".lock", wait=True):
                path = directory / _EXPERIMENT
                if served and path.exists() and path.read_text(encoding="utf-8") != experiment:
                    raise self._refusal("its keys for this run serve another experiment")
                yield directory
        except OSError as error:
            raise UserError(
                key=f"client {self.keys.ring.client_id}",
                rule=f"cannot note its answer in {directory}: {error.strerror}",
            ) from None

    def _known(self, experiment: str) -> dict[str, Any]:
        """Return the notes on the experiment's sums. Raises UserError if they cannot be read: they must not count as none."""
        path = self._noted_in(experiment, "sums", ".json")
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise UserError(key="private", rule=f"the notes on earlier sums cannot be read: {path}: {error}") from None

    def _note(self, experiment: str, **facts: object) -> None:
        path, known = self._noted_in(experiment, "sums", ".json"), self._known(experiment)
        if known != known | facts:
            make_directory(path.parent)
            publish_text(path, json.dumps(known | facts) + "\n")


def _run(site: Path, experiment: str) -> Path:
    if not re.fullmatch(r"[\w-]{1,64}", experiment):
        raise UserError(key="private", rule=f"malformed experiment id {experiment[:80]!r}")
    return site / _RUNS / experiment


def _directory(site: Path, ring: Keyring, run: int) -> Path:
    return site / _KEYS / f"{run}-{ring.own[:32]}"


def _kept(directory: Path, ring: Keyring, run: int, config: str) -> RunKeys:
    """Return the keys of a run from their directory; draw them if there are none.

    Raises UserError if they were drawn for another configuration, list of keys or client number.
    """
    path, told = directory / _PRIVATE, [ring.client_id, ring.num_clients, config, ring.fingerprint]
    try:
        make_directory(directory)
        with lock(directory / ".lock", wait=True):
            if not (path.exists() or (directory / _ENDED).exists()):
                _delete_old(directory.parent)
                drawn = drawn_run_keys(ring, run, config)
                parts = [drawn.masks.private_bytes_raw(), drawn.seals.private_bytes_raw(), drawn.secret]
                publish_text(path, json.dumps([told, *map(text_of, parts)]) + "\n")
            noted, *texts = json.loads(path.read_text(encoding="utf-8"))
            masks, seals, secret = map(base64.b64decode, texts)
            # the time of the last use
            os.utime(path)
    except FileNotFoundError:
        raise UserError(key="private", rule="this site has ended this run, and its keys are deleted") from None
    except OSError as error:
        raise UserError(key="private", rule=f"the run's keys cannot be kept in {directory}: {error.strerror}") from None
    except ValueError:
        raise UserError(key="private", rule=f"{path} is damaged; this site takes no further part in the run") from None
    if noted != told:
        raise UserError(
            key="private", rule="this run has asked this site before with another configuration, list of keys or number"
        )
    load: Callable[[bytes], X25519PrivateKey] = X25519PrivateKey.from_private_bytes
    return RunKeys(ring, run, config, load(masks), load(seals), secret)


def _delete_old(directory: Path) -> None:
    """Delete the keys of runs that have not been used for `_DAYS` days."""
    for path in directory.glob(f"*/{_PRIVATE}"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < time.time() - _DAYS * 86400:
                _end(path.parent)


def _end(directory: Path) -> None:
    """Delete a run's keys and the notes on them. What is left keeps the run from new keys, which would have no notes."""
    (directory / _ENDED).touch(0o600)
    for path in (directory / _PRIVATE, *directory.glob(f"*{_ANSWERED}"), *directory.glob(f"*{_OPENED}")):
        path.unlink(missing_ok=True)
    sync(directory)
