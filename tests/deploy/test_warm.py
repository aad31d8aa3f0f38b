"""Applications forked from a warm process: what is put in place of Flower's own, and what is done where that has changed."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import types
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from deploy import patches, superexec, supernode
from deploy.inventory import OWN, SHARED
from deploy.patches import Pace
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


def test_flowers_own_command_alone_is_replaced() -> None:
    words = ["flower-superexec", "--insecure", "--parent-pid", "1"]
    for warm, option in (("", []), (OWN, ["--warm"]), (SHARED, ["--shared"])):
        found = supernode.superexec_command(words, warm)
        assert found[1:] == ["-P", "-m", "deploy.superexec", *option, *words[1:]]
    # it would start code that nobody has compared with the bundle
    with pytest.raises(OSError, match="flower-other"):
        supernode.superexec_command(["flower-other", "--x"])


def test_sleeps_follow_the_time_since_the_last_work(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [100.0], list[float]()
    clock = types.SimpleNamespace(monotonic=lambda: now[0], sleep=slept.append, time=lambda: 7.0)
    monkeypatch.setattr(patches, "time", clock)
    paced = Pace(0.1)
    for later in (0.0, 4.0, 36.0, 1000.0):
        now[0] += later
        paced.sleep(3)
    paced.work()
    paced.sleep(3)
    assert slept == pytest.approx([0.1, 0.2, 2.0, 3.0, 0.1]) and paced.time() == 7.0


def test_another_warm_process_takes_the_place_of_a_killed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import signal, sys; from fl_app import forking; forking.serve(int(sys.argv[1]), lambda asker: signal.pause())"
    )
    # which imports no more than it needs to fork
    monkeypatch.setattr(superexec, "Warm", lambda command: Warm([sys.executable, "-c", code]))
    forker = superexec.Forker()
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


def packed(**files: str) -> bytes:
    """A bundle of files, with the list of hashes that Flower checks."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, text in files.items():
            archive.writestr(f"{name}.py", text)
        archive.writestr(".info/CONTENT", "hashes")
    return content.getvalue()


class Flower:
    """Flower's unpacking, which names each directory by eight digits. place: where each application was put."""

    def __init__(self, home: Path, digits: str = "01234567") -> None:
        self.home, self.digits, self.places = home, digits, list[Path]()

    def __call__(self, archive: bytes, place: Path, skip_prompt: bool) -> Path:
        assert skip_prompt and place.parent.parent == self.home / "code"
        directory = place / "apps" / f"a.b.1.0.{self.digits}"
        directory.mkdir(parents=True)
        with zipfile.ZipFile(io.BytesIO(archive)) as files:
            for name in files.namelist():
                if not name.startswith(".info/"):
                    (directory / name).write_bytes(files.read(name))
        self.places.append(directory)
        return directory


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Flower's home. Unpacking moves it, in a process that then runs one application."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    return tmp_path


def test_an_application_is_unpacked_once_and_appears_whole(home: Path) -> None:
    flower, archive = Flower(home), packed(app="code")
    once = superexec.installing_once(flower)
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: once(archive, skip_prompt=True), range(8)))
    place = home / "code" / hashlib.sha256(archive).hexdigest()
    assert found == {place / "apps" / "a.b.1.0.01234567"} and len(flower.places) == 1
    # there Flower looks for it
    assert os.environ["FLWR_HOME"] == str(place)
    assert [path.name for path in found.pop().iterdir()] == ["app.py"]

    def fails(*_: object, **__: object) -> Path:
        raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        superexec.installing_once(fails)(packed(app="other"), skip_prompt=True)
    assert [path.name for path in place.parent.iterdir() if path.is_dir()] == [place.name]


def test_two_applications_of_one_short_hash_are_two(home: Path) -> None:
    """Eight digits of a hash collide after minutes of one core: the approved code and another one."""
    once = superexec.installing_once(Flower(home))
    read = [(once(packed(app=text), skip_prompt=True) / "app.py").read_text() for text in ("hostile", "approved")]
    assert read == ["hostile", "approved"]


@pytest.mark.parametrize("change", ["content", "more", "fewer", "link", "linked directory", "another application"])
def test_changed_code_is_unpacked_anew(home: Path, change: str) -> None:
    flower, archive = Flower(home), packed(app="code", other="more")
    once = superexec.installing_once(flower)
    place = once(archive, skip_prompt=True)
    (place / "__pycache__").mkdir()
    (place / "__pycache__" / "app.pyc").touch()
    assert once(archive, skip_prompt=True) == place and len(flower.places) == 1
    match change:
        case "content":
            (place / "app.py").write_text("evil")
        case "more":
            # it would be imported in place of the library
            (place / "numpy.py").write_text("evil")
        case "fewer":
            (place / "other.py").unlink()
        case "link":
            (place / "other.py").rename(home / "outside.py")
            (place / "other.py").symlink_to(home / "outside.py")
        case "linked directory":
            (home / "outside").mkdir()
            (place / "numpy").symlink_to(home / "outside")
        case "another application":
            (place.parent / "c.d.1.0.01234567").mkdir()
            (place.parent / "c.d.1.0.01234567" / "app.py").write_text("evil")
    assert once(archive, skip_prompt=True) == place and len(flower.places) == 2
    assert {path.name: path.read_text() for path in place.iterdir()} == {"app.py": "code", "other.py": "more"}
    assert [path.name for path in place.parent.iterdir()] == [place.name]


def test_an_application_in_a_new_python_is_unpacked_in_the_same_way() -> None:
    started = list[list[str]]()
    processes = types.SimpleNamespace(Popen=lambda words, **how: started.append(list(words)), DEVNULL=-3)
    launcher = types.SimpleNamespace(subprocess=processes)
    superexec.start_safely(launcher)
    launcher.subprocess.Popen(["flwr-clientapp", "--token", "t"])
    launcher.subprocess.Popen(["flwr-serverapp"])
    assert started[0][1:] == ["-P", "-m", "deploy.superexec", "flwr-clientapp", "--token", "t"]
    assert started[1] == ["flwr-serverapp"]
    with pytest.raises(AttributeError):
        superexec.start_safely(types.SimpleNamespace())


def test_an_application_imports_its_own_copies_of_corollas_packages() -> None:
    code = (
        "import sys, types; from deploy import superexec; from fl_app.known_names import PACKAGES\n"
        "superexec.unpack_safely(types.SimpleNamespace(install_from_fab=None))\n"
        "print([name for name in sys.modules if name.partition('.')[0] in PACKAGES])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
