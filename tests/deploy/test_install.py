"""An image gets the files of the package."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_an_image_gets_every_file_that_the_package_is_built_from() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    wanted = {*wheel["packages"], *wheel["force-include"], project["project"]["readme"]}
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    before = text[: text.index(" /src \\\n")]
    copied = {source for line in re.findall(r"^COPY (?!--)(.*) /src/\S*$", before, re.M) for source in line.split()}
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")}
    assert wanted <= copied <= kept
