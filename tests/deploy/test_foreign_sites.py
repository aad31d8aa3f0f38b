"""What an application put into directories that it may write, as commands without walls find it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore

from client_app import stored_state
from deploy import node_cli, supernode
from deploy import site as site_rules
from deploy.audit import FILE, Audit
from deploy.gate import Gate, NodeConfig
from deploy.site import Request, Site
from fl_app.errors import UserError
from fl_app.privacy import pins
from fl_app.toml import flatten, read_toml
from fl_app.transport.app_bundle import project_file
from tests.deploy.test_gate import SuperLink
from tests.facts import mentions

pytestmark = pytest.mark.timeout(60)
HASH = "ab" * 32


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COROLLA_STATE_HOME", str(tmp_path))
    directory = supernode.sites_directory() / "lab" / "bern"
    Audit(directory).append("start")
    return directory


@pytest.mark.parametrize("inside", ["tmp", "state", "flwr"])
def test_a_false_site_is_none(site: Path, inside: str, capsys: pytest.CaptureFixture[str]) -> None:
    false = site / inside / "zurich"
    Audit(false).append("start")
    site_rules.ask(false, Request("7", HASH, {}))
    (site / "link").symlink_to(false)
    assert supernode.sites_in(supernode.sites_directory()) == ["lab/bern"]
    node_cli.approve(None, False, None)
    node_cli.audit(None, "")
    shown = capsys.readouterr().out
    assert "no run waits" in shown and "zurich" not in shown and mentions(shown, "lab/bern", "1 lines", "intact")
    for command in (lambda: node_cli.approve("7", False, None), lambda: node_cli.join(f"lab/bern/{inside}/zurich")):
        with pytest.raises(UserError):
            command()


def test_a_long_value_looks_like_no_other_key(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    padded = "x" + " " * 500 + "  private = True"
    site_rules.ask(site, Request("7", HASH, {"run-name": padded, "private": False}))
    node_cli.approve(None, False, None, whole=True)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[1:])) <= 80
    assert [line for line in lines if line.lstrip().startswith("private")] == ["  private = False"]
    assert "".join(line.removeprefix("    | ") for line in lines if "    | " in line).endswith("private = True")


def test_a_person_reads_what_is_not_default(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = flatten(read_toml(project_file())["tool"]["flwr"]["app"]["config"])
    config = {**known, "run-name": "july", "local-epochs": 7, "fedcac.beta": 3, "private": 0, "own.key": "x"}
    site_rules.ask(site, Request("7", HASH, config, "anna\x1b[2K\n  private = True"))
    node_cli.approve(None, False, None)
    first, *lines, rest = capsys.readouterr().out.splitlines()
    assert mentions(first, "run 7 at lab/bern", "submitted by anna") and first.endswith(HASH)
    assert sorted(lines) == [
        "  fedcac.beta = 3",
        "  local-epochs = 7",
        "  method = fedcac",
        "  own.key = x",
        "  private = 0",
        "  run-name = july",
    ]
    assert f"{len(config) - len(lines)} keys" in rest
    node_cli.approve(None, False, None, whole=True)
    assert len(capsys.readouterr().out.splitlines()) >= len(config) + 1


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{",
        "[" * 100_000,
        json.dumps({"run": "7"}),
        json.dumps({"run": "8", "application": HASH, "config": {}}),
        json.dumps({"run": 7, "application": HASH, "config": {}}),
        json.dumps({"run": "7", "application": HASH, "config": []}),
        json.dumps({"run": "7", "application": HASH, "config": {}, "submitter": 7}),
        json.dumps({"run": "7", "application": HASH, "config": {"a": {"b": 1}}}),
    ],
)
def test_a_malformed_request_is_none_and_others_stay(site: Path, content: str) -> None:
    site_rules.ask(site, Request("9", HASH, {}))
    (site / "waiting" / "7.json").write_text(content)
    os.mkfifo(site / "waiting" / "6.json")
    (site / "waiting" / "5.json").symlink_to("9.json")
    assert [request.run for request in site_rules.waiting(site)] == ["9"]
    site_rules.decide(site, "9", True)
    for name in ("9.json", "7.json"):
        (site / "decided" / name).unlink(missing_ok=True)
        os.mkfifo(site / "decided" / name)
        assert site_rules.answer(site, Request(name[:-5], HASH, {})) is None


def test_state_is_listed_and_removed_without_links_or_waiting(tmp_path: Path) -> None:
    root, outside = tmp_path / "state", tmp_path / "outside"
    for place in (root / "aa" / "client-0000", outside / "client-0000"):
        place.mkdir(parents=True)
        (place / "000001-0.state").write_bytes(b"x" * 9)
    os.utime(root / "aa" / "client-0000" / "000001-0.state", (1e11, 1e11))
    # an experiment and a client that lie elsewhere, a pipe, and a name that a terminal would follow
    (root / "bb").symlink_to(outside)
    (root / "cc").mkdir()
    (root / "cc" / "client-0000").symlink_to(outside / "client-0000")
    (root / "dd" / "client-0000").mkdir(parents=True)
    os.mkfifo(root / "dd" / "client-0000" / "000001-0.state")
    (root / "\x1b[2Jee" / "client-0000").mkdir(parents=True)
    (root / "\x1b[2Jee" / "client-0000" / "000001-0.state").touch()
    os.mkfifo(root / "ff")
    (root / "aa" / "client-0001").symlink_to(outside / "client-0000")
    (root / "aa" / "client-0000" / "more").symlink_to(outside)
    (found,) = stored_state.stored(root)
    assert (found.experiment, found.clients, found.nbytes) == ("aa", 1, 9) and found.modified < 1e10
    for name in ("bb", "cc", "dd", "..", "."):
        with pytest.raises(UserError):
            stored_state.remove(root, name)
    stored_state.remove(root, "aa")
    assert not (root / "aa").exists() and (outside / "client-0000" / "000001-0.state").read_bytes() == b"x" * 9


def test_an_audit_is_a_file_of_the_sites_own(site: Path) -> None:
    other = supernode.sites_directory() / "other"
    other.mkdir()
    (other / FILE).symlink_to(site / FILE)
    os.mkfifo(supernode.sites_directory() / "pipe")
    assert supernode.sites_in(supernode.sites_directory()) == ["lab/bern"]


def test_a_note_of_agreed_keys_is_read_and_written_in_the_sites_own_directory_alone(tmp_path: Path) -> None:
    kept, outside = tmp_path / "site", tmp_path / "outside"
    for place in (kept, outside):
        place.mkdir()
    (outside / "own").write_text("secret")
    (kept / "peers").symlink_to(outside)
    for work in (lambda: pins.agreed(kept, "own"), lambda: pins.accept(kept, "own", "new")):
        with pytest.raises(UserError):
            work()
    assert (outside / "own").read_text() == "secret" and os.listdir(outside) == ["own"]
    (kept / "peers").unlink()
    (kept / "peers").mkdir()
    os.mkfifo(kept / "peers" / "own")
    with pytest.raises(UserError):
        pins.agreed(kept, "own")
    pins.accept(kept, "own", "new")
    assert pins.agreed(kept, "own") == "new"


WATCHED = list[str]()
"""Directories that applications write, while a test watches them."""
SEEN = list[tuple[str, str]]()


def watch(event: str, given: tuple[object, ...]) -> None:
    """Note whatever reaches a path below a watched directory by its name. The door names only parts of a path."""
    for place in WATCHED:
        SEEN.extend((event, name) for name in map(str, given) if event != "import" and name.startswith(f"{place}/"))


sys.addaudithook(watch)


def test_no_command_and_no_judgement_reaches_what_applications_write_past_the_door(
    site: Path, tmp_path: Path, site_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, prepared = tmp_path / "client-state", tmp_path / "prepared"
    monkeypatch.setenv("COROLLA_DATA_DIR", str(prepared))
    for place in (root / "aa" / "client-0000", prepared, site_dir, site / "tmp" / "zurich"):
        place.mkdir(parents=True)
    (root / "aa" / "client-0000" / "000001-0.state").touch()
    Audit(site / "tmp" / "zurich").append("start")
    link = SuperLink({7: {"private": True}})
    rules = Site(min_samples=30, max_evaluations=5, approval="ask")
    made = Gate(rules, Audit(tmp_path / "gate"), tmp_path / "gate", NodeConfig(0, 4), InMemoryObjectStore())
    opened = made.around(link.connection())
    link.ask("get_properties", 7)
    monkeypatch.setattr(sys.modules[__name__], "WATCHED", [str(p) for p in (root, prepared, site_dir, site / "tmp")])
    SEEN.clear()
    assert opened.receive() is None
    site_rules.decide(tmp_path / "gate", "7", True)
    assert opened.receive() is not None and link.sent == []
    assert supernode.sites_in(supernode.sites_directory()) == ["lab/bern"]
    node_cli.audit(None, "")
    pins.accept(site_dir, "own", "new")
    assert pins.agreed(site_dir, "own") == "new"
    stored_state.remove(root, stored_state.stored(root)[0].experiment)
    assert SEEN == [] and list(prepared.glob("datasets/*/info.json"))
    # the hook sees such a way: the search above was one
    assert SEEN
