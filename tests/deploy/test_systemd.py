"""The systemd units: systemd reads every line of them, and they start what the launcher starts."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from deploy import commands, inventory
from deploy.commands import HostPlaces

UNITS = Path(__file__).resolve().parent.parent.parent / "deploy" / "systemd"
NAMES = {
    "corolla-superlink.service": "corolla-superlink.service",
    "corolla-supernode@.service": "corolla-supernode@a.service",
}
ANALYZE = shutil.which("systemd-analyze")
needs_systemd = pytest.mark.skipif(ANALYZE is None, reason="no systemd-analyze here (Debian: systemd)")


def analyze(directory: Path, *words: str) -> str:
    """Return what systemd-analyze says about copies of the units whose programs and user exist on this machine."""
    for name in NAMES:
        text = re.sub(r"^(ExecStart=)\S+", r"\1/bin/true", (UNITS / name).read_text(), flags=re.MULTILINE)
        (directory / name).write_text(re.sub(r"^(User|Group)=corolla", r"\1=root", text, flags=re.MULTILINE))
    done = subprocess.run([str(ANALYZE), *words], cwd=directory, capture_output=True, text=True)
    return f"{done.stdout}{done.stderr}exit code {done.returncode}"


@needs_systemd
def test_systemd_reads_every_line(tmp_path: Path) -> None:
    assert analyze(tmp_path, "verify", "--man=no", *(f"./{name}" for name in NAMES.values())) == "exit code 0"


@needs_systemd
@pytest.mark.parametrize("name, most", [*zip(NAMES, (20, 38), strict=True)])
def test_systemd_calls_them_hardened(name: str, most: int, tmp_path: Path) -> None:
    # tenths, from 0, hardened, to 100, unsafe; "OK" for both
    found = analyze(tmp_path, "security", "--offline=true", f"--threshold={most}", f"./{name}")
    assert found.endswith("exit code 0"), found


def test_a_supernodes_unit_lets_bubblewrap_make_its_walls() -> None:
    """It mounts a new /proc, which the kernel refuses to whoever sees one with covered parts."""
    lines = (UNITS / "corolla-supernode@.service").read_text().splitlines()
    unit = dict(line.split("=", 1) for line in lines if line[:1].isalpha() and "=" in line)
    assert not {"ProtectKernelTunables", "ProtectKernelLogs", "ProtectProc", "ProcSubset"} & unit.keys()
    assert set(unit["RestrictNamespaces"].split()) >= {"user", "mnt", "pid", "ipc", "uts", "net", "cgroup"}
    assert set(unit["SystemCallFilter"].split()) >= {"@system-service", "mount", "umount2", "pivot_root"}


def test_the_superlink_has_the_launchers_options(tmp_path: Path) -> None:
    raw = {"superlink": {"fleet-address": "lab.example.org", "database": "/db"}, "hosts": [{"host": "local"}]}
    launched = commands.superlink(inventory.parse(raw, "lab", tmp_path), HostPlaces("/d", "/s", ()))
    unit = (UNITS / "corolla-superlink.service").read_text().replace("\\\n", " ")
    started = re.search(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    assert started
    words = started[1].split()
    assert words[1:6] == list(launched.command[1:6])
    options = {word for word in launched.command if word.startswith("--")}
    assert options == {word for word in words if word.startswith("--")}
    assert words[words.index("--host") + 1] == "127.0.0.1"
