"""What the container image and `make run` are built from: pinned packages with hashes, and a pinned base."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.requirements import chosen

ROOT = Path(__file__).resolve().parent.parent.parent
CONSTRAINTS = ROOT / "constraints"
LOCK = """# a comment
numpy==2.0 \\
    --hash=sha256:aa
nvidia-cublas==13.0 ; sys_platform == 'linux' \\
    --hash=sha256:bb \\
    --hash=sha256:cc
pytest==8.0 \\
    --hash=sha256:dd
torch==2.14 \\
    --hash=sha256:ee
torchmetrics==1.9 \\
    --hash=sha256:ff
"""


def test_the_named_packages_with_all_their_lines() -> None:
    names = {"numpy", "nvidia-cublas", "torch", "torchmetrics"}
    assert chosen(LOCK, names) == LOCK.replace("# a comment\n", "").replace(
        "pytest==8.0 \\\n    --hash=sha256:dd\n", ""
    )
    assert re.findall(r"^\w+", chosen(LOCK, names, torch=False), re.MULTILINE) == ["numpy", "torchmetrics"]


@pytest.mark.parametrize("file", ["image.txt", "run.txt"])
@pytest.mark.parametrize("lock", sorted(CONSTRAINTS.glob("flwr-*.txt")), ids=lambda path: path.stem)
def test_every_package_that_runs_is_locked_with_hashes(lock: Path, file: str) -> None:
    names = (CONSTRAINTS / file).read_text().split()
    command = [sys.executable, "deploy/requirements.py", str(lock), f"constraints/{file}"]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    blocks = re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)[1:]
    assert all(re.match(r"[a-z0-9.-]+==", block) and "--hash=sha256:" in block for block in blocks)
    found = {block.partition("==")[0] for block in blocks}
    # a package of one Flower alone
    assert len(found) >= len(names) - 5 and {"flwr", "torch", "prometheus-client", "opacus"} <= found <= set(names)
    # what tests and lints need runs nothing; an editable installation is built
    assert not {"pytest", "mypy", "ruff", "mkdocs", "onnx"} & found
    assert {"hatchling", "editables"} & found == ({"hatchling", "editables"} if file == "run.txt" else set())


def test_the_base_is_pinned_and_the_last_stage_copies_no_tool() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    assert re.search(r"^ARG BASE_IMAGE=python:3\.11-slim-bookworm@sha256:[0-9a-f]{64}$", text, re.MULTILINE)
    last = text.rpartition("\nFROM ")[2]
    assert "/tools" not in last and "apt-get" not in last and "\nUSER 1000\n" in last


def test_an_edit_of_the_code_copies_no_packages() -> None:
    stages = re.split(r"^FROM ", (ROOT / "deploy" / "Dockerfile").read_text(), flags=re.MULTILINE)
    packages = next(stage for stage in stages if stage.startswith("${BASE_IMAGE} AS packages"))
    assert "--require-hashes -r /hashed.txt" in packages and "/src" not in packages
    copied = re.findall(r"^COPY --from=(\w+) (/\S+)", stages[-1], re.MULTILINE)
    assert copied[:2] == [("packages", "/opt/corolla"), ("builder", "/own")]
