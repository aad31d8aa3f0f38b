"""People on machines of their own: a server's operator and plants, each with a home, who run commands and keep nodes running."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from fl_app.processes import end_processes, flower_environment, free_ports, processes_with
from tests.e2e.conftest import COROLLA, wait_for


@dataclass
class Plants:
    """Each person's home lies in a directory. `~/share` is the same for all."""

    directory: Path
    ports: tuple[int, int] = field(default_factory=lambda: tuple(free_ports(2)))  # type: ignore[assignment]
    nodes: dict[str, psutil.Popen] = field(default_factory=dict)

    def home(self, who: str) -> Path:
        """Return a person's home, made at first."""
        home = self.directory / who
        if not home.exists():
            home.mkdir()
            (self.directory / "share").mkdir(exist_ok=True)
            (home / "share").symlink_to(self.directory / "share")
        return home

    def environment(self, who: str) -> dict[str, str]:
        """Return the environment of a person's commands: nothing of this machine's account."""
        home = self.home(who)
        everything = flower_environment(home / ".flwr")
        inherited = {name: value for name, value in everything.items() if not name.startswith(("COROLLA_", "XDG_"))}
        path = f"{Path(COROLLA).parent}{os.pathsep}{inherited['PATH']}"
        return inherited | {"HOME": str(home), "PLANTS": str(self.directory), "PATH": path}

    def write(self, who: str, name: str, text: str) -> None:
        """Write a file of a person, with ports that are free here and a database in a directory that there is."""
        fleet, control = self.ports
        text = text.replace("9092", str(fleet)).replace("8000", str(control))
        (self.home(who) / name).write_text(text.replace("/var/lib/corolla", str(self.home(who))))

    def run(self, who: str, command: str, code: int = 0) -> str:
        """Run a person's command in a shell, and return what it printed. Raises AssertionError for another exit code."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.home(who),
            env=self.environment(who),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, f"{who}$ {command}\n{self.logs()}{done.stdout}{done.stderr}"
        return done.stdout

    def logs(self) -> str:
        """Return the ends of the nodes' logs."""
        return "".join(f"--- {who}\n{(self.home(who) / 'node.log').read_text()[-1500:]}\n" for who in self.nodes)

    def start(self, who: str, command: str) -> None:
        """Start a plant's node, in the place of the one that runs, and return when it is connected."""
        self.stop(who)
        with (self.home(who) / "node.log").open("wb") as log:
            self.nodes[who] = psutil.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self.home(who),
                env=self.environment(who),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_for(
            lambda: "SuperNode ID" in (self.home(who) / "node.log").read_text() or self.nodes[who].poll() is not None,
            120,
        )
        assert self.nodes[who].poll() is None, self.logs()

    def stop(self, who: str) -> None:
        """End a plant's node as systemd would, with all that it started."""
        if (node := self.nodes.pop(who, None)) is not None:
            end_processes([node, *node.children(recursive=True)])


@contextlib.contextmanager
def plants_in(directory: Path) -> Iterator[Plants]:
    """People whose processes are all ended."""
    found = Plants(directory)
    try:
        yield found
    finally:

        def ended() -> bool:
            # a supervisor may have started another one meanwhile
            left = processes_with(f"PLANTS={directory}")
            end_processes(left)
            return not left

        wait_for(ended, 60)
