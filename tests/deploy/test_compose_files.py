"""The compose files: no service has more rights than it needs, and no SuperNode starts without the rules that it was given."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

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
