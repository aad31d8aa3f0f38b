"""Numbers of a SuperLink and its runs for Prometheus: `python -P -m deploy.prometheus --listen HOST:PORT OPTIONS`.

The process reads the run folders and asks the SuperLink's control port, at every scrape. It writes nothing, and no run
depends on it. `/metrics` has the numbers of TABLE. `/health` answers 200 while the process runs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import logging
import os
import shutil
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from deploy import certificates, detached, superlink_nodes
from deploy.commands import listen_address
from fl_app import log_format
from fl_app.checksums import Stamp, stamp_of
from fl_app.errors import MALFORMED, DeploymentError, UserError, describe, plain
from fl_app.exit_codes import ending_on_bad_input
from fl_app.extras import require
from fl_app.server import events
from fl_app.server.events import EVENTS
from fl_app.server.run_folder import CLIENTS, NAME, read_clients

log = logging.getLogger("corolla")

# run folders with numbers: those that changed last
MOST_FOLDERS = 20
# runs of the SuperLink that are counted by status: its latest
MOST_RUNS = 1000
PREFIX = "corolla_"
FAILED_RUN = "finished:failed"


@dataclass(frozen=True)
class Family:
    """A metric: its name without PREFIX, its kind, its labels, and what it counts."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str

    @property
    def exported(self) -> str:
        """The name under which Prometheus has it."""
        return PREFIX + self.name


TABLE = {
    family.name: family
    for family in (
        Family("info", "gauge", ("corolla", "flwr", "torch"), "1; the labels are the versions"),
        Family("superlink_up", "gauge", (), "1 if the SuperLink answers on its control port, else 0"),
        Family("nodes", "gauge", ("status",), "SuperNodes by the SuperLink's status: online, offline, registered"),
        Family("node_up", "gauge", ("client",), "1 if a registered SuperNode is online, else 0; by the client's name"),
        Family("runs", "gauge", ("status",), f"the SuperLink's latest {MOST_RUNS} runs by status"),
        Family("disk_free_bytes", "gauge", ("place",), "free bytes of the disk under runs or database"),
        Family("disk_size_bytes", "gauge", ("place",), "size of the same disk"),
        Family(
            "certificate_stage",
            "gauge",
            ("file",),
            "0; 1 from two weeks before a certificate's end, 2 from two days, 3 from an hour, 4 afterwards",
        ),
        Family("certificate_days", "gauge", ("file",), "days until a certificate expires; negative afterwards"),
        Family("run_rounds", "gauge", ("run",), "rounds that a run has in all"),
        Family("run_finished", "gauge", ("run",), "1 if a run has its summary, else 0"),
        Family("run_failed", "gauge", ("run",), "1 if an error has ended a run, else 0"),
        Family("run_going", "gauge", ("run",), "1 until a run has finished, failed or been stopped"),
        Family("run_idle_seconds", "gauge", ("run",), "seconds since a run's last event"),
        Family("rounds_total", "counter", ("run",), "finished rounds"),
        Family("phase_seconds_total", "counter", ("run", "phase"), "seconds of the server's rounds by phase"),
        Family("replies_total", "counter", ("run",), "clients' replies that were used"),
        Family("failures_total", "counter", ("run", "client", "cause"), "replies that were dropped"),
        Family("left_out", "gauge", ("run",), "nodes that took no part in the last round"),
        Family("bytes_total", "counter", ("run", "direction"), "bytes of models and arrays: download or upload"),
        Family("score", "gauge", ("run", "metric", "when"), "the last round's headline metric, before and after"),
        Family("loss", "gauge", ("run",), "the last round's training loss"),
    )
}
"""All metrics by name."""

Samples = dict[str, dict[tuple[str, ...], float]]


@dataclass(frozen=True)
class Watched:
    """What the exporter reads: the runs' directory, the SuperLink's control port, its database and certificates.

    connection: the table of Flower's config.
    """

    runs: Path
    connection: Mapping[str, Any]
    database: Path | None = None
    certificates: Sequence[Path] = ()


# A run folder -----------------------------------------------------------------------------------------------------------


@dataclass
class FolderTotals:
    """The sums over the rounds of one run folder. Each call of `read` adds what is new.

    A resumed run repeats rounds; what they cost counts again.
    """

    path: Path
    rounds: int = 0
    planned: int = 0
    replies: int = 0
    seconds: Counter[str] = field(default_factory=Counter)
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    sizes: Counter[str] = field(default_factory=Counter)
    last: events.Round | None = None
    # the event that ended it
    ended: events.Event | None = None
    changed: float = 0.0
    names: dict[str, str] = field(default_factory=dict)
    _named: Stamp | None = None
    _at: tuple[int, int] = (0, 0)

    def read(self) -> None:
        """Add the new events. The file of a run that replaced another one is read from its start."""
        with (self.path / EVENTS).open("rb") as file:
            number = os.fstat(file.fileno()).st_ino
            if self._at[0] not in (0, number):
                self.__init__(self.path)  # type: ignore[misc]
            self.changed = os.fstat(file.fileno()).st_mtime
            file.seek(self._at[1])
            for line in file:
                # the rest of half a line comes later
                if not line.endswith(b"\n"):
                    break
                with contextlib.suppress(*MALFORMED):
                    self._add(events.decode(line.decode()))
                self._at = number, self._at[1] + len(line)
        self._read_names()

    def _read_names(self) -> None:
        """Read the clients' names if their file has changed. Only a name that is no other client's, nor a number, is a label."""
        if (stamp := stamp_of(self.path / CLIENTS)) == self._named:
            return
        found = {i: str(facts[NAME]) for i, facts in read_clients(self.path).items() if facts.get(NAME)}
        counts = Counter(found.values())
        self._named = stamp
        self.names = {i: name for i, name in found.items() if counts[name] == 1 and not name.isdecimal()}

    def _add(self, event: events.Event) -> None:
        match event:
            case events.Started():
                self.rounds, self.planned, self.ended = event.round, event.rounds, None
            case events.Round():
                # everything before the first sum: an event that cannot be read leaves no half of it
                seconds = {name: float(spent) for name, spent in event.seconds.items() if name != "round"}
                # a cause is a metric's label, of which there must be few
                failures = [(str(int(f["client"])), f["cause"]) for f in event.failures if f["cause"] in events.CAUSES]
                sizes = {"download": int(event.download_bytes), "upload": int(event.upload_bytes)}
                self.replies += int(event.clients)
                self.rounds = int(event.round)
                self.seconds.update(seconds)
                self.failures.update(failures)
                self.sizes.update(sizes)
                self.last = event
            case events.Finished() | events.Failed() | events.Stopped():
                self.ended = event

    def samples(self) -> Iterator[tuple[str, tuple[str, ...], float]]:
        """Yield the folder's numbers: a metric's name, the values of its labels, the value."""
        run = self.path.name
        yield "run_rounds", (run,), self.planned
        yield "run_finished", (run,), isinstance(self.ended, events.Finished)
        yield "run_failed", (run,), isinstance(self.ended, events.Failed)
        yield "run_going", (run,), self.ended is None
        yield "run_idle_seconds", (run,), time.time() - self.changed
        yield "rounds_total", (run,), self.rounds
        yield "replies_total", (run,), self.replies
        yield "left_out", (run,), self.last.left_out if self.last else 0
        yield from (("phase_seconds_total", (run, phase), seconds) for phase, seconds in self.seconds.items())
        yield from (("bytes_total", (run, way), size) for way, size in self.sizes.items())
        for (client, cause), count in self.failures.items():
            yield "failures_total", (run, self.names.get(client, client), cause), count
        if self.last is None:
            return
        if self.last.loss is not None:
            yield "loss", (run,), self.last.loss
        for when, value in (("before", self.last.before), ("after", self.last.after)):
            if value is not None:
                yield "score", (run, self.last.metric, when), value


# All of it --------------------------------------------------------------------------------------------------------------


class Exporter:
    """The numbers of now."""

    def __init__(self, watched: Watched) -> None:
        self.watched = watched
        self._folders: dict[Path, FolderTotals] = {}
        self._complained: set[str] = set()
        self._reading = threading.Lock()

    def samples(self) -> Samples:
        """Return every metric's samples: by name, the value by the labels' values."""
        found: Samples = {name: {} for name in TABLE}
        # scrapes share the folders' sums
        with self._reading:
            for name, labels, value in self._all():
                found[name][tuple(map(plain, labels))] = value
        return found

    def _all(self) -> Iterator[tuple[str, tuple[str, ...], float]]:
        yield "info", tuple(version(name) for name in TABLE["info"].labels), 1
        yield from self._places()
        names: dict[str, str] = {}
        for totals in self._newest():
            try:
                totals.read()
                yield from [(name, labels, float(value)) for name, labels, value in totals.samples()]
            # a run's process may have written anything there
            except Exception as error:
                self._complain(f"{totals.path}: has no numbers: {error!r}")
            names |= totals.names
        yield from self._superlink(names)

    def _superlink(self, names: Mapping[str, str]) -> Iterator[tuple[str, tuple[str, ...], float]]:
        """Yield the SuperLink's numbers. names: clients' names by id, as the newest runs have them."""
        try:
            # Flower prints the connection's name
            with contextlib.redirect_stdout(io.StringIO()):
                nodes, runs = superlink_nodes.nodes_and_runs("metrics", self.watched.connection, MOST_RUNS)
        except UserError as error:
            self._complain(str(error))
            yield "superlink_up", (), 0
            return
        yield "superlink_up", (), 1
        states = Counter(node.status for node in nodes)
        yield from (("nodes", (status,), states[status]) for status in sorted({"online", "offline", *states}))
        for node in nodes:
            if node.name and node.status != "unregistered":
                client = node.name.removeprefix("supernode-")
                yield "node_up", (names.get(client, node.name),), float(node.status == "online")
        ends = Counter(":".join(filter(None, (run.status.status, run.status.sub_status))) for run in runs)
        # a series that begins with its first failure would show no increase
        yield from (("runs", (status,), ends[status]) for status in sorted({FAILED_RUN, *ends}))

    def _places(self) -> Iterator[tuple[str, tuple[str, ...], float]]:
        places = {"runs": self.watched.runs}
        if self.watched.database:
            places["database"] = self.watched.database.parent
        for place, path in places.items():
            with contextlib.suppress(OSError):
                usage = shutil.disk_usage(existing(path))
                yield "disk_free_bytes", (place,), usage.free
                yield "disk_size_bytes", (place,), usage.total
        for path in self.watched.certificates:
            try:
                certificate = certificates.read_certificate(path)
                yield "certificate_days", (path.name,), certificates.days_left(certificate)
                yield "certificate_stage", (path.name,), certificates.stage(certificate)
            except UserError as error:
                self._complain(str(error))

    def _newest(self) -> list[FolderTotals]:
        changed: dict[Path, float] = {}
        with contextlib.suppress(OSError):
            for path in self.watched.runs.iterdir():
                with contextlib.suppress(OSError):
                    changed[path] = (path / EVENTS).stat().st_mtime
        newest = sorted(changed, key=lambda path: changed[path])[-MOST_FOLDERS:]
        self._folders = {path: self._folders.get(path) or FolderTotals(path) for path in newest}
        return list(self._folders.values())

    def _complain(self, text: str) -> None:
        """Log a line the first time."""
        text = plain(text)
        if text not in self._complained:
            self._complained.add(text)
            log.warning("%s", text)


def existing(path: Path) -> Path:
    """Return a directory, or the nearest one above it that exists: the first run makes the runs' directory."""
    return next(place for place in (path, *path.resolve().parents) if place.exists())


def version(package: str) -> str:
    """Return a package's version; "" if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


# HTTP -------------------------------------------------------------------------------------------------------------------


def text_of(samples: Samples) -> bytes:
    """Return the samples in Prometheus's text format."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector

    class Collected(Collector):
        def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
            for name, values in samples.items():
                family = TABLE[name]
                make = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
                made = make(family.exported, family.help, labels=family.labels)
                for labels, value in values.items():
                    made.add_metric(labels, value)
                yield made

    registry = CollectorRegistry()
    registry.register(Collected())
    return generate_latest(registry)


def server(at: tuple[str, int], exporter: Exporter) -> ThreadingHTTPServer:
    """Return a server that listens there and answers /metrics and /health. Raises UserError."""

    class Handler(BaseHTTPRequestHandler):
        # seconds that a silent connection may hold its thread
        timeout = 30

        def do_GET(self) -> None:  # noqa: N802
            if self.path not in ("/metrics", "/health"):
                self.send_error(404)
                return
            body = text_of(exporter.samples()) if self.path == "/metrics" else b"ok\n"
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Log no requests."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Log one line, and none about a connection that the other side closed."""
            if not isinstance(error := sys.exception(), ConnectionError | TimeoutError):
                log.warning("a request failed: %s", describe(error or Exception()))

        address_family = socket.AF_INET6 if ":" in at[0] else socket.AF_INET

    try:
        return Server(at, Handler)
    except OSError as error:
        raise DeploymentError(
            key="--metrics", rule=f"cannot listen on {at[0]}, port {at[1]}: {error.strerror}"
        ) from None


def main() -> None:
    """Serve the numbers until the process is ended."""
    parser = argparse.ArgumentParser(prog="deploy.prometheus")
    parser.add_argument("--listen", required=True, metavar="HOST:PORT")
    parser.add_argument("--runs", required=True, type=Path, help="the directory of the run folders")
    parser.add_argument("--control", default="127.0.0.1:8000", help="the SuperLink's control port")
    parser.add_argument("--root-certificates", default="", help="the CA's certificate; without it no TLS")
    parser.add_argument("--database", type=Path, help="the SuperLink's database")
    parser.add_argument("--certificate", type=Path, action="append", default=[], help="a certificate to watch")
    given = parser.parse_args()
    log_format.configure("metrics")
    detached.keep_small()
    connection: dict[str, Any] = {"address": given.control}
    trust = {"root-certificates": given.root_certificates} if given.root_certificates else {"insecure": True}
    with ending_on_bad_input():
        require("prometheus_client", "--metrics")
        exporter = Exporter(Watched(given.runs, connection | trust, given.database, given.certificate))
        server(listen_address(given.listen), exporter).serve_forever()


if __name__ == "__main__":
    main()
