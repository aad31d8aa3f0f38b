"""The user's own files at a site: a run names files of its application, and nothing else that the site has."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from client_app import client_app
from fl_app import plugins
from fl_app.errors import UserError
from fl_app.keys import Scalar
from fl_app.transport import wire
from fl_app.transport.app_bundle import unpacked
from tests.facts import mentions


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of an unpacked application, with a module of its own, and a module beside it that is the site's."""
    directory = tmp_path / "app"
    directory.mkdir()
    (directory / "pyproject.toml").write_text("")
    (directory / "of_the_app.py").write_text("def net(**sizes): raise RuntimeError('it ran')\n")
    (tmp_path / "of_the_site.py").write_text("raise SystemExit('it ran')\n")
    (directory / "linked.py").symlink_to(tmp_path / "of_the_site.py")
    monkeypatch.setattr("fl_app.transport.app_bundle.APP_DIRECTORY", directory)
    monkeypatch.syspath_prepend(tmp_path)
    return directory


def answer(**config: Scalar) -> str:
    """What a site answers a run's first message with."""
    TaskIdentity.task_id = TaskIdentity.node_id = TaskIdentity.run_id = 0
    message = Message(wire.encode_query(), 1, wire.QUERY)
    run = {
        "num-clients": 2,
        "train-samples": 20,
        "test-samples": 5,
        **{k.replace("_", "-"): v for k, v in config.items()},
    }
    context = Context(7, 1, {"partition-id": 0, "num-partitions": 2}, RecordDict(), run)
    reply = client_app.app(message, context)
    record = reply.content.config_records["getpropertiesres.properties"]
    return str(record.get(wire.ERROR, ""))


@pytest.mark.parametrize("key", ["model", "method", "task"])
@pytest.mark.parametrize(
    "module",
    ["this", "unittest.__main__", "of_the_site", "linked", "sklearn.datasets", "..app.of_the_app", "no_such_module"],
)
@pytest.mark.usefixtures("app")
def test_a_run_imports_no_module_of_the_site(key: str, module: str) -> None:
    before = set(sys.modules)
    with plugins.only_from(unpacked()), pytest.raises(UserError) as raised:
        plugins.load(key, f"{module}:main")
    assert mentions(str(raised.value), key, "names a module", "not the application's")
    assert not {"this", "unittest.__main__", "of_the_site", "linked"} & (set(sys.modules) - before)


@pytest.mark.parametrize(
    "key, reason", [("method", "configuration/method/own-files"), ("task", "data/dataset/readable")]
)
@pytest.mark.usefixtures("app")
def test_a_client_answers_and_lives(key: str, reason: str) -> None:
    assert answer(**{key: "of_the_site:main"}) == answer(**{key: "no_such_module:main"}) == reason


@pytest.mark.parametrize("module", ["client_app.session", "deploy.supernode", "json"])
def test_corollas_modules_are_no_files_of_a_run(app: Path, module: str) -> None:
    (app / "json.py").write_text("")
    for package in ("client_app", "deploy"):
        (app / package).mkdir()
        for name in ("__init__", "session", "supernode"):
            (app / package / f"{name}.py").write_text("")
    with plugins.only_from(app), pytest.raises(UserError, match="has a module .* already"):
        plugins.load("model", f"{module}:main")


def test_the_applications_own_files_are_found(app: Path) -> None:
    with plugins.only_from(app):
        assert plugins.load("model", "of_the_app:net").__module__ == "of_the_app"
        plugins.read(plugins.fingerprint({"of_the_app.py": (app / "of_the_app.py").read_bytes()}))


def test_code_that_is_not_unpacked_has_no_files_of_a_run(app: Path) -> None:
    (app / "pyproject.toml").unlink()
    with plugins.only_from(unpacked()), pytest.raises(UserError):
        plugins.load("model", "of_the_app:net")


def test_the_key_plugins_tells_nothing_of_the_sites_files(app: Path, tmp_path: Path) -> None:
    """Missing, existing with a wrong guess, and existing with the right one are answered alike."""
    secret = tmp_path / "secret"
    secret.write_text("8 digits")
    right = hashlib.sha256(secret.read_bytes()).hexdigest()[:16]
    answers = {
        answer(plugins=f"{name}:{digits}")
        for name in (secret, tmp_path / "none", "../secret", "../none", "none", "linked.py", "of_the_app.py")
        for digits in (right, "0" * 16)
    }
    assert answers == {"configuration/plugins/own-files"}
