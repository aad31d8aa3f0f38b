"""A site's audit: written in a chain, and every damage found."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from deploy import audit
from deploy.audit import FILE, HEAD, Audit
from fl_app.errors import DeploymentError, UserError
from tests.facts import rejected


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A site with four lines."""
    writer = Audit(tmp_path)
    for number in range(4):
        writer.append("download", run="17", bytes=number, sha256="ab" * 32, text='größer\n"x"')
    return tmp_path


def test_lines_follow_one_another(kept: Path) -> None:
    chain = audit.verify(kept)
    lines = audit.entries(kept)
    assert (
        [line["n"] for line in lines] == [1, 2, 3, 4] and lines[2]["bytes"] == 2 and lines[0]["text"] == 'größer\n"x"'
    )
    assert [line["hash"] for line in lines] == list(chain.hashes)
    assert [line["previous"] for line in lines] == ["0" * 64, *chain.hashes[:3]]
    assert (kept / FILE).stat().st_mode & 0o777 == 0o600


def test_any_changed_byte_is_found(kept: Path) -> None:
    content = (kept / FILE).read_bytes()
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << random.Random(position).randrange(8)
        (kept / FILE).write_bytes(damaged)
        with pytest.raises(UserError, match=FILE):
            audit.verify(kept)
    (kept / FILE).write_bytes(content)
    assert len(audit.verify(kept).hashes) == 4


@pytest.mark.parametrize("keep", [[], [0], [0, 1, 2], [1, 2, 3], [0, 1, 3], [0, 2, 1, 3], [0, 0, 1, 2, 3]])
def test_removed_and_moved_lines_are_found(kept: Path, keep: list[int]) -> None:
    lines = (kept / FILE).read_bytes().splitlines(keepends=True)
    (kept / FILE).write_bytes(b"".join(lines[k] for k in keep))
    with pytest.raises(UserError):
        audit.verify(kept)


def test_half_a_line_is_found(kept: Path) -> None:
    content = (kept / FILE).read_bytes()
    for cut in (1, 40, 100):
        (kept / FILE).write_bytes(content[:-cut])
        with pytest.raises(UserError, match="line 4 was changed"):
            audit.verify(kept)


def test_without_the_head_a_cut_is_found_by_a_hash_noted_elsewhere(kept: Path) -> None:
    noted = audit.verify(kept).last
    lines = (kept / FILE).read_bytes().splitlines(keepends=True)
    (kept / FILE).write_bytes(b"".join(lines[:2]))
    head = audit.entries(kept)[1]["hash"]
    (kept / HEAD).write_text(f"2 {head}\n")
    assert noted not in audit.verify(kept).hashes
    (kept / HEAD).unlink()
    with pytest.raises(UserError, match="is missing"):
        audit.verify(kept)


def test_a_process_killed_before_it_noted_its_last_line_is_no_damage(kept: Path) -> None:
    (kept / HEAD).write_text(f"3 {audit.entries(kept)[2]['hash']}\n")
    assert len(audit.verify(kept).hashes) == 4


def test_it_goes_on_where_it_ended_and_not_behind_damage(kept: Path) -> None:
    again = Audit(kept)
    again.append("start")
    assert len(audit.verify(kept).hashes) == 5
    with rejected(DeploymentError, kept, "another SuperNode", "site is running"):
        Audit(kept)
    with (kept / FILE).open("ab") as file:
        file.write(b"x")
    with pytest.raises(UserError, match="it was changed"):
        again.append("run")
    del again
    with rejected(DeploymentError, "", "keep", "evidence"):
        Audit(kept)
