"""When clients answer: simulated time, and the arrivals that a run records.

In simulated time each answer is an exact function of the config, and nobody waits for it. A client that is sent a model at second
T answers at

    T + bytes sent / down + samples * epochs * parameters / compute + bytes received / up

unless it fails (`drop-rate`), or is away before that (`availability`, or its hours in the file of `speeds`).

Speeds: `compute` counts samples times trained parameters per second. `down` and `up` are bytes per second.

A run that may close rounds early or has simulated time writes a line per round into `arrivals.jsonl`. It has the clients
that the round asked (`asked`), those that were away (`away`), its seconds, and the ends of clients' works (`ends`). An end
has the client, the age of its work in rounds, the second since the round's beginning, and its fate: used, thrown-away or
failed. A client that was asked and has no end in the round is late.
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_app import rng
from fl_app.config import RunConfig
from fl_app.config.rules import SPEEDS_FILE, sigma_of
from fl_app.errors import MALFORMED, ConfigurationError, UserError
from fl_app.files import opener, publish_text

# a client's median speeds, with `lognormal:SIGMA`
COMPUTE, DOWN, UP = 1e9, 4e6, 1e6
# smallest speed of a file of speeds
LEAST_SPEED = 1e-6
_COLUMNS = ("client", "compute", "down", "up")
_HOURS = ("from", "until")


FILE = "arrivals.jsonl"
# what became of an end; a failed one brought no upload
USED, THROWN_AWAY, FAILED = "used", "thrown-away", "failed"
Line = Mapping[str, Any]


@dataclass(frozen=True)
class Speed:
    """A client's speeds, and the part of each day in which it is there.

    begins: the second of the day at which its hours begin. lasts: their number in seconds.
    """

    compute: float
    down: float
    up: float
    begins: float = 0.0
    lasts: float = math.inf


@dataclass(frozen=True)
class WorkEnd:
    """The end of a client's work. second: when it answers, or is gone. cause: why there is no answer, "" if there is one."""

    second: float
    cause: str = ""


class Clock:
    """The clients' speeds, and the time of the simulation. now, began: seconds since the run's start, and at the round's.

    parameters: the number of trained parameters of the model.
    """

    def __init__(self, config: RunConfig, parameters: int) -> None:
        self.config, self.parameters, self.now, self.began = config, parameters, 0.0, 0.0
        self._sigma = sigma_of(config.speeds)
        path = config.speeds.removeprefix(SPEEDS_FILE)
        self._speeds = {} if self._sigma is not None else read_speeds(Path(path), config.num_clients, config.day_length)

    def begin(self, round: int) -> None:
        """Begin a round now."""
        self.began = self.now

    @property
    def lasted(self) -> float:
        """The seconds since the round began."""
        return self.now - self.began

    def speed(self, client_id: int) -> Speed:
        """Return a client's speeds and hours."""
        if client_id not in self._speeds:
            self._speeds[client_id] = self._drawn(client_id)
        return self._speeds[client_id]

    def _drawn(self, client_id: int) -> Speed:
        stream, config = rng.generator(self.config.seed, "speeds", client_id=client_id), self.config
        sigma = self._sigma or 0.0
        # six digits: the last ones of exp differ between machines
        factors = [float(f"{math.exp(sigma * z):.6g}") for z in stream.standard_normal(3).tolist()]
        compute, down, up = (median * factor for median, factor in zip((COMPUTE, DOWN, UP), factors, strict=True))
        begins = float(stream.random()) * config.day_length
        lasts = config.availability * config.day_length if config.availability < 1 else math.inf
        return Speed(compute, down, up, begins, lasts)

    def waits_for(self, client_ids: list[int]) -> list[int]:
        """Return the clients that are there now. If none is, let time pass until one returns."""
        there = [i for i in client_ids if self.returns(i, self.now) <= self.now]
        if client_ids and not there:
            self.now = min(self.returns(i, self.now) for i in client_ids)
            return self.waits_for(client_ids)
        return there

    def goes_on(self, client_ids: list[int], since: float) -> bool:
        """Let time pass until the next client that is away now returns. Return False if none does within a day.

        since: the second from which the day counts.
        """
        later = [back for i in client_ids if (back := self.returns(i, self.now)) > self.now]
        if not later or min(later) > since + self.config.day_length:
            return False
        self.now = min(later)
        return True

    def close(self, round: int, ends: Sequence[WorkEnd]) -> None:
        """Let time pass until a round closes. ends: of the work of all clients that it asked."""
        self.now = closing(ends, self.now, self.config)

    def leaves(self, client_id: int, second: float) -> float:
        """Return the second at which a client goes away; `second` itself if it is away then, inf if it always stays."""
        speed = self.speed(client_id)
        if math.isinf(speed.lasts):
            return math.inf
        since = (second - speed.begins) % self.config.day_length
        return max(second, second - since + speed.lasts)

    def returns(self, client_id: int, second: float) -> float:
        """Return the first second, from `second` on, at which a client is there."""
        if self.leaves(client_id, second) > second:
            return second
        speed, day = self.speed(client_id), self.config.day_length
        later = second - (second - speed.begins) % day + day
        # a rounded sum must not lie before its hours
        return later if self.leaves(client_id, later) > later else math.nextafter(later, math.inf)

    def answer(self, client_id: int, round: int, attempt: int, samples: int, down: int, up: int) -> WorkEnd:
        """Return the end of a client's work that begins now. samples: for training. down, up: bytes of its messages."""
        speed = self.speed(client_id)
        trained = self.config.local_steps * self.config.batch_size or samples * self.config.local_epochs
        work = trained * self.parameters / speed.compute
        lasts = down / speed.down + work + up / speed.up
        stream = rng.generator(self.config.seed, f"drop-{attempt}", round, client_id)
        drops, part = stream.random(2).tolist()
        ends = [WorkEnd(self.now + lasts)]
        if drops < self.config.drop_rate:
            ends.append(WorkEnd(self.now + part * lasts, "it failed while it worked (drop-rate)"))
        if (gone := self.leaves(client_id, self.now)) < ends[0].second:
            ends.append(WorkEnd(gone, "it went away while it worked (its hours)"))
        return min(ends, key=lambda end: end.second)


def part_of(part: float, count: int) -> int:
    """Return the number of answers that are a part of the clients: rounded up, at least one."""
    return max(1, math.ceil(part * count - 1e-9))


def may_close(answered: int, failed: int, asked: int, is_due: bool, config: RunConfig) -> bool:
    """Return whether a round may close: a part `quorum` of its clients that have not failed has answered.

    is_due: whether its deadline has passed, which ends the wait for the quorum. A part `min-results` of all clients that
    were asked must have answered in any case.
    """
    quorum = 0 if is_due else part_of(config.quorum, asked - failed)
    return answered >= max(quorum, part_of(config.min_results, asked))


def closing(ends: Sequence[WorkEnd], begins: float, config: RunConfig) -> float:
    """Return the second at which a round may close (`may_close`), or at which its last client ends if it never may.

    ends: of all clients that were asked. begins: the second at which the round began.
    """
    due = begins + config.round_deadline if config.round_deadline else math.inf
    answered = failed = 0
    second = begins
    for end in sorted(ends, key=lambda end: end.second):
        if due < end.second and may_close(answered, failed, len(ends), True, config):
            return due
        second = end.second
        failed, answered = failed + bool(end.cause), answered + (not end.cause)
        if may_close(answered, failed, len(ends), due <= second, config):
            return second
    return second


def read_speeds(path: Path, num_clients: int, day_length: float) -> dict[int, Speed]:
    """Read clients' speeds from a CSV file with a row for each client: client, compute, down, up, and the hours' from, until.

    The hours are seconds of the day, of both columns or none; equal ones mean the whole day. Raises UserError for a file
    that is malformed, or does not have every client once.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            key="speeds", rule=f"{path} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None
    named = set(rows[0]) if rows else set()
    if not named >= set(_COLUMNS) or len(named & set(_HOURS)) == 1:
        raise ConfigurationError(
            key="speeds",
            rule=f"{path} must have the columns {', '.join(_COLUMNS)}, and both or none of {' and '.join(_HOURS)}",
        )
    found: dict[int, Speed] = {}
    for line, row in enumerate(rows, 2):
        try:
            client_id, values = int(row["client"]), [float(row[name]) for name in _COLUMNS[1:]]
            hours = [float(row[name]) for name in _HOURS if name in row]
        except (TypeError, ValueError):
            raise ConfigurationError(
                key="speeds", rule=f"{path}, line {line}: numbers in all columns, got {list(row.values())}"
            ) from None
        if not all(LEAST_SPEED <= value < math.inf for value in values):
            raise ConfigurationError(
                key="speeds", rule=f"{path}, line {line}: speeds must be numbers >= {LEAST_SPEED:g}, got {values}"
            )
        if client_id < 0:
            raise ConfigurationError(key="speeds", rule=f"{path}, line {line}: clients count from 0", value=client_id)
        if not all(0 <= hour <= day_length for hour in hours):
            raise ConfigurationError(
                key="speeds",
                rule=f"{path}, line {line}: from and until must be in 0..{day_length:g} (day-length), got {hours}",
            )
        if client_id in found:
            raise ConfigurationError(key="speeds", rule=f"{path}, line {line}: client {client_id} has a row already")
        lasts = (hours[1] - hours[0]) % day_length if hours else 0.0
        compute, down, up = values
        found[client_id] = Speed(compute, down, up, hours[0] if hours else 0.0, lasts or math.inf)
    if lacking := sorted(set(range(num_clients)) - set(found)):
        raise ConfigurationError(
            key="speeds", rule=f"{path} has no row for client {lacking[0]} of {num_clients} (num-clients)"
        )
    return found


def append(run: Path, line: Line) -> None:
    """Append a round's arrivals. The file is durable when this returns."""
    with open(run / FILE, "a", encoding="utf-8", opener=opener) as file:
        file.write(json.dumps(line, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def cut(run: Path, round: int) -> None:
    """Delete the lines of rounds after this one, if there is a file."""
    if (run / FILE).exists():
        kept = [line for line in read(run) if line["round"] <= round]
        publish_text(run / FILE, "".join(json.dumps(line, allow_nan=False) + "\n" for line in kept))


def read(run: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's arrivals. A last line that is cut off is left out. Raises UserError if there is no file."""
    try:
        text = (run / FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(
            key="replay",
            rule=f"{run} recorded no arrivals: its rounds waited for every client, or it is a replay itself",
        ) from None
    except OSError as error:
        raise UserError(key="replay", rule=f"{run / FILE} cannot be read: {error.strerror}") from None
    lines = text.split("\n")
    try:
        return [json.loads(line) for line in lines[:-1]]
    except ValueError as error:
        raise UserError(key="replay", rule=f"{run / FILE} is damaged: {error}") from None


class Replay:
    """A clock that lets uploads arrive in the rounds in which they arrived in another run. now: the rounds that have closed.

    rounds: the lines of the other run by round.
    """

    def __init__(self, run: Path) -> None:
        self.run, self.now, self.began = run, 0.0, 0.0
        try:
            self.rounds = {int(line["round"]): line for line in read(run)}
            # (client, round of its work) -> round of its end, and why there is no upload
            self._ends = {
                (end["client"], number - end["age"]): WorkEnd(
                    float(number), "it failed in the run that is repeated" if end["fate"] == FAILED else ""
                )
                for number, line in self.rounds.items()
                for end in line["ends"]
            }
        except MALFORMED as error:
            raise UserError(key="replay", rule=f"{run / FILE} is damaged: {error!r}") from None

    def begin(self, round: int) -> None:
        """Begin a round. Raises UserError if the other run has none of this number."""
        if round not in self.rounds:
            raise UserError(key="replay", rule=f"{self.run} has no arrivals of round {round}")
        self.began = float(round - 1)

    @property
    def lasted(self) -> float:
        """The seconds of the round in the other run."""
        return float(self.rounds[int(self.began) + 1]["seconds"])

    def waits_for(self, client_ids: list[int]) -> list[int]:
        """Return the clients that were there in the round."""
        away = set(self.rounds[int(self.began) + 1]["away"])
        return [i for i in client_ids if i not in away]

    def answer(self, client_id: int, round: int, attempt: int, samples: int, down: int, up: int) -> WorkEnd:
        """Return the end of a client's work on a round: the number of the round in which it ended, inf if it never did."""
        return self._ends.get((client_id, round), WorkEnd(math.inf))

    def close(self, round: int, ends: Sequence[WorkEnd]) -> None:
        """Close a round."""
        self.now = float(round)


def clock_of(config: RunConfig, parameters: int) -> Clock | Replay | None:
    """Return the clock of a run, None if its uploads arrive when they come. parameters: the number of trained parameters.

    Raises UserError if the file of `speeds`, or the run of `replay`, cannot be used, or has too few rounds.
    """
    if config.replay:
        replay = Replay(Path(config.replay))
        missing = next((t for t in range(1, config.num_server_rounds + 1) if t not in replay.rounds), None)
        # a run that may stop early needs some rounds
        if missing is not None and (missing == 1 or not config.stop_when):
            fewer = f"; repeat fewer rounds with --set num-server-rounds={missing - 1}" if missing > 1 else ""
            raise UserError(
                key="replay",
                rule=f"{replay.run} has no arrivals of round {missing}{fewer}",
                value=config.num_server_rounds,
            )
        return replay
    return Clock(config, parameters) if config.is_timed else None
