"""`make install` says what it is doing; an image gets the files of the package."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from deploy import install


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("  Downloading torch-2.11.0-cp311-manylinux_2_28_x86_64.whl (890.1 MB)\n", "downloading torch (890.1 MB)"),
        (
            "Downloading https://files.example/packages/ray-2.51.1-cp311-any.whl (70.5 MB)\n",
            "downloading ray (70.5 MB)",
        ),
        ("  Downloading rich-14.3.4-py3-none-any.whl.metadata (18 kB)\n", ""),
        ("Collecting torch>=2.11\n", ""),
        ("Installing collected packages: rich, typer, corolla\n", "installing 3 packages"),
    ],
)
def test_words_for_pips_lines(line: str, words: str) -> None:
    assert install.summarize(line) == words


def test_no_silence_is_long(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(install, "SILENCE_SECONDS", 0.3)
    code = "import time; print('Installing collected packages: a, b', flush=True); time.sleep(1.5)"
    install.run([sys.executable, "-c", code], "looking up packages", install.summarize)
    out = capsys.readouterr().out.splitlines()
    after = out[out.index("    installing 2 packages") + 1 :]
    assert after and all(line.startswith("    installing 2 packages (") for line in after)


def test_a_command_that_fails_is_named_with_what_it_said() -> None:
    with pytest.raises(SystemExit) as exit_:
        install.run([sys.executable, "-c", "print('no such package'); raise SystemExit(3)"], "looking up packages")
    assert "no such package" in str(exit_.value) and "the command failed" in str(exit_.value)


ROOT = Path(install.__file__).resolve().parent.parent


def test_an_image_gets_every_file_that_the_package_is_built_from() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    wanted = {*wheel["packages"], *wheel["force-include"], project["project"]["readme"]}
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    before = text[: text.index(" /src \\\n")]
    copied = {source for line in re.findall(r"^COPY (?!--)(.*) /src/\S*$", before, re.M) for source in line.split()}
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")}
    assert wanted <= copied <= kept
