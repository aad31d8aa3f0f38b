"""README's `flwr run` line as it stands: sentences alone, the number of clients, and what it leaves behind."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from client_app.client_app import RAY
from fl_app import plugins
from fl_app.processes import end_processes, flower_environment, processes_with
from fl_app.transport.app_bundle import APP_DIRECTORY, PROJECT

README = Path(__file__).resolve().parents[2] / "README.md"


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_the_line_of_the_readme() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    line = next(line for line in lines if line.startswith("flwr run . ")).partition("#")[0]
    # Ray's sockets need a short path
    with tempfile.TemporaryDirectory(prefix="c") as name:
        directory, mark = Path(name), f"FLWR_RUN={name}"
        app = directory / "app"
        for package in plugins.PACKAGES:
            shutil.copytree(APP_DIRECTORY / package, app / package)
        shutil.copy(APP_DIRECTORY / PROJECT, app)
        (directory / "flwr").mkdir()
        environment = flower_environment(directory / "flwr") | {"FLWR_RUN": name, "XDG_STATE_HOME": name}
        for key in RAY:
            # this process has imported the ClientApp, which sets them
            environment.pop(key, None)
        try:
            done = subprocess.run(
                ["bash", "-c", line], cwd=app, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
            )
            left = [" ".join(process.cmdline()) for process in processes_with(mark)]
        finally:
            end_processes(processes_with(mark))
        printed = done.stdout + done.stderr
        assert done.returncode == 0, printed
        told = re.findall(r"round (\d+)/10: (.*)", done.stdout)
        assert [int(number) for number, _ in told] == list(range(1, 11)), printed
        assert not re.search(r'data: ?\{|"number":|progress', printed), printed
        (summary,) = (app / "runs").glob("*/summary.json")
        found = json.loads(summary.read_text())
        assert (found["method"], found["num-clients"]) == ("fedcac", 10)
        # what it leaves behind
        assert any("flower-superlink" in command for command in left), left
