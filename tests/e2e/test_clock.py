"""A SuperNode whose clock is wrong: what becomes of a real one, and that its log is explained."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e.conftest import Lab

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

# a process that finds this first has another clock; as if its host had, which `up` would see before
AHEAD = """
import datetime, os

class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + datetime.timedelta(seconds=float(os.environ["AHEAD"]))

datetime.datetime = Clock
"""


def test_a_supernode_with_a_wrong_clock_ends_and_its_log_says_why(lab: Lab, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text(AHEAD)
    paths = os.pathsep.join([str(other), *filter(None, [lab.environment.get("PYTHONPATH")])])
    entry = {"host": "local", "gpus": [], "environment": {"PYTHONPATH": paths, "AHEAD": "12"}}
    lab.write(tls=True, hosts=[entry])
    assert lab.cluster("keys").returncode == 0
    up = lab.cluster("up", "--timeout", "240")
    said = " ".join(up.stderr.split())
    assert up.returncode == 2 and "supernode-0: ended" in said, up.stdout + up.stderr
    assert "=> ended: on request, or the SuperLink refused it: its clock is more than 5 s ahead" in said, said
    assert lab.started() == []
