"""A run's trail at the server and its sites' audits, side by side (`corolla audit join`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corolla.experiments.runs import RecordedRun
from deploy import audit
from fl_app.errors import UserError, counted, listed, plain
from fl_app.keys import Scalar
from fl_app.server import trail
from fl_app.server.properties import SAMPLES
from fl_app.transport.wire import QUERY
from strategies import METHOD_PARAMS

Line = Mapping[str, Any]
# what a run's line says in the place of a refusal while a person decides
_WAITS = "waits for approval"
# the fields that are read, and their types
_TEXTS = ("message", "run", "key")
_OF_AUDIT = {**dict.fromkeys((*_TEXTS, "kind", "round", "sha256", "refusal", "submitter", "why"), ""), "config": {}}
_OF_TRAIL = {**dict.fromkeys((*_TEXTS, "asked", "answer", "name", "supernode"), ""), "round": 0, "client": -1}


@dataclass(frozen=True)
class SiteAudit:
    """A site's audit, as far as it is about a run.

    given: its path as given. keys: fingerprints of the keys that its SuperNode started with. runs: its lines on the run, one
    for each start. down, up: its lines on downloads and uploads, by Flower's id of the message. refusal: why it refused the run,
    "" if it did not.
    """

    given: Path
    keys: frozenset[str]
    runs: Sequence[Line]
    down: Mapping[str, Line]
    up: Mapping[str, Line]
    refusal: str

    @property
    def data(self) -> dict[str, Any]:
        """The last hash of its data and numbers of samples, as it answered the server."""
        return next((data for line in reversed([*self.up.values()]) if (data := _data(line))), {})


@dataclass(frozen=True)
class Joined:
    """The two sides. rows: a table for each message to a client. clients: one for each client. differences: in words.

    apart: a table for each audit of a site that knows the run and had no part in it: `audit`, and `why`.
    """

    rows: list[dict[str, Any]]
    clients: list[dict[str, Any]]
    differences: list[str]
    apart: list[dict[str, Any]]


def join(run: Path, audits: Iterable[Path]) -> Joined:
    """Compare a run's trail with audits: files or the directories that hold them.

    Raises UserError if the run has no trail, or if an audit was changed, cannot be read or is of none of the run's clients.
    """
    recorded, entries = RecordedRun(run, METHOD_PARAMS), list(_formed(run / trail.FILE, trail.read(run), _OF_TRAIL))
    if not entries:
        raise UserError(
            key=run, rule=f"has no {trail.FILE}: only a deployment's run has one, by this version or a later one"
        )
    runs = {entry["run"] for entry in entries}
    asked = {entry["asked"]: entry["client"] for entry in entries}
    sites, apart = dict[int, SiteAudit](), list[dict[str, Any]]()
    for path in audits:
        found = _read(path, runs)
        whose = {asked[name] for name in found.down if name in asked}
        # it knows the run, and answered at most the questions from before the first round
        had_no_part = bool(found.runs) and {line["message"] for line in found.up.values()} <= {QUERY}
        if not whose and had_no_part:
            apart.append({"audit": str(path), "why": found.refusal or "the server used none of its answers"})
            continue
        if len(whose) != 1:
            what = "is of several clients" if whose else "has none of its messages"
            raise UserError(
                key=path,
                rule=f"{what}; run {recorded.path.name} is {counted(len(runs), 'run')} of Flower: "
                f"{listed(sorted(runs))}",
            )
        sites[whose.pop()] = found
    rows = [_row(entry, sites.get(entry["client"])) for entry in entries]
    by_client: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_client[row["client"]].append(row)
    clients = [_client(i, own, sites.get(i)) for i, own in sorted(by_client.items())]
    return Joined(rows, clients, list(_differences(recorded, rows, clients, sites)), apart)


def _read(path: Path, runs: set[str]) -> SiteAudit:
    if not (path / audit.FILE if path.is_dir() else path).is_file():
        raise UserError(key=path, rule=f"is no audit, nor a directory with an {audit.FILE}")
    # a copy of the file alone lacks the count of its lines
    _ = audit.verify(path) if path.is_dir() else audit.chain_of(path)
    lines = list(_formed(path, audit.entries(path), _OF_AUDIT))
    mine = [line for line in lines if line["run"] in runs]
    by_kind: dict[str, list[Line]] = defaultdict(list)
    for line in mine:
        by_kind[line["kind"]].append(line)
    down, up = ({line["sha256"]: line for line in by_kind[kind]} for kind in ("download", "upload"))
    keys = frozenset(line["key"] for line in lines if line["kind"] == "start" and line["key"])
    said = [line["refusal"] for line in by_kind["run"]] + [line["why"] for line in by_kind["refusal"]]
    refusal = next((why for why in said if why and why != _WAITS), "")
    return SiteAudit(path, keys, by_kind["run"], down, up, refusal)


def _formed(path: Path, lines: Iterable[Line], form: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield lines that others may have written, with texts that are safe to show, and with defaults for what is missing.

    form: the fields that are read, each with its default. Raises UserError for a field of another type.
    """
    for number, line in enumerate(lines, 1):
        found = {**form, **line}
        for name, default in form.items():
            if type(found[name]) is not type(default):
                what = type(default).__name__
                raise UserError(
                    f"{path}: line {number}: {name} must be a {what}, got {type(found[name]).__name__}", key=name
                )
        yield {name: plain(value) if isinstance(value, str) else value for name, value in found.items()}


def _row(entry: Mapping[str, Any], site: SiteAudit | None) -> dict[str, Any]:
    """Return a message's row: the server's entry, and whether the site has the message and the answer. None: no audit."""
    down = None if site is None else entry["asked"] in site.down
    up = None if site is None or not entry["answer"] or entry.get("cause") else entry["answer"] in site.up
    return {**entry, "site-received": down, "site-answered": up}


def _client(client: int, rows: Sequence[Mapping[str, Any]], site: SiteAudit | None) -> dict[str, Any]:
    last = rows[-1]
    return {
        "client": client,
        "name": last["name"],
        "supernode": last["supernode"],
        "keys": sorted({row["key"] for row in rows}),
        "runs": sorted({row["run"] for row in rows}),
        "messages": len(rows),
        "answers": sum(bool(row["answer"]) and not row.get("cause") for row in rows),
        "audit": "" if site is None else str(site.given),
        "submitters": [] if site is None else sorted({str(line.get("submitter", "")) for line in site.runs} - {""}),
        **({} if site is None else site.data),
    }


def _differences(
    run: RecordedRun,
    rows: Sequence[Mapping[str, Any]],
    clients: Sequence[Mapping[str, Any]],
    sites: Mapping[int, SiteAudit],
) -> Iterator[str]:
    called = {
        each["client"]: f"client {each['client']}" + f" ({plain(each['name'])})" * bool(each["name"])
        for each in clients
    }
    yield from (f"{called[each['client']]}: no audit of it was given" for each in clients if not each["audit"])
    for row in rows:
        what = f"{called[row['client']]}, round {row['round']}, {row['message']}"
        if row["site-received"] is False:
            yield f"{what}: the server has sent {row['asked']}, its audit has no such download"
        if row["site-answered"] is False:
            yield f"{what}: the server has the answer {row['answer']}, its audit has no such upload"
    known = {row["answer"] for row in rows}
    keys_of = {each["client"]: each["keys"] for each in clients}
    for client, site in sites.items():
        who = called[client]
        for name, line in site.up.items():
            # the trail has no questions from before the first round
            if name not in known and (line["round"] or line["message"] != QUERY):
                what = f"{who}, round {line['round']}, {line['message']}"
                yield f"{what}: its audit has the upload {name}, the server has no such answer"
        if site.keys and not {*keys_of[client]} <= site.keys:
            keys = listed(keys_of[client]), listed(sorted(site.keys))
            yield f"{who}: the server knows it by the key {keys[0]}, its SuperNode has started with {keys[1]}"
        if not site.runs:
            yield f"{who}: its audit has no line about the start of the run"
        for line in site.runs:
            if line["refusal"] in ("", _WAITS):
                yield from (f"{who}: {text}" for text in _config_differences(run, line["config"]))


def _config_differences(run: RecordedRun, theirs: Mapping[str, Scalar]) -> Iterator[str]:
    """Yield the keys whose value at the site is not the run's. Keys that a resumed run may change are left out."""
    for spec, value in run.config.own_keys():
        if (
            not spec.may_change_on_resume
            and spec.name != "num-clients"
            and (there := theirs.get(spec.name, spec.default)) != value
        ):
            yield f"{spec.name} is {value!r} in the run's folder, {there!r:.200} in its audit"


def _data(line: Line) -> dict[str, Any]:
    found = {name: line[name] for name in ("data-sha256", *SAMPLES) if name in line}
    # a private run's numbers are not told
    return {name: value for name, value in found.items() if isinstance(value, int if name in SAMPLES else str)}
