"""`corolla audit join`: a run's trail beside its sites' audits, and every way in which they may differ."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy import audit
from deploy.audit import Audit
from fl_app.server import trail
from fl_app.server.run_folder import RunFolder
from fl_app.transport.wire import QUERY
from tests.conftest import Command, Made

KEYS = ("SHA256:celle", "SHA256:verden")
NAMES = ("celle", "verden")


def sha(round: int, client: int, what: str) -> str:
    return f"{round}{client}{'ab'[what == 'up']}".ljust(64, "0")


def entry(round: int, client: int, **more: Any) -> dict[str, Any]:
    ids = {"asked": sha(round, client, "down"), "answer": sha(round, client, "up")}
    who = {"client": client, "name": NAMES[client], "run": "7", "node": str(client), "supernode": f"supernode-{client}"}
    return {"round": round, "message": "train", **who, "key": KEYS[client], **ids, **more}


@pytest.fixture
def folder(made_once: Made, tmp_path: Path) -> RunFolder:
    made = made_once(tmp_path / "runs" / "july", run_name="july")
    for round in (1, 2):
        for client in range(2):
            trail.add(made.path, entry(round, client))
    return made


def site(place: Path, folder: RunFolder, client: int, rounds: tuple[int, ...] = (1, 2), **config: Any) -> Path:
    """Write the audit of an honest site."""
    written = Audit(place / NAMES[client])
    written.append("start", site="", rules="", key=KEYS[client])
    from corolla.experiments.runs import RecordedRun

    settings = {**RecordedRun(folder.path).settings, **config}
    written.append("run", run="7", application="ab", submitter="anna", config=settings, refusal="")
    data = {"data-sha256": "d" * 64, "train-samples": 24, "test-samples": 10}
    written.append("upload", run="7", message=QUERY, round="", bytes=1, sha256="q", **data)
    for round in rounds:
        about = {"run": "7", "application": "ab", "message": "train", "round": str(round), "bytes": 9}
        written.append("download", **about, sha256=sha(round, client, "down"))
        written.append("upload", **about, sha256=sha(round, client, "up"))
    written._held.close()
    return place / NAMES[client]


def test_two_trails_that_agree(command: Command, folder: RunFolder, tmp_path: Path) -> None:
    places = [site(tmp_path, folder, client) for client in range(2)]
    # a directory, and a copy of the file alone
    copy = shutil.copy(places[1] / audit.FILE, tmp_path / "verden.jsonl")
    code, out, err = command("audit", "join", folder.path, places[0], copy)
    assert code == 0 and "agree on 4 messages" in out and "submitted by anna\n" in out, out + err
    code, out, _ = command("audit", "join", folder.path, *places, "--json")
    joined = json.loads(out)
    assert code == 0 and joined["differences"] == [] and len(joined["messages"]) == 4
    first = joined["clients"][0]
    assert (first["name"], first["supernode"], first["keys"], first["runs"]) == (
        "celle",
        "supernode-0",
        [KEYS[0]],
        ["7"],
    )
    assert (first["submitters"], first["train-samples"], first["data-sha256"]) == (["anna"], 24, "d" * 64)


Change = Callable[[RunFolder, Path], list[Path]]


def without_an_upload(folder: RunFolder, place: Path) -> list[Path]:
    return [site(place, folder, 0), site(place, folder, 1, rounds=(1,))]


def with_one_more(folder: RunFolder, place: Path) -> list[Path]:
    return [site(place, folder, 0), site(place, folder, 1, rounds=(1, 2, 3))]


def with_another_config(folder: RunFolder, place: Path) -> list[Path]:
    return [site(place, folder, 0), site(place, folder, 1, **{"local-epochs": 9})]


def without_a_site(folder: RunFolder, place: Path) -> list[Path]:
    return [site(place, folder, 0)]


def with_another_key(folder: RunFolder, place: Path) -> list[Path]:
    trail.add(folder.path, entry(2, 1, key="SHA256:stolen"))
    return [site(place, folder, k) for k in range(2)]


@pytest.mark.parametrize(
    "change", [without_an_upload, with_one_more, with_another_config, without_a_site, with_another_key]
)
def test_each_difference_is_said_with_its_client(
    command: Command, folder: RunFolder, tmp_path: Path, change: Change
) -> None:
    code, out, _ = command("audit", "join", folder.path, *change(folder, tmp_path), "--json")
    differences = json.loads(out)["differences"]
    assert code == 1 and differences and all("client 1 (verden)" in line for line in differences)


def test_an_audit_that_was_changed_is_refused(command: Command, folder: RunFolder, tmp_path: Path) -> None:
    place = site(tmp_path, folder, 0)
    path = place / audit.FILE
    path.write_bytes(path.read_bytes().replace(b"anna", b"emil"))
    for given in (place, path):
        code, _, err = command("audit", "join", folder.path, given)
        assert code == 2 and "line 2 was changed" in err


def test_a_site_that_refused_the_run_is_named_and_no_difference(
    command: Command, folder: RunFolder, tmp_path: Path
) -> None:
    places = [site(tmp_path, folder, client) for client in range(2)]
    refusing = Audit(tmp_path / "uelzen")
    refusing.append("run", run="7", application="ab", submitter="", config={}, refusal="")
    refusing.append("refusal", run="7", message=QUERY, round="", bytes=0, sha256="", why="min-samples: too few")
    code, out, err = command("audit", "join", folder.path, *places, tmp_path / "uelzen", "--json")
    joined = json.loads(out)
    assert code == 0 and joined["differences"] == [], err
    assert joined["apart"] == [{"audit": str(tmp_path / "uelzen"), "why": "min-samples: too few"}]
    # one that has trained took part, whatever the server says
    refusing.append("upload", run="7", message="train", round="1", bytes=9, sha256="c" * 64)
    code, _, err = command("audit", "join", folder.path, *places, tmp_path / "uelzen")
    assert code == 2 and "uelzen" in err


def test_only_a_deployments_run_and_its_own_audits_are_joined(
    command: Command, made_once: Made, folder: RunFolder, tmp_path: Path
) -> None:
    other = made_once(tmp_path / "runs" / "simulated", run_name="july")
    place = site(tmp_path, folder, 0)
    code, _, err = command("audit", "join", other.path, place)
    assert code == 2 and trail.FILE in err
    Audit(tmp_path / "stranger").append("start")
    for given in (tmp_path / "stranger", tmp_path / "none"):
        code, _, err = command("audit", "join", folder.path, given)
        assert code == 2 and str(given) in err


def rewritten(place: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """An audit whose writer has made a whole new chain: every line is changed."""
    lines = [dict(line) for line in audit.entries(place)]
    made = Audit(place.with_name(f"{place.name}-anew"))
    for line in lines:
        change(line)
        kind = line.pop("kind", "none")
        made.append(
            kind, **{name: value for name, value in line.items() if name not in ("n", "time", "previous", "hash")}
        )
    made._held.close()
    return made.directory


FIELDS = (
    "kind",
    "run",
    "sha256",
    "message",
    "round",
    "key",
    "refusal",
    "submitter",
    "config",
    "data-sha256",
    "train-samples",
)


@pytest.mark.parametrize("field", FIELDS)
def test_a_foreign_audit_of_another_form_is_an_error_and_no_traceback(
    command: Command, folder: RunFolder, tmp_path: Path, field: str
) -> None:
    place = site(tmp_path, folder, 0)
    for value in (["x"], {"a": 1}, 7, None, True, 1e999):

        def change(line: dict[str, Any], value: object = value) -> None:
            if field in line and line["kind"] != "none":
                line[field] = value

        path = rewritten(place, change)
        code, _, err = command("audit", "join", folder.path, path)
        assert code in (1, 2) and "Traceback" not in err and (code == 1 or str(path) in err), value
        shutil.rmtree(path)


def test_texts_of_a_foreign_audit_command_no_terminal(command: Command, folder: RunFolder, tmp_path: Path) -> None:
    def change(line: dict[str, Any]) -> None:
        line |= {name: f"\x1b]0;x\x07{line[name]}\x9b2J" for name in ("submitter", "round", "key") if name in line}
        line |= {"data-sha256": "\x1b[2J"} if "data-sha256" in line else {}

    code, out, err = command("audit", "join", folder.path, rewritten(site(tmp_path, folder, 0, (1, 2, 3)), change))
    assert code == 1 and "round ]0;x32J, train" in out and not {"\x1b", "\x07", "\x9b"} & set(out + err)


def test_a_server_that_hides_all_messages_of_a_kind_is_found(
    command: Command, folder: RunFolder, tmp_path: Path
) -> None:
    places = [site(tmp_path, folder, k) for k in range(2)]
    more = Audit(places[1])
    more.append("upload", run="7", message="evaluate", round="2", bytes=9, sha256="e" * 64)
    code, out, _ = command("audit", "join", folder.path, *places, "--json")
    assert code == 1 and ["e" * 64 in line for line in json.loads(out)["differences"]] == [True]


def test_an_audit_that_does_not_say_what_ran_is_named(command: Command, folder: RunFolder, tmp_path: Path) -> None:
    def change(line: dict[str, Any]) -> None:
        if line["kind"] == "run":
            line["run"] = "8"

    places = [rewritten(site(tmp_path, folder, 0), change), site(tmp_path, folder, 1)]
    code, out, _ = command("audit", "join", folder.path, *places, "--json")
    assert code == 1 and len(json.loads(out)["differences"]) == 1


@pytest.mark.parametrize("field", ["run", "client", "round", "asked", "answer", "name", "key", "supernode", "message"])
def test_a_foreign_trail_of_another_form_is_an_error_and_no_traceback(
    command: Command, folder: RunFolder, tmp_path: Path, field: str
) -> None:
    trail.add(folder.path, {**entry(2, 1), field: [1]})
    code, _, err = command("audit", "join", folder.path, site(tmp_path, folder, 0))
    assert code == 2 and trail.FILE in err and field in err
