"""Applications forked from a warm process: what is put in place of Flower's own, and what is done where that has changed."""

from __future__ import annotations

import hashlib
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from deploy import pace, superexec, supernode
from deploy.pace import Pace
from fl_app.forking import Warm


class Asked:
    """A warm process that remembers what it was asked for. gone: how many requests fail."""

    def __init__(self, gone: int = 0) -> None:
        self.gone, self.tasks, self.started = gone, list[Any](), 0

    def start(self, spec: Any) -> None:
        if self.gone:
            raise OSError("gone")
        self.tasks.append(spec)


def flower() -> tuple[Any, Any]:
    """Flower's modules, as far as they are looked at."""

    class Executor:
        def launch(self, spec: Any) -> Any:
            return f"cold {spec.task_type}"

    launcher = types.SimpleNamespace(
        SubprocessExecutor=Executor, TaskType=types.SimpleNamespace(CLIENT_APP="client-app")
    )
    return launcher, types.SimpleNamespace(time=types.SimpleNamespace(sleep=lambda seconds: None))


@pytest.mark.parametrize(
    ("kind", "installs", "gone", "cold"),
    [
        ("client-app", False, 0, False),
        ("server-app", False, 0, True),
        ("client-app", True, 0, True),
        ("client-app", False, 1, True),
    ],
)
def test_clients_alone_are_forked_and_flowers_way_is_left(
    kind: str, installs: bool, gone: int, cold: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, (launcher, loop) = Asked(gone), flower()
    monkeypatch.setattr(superexec, "Forker", lambda shared: asked)
    superexec.install(launcher, loop)
    spec = types.SimpleNamespace(task_type=kind, runtime_dependency_install=installs)
    answer = launcher.SubprocessExecutor().launch(spec)
    assert (answer == f"cold {kind}") is cold and asked.tasks == ([] if cold else [spec])
    assert isinstance(loop.time, Pace)


def test_another_flower_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(superexec, "Forker", lambda shared: Asked())
    launcher, loop = flower()
    before = launcher.SubprocessExecutor.launch
    for missing in (types.SimpleNamespace(TaskType=launcher.TaskType), types.SimpleNamespace()):
        with pytest.raises(AttributeError):
            superexec.install(missing, loop)
    with pytest.raises(AttributeError):
        superexec.install(launcher, types.SimpleNamespace())
    assert launcher.SubprocessExecutor.launch is before


def test_flowers_own_command_alone_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    found = supernode.warm_command(["flower-superexec", "--insecure", "--parent-pid", "1"])
    assert found[1:] == ["-P", "-m", "deploy.superexec", "--insecure", "--parent-pid", "1"]
    shared = supernode.warm_command(["flower-superexec", "--insecure"], shared=True)
    assert shared[1:] == ["-P", "-m", "deploy.superexec", "--shared", "--insecure"]
    assert supernode.warm_command(["flower-other", "--x"]) == ["flower-other", "--x"]
    assert "flower-other" in caplog.text


def test_sleeps_follow_the_time_since_the_last_work(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [100.0], list[float]()
    clock = types.SimpleNamespace(monotonic=lambda: now[0], sleep=slept.append, time=lambda: 7.0)
    monkeypatch.setattr(pace, "time", clock)
    paced = Pace(0.1)
    for later in (0.0, 4.0, 36.0, 1000.0):
        now[0] += later
        paced.sleep(3)
    paced.work()
    paced.sleep(3)
    assert slept == pytest.approx([0.1, 0.2, 2.0, 3.0, 0.1]) and paced.time() == 7.0


def test_another_warm_process_takes_the_place_of_a_killed_one() -> None:
    forker = superexec.Forker()
    # the runtime that it names is not there: the application ends by itself
    spec = types.SimpleNamespace(
        runtime_api_address="127.0.0.1:9", token="t", insecure=True, root_certificates_path=None, parent_pid=None
    )
    spec.suppress_output = True

    def warm_process() -> psutil.Process:
        assert isinstance(forker._warm, Warm)
        return psutil.Process(forker._warm.pid)

    first = warm_process()
    forker.start(spec)
    (application,) = first.children()
    first.kill()
    forker.start(spec)
    second = warm_process()
    assert second.pid != first.pid and len(second.children()) == 1
    left = [application, second, *second.children()]
    forker._warm.close()
    _, alive = psutil.wait_procs(left, timeout=20)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def test_an_application_is_unpacked_once_and_appears_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    apps, digits, seen = tmp_path / "apps", hashlib.sha256(b"archive").hexdigest()[:8], list[bool]()

    def install(archive: bytes, place: Path, skip_prompt: bool) -> Path:
        assert skip_prompt
        directory = place / "apps" / f"a.b.1.0.{digits}"
        directory.mkdir(parents=True)
        seen.append((apps / directory.name).exists())
        if archive != b"archive":
            raise ValueError("damaged")
        (directory / "pyproject.toml").touch()
        return directory

    once = superexec.installing_once(install)
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: once(b"archive", skip_prompt=True), range(8)))
    assert found == {apps / f"a.b.1.0.{digits}"} and seen == [False]
    assert [path.name for path in found.pop().iterdir()] == ["pyproject.toml"]
    with pytest.raises(ValueError, match="damaged"):
        once(b"another", skip_prompt=True)
    assert not list(apps.glob(".new-*")) and len([path for path in apps.iterdir() if path.is_dir()]) == 1
