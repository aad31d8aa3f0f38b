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
from tests.conftest import Command, Run

KEYS = ("SHA256:celle", "SHA256:verden")
NAMES = ("celle", "verden")


def sha(round: int, client: int, what: str) -> str:
    return f"{round}{client}{'ab'[what == 'up']}".ljust(64, "0")


def entry(round: int, client: int, **more: Any) -> dict[str, Any]:
    ids = {"asked": sha(round, client, "down"), "answer": sha(round, client, "up")}
    who = {"client": client, "name": NAMES[client], "run": "7", "node": str(client), "supernode": f"supernode-{client}"}
    return {"round": round, "message": "train", **who, "key": KEYS[client], **ids, **more}


@pytest.fixture
def folder(run: Run) -> RunFolder:
    made = run(run_name="july")
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
    written.append("upload", run="7", message="query", round="", bytes=1, sha256="q", **data)
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
    assert code == 0 and "agree on 4 messages" in out, out + err
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


def test_only_a_deployments_run_and_its_own_audits_are_joined(
    command: Command, run: Run, folder: RunFolder, tmp_path: Path
) -> None:
    other = run(run_name="simulated")
    place = site(tmp_path, folder, 0)
    code, _, err = command("audit", "join", other.path, place)
    assert code == 2 and trail.FILE in err
    Audit(tmp_path / "stranger").append("start")
    for given in (tmp_path / "stranger", tmp_path / "none"):
        code, _, err = command("audit", "join", folder.path, given)
        assert code == 2 and str(given) in err
