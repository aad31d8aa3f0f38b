"""The cluster launcher's table in Flower's config file."""

from __future__ import annotations

import threading
import tomllib
from pathlib import Path

import pytest

from deploy import connection
from fl_app.errors import DeploymentError, UserError
from tests.facts import rejected

TABLE = {"address": "127.0.0.1:8000", "root-certificates": '/keys "x"/ca.crt'}
MINE = """# my own notes
[superlink]
default = "local"   # keep

[superlink.local]
address = ":local:"
options.num-supernodes = 10

[other]
list = [1,
  2]"""


@pytest.mark.parametrize("text", [MINE, MINE + "\n", MINE + "\n\n# the end\n", ""])
def test_add_and_remove_leave_the_rest_as_it_was(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    path.chmod(0o600)
    connection.add(path, "lab", TABLE)
    after = tomllib.loads(path.read_text())
    assert after["superlink"]["lab"] == TABLE and path.read_text().startswith(text)
    assert path.stat().st_mode & 0o777 == 0o600
    connection.remove(path, "lab", TABLE)
    assert path.read_text().rstrip("\n") == text.rstrip("\n")


def test_tables_after_ours_survive(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(MINE)
    connection.add(path, "lab", TABLE)
    connection.add(path, "lab2", TABLE)
    with path.open("a") as file:
        file.write("# about mine\n[superlink.mine]\naddress = 'x'\n")
    connection.remove(path, "lab", TABLE)
    assert set(tomllib.loads(path.read_text())["superlink"]) == {"default", "local", "lab2", "mine"}
    assert "# about mine" in path.read_text()


def test_remove_after_flower_rewrote_the_file(tmp_path: Path) -> None:
    import tomli_w

    path = tmp_path / "config.toml"
    path.write_text(MINE)
    connection.add(path, "lab", TABLE)
    path.write_text(tomli_w.dumps(tomllib.loads(path.read_text())))
    connection.remove(path, "lab", TABLE)
    assert tomllib.loads(path.read_text()) == tomllib.loads(MINE)


def test_another_connection_of_that_name_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[superlink.lab]\naddress = "elsewhere:1"\n')
    with rejected(DeploymentError, "", "connection named 'lab'", "already"):
        connection.add(path, "lab", TABLE)
    connection.remove(path, "lab", TABLE)
    assert "elsewhere" in path.read_text()


def test_files_that_cannot_take_a_table_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    for text in ('superlink = { default = "x" }\n', "broken = [\n"):
        path.write_text(text)
        with pytest.raises(UserError):
            connection.add(path, "lab", TABLE)
        assert path.read_text() == text


def test_without_a_file_flowers_own_defaults_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "new" / "config.toml"
    connection.add(path, "lab", TABLE)
    assert {"default", "local", "lab"} <= set(tomllib.loads(path.read_text())["superlink"])


def test_clusters_that_start_and_end_at_once_all_have_their_tables(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(MINE)
    for name in ("old-0", "old-1"):
        connection.add(path, name, TABLE)
    edits = [(connection.add, f"new-{k}") for k in range(6)] + [(connection.remove, f"old-{k}") for k in range(2)]
    threads = [threading.Thread(target=edit, args=(path, name, TABLE)) for edit, name in edits]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    links = tomllib.loads(path.read_text())["superlink"]
    assert set(links) == {"default", "local", *(f"new-{k}" for k in range(6))}


@pytest.mark.parametrize("name", ["keys 😀", "keys\u2028", 'a"b\\c', "tab\t"])
def test_any_path_can_be_in_a_table(tmp_path: Path, name: str) -> None:
    path, table = tmp_path / "config.toml", {"address": "127.0.0.1:8000", "root-certificates": f"/{name}/ca.crt"}
    connection.add(path, "lab", table)
    assert tomllib.loads(path.read_text(encoding="utf-8"))["superlink"]["lab"] == table
    connection.remove(path, "lab", table)
    assert "lab" not in tomllib.loads(path.read_text(encoding="utf-8"))["superlink"]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with rejected(DeploymentError, "config.toml", "cannot be changed"):
        connection.add(tmp_path / "file" / "config.toml", "lab", TABLE)


def test_a_path_that_is_no_text_is_named(tmp_path: Path) -> None:
    with rejected(DeploymentError, "config.toml", "cannot be changed", "'utf-8' codec can't", "encode"):
        connection.add(tmp_path / "config.toml", "lab", TABLE | {"root-certificates": "/caf\udce9/ca.crt"})
    assert not (tmp_path / "config.toml").exists()
