"""A simulation says before it starts that it has no room for temporary files, or no memory to share, and the way out."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from corolla.experiments import launch
from corolla.experiments.launch import SimulationSuperLink
from fl_app.errors import UserError
from tests.disks import full_disk
from tests.facts import mentions

WAY_OUT = "make room there, set TMPDIR to another folder, or run with --in-process"


@pytest.mark.parametrize(("free", "left"), [(4096, "0 B"), (300_000, "303 kB")])
def test_temporary_files_without_room_name_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, left: str
) -> None:
    with full_disk(tmp_path, free) as there:
        if free == 4096:
            (there / "all").write_bytes(b"x" * free)
        monkeypatch.setenv("TMPDIR", str(there))
        with pytest.raises(UserError) as caught:
            SimulationSuperLink()
        told = str(caught.value)
        assert mentions(told, "TMPDIR", f"{there} has {left} left", "simulation needs 50 MB", "more") and told.endswith(
            f"{WAY_OUT}, which needs none"
        )


def test_a_folder_for_temporary_files_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "gone"))
    assert launch.temporary_directory() == Path(tempfile.gettempdir())
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert launch.temporary_directory() == tmp_path


def test_memory_that_cannot_be_shared(tmp_path: Path) -> None:
    """On a mount of its own, which ends with the process."""
    program = (
        "from corolla.experiments.launch import SimulationSuperLink\n"
        "from fl_app.errors import UserError\n"
        "try:\n    SimulationSuperLink()\nexcept UserError as error:\n    print(error)\n"
    )
    mount = 'mount -t tmpfs -o ro none /dev/shm || exit 77; exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", mount, "sh", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True)
    if "unshare failed" in done.stderr or done.returncode == 77:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    assert mentions(done.stdout, "/dev/shm", "cannot be written") and mentions(done.stdout, "run with --in-process")


def test_a_sockets_name_is_as_long_as_this_system_allows() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory, socket.socket(socket.AF_UNIX) as sock:
        longest = f"{directory}/".ljust(launch._LONGEST_NAME, "x")
        with pytest.raises(OSError, match="too long"):
            sock.bind(f"{longest}x")
        sock.bind(longest)
