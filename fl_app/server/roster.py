"""Who is connected: which SuperNode is which client, asked once of every node that is new.

Flower's node ids are random and change when a SuperNode restarts; they stay here and in the exchange of messages. Everything else
speaks of client ids (a SuperNode's partition-id).
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

from flwr.app import Message
from flwr.serverapp import Grid

from fl_app import wire
from fl_app.checksums import DataHashes, told_hashes
from fl_app.config import RunConfig
from fl_app.errors import UserError, plain
from fl_app.keys import Scalar
from fl_app.server import properties
from fl_app.server.identity import Holders, Identity
from fl_app.server.progress_protocol import left_out_line
from fl_app.server.properties import Names, Properties, Shape
from fl_app.server.replies import Answer, Inbox
from fl_app.server.superlink import SuperLink, has_fixed_nodes
from fl_app.sources import NODE

log = logging.getLogger("corolla")

POLL_SECONDS = 0.1
QUERY = "get_properties"
# Seconds after which the log says who is waited for.
_SILENT_SECONDS = 60
# how often a node that answers with an error, or too late, is asked who it is
_QUERIES = 3
# seconds before the second time, twice that before the third; at most a tenth of available-timeout
_PAUSE = 0.5
# seconds a round waits for what newcomers have already answered
_ARRIVAL = 2.0
T = TypeVar("T", bound=Hashable)


class Roster:
    """The clients of a run: the node each one is (`node_of`) and what it said about itself (`properties`).

    progress(what, done, total) is called as clients connect, and while none does. link: the grid's way to each reply by itself,
    if it has one.
    """

    def __init__(
        self, grid: Grid, config: RunConfig, progress: Callable[[str, int, int], None], link: SuperLink | None = None
    ) -> None:
        self.grid = grid
        self.config = config
        self.progress = progress
        # 0 until nodes say how many there are
        self.num_clients = config.num_clients
        # The shape of most clients' data.
        self.shape: Shape | None = None
        # What most sites call the features of their own data; in private runs, an answer that most agree with.
        self.names: Names | None = None
        self.like: Properties | None = None
        # nodes whose answers it was chosen from
        self._compared: set[int] = set()
        # The list of all sites' keys that most clients hold.
        self.key_list: str | None = None
        # Hashes of most clients' data and partition, where all hold the same.
        self.hashes: DataHashes | None = None
        # Those that the run started with: by client where each holds data of its own, else under None.
        self.recorded: dict[int | None, DataHashes] = {}
        self.properties: dict[int, dict[str, Scalar]] = {}
        self.node_of: dict[int, int] = {}  # client id -> node id
        self._inbox = Inbox(grid, link)
        # id of a pending query -> node id
        self._asked: dict[str, int] = {}
        # node id -> how often it was asked
        self._queries: dict[int, int] = {}
        # what connected nodes said, in the order of their answers
        self._answers: dict[int, Properties] = {}
        self._who: dict[int, Identity] = {}
        # node id -> who it says it is, why it cannot take part
        self._refused: dict[int, tuple[str, str]] = {}
        self._logged: set[tuple[int, str]] = set()  # refusals that were logged
        # node id -> when a node that answered with an error is asked again
        self._again: dict[int, float] = {}
        self._holders = Holders()
        self._started = False

    @property
    def client_ids(self) -> list[int]:
        """Connected clients whose properties are known, sorted."""
        return sorted(self.node_of)

    @property
    def minimum(self) -> int:
        """Clients that must be connected before a round starts."""
        return self.config.min_available_clients or self.num_clients or 1

    def wait(self) -> None:
        """Return when `minimum` clients are connected and every connected node has said who it is, or has had its time to.

        Who is refused or silent is left out, by name in the log. Raises UserError after `available-timeout` without enough clients,
        at once where no others can come.
        """
        started = time.monotonic()
        hinted = False
        while True:
            answered = self._take_in()
            waited = time.monotonic() - started
            pending = bool(self._asked or self._again)
            if not pending:
                self._warn_of_refused()
            if len(self.node_of) >= self.minimum and (not pending or waited > self.config.available_timeout):
                self._warn_of_refused()
                self._warn_of_silent(waited)
                self._started = True
                self._record_hashes()
                return
            self.progress("clients connected", len(self.node_of), self.minimum)
            if self._asked and waited > _SILENT_SECONDS and not self._started and not hinted:
                hinted = True
                why = "the machine is busy" if os.environ.get(wire.SIMULATION) else "a site may have to approve the run"
                log.info("%d SuperNodes have not said yet who they are: %s", len(self._asked), why)
            limit = max(self.config.available_timeout, self.config.round_timeout if pending else 0)
            if waited > limit or (self._refused and not pending and not self._started and has_fixed_nodes(self.grid)):
                raise UserError(self._too_few(waited))
            if not answered:
                time.sleep(POLL_SECONDS)

    def refresh(self) -> None:
        """Take in nodes that came or went since the last round; waits only if fewer than `minimum` are left."""
        self._take_in()
        until = time.monotonic() + _ARRIVAL
        # who has answered takes part in this round
        while self._asked and self._inbox.arriving and time.monotonic() < until:
            time.sleep(POLL_SECONDS / 10)
            self._take_in()
        self._warn_of_refused()
        if len(self.node_of) < self.minimum:
            self.wait()

    # Who is missing, and why

    def _too_few(self, waited: float) -> str:
        if self._started or not self._refused:
            return (
                f"min-available-clients: {self.minimum} clients must be connected, {len(self.node_of)} were after "
                f"{waited:.0f} s (client ids {self.client_ids})"
            )
        told = {properties.names(given) for given in self._answers.values()}
        shapes = properties.differing_shapes(self._answers.values())
        if shapes and (self.config.dataset != NODE or len(told) == 1):
            return f"clients' data must have the same channels, classes and image size:\n{shapes}"
        return "clients that cannot take part:\n" + "\n".join(
            f"  {who}: {why}" for who, why in sorted(self._refused.values())
        )

    def _warn_of_refused(self) -> None:
        for node, (who, why) in self._refused.items():
            if (node, why) not in self._logged:
                self._logged.add((node, why))
                log.warning("%s", left_out_line(who, why))

    @property
    def left_out(self) -> list[dict[str, str]]:
        """Who is connected and takes no part, and why, for the record."""
        return [{"who": who, "cause": why} for who, why in sorted(self._refused.values())]

    def _warn_of_silent(self, waited: float) -> None:
        for node in sorted({*self._asked.values(), *self._again}):
            log.warning("%s has not said who it is within %.0f s: the run starts without it", self._name(node), waited)

    def _name(self, node: int) -> str:
        who = self._who.get(node)
        return plain(who.name) if who and who.name else f"SuperNode {node}"

    # Who is there

    def _take_in(self) -> bool:
        """Ask new nodes who they are and take in answers; tell whether there were any."""
        online = set(self.grid.get_node_ids())
        for client_id, node in list(self.node_of.items()):
            if node not in online:
                log.warning("client %d is gone", client_id)
                del self.node_of[client_id]
        for message_id, node in list(self._asked.items()):
            if node not in online:
                del self._asked[message_id]
                self._inbox.forget(message_id)
        for table in (self._answers, self._refused):
            for node in set(table) - online:
                table.pop(node)  # type: ignore[attr-defined]
        self._again = {node: at for node, at in self._again.items() if node in online and at > time.monotonic()}
        self._ask(online - set(self._answers) - set(self._refused) - set(self._asked.values()) - set(self._again))
        answers = self._inbox.take(0) if self._asked else []
        for answer in answers:
            self._receive(self._asked.pop(answer.message_id), answer)
        self._seat_all()
        return bool(answers)

    def _ask(self, nodes: Iterable[int]) -> None:
        new = [Message(wire.encode_query(), node, QUERY) for node in sorted(nodes)]
        if not new:
            return
        named = {info.node_id: Identity(info.public_key, info.name) for info in self.grid.get_nodes()}
        asked = [m.metadata.dst_node_id for m in new]
        for node, message_id in zip(asked, self.grid.push_messages(new), strict=True):
            who = named.get(node)
            self._who[node] = who if who and who.key else Identity(f"node {node}".encode())
            self._queries[node] = self._queries.get(node, 0) + 1
            # undelivered: asked again next time
            if message_id:
                self._asked[message_id] = node
                self._inbox.expect(message_id, self.config.round_timeout)

    def _receive(self, node: int, answer: Answer) -> None:
        """Take in what a node said about itself, or why it did not."""
        if answer.kind in ("error", "late") and self._queries[node] < _QUERIES:
            pause = min(_PAUSE, self.config.available_timeout / 10)
            self._again[node] = time.monotonic() + pause * self._queries[node]
            return
        who = "a node" if self._who[node].name == "" else self._name(node)
        try:
            if answer.content is None:
                raise wire.WireError(answer.cause if answer.kind == "malformed" else f"no properties: {answer.reason}")
            given = properties.known(wire.decode_properties(answer.content))
            who = claimed(given)
            if given.get(wire.ERROR):
                raise wire.WireError(wire.one_line(given[wire.ERROR]))
            self._answers[node] = given
        except wire.WireError as error:
            self._refused[node] = who, str(error)

    def _most_alike(self) -> Properties | None:
        """Return an answer whose names most others share, as their tags say; None where no answer has tags.

        The first that more than half agree with is taken, so that a few comparisons with all do where sites are alike.
        """
        answers = [given for given in self._answers.values() if wire.FEATURE_TAGS in given]
        tags = [properties.tags(given) for given in answers]
        best, most = None, 0
        for given, own in zip(answers, tags, strict=True):
            alike = sum(own.alike(theirs) for theirs in tags)
            if alike > most:
                best, most = given, alike
            if 2 * most > len(answers):
                break
        return best

    # Which node is which client

    def _seat_all(self) -> None:
        """Give every node that answered the client id it names, or note why not; before the start all anew, after every answer."""
        if not self._started:
            self.num_clients = (
                self.config.num_clients or most_common(properties.num_clients(p) for p in self._answers.values()) or 0
            )
            self.shape = most_common(properties.shape(p) for p in self._answers.values())
            if self.config.dataset == NODE:
                self.names = most_common(map(properties.names, self._answers.values()))
                if set(self._answers) != self._compared:
                    self.like, self._compared = self._most_alike(), set(self._answers)
            self.key_list = most_common(properties.key_list(p) for p in self._answers.values())
            self.hashes = most_common(
                found for p in self._answers.values() if (found := told_hashes(p)) and found.partition
            )
            self.node_of, self.properties, self._holders = {}, {}, Holders()
        seated = set(self.node_of.values())
        for node, given in self._answers.items():
            if node not in seated:
                try:
                    self._refused.pop(node, None)
                    self._seat(node, given)
                except wire.WireError as error:
                    self._refused[node] = claimed(given), str(error)

    def _seat(self, node: int, given: Properties) -> None:
        client_id = properties.check(given, self.num_clients)
        if self.config.dataset == NODE:
            properties.check_names(given, self.names)
            if (
                self.config.private
                and self.like is not None
                and not properties.tags(given).alike(properties.tags(self.like))
            ):
                raise wire.WireError(
                    f"its features or classes are not called as those of {claimed(self.like)} and most others, or are in another "
                    "order; which these are only the sites can compare"
                )
        if properties.shape(given) != self.shape:
            raise wire.WireError(
                f"its data have {properties.describe(properties.shape(given))}, the others' {properties.describe(self.shape)}"
            )
        self._check_data(client_id, told_hashes(given))
        if self.config.private:
            properties.check_keys(given, self.key_list, self.num_clients)
        self._holders.claim(client_id, self._who[node], client_id in self.node_of)
        if client_id in self.properties and self._started:
            log.warning("client %d is now another SuperNode", client_id)
        if client_id in self.node_of:
            self._refused[self.node_of[client_id]] = f"client {client_id}", "two SuperNodes carry this partition-id"
        self.node_of[client_id] = node
        self.properties[client_id] = given
        if self._started:
            self._record_hashes()

    def _check_data(self, client_id: int, found: DataHashes | None) -> None:
        """Raise WireError for a client that holds other data than the run started with, or than the others hold."""
        if found is None:
            return
        whose = None if found.partition else client_id
        if differs := found.difference(self.recorded.get(whose, found)):
            raise wire.WireError(f"its {differs} is not what the run started with")
        if whose is None and self.hashes is not None and (differs := found.difference(self.hashes)):
            raise wire.WireError(f"its {differs} is not the others'")

    def _record_hashes(self) -> None:
        """Keep what data the run has, for clients that come later or again."""
        for client_id in self.node_of:
            found = told_hashes(self.properties[client_id])
            if found is not None:
                self.recorded.setdefault(None if found.partition else client_id, found)


def claimed(given: Properties) -> str:
    """Say which client a node says it is."""
    return f"client {wire.one_line(given.get('client-id', '?'))[:40]}"


def most_common(values: Iterable[T | None]) -> T | None:
    """Return the value that occurs most often, of several the first; None if there is none."""
    counted = Counter(value for value in values if value is not None)
    return max(counted, key=lambda value: counted[value]) if counted else None
