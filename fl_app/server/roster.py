"""The roster: which SuperNode is which client. Each new node is asked once for its properties.

Flower's node ids are random and change when a SuperNode restarts. Only this module and the exchange of messages use
them. All other code uses client ids (a SuperNode's partition-id). Each answer is examined once, at a cost that does not
grow with the number of earlier answers.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from flwr.app import Message
from flwr.serverapp import Grid

from fl_app import software, wire
from fl_app.checksums import DataHashes
from fl_app.config import RunConfig
from fl_app.data.moments import added
from fl_app.errors import UserError, listed, plain
from fl_app.known_names import SCALING
from fl_app.server import properties
from fl_app.server.agreement import Agreed, Agreement, most_alike
from fl_app.server.identity import Holders, Identity
from fl_app.server.progress_protocol import left_out_line
from fl_app.server.properties import Properties, Shape, Told
from fl_app.server.replies import Answer, Inbox
from fl_app.server.superlink import SuperLink, has_fixed_nodes
from fl_app.sources import NODE

log = logging.getLogger("corolla")

POLL_SECONDS = 0.1
# Seconds after which the log reports that nodes have not answered.
_SILENT_SECONDS = 60
# Most queries to a node that answers with an error, or too late.
_QUERIES = 3
# Seconds before the second query, twice that before the third; at most a tenth of available-timeout.
_PAUSE = 0.5
# Seconds that a round waits for newcomers' answers that are on their way.
_ARRIVAL = 2.0
# After scanning all nodes, pause nine times as long as the scan took, at least POLL_SECONDS: scans take a tenth of the time.
_REST = 9
# Most client ids in an error.
_MOST_SHOWN = 50


class Roster:
    """The clients of a run: each client's node (`node_of`) and its answer to the query (`properties`).

    progress(what, done, total) is called as clients connect, and while none does. link: the grid's access to single
    replies, None if it has none.
    """

    def __init__(
        self, grid: Grid, config: RunConfig, progress: Callable[[str, int, int], None], link: SuperLink | None = None
    ) -> None:
        self.grid = grid
        self.config = config
        self.progress = progress
        # The facts that a client must share to get its id. Before the start, a new majority can change them.
        self.agreed = Agreed(config.num_clients)
        self._agreement = Agreement(config)
        # number of answers when all ids were last assigned
        self._seated_among = 0
        # Hashes of the data that the run started with: by client id if each client has its own data, else under None.
        self.recorded: dict[int | None, DataHashes] = {}
        self.properties: dict[int, Properties] = {}
        self.node_of: dict[int, int] = {}  # client id -> node id
        # node id -> client id, of all connected nodes
        self._client_of: dict[int, int] = {}
        # client id -> node id, if known before the clients answer (`expect`): of all clients, and of those not asked yet
        self._known: Mapping[int, int] = {}
        self._unmet: dict[int, int] = {}
        self._inbox = Inbox(grid, link)
        self._online: set[int] = set()
        # time of the next scan of all nodes
        self._next_look = 0.0
        # nodes to be queried
        self._unasked: set[int] = set()
        # id of a pending query -> node id
        self._asked: dict[str, int] = {}
        # node id -> number of queries
        self._queries: dict[int, int] = {}
        # node id -> its answer, of connected nodes in the order of their answers
        self._answers: dict[int, Told] = {}
        # nodes with an answer and no client id: not tried yet; refused because another node holds the client id or the key
        self._unseated: list[int] = []
        self._contested: set[int] = set()
        # whether a client id or a key may have become free, so that refused nodes are tried again
        self._vacated = False
        self._who: dict[int, Identity] = {}
        # node id -> the client it claims to be, why it cannot take part
        self._refused: dict[int, tuple[str, str]] = {}
        self._logged: set[tuple[int, str]] = set()  # refusals that were logged
        # nodes that had not answered when a meeting ended
        self._silent: set[int] = set()
        self._unlogged: list[int] = []
        # clients whose software was not compared with the server's yet
        self._uncompared: list[int] = []
        # node id -> time of the next query, after an error
        self._again: dict[int, float] = {}
        self._holders = Holders()
        self._started = False

    @property
    def num_clients(self) -> int:
        """Number of the run's clients, by the config or by most nodes; 0 until it is known."""
        return self.agreed.num_clients

    @property
    def shape(self) -> Shape | None:
        """Shape of most clients' data."""
        return self.agreed.shape

    @property
    def hashes(self) -> DataHashes | None:
        """Hashes of most clients' data and partition, if all clients share them."""
        return self.agreed.hashes

    @property
    def client_ids(self) -> list[int]:
        """Ids of connected clients, sorted. A client may not have sent its properties yet (see `meet`)."""
        return sorted([*self.node_of, *self._unmet])

    @property
    def minimum(self) -> int:
        """Number of clients that must be connected before a round starts."""
        return self.config.min_available_clients or self.num_clients or 1

    def node(self, client_id: int) -> int:
        """Return the node id of a connected client."""
        return self.node_of[client_id] if client_id in self.node_of else self._unmet[client_id]

    def client(self, node: int) -> int:
        """Return the client id of a connected node."""
        return self._client_of[node]

    def expect(self, nodes: Mapping[int, int]) -> None:
        """Query each client only when it is first needed (`meet`). nodes: node id by client id."""
        self._known, self._unmet = nodes, dict(nodes)
        self._client_of = {node: client_id for client_id, node in nodes.items()}

    def wait(self) -> None:
        """Wait until `minimum` clients are connected, and every connected node has answered or has had its time.

        Refused and silent nodes are left out, and the log names them. Raises UserError if `available-timeout` passes
        with too few clients, or at once if no others can come or every client has refused. While answers are pending,
        the limit is at least `round-timeout`.
        """
        if self._known and not self._started:
            self._meet_first()
            return
        started = time.monotonic()
        hinted = False
        while True:
            waited = time.monotonic() - started
            answered = self._take_in(late=waited > self.config.available_timeout)
            pending = self._pending
            if not pending:
                self._warn_of_refused()
            if len(self.node_of) >= self.minimum and (not pending or waited > self.config.available_timeout):
                self._warn_of_refused()
                self._warn_of_silent(waited)
                self._start()
                return
            self.progress("clients connected", len(self.node_of), self.minimum)
            if self._asked and waited > _SILENT_SECONDS and not self._started and not hinted:
                hinted = True
                why = "the machine is busy" if os.environ.get(wire.SIMULATION) else "a site may have to approve the run"
                log.info("%d SuperNodes have not answered yet: %s", len(self._asked), why)
            limit = max(self.config.available_timeout, self.config.round_timeout if pending else 0)
            if waited > limit or (not pending and self._all_refused):
                raise UserError(self._too_few(waited))
            if not answered:
                time.sleep(POLL_SECONDS)

    def meet(self, client_ids: Sequence[int]) -> bool:
        """Query those of the clients that were not asked yet. Return when they have answered or have had their time.

        Return whether all of the clients take part. Refused and silent clients leave `client_ids`, and the log names
        them. Raises UserError if fewer than `minimum` clients are left.
        """
        nodes = [self._unmet.pop(i) for i in client_ids if i in self._unmet]
        if not nodes:
            return all(i in self.node_of for i in client_ids)
        # those that were silent when they were needed first: no later meeting waits for them
        silent = self._unanswered
        self._ask(nodes)
        heard = time.monotonic()
        while (left := self._left_of(silent)) and time.monotonic() - heard <= self.config.available_timeout:
            self.progress("clients queried", len(nodes) - left, len(nodes))
            if self._take_answers():
                heard = time.monotonic()
            else:
                time.sleep(POLL_SECONDS)
        self._warn_of_refused()
        self._warn_of_silent(time.monotonic() - heard)
        if len(self.node_of) + len(self._unmet) < self.minimum:
            raise UserError(self._too_few(0.0))
        return all(i in self.node_of for i in client_ids)

    def agreed_scaling(self) -> dict[str, list[float]] | None:
        """Return the scaling of raw numbers over all connected sites, as in run.json; None if no site sends sums."""
        told = [self._answers[node].sums for _, node in sorted(self.node_of.items())]
        known = [sums for sums in told if sums is not None]
        if not known:
            return None
        found = added(known).scaling
        lists = (found.mean, found.std, found.shift, found.scale, ())
        return {name: [*values] for name, values in zip(SCALING, lists, strict=True)}

    def refresh(self) -> None:
        """Take in nodes that came or went since the last round. Wait only if fewer than `minimum` clients are left."""
        self._next_look = 0.0
        self._take_in()
        until = time.monotonic() + _ARRIVAL
        # a node that has answered takes part in this round
        while self._asked and self._inbox.arriving and time.monotonic() < until:
            time.sleep(POLL_SECONDS / 10)
            self._take_in()
        self._warn_of_refused()
        if len(self.node_of) + len(self._unmet) < self.minimum:
            self.wait()

    # Missing clients, and the causes

    def _too_few(self, waited: float) -> str:
        if (self._started and not self._known) or not self._refused:
            ids = self.client_ids
            shown = str(ids) if len(ids) <= _MOST_SHOWN else f"{str(ids[:_MOST_SHOWN])[:-1]}, ...]"
            return (
                f"min-available-clients: {self.minimum} clients must be connected, {len(ids)} were after "
                f"{waited:.0f} s (client ids {shown})"
            )
        told = {told.names for told in self._answers.values()}
        shapes = properties.differing_shapes(self._answers.values())
        if shapes and (self.config.dataset != NODE or len(told) == 1):
            return f"clients' data must have the same channels, classes and image size:\n{shapes}"
        return "clients that cannot take part:\n" + "\n".join(
            f"  {who}: {why}" for who, why in sorted(self._refused.values())
        )

    @property
    def _all_refused(self) -> bool:
        """Whether waiting has no use before the start: every client has refused, or one has and no node can join."""
        if self._started or not self._refused:
            return False
        everyone = max(self.num_clients, self.minimum)
        return has_fixed_nodes(self.grid) or (not self.node_of and len(self._refused) >= everyone)

    def _refuse(self, node: int, who: str, why: str) -> None:
        self._refused[node] = who, why
        self._unlogged.append(node)

    def _warn_of_refused(self) -> None:
        for node in self._unlogged:
            who, why = self._refused.get(node, ("", ""))
            if why and (node, why) not in self._logged:
                self._logged.add((node, why))
                log.warning("%s", left_out_line(who, why))
        self._unlogged.clear()
        if self._started:
            for line in self.notes_on_software():
                log.warning("%s", line)

    def notes_on_software(self) -> list[str]:
        """Return a line for each software that differs from the server's, with its clients. Each client is named once."""
        here, found = software.announced(), dict[str, list[int]]()
        for client_id in dict.fromkeys(self._uncompared):
            if client_id in self.node_of:
                there = self._answers[self.node_of[client_id]].software
                if differs := software.differences(here, there):
                    found.setdefault(differs, []).append(client_id)
        self._uncompared = []
        return [
            f"{'client' if len(ids) == 1 else 'clients'} {listed([str(i) for i in sorted(ids)], most=_MOST_SHOWN)}: "
            f"{differs} as the server: results may differ in bits"
            for differs, ids in found.items()
        ]

    @property
    def left_out(self) -> list[dict[str, str]]:
        """Connected nodes that take no part, each with the cause, for the record."""
        return [{"who": who, "cause": why} for who, why in sorted(self._refused.values())]

    def _warn_of_silent(self, waited: float) -> None:
        if silent := self._unanswered - self._silent:
            goes_on = "goes on" if self._started else "starts"
            known = {node: f"client {client_id}" for client_id, node in self._known.items()}
            for node in sorted(silent):
                who = known.get(node) or self._name(node)
                log.warning("%s has not answered within %.0f s: the run %s without it", who, waited, goes_on)
        self._silent = self._unanswered

    def _name(self, node: int) -> str:
        who = self._who.get(node)
        return plain(who.name) if who and who.name else f"SuperNode {node}"

    # Connected nodes

    @property
    def _pending(self) -> bool:
        """Whether a node has yet to answer."""
        return bool(self._asked or self._again)

    @property
    def _unanswered(self) -> set[int]:
        """Nodes that have yet to answer."""
        return {*self._asked.values(), *self._again}

    def _left_of(self, silent: set[int]) -> int:
        """Return the number of nodes that have yet to answer, without those that were silent before."""
        left = len(self._asked) + len(self._again)
        return left - len(silent & self._unanswered) if silent else left

    def _start(self) -> None:
        """Fix the facts that clients agree on.

        Keep the hashes of the data, to check clients that come later or return.
        """
        self._started = True
        for client_id in self.node_of:
            self._record_hashes(client_id)

    def _meet_first(self) -> None:
        """Query clients one by one until one answers: its facts are enough to start the run."""
        for client_id in self._known:
            self.meet([client_id])
            if self.node_of:
                break
        self._start()

    def _take_in(self, late: bool = False) -> bool:
        """Query new nodes and take in answers. Return whether there were any answers.

        late: assign client ids even if answers are pending.
        """
        if not self._known and time.monotonic() >= self._next_look:
            self._look_around()
        return self._take_answers(late)

    def _look_around(self) -> None:
        """Find nodes that came or went, and query the new ones. The cost grows with the number of nodes."""
        started = time.monotonic()
        if not (self._online and has_fixed_nodes(self.grid)):
            online = set(self.grid.get_node_ids())
            if gone := self._online - online:
                self._leave(gone)
            self._unasked = (self._unasked & online) | (online - self._online)
            self._online = online
        now = time.monotonic()
        self._next_look = now + max(POLL_SECONDS, _REST * (now - started))
        unasked, self._unasked = self._unasked, set()
        self._ask(unasked)

    def _leave(self, gone: set[int]) -> None:
        """Forget nodes that have gone. Before the start, the others are counted and given client ids anew."""
        for node in gone:
            client_id = self._client_of.pop(node, None)
            if client_id is not None:
                log.warning("client %d is gone", client_id)
                del self.node_of[client_id]
        for message_id, node in list(self._asked.items()):
            if node in gone:
                del self._asked[message_id]
                self._inbox.forget(message_id)
        for node in gone:
            self._answers.pop(node, None)
            self._refused.pop(node, None)
            self._again.pop(node, None)
        self._contested -= gone
        self._unseated = [node for node in self._unseated if node not in gone]
        self._vacated = True
        if not self._started:
            self._agreement = Agreement(self.config)
            for told in self._answers.values():
                self._agreement.add(told)
            self._seat_anew()

    def _ask(self, nodes: Iterable[int]) -> None:
        new = [Message(wire.encode_query(), node, wire.QUERY) for node in sorted(nodes)]
        if not new:
            return
        # nodes that are known from the start need no identity
        infos = () if self._known else self.grid.get_nodes()
        named = {info.node_id: Identity(info.public_key, info.name) for info in infos}
        asked = [m.metadata.dst_node_id for m in new]
        for node, message_id in zip(asked, self.grid.push_messages(new), strict=True):
            who = named.get(node)
            self._who[node] = who if who and who.key else Identity(f"node {node}".encode())
            self._queries[node] = self._queries.get(node, 0) + 1
            if message_id:
                self._asked[message_id] = node
                self._inbox.expect(message_id, self.config.round_timeout)
            else:
                # undelivered: asked again next time
                self._unasked.add(node)

    def _ask_again(self) -> None:
        now = time.monotonic()
        due = [node for node, at in self._again.items() if at <= now]
        for node in due:
            del self._again[node]
        self._ask(due)

    def _take_answers(self, late: bool = False) -> bool:
        """Take in answers and assign client ids. Return whether there were any answers. late: as in `_take_in`."""
        if self._again:
            self._ask_again()
        answers = self._inbox.take(0) if self._asked else []
        for answer in answers:
            self._receive(self._asked.pop(answer.message_id), answer)
        self._seat_new(late)
        return bool(answers)

    def _receive(self, node: int, answer: Answer) -> None:
        """Take in a node's answer, or the reason why it has none. Schedule another query after an error."""
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
            if error := wire.error_in(given):
                raise wire.WireError(error)
            told = Told(given)
            properties.check_wire(told.software)
            self._answers[node] = told
            self._unseated.append(node)
            if not self._started:
                self._agreement.add(told)
        except wire.WireError as error:
            self._refuse(node, who, str(error))

    # Which node is which client

    def _seat_new(self, late: bool) -> None:
        """Give every node that has answered the client id it claims, or record why not.

        Before the start, a new majority makes all ids be assigned anew. The cost grows with the number of answers. So
        this waits until the number of answers has doubled, no answer is pending, or `late` is set.
        """
        if not self._started and self._unseated and self._outdated:
            if self._pending and not late and len(self._answers) < 2 * self._seated_among:
                return
            self._seat_anew()
            return
        if self._vacated:
            self._vacated = False
            waiting = self._contested | set(self._unseated)
            self._unseated = [node for node in self._answers if node in waiting]
        unseated, self._unseated = self._unseated, []
        for node in unseated:
            self._seat(node)

    @property
    def _outdated(self) -> bool:
        """Whether the client ids rest on facts that most clients no longer share.

        Always true in private runs with sites' own data: the most common names are found by comparing all answers. This
        is cheap, because sites are few.
        """
        if self.config.private and self.config.dataset == NODE:
            return True
        return self._agreement.found != self.agreed

    def _seat_anew(self) -> None:
        """Assign all client ids anew, by the facts that most clients share."""
        like = most_alike(self._answers.values()) if self.config.dataset == NODE else None
        self.agreed = self._agreement.found._replace(like=like)
        self._seated_among = len(self._answers)
        self.node_of, self.properties, self._holders = {}, {}, Holders()
        self._client_of = {node: client_id for client_id, node in self._unmet.items()}
        self._contested, self._unseated, self._vacated = set(), [], False
        self._uncompared = []
        for node in self._answers:
            self._seat(node)

    def _seat(self, node: int) -> None:
        """Give a node that has answered the client id it claims, or record why not."""
        told = self._answers[node]
        self._refused.pop(node, None)
        self._contested.discard(node)
        try:
            client_id = self._checked(node, told)
            try:
                self._holders.claim(client_id, self._who[node], client_id in self.node_of)
            except wire.WireError:
                self._contested.add(node)
                raise
        except wire.WireError as error:
            self._refuse(node, claimed(told.answer), str(error))
            return
        if client_id in self.properties and self._started:
            log.warning("client %d is now another SuperNode", client_id)
            # the key of its last holder may be free
            self._vacated = True
        if client_id in self.node_of:
            other = self.node_of[client_id]
            self._refuse(other, f"client {client_id}", "two SuperNodes carry this partition-id")
            self._contested.add(other)
            del self._client_of[other]
        self.node_of[client_id], self._client_of[node] = node, client_id
        self.properties[client_id] = told.answer
        self._uncompared.append(client_id)
        if self._started:
            self._record_hashes(client_id)

    def _checked(self, node: int, told: Told) -> int:
        """Return the client id that a node claims.

        Raises WireError if its data differ from most clients' or from the run's.
        """
        client_id = properties.check(told.answer, self.num_clients)
        if self._known and self._known.get(client_id) != node:
            raise wire.WireError("its node is another client's")
        if self.config.dataset == NODE:
            properties.check_names(told, self.agreed.names)
            like = self.agreed.like
            if self.config.private and like is not None and not told.tags.alike(like.tags):
                raise wire.WireError(
                    f"its features or classes differ in names or order from those of {claimed(like.answer)} and most others; only "
                    "the sites can compare them"
                )
        if told.shape != self.shape:
            raise wire.WireError(
                f"its data have {properties.describe(told.shape)}, the others' {properties.describe(self.shape)}"
            )
        properties.check_sums(told, self.agreed.sums_kind, self.config.validation_ratio > 0)
        self._check_data(client_id, told.hashes)
        if self.config.private:
            properties.check_keys(told.answer, self.agreed.key_list)
        return client_id

    def _check_data(self, client_id: int, found: DataHashes | None) -> None:
        """Raise WireError if a client's data differ from those that the run started with, or from the others'."""
        if found is None:
            return
        whose = None if found.partition else client_id
        if differs := found.difference(self.recorded.get(whose, found)):
            raise wire.WireError(f"its {differs} has changed since the run started")
        if whose is None and self.hashes is not None and (differs := found.difference(self.hashes)):
            raise wire.WireError(f"its {differs} differs from the others'")

    def _record_hashes(self, client_id: int) -> None:
        """Keep the hashes of a client's data, to check them when the client returns."""
        found = self._answers[self.node_of[client_id]].hashes
        if found is not None:
            self.recorded.setdefault(None if found.partition else client_id, found)


def claimed(given: Properties) -> str:
    """Return the client that a node claims to be, as text."""
    return f"client {wire.one_line(given.get('client-id', '?'))[:40]}"
