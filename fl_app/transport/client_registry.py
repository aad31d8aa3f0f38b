"""The registry of clients: which SuperNode is which client. Each new node is queried once for its report.

Flower's node ids are random and change when a SuperNode restarts. Only this module and the exchange of messages use
them. All other code uses client ids (a SuperNode's partition-id). Each report is examined once, at a cost that does not
grow with the number of earlier reports.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from operator import itemgetter
from typing import TYPE_CHECKING

from flwr.app import Message
from flwr.serverapp import Grid

from fl_app import software
from fl_app.checksums import DataHashes
from fl_app.config import RunConfig
from fl_app.data.moments import added
from fl_app.data.spelling import spellings
from fl_app.errors import UserError, listed, plain
from fl_app.known_names import SCALING
from fl_app.server import properties
from fl_app.server.events import LeftOut, tell
from fl_app.server.properties import ClientReport, Properties
from fl_app.server.run_folder import called, name_of
from fl_app.sources import NODE
from fl_app.transport import wire
from fl_app.transport.agreement import Agreed, Agreement, majority, remarks
from fl_app.transport.identity import Holders, Identity
from fl_app.transport.inprocess import InProcessGrid
from fl_app.transport.replies import Answer, Inbox, SuperLinkCalls, has_fixed_nodes

if TYPE_CHECKING:
    from fl_app.privacy.keyring import Statements

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
FEW = 1000
"""Most clients for which `discover = auto` queries all of them before the first round."""


class Stage(Enum):
    """What is known of a connected node (`ClientRegistry` has the diagram)."""

    FOUND = auto()
    ASKED = auto()
    PAUSED = auto()
    ANSWERED = auto()
    CLIENT = auto()
    CONTESTED = auto()
    REFUSED = auto()


@dataclass(eq=False)
class Node:
    """A connected SuperNode.

    - `who`: its identity.
    - `queries`: number of queries to it. `due`: time of the next one, if it is PAUSED.
    - `report`: its answer to the query. `matched`: the same by the run's columns, if its own have another order, or are more.
    - `client_id`: the client that it is, or that it is known to be before it answers.
    - `left_out`: the client that it claims to be, and why it takes no part.
    """

    id: int
    stage: Stage = Stage.FOUND
    who: Identity = Identity(b"")
    queries: int = 0
    due: float = 0.0
    report: ClientReport | None = None
    matched: ClientReport | None = None
    client_id: int = -1
    left_out: tuple[str, str] = ("", "")

    @property
    def name(self) -> str:
        """Its registered name, or its number."""
        return plain(self.who.name) if self.who.name else f"SuperNode {self.id}"


class ClientRegistry:
    """The clients of a run: each client's node (`node_of`) and its report (`properties`).

    A connected node is at one of these stages. A node that goes is forgotten, and those it stood in the way of are tried again:

        FOUND ── query ──► ASKED ── report ──► ANSWERED ──────────► CLIENT
          ▲               │  ▲  │                │  ▲ │                │
          └─ undelivered ─┘  │  │ error, late    │  │ └─ its id is     │ another node has
                             │  ▼                │  │    another's ─►  ▼ its id now
                           PAUSED ─ the last ─►  │  └─ a node went ─ CONTESTED
                                     query       ▼
                                      └─────► REFUSED

    Before the start, a new majority for the facts of `agreed` makes every node with a report ANSWERED again.

    progress(what, done, total) is called as clients connect, and while none does. link: the grid's access to single
    replies, None if it has none. before: the features of the run that this one goes on from, by which columns are matched.
    """

    def __init__(
        self,
        grid: Grid,
        config: RunConfig,
        progress: Callable[[str, int, int], None],
        link: SuperLinkCalls | None = None,
        before: tuple[str, ...] = (),
    ) -> None:
        self.grid = grid
        self.config = config
        self.progress = progress
        # The facts that a client must share to get its id. Before the start, a new majority can change them.
        self.agreed = Agreed(config.num_clients)
        # Hashes of the data that the run started with: by client id if each client has its own data, else under None.
        self.recorded: dict[int | None, DataHashes] = {}
        # What tells whether the clients of a private run have signed something.
        self.statements: Statements | None = None
        self.properties: dict[int, Properties] = {}
        # client id -> node id
        self.node_of: dict[int, int] = {}
        self._before = before
        # Whether columns are matched by the server: those of sites, and of data that another run had in another order. Sites of a
        # private run do so themselves.
        self._by_name = not config.private and (config.dataset == NODE or bool(self._before))
        self._agreement = Agreement(config, self._before)
        # number of reports when all ids were last assigned, and what most of these said
        self._assigned_among, self._assigned_by = 0, self.agreed
        self._nodes: dict[int, Node] = {}
        # nodes by stage, each in the order in which they came to it; those with a report, in the order of their reports
        self._at: dict[Stage, dict[int, Node]] = {stage: {} for stage in Stage}
        self._reported: dict[int, Node] = {}
        # id of a pending query -> node
        self._queries: dict[str, Node] = {}
        # nodes by client id, if known before the clients answer (`expect`); a client not queried yet is FOUND
        self._known: dict[int, Node] = {}
        self._inbox = Inbox(grid, link)
        # time of the next scan of all nodes
        self._next_look = 0.0
        self._holders = Holders()
        # refusals that the log has: a node's id, and the cause
        self._logged: set[tuple[int, str]] = set()
        # nodes that had not answered when a wait ended
        self._silent: set[Node] = set()
        # clients that were not compared with the server and the others yet, and the lines about those that were
        self._uncompared: list[int] = []
        self._compared = 0
        self._said: set[str] = set()
        self._started = False

    @property
    def num_clients(self) -> int:
        """Number of the run's clients, by the config or by most nodes; 0 until it is known."""
        return self.agreed.num_clients

    @property
    def client_ids(self) -> list[int]:
        """Ids of connected clients, sorted. A client may not have sent its properties yet (see `query`)."""
        unmet = [node.client_id for node in self._at[Stage.FOUND].values()] if self._known else []
        return sorted([*self.node_of, *unmet])

    @property
    def minimum(self) -> int:
        """Number of clients that must be connected before a round starts."""
        there = self.num_clients - len(self.config.gone)
        return min(self.config.min_available_clients or there, there) or 1

    def node(self, client_id: int) -> int:
        """Return the node id of a connected client."""
        return self.node_of[client_id] if client_id in self.node_of else self._known[client_id].id

    def identity(self, client_id: int) -> Identity:
        """Return the identity of a connected client's node, as the SuperLink knows it."""
        return self._nodes[self.node(client_id)].who

    def client(self, node: int) -> int:
        """Return the client id of a connected node."""
        return self._nodes[node].client_id

    def expect(self, nodes: Mapping[int, int]) -> None:
        """Query each client only when it is first needed (`query`). nodes: node id by client id."""
        for client_id, node_id in nodes.items():
            if client_id not in self.config.gone:
                self._known[client_id] = node = self._found(node_id)
                node.client_id = client_id

    def wait(self) -> None:
        """Wait until `minimum` clients are connected, and every connected node has answered or has had its time.

        Refused and silent nodes are left out, and the log names them. Raises UserError if `available-timeout` passes
        with too few clients, or at once if no others can come or every client has refused. While answers are pending,
        the limit is at least `round-timeout`.
        """
        if self._known and not self._started:
            # one answer has the facts that are enough to start the run
            for client_id in self._known:
                self.query([client_id])
                if self.node_of:
                    break
            self._start()
            return
        started = time.monotonic()
        hinted = False
        while True:
            waited = time.monotonic() - started
            answered = self._take_in(late=waited > self.config.available_timeout)
            pending = bool(self._unanswered)
            if not pending:
                self._warn_of_refused()
            if len(self.node_of) >= self.minimum and (not pending or waited > self.config.available_timeout):
                self._warn_of_refused()
                self._warn_of_silent(waited)
                self._start()
                return
            self.progress("clients connected", len(self.node_of), self.minimum)
            if self._queries and waited > _SILENT_SECONDS and not self._started and not hinted:
                hinted = True
                why = "the machine is busy" if os.environ.get(wire.SIMULATION) else "a site may have to approve the run"
                log.info("%d SuperNodes have not answered yet: %s", len(self._queries), why)
            limit = max(self.config.available_timeout, self.config.round_timeout if pending else 0)
            if waited > limit or (not pending and self._all_refused):
                raise self._too_few(waited)
            if not answered:
                time.sleep(POLL_SECONDS)

    def query(self, client_ids: Sequence[int]) -> bool:
        """Query those of the clients that were not asked yet. Return when they have answered or have had their time.

        Return whether all of the clients take part. Refused and silent clients leave `client_ids`, and the log names
        them. Raises UserError if fewer than `minimum` clients are left.
        """
        if self.node_of.keys() >= {*client_ids}:
            return True
        nodes = [node for i in client_ids if (node := self._known.get(i)) and node.stage is Stage.FOUND]
        if not nodes:
            return False
        # those that were silent when they were needed first: no later meeting waits for them
        silent = self._unanswered
        self._ask(nodes)
        heard = time.monotonic()
        while (left := len(self._unanswered - silent)) and time.monotonic() - heard <= self.config.available_timeout:
            self.progress("clients queried", len(nodes) - left, len(nodes))
            if self._take_in():
                heard = time.monotonic()
            else:
                time.sleep(POLL_SECONDS)
        self._warn_of_refused()
        self._warn_of_silent(time.monotonic() - heard)
        if len(self.client_ids) < self.minimum:
            raise self._too_few(0.0)
        return self.node_of.keys() >= {*client_ids}

    def columns(self, client_id: int) -> dict[str, str]:
        """Return the scalar that a client needs to take its columns by the run's names; {} if it has these."""
        node = self._nodes[self.node(client_id)]
        told = node.report if node.matched else None
        return {properties.COLUMNS: json.dumps(self.agreed.names.features)} if told and self.agreed.names else {}

    def agreed_scaling(self) -> dict[str, list[float]] | None:
        """Return the scaling of raw numbers over all connected sites, as in run.json; None if no site sends sums."""
        known = []
        for _, node_id in sorted(self.node_of.items()):
            report = self._nodes[node_id].matched or self._nodes[node_id].report
            if report and (sums := report.sums) is not None:
                known.append(sums)
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
        while self._queries and self._inbox.arriving and time.monotonic() < until:
            time.sleep(POLL_SECONDS / 10)
            self._take_in()
        self._warn_of_refused()
        if len(self.client_ids) < self.minimum:
            self.wait()

    # Missing clients, and the causes

    def _too_few(self, waited: float) -> UserError:
        if (self._started and not self._known) or not self._left_out:
            ids = self.client_ids
            shown = str(ids) if len(ids) <= _MOST_SHOWN else f"{str(ids[:_MOST_SHOWN])[:-1]}, ...]"
            return UserError(
                key="min-available-clients",
                rule=f"{self.minimum} clients must be connected, {len(ids)} were after {waited:.0f} s (client ids {shown})",
            )
        reports = [node.report for node in self._reported.values() if node.report]
        shapes = properties.differing_shapes(reports)
        # a private run's clients do not tell their names, which may be why
        of_names = self.config.dataset == NODE and (
            self.config.private or len({report.names for report in reports}) > 1
        )
        if shapes and not of_names:
            return UserError(f"clients' data must have the same channels, classes and image size:\n{shapes}")
        left_out = sorted(node.left_out for node in self._left_out)
        return UserError("clients that cannot take part:\n" + "\n".join(f"  {who}: {why}" for who, why in left_out))

    @property
    def _all_refused(self) -> bool:
        """Whether waiting has no use before the start: every client has refused, or one has and no node can join."""
        if self._started or not self._left_out:
            return False
        gone = self.config.gone
        refused = [node for node in self._left_out if not (node.report and node.report.answer.get("client-id") in gone)]
        everyone = max(self.num_clients - len(gone), self.minimum)
        return has_fixed_nodes(self.grid) or (not self.node_of and len(refused) >= everyone)

    @property
    def _left_out(self) -> list[Node]:
        """Nodes that take no part, each with the cause."""
        return [*self._at[Stage.REFUSED].values(), *self._at[Stage.CONTESTED].values()]

    def _warn_of_refused(self) -> None:
        for node in self._left_out:
            who, why = node.left_out
            if (node.id, why) not in self._logged:
                self._logged.add((node.id, why))
                tell(LeftOut(who=who, why=why))
        if self._started:
            for line in self.notes():
                log.warning("%s", line)

    def notes(self) -> list[str]:
        """Return lines about clients that were not compared yet: other software, remarks on sites' data, names that look alike.

        Clients are compared with each other if there are a tenth more than at the last comparison. So the comparisons of a run
        take time in proportion to its clients, also where they come one by one.
        """
        if not self._uncompared:
            return []
        here, lines, others = software.announced(), list[str](), dict[str, list[str]]()
        for client_id in sorted({*self._uncompared} & self.node_of.keys()):
            report = self._nodes[self.node_of[client_id]].report
            if report and (differs := software.differences(here, report.software)):
                others.setdefault(differs, []).append(str(client_id))
        for differs, ids in others.items():
            who = f"client{'s' * (len(ids) > 1)} {listed(ids, most=_MOST_SHOWN)}"
            lines.append(f"{who}: {differs} as the server: results may differ in bits")
        self._uncompared = []
        if len(self.node_of) >= 1.1 * self._compared:
            self._compared = len(self.node_of)
            lines += self._notes_on_all()
        lines = [line for line in lines if line not in self._said]
        self._said.update(lines)
        return lines

    def _notes_on_all(self) -> list[str]:
        """Return lines about all clients together: columns that the run leaves out, remarks on data, names that look alike."""
        wanted = set(self.agreed.names.features or ()) if self.agreed.names else set()
        goes_on = bool(self._before) and wanted == set(self._before)
        whose = "the run that this one goes on from does" if goes_on else "most others do"
        told, having = dict[int, ClientReport](), dict[str, list[str]]()
        for i, node_id in sorted(self.node_of.items()):
            node = self._nodes[node_id]
            if node.report is None:
                continue
            told[i] = node.matched or node.report
            if node.matched and (more := sorted({*(node.report.names.features or ())} - wanted)):
                having.setdefault(listed(more), []).append(called(i, self.properties))
        lines = []
        for more_of, who in having.items():
            clients = f"client{'s' * (len(who) > 1)} {listed(who)}"
            lines.append(f"{clients}: {whose} not have {more_of}, which the run leaves out")
        lines += remarks(told, self.config.dataset == NODE, lambda i: called(i, self.properties))
        names = filter(None, (name_of(self.properties.get(i, {})) for i in told))
        return [*lines, *spellings("clients", names, "client")]

    @property
    def left_out(self) -> list[dict[str, str]]:
        """Connected nodes that take no part, each with the cause, for the record."""
        found = []
        for node in self._left_out:
            who, why = node.left_out
            found.append({"who": who, "cause": why})
        return sorted(found, key=itemgetter("who", "cause"))

    def _warn_of_silent(self, waited: float) -> None:
        if silent := self._unanswered - self._silent:
            goes_on = "goes on" if self._started else "starts"
            for node in sorted(silent, key=lambda node: node.id):
                who = f"client {called(node.client_id, self.properties)}" if self._known else node.name
                log.warning("%s has not answered within %.0f s: the run %s without it", who, waited, goes_on)
        self._silent = self._unanswered

    # Connected nodes

    def _found(self, node: int) -> Node:
        """Return a new node, which is connected."""
        found = self._nodes[node] = self._at[Stage.FOUND][node] = Node(node)
        return found

    def _move(self, node: Node, stage: Stage, who: str = "", why: str = "") -> None:
        """Move a node to another stage. who, why: the client that it claims to be, and why it takes no part."""
        self._at[node.stage].pop(node.id, None)
        node.stage, node.left_out = stage, (who, why)
        self._at[stage][node.id] = node

    @property
    def _unanswered(self) -> set[Node]:
        """Nodes that have yet to answer."""
        return {*self._at[Stage.ASKED].values(), *self._at[Stage.PAUSED].values()}

    def _start(self) -> None:
        """Fix the facts that clients agree on.

        Keep the hashes of the data, to check clients that come later or return.
        """
        self._started = True
        for client_id in self.node_of:
            self._record_hashes(client_id)

    def _take_in(self, late: bool = False) -> bool:
        """Find nodes that came or went, query new ones, take in answers, give client ids. Return whether there were answers.

        late: assign client ids even if answers are pending. The cost of finding nodes grows with their number.
        """
        started = time.monotonic()
        looks = not self._known and started >= self._next_look
        if looks:
            if not (self._nodes and has_fixed_nodes(self.grid)):
                online = set(self.grid.get_node_ids())
                if gone := [node for node in self._nodes.values() if node.id not in online]:
                    self._leave(gone)
                for node_id in online - self._nodes.keys():
                    self._found(node_id)
            now = time.monotonic()
            self._next_look = now + max(POLL_SECONDS, _REST * (now - started))
        due = [node for node in self._at[Stage.PAUSED].values() if node.due <= started]
        self._ask([*due, *(self._at[Stage.FOUND].values() if looks else ())])
        answers = self._inbox.take(0) if self._queries else []
        for answer in answers:
            self._receive(self._queries.pop(answer.message_id), answer)
        # In private runs with sites' own data the most common names are found by comparing all answers, which are few.
        compares_all = self.config.private and self.config.dataset == NODE
        if self._started or not (compares_all or self._agreement.found != self._assigned_by):
            for node in [*self._at[Stage.ANSWERED].values()]:
                self._assign_client_id(node)
        # A new majority makes all ids be assigned anew, at a cost that grows with the number of reports. So this waits until their
        # number has doubled, no answer is pending, or `late` is set.
        elif self._at[Stage.ANSWERED]:
            if late or not self._unanswered or len(self._reported) >= 2 * self._assigned_among:
                self._assign_anew()
        return bool(answers)

    def _leave(self, gone: list[Node]) -> None:
        """Forget nodes that have gone. Before the start, the others are counted and given client ids anew."""
        for node in gone:
            if node.stage is Stage.CLIENT:
                log.warning("client %s is gone", called(node.client_id, self.properties))
                del self.node_of[node.client_id]
            del self._nodes[node.id], self._at[node.stage][node.id]
            self._reported.pop(node.id, None)
        for message_id in [name for name, node in self._queries.items() if node.id not in self._nodes]:
            del self._queries[message_id]
            self._inbox.forget(message_id)
        if self._started:
            self._try_again()
            return
        self._agreement = Agreement(self.config, self._before)
        for node in self._reported.values():
            if node.report:
                self._agreement.add(node.report)
        self._assign_anew()

    def _ask(self, nodes: Iterable[Node]) -> None:
        new = sorted(nodes, key=lambda node: node.id)
        if not new:
            return
        # nodes that are known from the start need no identity
        infos = () if self._known else self.grid.get_nodes()
        named = {info.node_id: Identity(info.public_key, info.name) for info in infos}
        messages = [Message(wire.encode_query(), node.id, wire.QUERY) for node in new]
        for node, message_id in zip(new, self.grid.push_messages(messages), strict=True):
            who = named.get(node.id)
            node.who = who if who and who.key else Identity(f"node {node.id}".encode())
            node.queries += 1
            # undelivered: asked again next time
            self._move(node, Stage.ASKED if message_id else Stage.FOUND)
            if message_id:
                self._queries[message_id] = node
                self._inbox.expect(message_id, self.config.round_timeout)

    def _receive(self, node: Node, answer: Answer) -> None:
        """Take in a node's report, or the reason why it has none. Schedule another query after an error."""
        if answer.kind in ("error", "late") and node.queries < _QUERIES:
            node.due = time.monotonic() + min(_PAUSE, self.config.available_timeout / 10) * node.queries
            self._move(node, Stage.PAUSED)
            return
        who = node.name if node.who.name else "a node"
        try:
            if answer.content is None:
                raise wire.WireError(answer.cause if answer.kind == "malformed" else f"no properties: {answer.reason}")
            given = properties.known(wire.decode_properties(answer.content))
            who = claimed(given)
            if error := wire.error_in(given):
                raise wire.WireError(error)
            report = ClientReport(given)
            properties.check_wire(report.software)
        except wire.WireError as error:
            self._move(node, Stage.REFUSED, who, str(error))
            return
        node.report = report
        self._reported[node.id] = node
        self._move(node, Stage.ANSWERED)
        if not self._started:
            self._agreement.add(report)

    # Which node is which client

    def _try_again(self) -> None:
        """Let contested nodes claim their client ids again, because an id or a key may have become free."""
        for node in [node for node in self._reported.values() if node.stage in (Stage.ANSWERED, Stage.CONTESTED)]:
            self._move(node, Stage.ANSWERED)

    def _assign_anew(self) -> None:
        """Assign all client ids anew, by the facts that most clients share."""
        reports = [node.report for node in self._reported.values() if node.report]
        like = majority(reports) if self.config.dataset == NODE else None
        self._assigned_by = found = self._agreement.found
        if self._by_name:
            # shapes and sums are those of the columns that the run takes
            matched = Agreement(self.config, self._before)
            for report in reports:
                # one that is malformed is refused when it claims its id
                with contextlib.suppress(wire.WireError):
                    matched.add(properties.by_name(report, found.names) or report)
            found = matched.found._replace(names=found.names)
        self.agreed = found._replace(like=like)
        if self.config.private:
            config = dataclasses.replace(self.config, num_clients=self.num_clients)
            self.statements = properties.statements(reports, self.agreed.key_list, int(self.grid.run.run_id), config)
        self._assigned_among = len(self._reported)
        self.node_of, self.properties, self._holders = {}, {}, Holders()
        self._uncompared = []
        for node in self._reported.values():
            self._move(node, Stage.ANSWERED)
        for node in self._reported.values():
            self._assign_client_id(node)

    def _assign_client_id(self, node: Node) -> None:
        """Give a node that has answered the client id it claims, or record why not."""
        assert node.report is not None, "only nodes with a report are given client ids"
        report, stage, node.matched = node.report, Stage.REFUSED, None
        try:
            if self._by_name:
                node.matched = properties.by_name(report, self.agreed.names)
                report = node.matched or report
            client_id = self._checked(node, report)
            stage = Stage.CONTESTED
            self._holders.claim(client_id, node.who, client_id in self.node_of)
        except wire.WireError as error:
            self._move(node, stage, claimed(report.answer), str(error))
            return
        if client_id in self.properties and self._started:
            log.warning("client %s is now another SuperNode", called(client_id, self.properties))
            # the key of its last holder may be free
            self._try_again()
        if client_id in self.node_of:
            other = self._nodes[self.node_of[client_id]]
            who = f"client {called(client_id, self.properties)}"
            self._move(other, Stage.CONTESTED, who, "two SuperNodes carry this partition-id")
        self.node_of[client_id], node.client_id = node.id, client_id
        self._move(node, Stage.CLIENT)
        self.properties[client_id] = report.answer
        self._uncompared.append(client_id)
        if self._started:
            self._record_hashes(client_id)

    def _checked(self, node: Node, told: ClientReport) -> int:
        """Return the client id that a node claims.

        Raises WireError if its data differ from most clients' or from the run's.
        """
        client_id = properties.check(told.answer, self.num_clients)
        if client_id in self.config.gone:
            raise wire.WireError("the run goes on without it (without)")
        if self._known and self._known.get(client_id) is not node:
            raise wire.WireError("its node is another client's")
        if self.config.dataset == NODE:
            properties.check_names(told, self.agreed.names)
            like = self.agreed.like
            if self.config.private and like is not None and not told.tags.alike(like.tags):
                raise wire.WireError(
                    f"its columns or classes have other names than those of {claimed(like.answer)} and most others; only the sites "
                    "can compare them: their site.toml leaves out a column ([data] exclude), renames it or fills it in"
                )
        if told.shape != (most := self.agreed.shape):
            shapes = (told.shape or "no known shape", most or "no known shape")
            raise wire.WireError("its data have {}, the others' {}".format(*shapes))
        properties.check_sums(told, self.agreed.sums_kind, self.config.validation_ratio > 0)
        if (found := told.hashes) is not None:
            whose = None if found.partition else client_id
            if differs := found.difference(self.recorded.get(whose, found)):
                raise wire.WireError(f"its {differs} has changed since the run started")
            if whose is None and (most_hashes := self.agreed.hashes) and (differs := found.difference(most_hashes)):
                raise wire.WireError(f"its {differs} differs from the others'")
        if self.config.private:
            properties.check_keys(told, client_id, self.agreed.key_list, self.statements)
        return client_id

    def _record_hashes(self, client_id: int) -> None:
        """Keep the hashes of a client's data, to check them when the client returns."""
        report = self._nodes[self.node_of[client_id]].report
        found = report.hashes if report else None
        if found is not None:
            self.recorded.setdefault(None if found.partition else client_id, found)


def claimed(given: Properties) -> str:
    """Return the client that a node claims to be, as text, with its name if it tells one."""
    name = name_of(given)
    return f"client {wire.one_line(given.get('client-id', '?'))[:40]}" + f" ({name})" * bool(name)


def clients_to_meet(grid: Grid, config: RunConfig, needs_all: str = "") -> Mapping[int, int]:
    """Return nodes by client id, if each client is queried when it is first drawn; {} if all are queried first.

    needs_all: why the method needs to know all clients before its first round, "" if it does not. If `discover`, or the
    number of clients, calls for the first way and the second is needed, the log gives the reason.
    """
    if config.discover != "sampled" and (config.discover != "auto" or config.num_clients <= FEW):
        return {}
    why = needs_all
    if config.private:
        why = why or "a private run needs the keys of all clients"
    elif config.dataset == NODE:
        why = why or "the sites' own data must be compared"
    elif type(grid).get_node_ids is not InProcessGrid.get_node_ids:
        why = why or "only their answers show which node is which client"
    if why:
        log.info("discover = all: every client is asked for its properties before the first round, because %s", why)
        return {}
    known = {node - 1: node for node in grid.get_node_ids()}
    log.info(
        "discover = sampled: each of %d clients is asked for its properties when first sampled or evaluated", len(known)
    )
    return known
