"""run.json says with what a run was made, and with what it went on."""

from __future__ import annotations

import platform
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from fl_app import machine, software
from fl_app.config import parse
from fl_app.errors import UserError
from fl_app.machine import made_with
from fl_app.server.run_folder import MADE_WITH, RUN, RunFolder, read_about
from strategies import METHOD_PARAMS


def test_versions_and_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    packages = {name: metadata.version(name) for name in machine.PACKAGES}
    assert made_with() == {"python": platform.python_version(), **packages, "cpu": machine.cpu()}
    cpus = tmp_path / "cpuinfo"
    cpus.write_text("processor\t: 0\nmodel name\t: A: CPU\nmodel name\t: another\n")
    monkeypatch.setattr(machine, "_CPUS", cpus)
    assert machine.cpu() == "A: CPU"
    monkeypatch.setattr(machine, "_CPUS", tmp_path / "none")
    assert machine.cpu() == (platform.processor() or platform.machine()) != ""
    monkeypatch.setattr(machine, "PACKAGES", ("numpy", "no-such-package"))
    assert set(machine.versions()) == {"python", "numpy"}


def test_a_run_goes_on_with_its_secret_alone(tmp_path: Path) -> None:
    config = parse({"method": "fedavg", "output-dir": str(tmp_path), "run-name": "a"}, METHOD_PARAMS)
    folder = RunFolder.create(config, "0123456789ab")
    folder.close()
    secret = folder.path / "secret"
    assert secret.stat().st_mode & 0o777 == 0o600 and "0123456789ab" not in (folder.path / RUN).read_text()
    again = replace(config, resume=str(folder.path))
    resumed = RunFolder.resume(again)
    resumed.close()
    assert (resumed.secret, resumed.experiment) == ("0123456789ab", folder.experiment)
    for change in (lambda: secret.write_text("another"), secret.unlink):
        change()
        with pytest.raises(UserError, match="resume: .*secret"):
            RunFolder.resume(again)


def test_what_a_run_goes_on_with_is_noted_where_it_is_something_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = parse({"method": "fedavg", "output-dir": str(tmp_path), "run-name": "a"}, METHOD_PARAMS)
    folder = RunFolder.create(config, "0123456789ab")
    first = made_with() | {"code": software.code_hash(), "from-round": 1}
    assert read_about(folder.path)[MADE_WITH] == [first]
    folder.close()

    def go_on() -> object:
        again = RunFolder.resume(replace(config, resume=str(folder.path)))
        again.continue_with(config, done=4)
        again.close()
        return read_about(folder.path)[MADE_WITH]

    assert go_on() == [first]
    monkeypatch.setattr(machine, "versions", lambda: {"torch": "another"})
    second = {"torch": "another", "cpu": machine.cpu(), "code": software.code_hash(), "from-round": 5}
    assert go_on() == [first, second] and go_on() == [first, second]
