"""The files of a deployment: compose files, and what the container image and `make run` are built from."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.requirements import chosen

DEPLOY = Path(__file__).resolve().parent.parent.parent / "deploy"
NAMES = ("compose.yaml", "compose.tls.yaml", "compose.monitored.yaml")
FILES: dict[str, Any] = {name: yaml.safe_load((DEPLOY / name).read_text()) for name in NAMES}
ONE_SHOT = ("keys", "register")


def services() -> dict[str, dict[str, Any]]:
    """Return all services by name, as the three files together describe them."""
    found: dict[str, dict[str, Any]] = {}
    for file in FILES.values():
        for name, about in file["services"].items():
            found[name] = {**found.get(name, {}), **about}
    return found


@pytest.mark.parametrize("name", services())
def test_every_service_is_closed(name: str) -> None:
    about = services()[name]
    assert about["user"].split(":")[0] not in ("0", "root")
    assert about["cap_drop"] == ["ALL"] and "cap_add" not in about and about["read_only"] is True
    assert about["security_opt"] == ["no-new-privileges:true"] and not about.get("privileged")
    assert about["mem_limit"] and about["pids_limit"]
    assert about["logging"]["options"].keys() == {"max-size", "max-file"}
    # what ends by itself is waited for
    assert name in ONE_SHOT or about["healthcheck"]["test"]
    assert about["restart"] == ("no" if name in ONE_SHOT else "unless-stopped")
    assert all(port.startswith("127.0.0.1:") for port in about.get("ports", ()))


def test_foreign_images_are_pinned_by_digest() -> None:
    images = {about["image"] for about in services().values() if "COROLLA_IMAGE" not in about["image"]}
    assert len(images) == 2
    for image in images:
        assert re.fullmatch(r"\$\{\w+:-[\w/.-]+:v?[\d.]+@sha256:[0-9a-f]{64}\}", image)


def test_nobody_logs_in_to_grafana() -> None:
    settings = services()["grafana"]["environment"]
    assert settings["GF_AUTH_BASIC_ENABLED"] == "false" and settings["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert settings["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert settings["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"


@pytest.mark.parametrize("name", ["compose.yaml", "compose.tls.yaml"])
@pytest.mark.parametrize("given", ["", "/misspelt"])
@pytest.mark.parametrize("seen", [False, True])
def test_rules_that_are_named_are_given(name: str, given: str, seen: bool, tmp_path: Path) -> None:
    """The container's shell, with a `python` that prints its words."""
    (tmp_path / "python").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "site").mkdir()
    if seen:
        (tmp_path / "site" / "site.toml").touch()
    for k in range(4):
        assert services()[f"supernode-{k}"]["environment"]["SITE"] == f"${{SITE_{k}:-}}"
        *shell, line = FILES[name]["services"][f"supernode-{k}"]["command"]
        line = line.replace("$$", "$").replace("/site/", f"{tmp_path}/site/")
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SITE": given, "CLIENT_ID": str(k)}
        said = subprocess.run(
            [*shell, line], env=environment, capture_output=True, text=True, check=True
        ).stdout.split()
        assert ("--site" in said) == (bool(given) or seen)
        if "--site" in said:
            at = said.index("--site")
            assert said[at + 1] == f"{tmp_path}/site/site.toml" and at < said.index("--")


def test_a_unit_needs_the_file_that_names_its_rules() -> None:
    unit = (DEPLOY / "systemd" / "corolla-supernode@.service").read_text()
    assert re.findall(r"^EnvironmentFile=(.*)$", unit, re.MULTILINE) == ["/etc/corolla/%i.env"]


# What the container image and `make run` are built from: pinned packages with hashes, and a pinned base ---------------

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


# An image gets the files of the package -------------------------------------------------------------------------------


def test_an_image_gets_every_file_that_the_package_is_built_from() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    wanted = {*wheel["packages"], *wheel["force-include"], project["project"]["readme"]}
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    before = text[: text.index(" /src \\\n")]
    copied = {source for line in re.findall(r"^COPY (?!--)(.*) /src/\S*$", before, re.M) for source in line.split()}
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")}
    assert wanted <= copied <= kept
