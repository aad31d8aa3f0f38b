"""What is drawn while a command waits."""

from __future__ import annotations

from pathlib import Path

from corolla.api.waiting import waiting
from fl_app import data, progress
from tests.api.test_live import display
from tests.data.test_data_folder import write_folder


def test_decoding_images_has_a_bar_on_a_terminal(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images", {"a": 60, "b": 40}, {"a": 1, "b": 2}, side=4)
    _, console = display()
    told: list[tuple[str, int, int]] = []
    with waiting(console), progress.listening(lambda *what: told.append(what)):
        data.prepare(f"folder:{folder}", tmp_path / "root")
    assert told == [("decoding images", *numbers) for numbers in ((64, 100), (100, 100), (3, 3))]
    *_, last = console.file.getvalue().rpartition("decoding images")  # type: ignore[attr-defined]
    assert f" {'━' * 40} 3/3 " in last, "a bar of the test images, full"
    assert last.endswith("\x1b[?25h\r\x1b[1A\x1b[2K"), "nothing is left of it"
