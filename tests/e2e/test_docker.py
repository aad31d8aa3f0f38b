"""The demo clusters in containers, without and with TLS, on a real engine: same digest as one process in the same image."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
PROJECT, IMAGE = "corolla-test", "corolla-test"
RUN = {"method": "fedcac", "num-server-rounds": 2, "fedcac.beta": 1, "train-samples": 40}
SETTINGS = [word for k, v in RUN.items() for word in ("--set", f"{k}={json.dumps(v)}")]
# by its tag: a machine without a registry has a base image of its own, with another digest
BASE = {"BASE_IMAGE": "python:3.11-slim-bookworm"}
ENVIRONMENT = {**BASE, **os.environ, "COMPOSE_PROJECT_NAME": PROJECT, "COROLLA_IMAGE": IMAGE}


def run(*command: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command, cwd=ROOT, env={**ENVIRONMENT, **environment}, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0 or not check, f"{' '.join(command)}\n{done.stdout[-8000:]}\n{done.stderr[-8000:]}"
    return done


def engine() -> str:
    """Return why there is no engine, or ""."""
    if not shutil.which("docker"):
        return "no docker command"
    done = run("docker", "info", check=False)
    return "" if done.returncode == 0 else f"no Docker engine: {done.stderr.strip()[-200:]}"


def composer() -> list[str]:
    if run("docker", "compose", "version", check=False).returncode == 0:
        return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") else []


MISSING = engine() or ("" if composer() else "neither `docker compose` nor `docker-compose`")
pytestmark = [pytest.mark.docker, pytest.mark.timeout(2400), pytest.mark.skipif(bool(MISSING), reason=MISSING)]


def compose(*arguments: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    files = ["-f", "deploy/compose.yaml", "-f", "deploy/compose.tls.yaml"]
    return run(*composer(), "-p", PROJECT, *files, *arguments, check=check, **environment)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    # what a run of these tests that was killed has left
    compose("down", "--volumes", "--timeout", "20", check=False)
    yield
    compose("down", "--volumes", "--timeout", "20", check=False)
    label = f"label=com.docker.compose.project={PROJECT}"
    for what in ("container", "volume", "network"):
        everything = ["--all"] if what == "container" else []
        assert run("docker", what, "ls", *everything, "--quiet", "--filter", label).stdout == "", what


@pytest.fixture(scope="module")
def image() -> str:
    compose("build", "superlink")
    return IMAGE


@pytest.fixture(scope="module")
def expected(image: str) -> str:
    """Digest of the same run in one process."""
    command = (
        f"corolla run --in-process --clients 4 --set run-name=one {' '.join(SETTINGS)} && cat runs/one/summary.json"
    )
    done = run("docker", "run", "--rm", image, "sh", "-c", command)
    return str(read(done.stdout)["digest"])


def read(text: str) -> dict[str, Any]:
    """Read the summary at the end of a command's output."""
    found: dict[str, Any] = json.loads(text[text.rindex("\n{") if "\n{" in text else 0 :])
    return found


@pytest.mark.nightly
def test_the_demo_runs_to_the_end(expected: str, tmp_path: Path) -> None:
    done = run("deploy/demo.sh", *SETTINGS, RUNS=str(tmp_path), RUN_NAME="demo")
    assert "fedcac" in done.stdout and f"copied to {tmp_path}/demo" in done.stdout
    assert json.loads((tmp_path / "demo" / "summary.json").read_text())["digest"] == expected


def test_tls_and_authentication(expected: str) -> None:
    compose("up", "-d")
    arguments = ["--clients", "4", "--output-dir", "/results", "--set", "run-name=tls", *SETTINGS]
    compose("exec", "-T", "superlink", "corolla", "run", "--superlink", "cluster-tls", *arguments)
    assert (
        read("\n" + compose("exec", "-T", "superlink", "cat", "/results/tls/summary.json").stdout)["digest"] == expected
    )

    # with keys of their own they run private, without more
    private = [
        "--clients",
        "4",
        "--output-dir",
        "/results",
        "--set",
        "run-name=private",
        "--set",
        "private=true",
        *SETTINGS,
    ]
    compose("exec", "-T", "superlink", "corolla", "run", "--superlink", "cluster-tls", *private)
    assert (
        read("\n" + compose("exec", "-T", "superlink", "cat", "/results/private/summary.json").stdout)["failures"] == 0
    )

    # a container sees its own private key only, and runs as nobody special
    held = compose("exec", "-T", "supernode-2", "ls", "/keys").stdout.split()
    assert held == ["ca.crt", "peers.txt", "supernode.key", "supernode.x25519"]
    held = compose("exec", "-T", "superlink", "ls", "/keys").stdout.split()
    assert "server.key" in held and not [
        name for name in held if name.startswith(("ca.key", "supernode")) and ".pub" not in name
    ]
    assert compose("exec", "-T", "supernode-2", "id", "-u").stdout.strip() == "1000"

    # each is behind its site's gate, whose audit knows the run
    assert "supernode-2: " in compose("exec", "-T", "supernode-2", "corolla", "node", "audit").stdout

    # plaintext is refused, and so is a SuperNode without a registered key
    node = "flower-supernode --superlink superlink:9092 --port 9099"
    ca = "--root-certificates /keys/ca.crt"
    tried = compose(
        "exec", "-T", "supernode-2", "sh", "-c", f"timeout 30 {node} --insecure; timeout 60 {node} {ca}", check=False
    )
    said = tried.stdout + tried.stderr
    assert "SuperNode ID" not in said and "[code: 2001] SuperNode authentication is enabled" in said
    log = compose("logs", "superlink").stdout
    assert "WRONG_VERSION_NUMBER" in log
    states = compose("ps").stdout
    assert states.lower().count("healthy") >= 5, states

    # once more: what is registered and made stays, nothing fails
    compose("up", "-d")


def test_what_is_in_the_image(image: str) -> None:
    def inside(script: str) -> str:
        return run("docker", "run", "--rm", "--read-only", "--tmpfs", "/tmp", image, "sh", "-c", script).stdout

    sbom = json.loads(inside("cat /usr/share/corolla/sbom.cdx.json"))
    there = {part["name"].lower().replace("_", "-"): part["version"] for part in sbom["components"]}
    assert sbom["bomFormat"] == "CycloneDX" and {"flwr", "torch", "prometheus-client", "corolla"} <= set(there)
    # locked versions, and nothing else; a package may have one for each Python
    if not os.environ.get("TORCH"):
        lock = (ROOT / "constraints" / "flwr-1.39.txt").read_text()
        locked = set(re.findall(r"^([a-z0-9.-]+)==([^ ]+)", lock, re.MULTILINE))
        assert set(there.items()) - locked == {("corolla", there["corolla"])}
    # nobody special, and no tools that build
    assert inside("id -u").strip() == "1000"
    assert (
        inside("command -v gcc cc make pip uv-build; python -m pip --version 2>&1 | tail -1")
        .strip()
        .endswith("No module named pip")
    )
    assert "usage: deploy.prometheus" in inside("python -P -m deploy.prometheus --help")


def test_the_gpu_file_gives_each_supernode_a_gpu() -> None:
    files = ["-f", "deploy/compose.yaml", "-f", "deploy/compose.gpu.yaml"]
    assert run(*composer(), *files, "config").stdout.count("nvidia") == 4


@pytest.mark.parametrize("tls", [False, True])
def test_the_monitored_files_are_read(tls: bool) -> None:
    files = ["-f", "deploy/compose.yaml", *(["-f", "deploy/compose.tls.yaml"] if tls else [])]
    files += ["-f", "deploy/compose.monitored.yaml"]
    keys = {"KEYS_SUPERLINK": "keys-superlink"} if tls else {}
    config = yaml.safe_load(run(*composer(), *files, "config", **keys).stdout)["services"]
    assert {"superlink", "metrics", "prometheus", "grafana"} <= set(config)
    # nothing but this machine reaches them
    assert all("127.0.0.1" in str(port) for name in ("prometheus", "grafana") for port in config[name]["ports"])
    assert config["superlink"]["cap_drop"] == ["ALL"]
