"""Arrivals of a run that may close rounds early or has simulated time: a line per round in `arrivals.jsonl`.

A line has the clients that the round asked (`asked`), those that were away (`away`), its seconds, and the ends of
clients' works (`ends`). An end has the client, the age of its work in rounds, the second since the round's beginning,
and its fate: used, thrown-away or failed. A client that was asked and has no end in the round is late.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_app.config import RunConfig
from fl_app.errors import MALFORMED, UserError
from fl_app.files import opener, publish_text
from fl_app.server.clock import Clock, WorkEnd

FILE = "arrivals.jsonl"
# what became of an end; a failed one brought no upload
USED, THROWN_AWAY, FAILED = "used", "thrown-away", "failed"
Line = Mapping[str, Any]


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
