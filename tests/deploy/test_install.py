"""`make install` says what it is doing; an image is told what to install."""

from __future__ import annotations

import re
import subprocess
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


@pytest.mark.parametrize("torch", ["", "torch torchvision"])
def test_an_image_gets_what_runs_need_of_a_node(tmp_path: Path, torch: str) -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    extras = re.search(r'^ARG EXTRAS="(.*)"$', text, re.M)
    program = re.search(r'^RUN python -c "(.*?)"$', text, re.M | re.S)
    assert extras and program
    code = program[1].replace("\\\n", "").replace("${TORCH}", torch).replace("${EXTRAS}", extras[1])
    for name in ("pyproject.toml", "torch.txt", "rest.txt"):
        code = code.replace(f"'/{name}'", repr(str(tmp_path / name)))
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    subprocess.run([sys.executable, "-c", code], check=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    first, rest = (set((tmp_path / name).read_text().splitlines()) for name in ("torch.txt", "rest.txt"))
    own = {word for word in project["dependencies"] if re.match(r"torch(vision)?\W", word)}
    assert first == (set(torch.split()) or own) and len(own) == 2
    wanted = {word for extra in extras[1].split() for word in project["optional-dependencies"][extra]}
    assert rest == {*project["dependencies"], *wanted} - own
    assert not any(word.startswith(("corolla", "matplotlib")) for word in rest)


def test_an_image_gets_every_file_that_the_package_is_built_from() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    wanted = {*wheel["packages"], *wheel["force-include"], project["project"]["readme"]}
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    before = text[: text.index("--editable /app")]
    copied = {source for line in re.findall(r"^COPY (?!--)(.*) /app/\S*$", before, re.M) for source in line.split()}
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")}
    assert wanted <= copied <= kept
