"""CITATION.cff names this version of Corolla, and the papers as the methods' own files do."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
CITATION: dict[str, Any] = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
PAPERS = {reference["notes"]: reference for reference in CITATION["references"]}


def test_it_names_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert CITATION["version"] == project["version"]
    assert CITATION["title"].lower() == project["name"]
    assert (CITATION["cff-version"], CITATION["type"]) == ("1.2.0", "software")
    assert CITATION["authors"] == [{"name": "The Corolla developers"}] and CITATION["message"]


@pytest.mark.parametrize("paper", ["FedCAC", "FedDAC", "FedPake", "FedOBP"])
def test_a_paper_is_the_one_that_its_method_cites(paper: str) -> None:
    reference = PAPERS[paper]
    source = (ROOT / "strategies" / f"{paper.lower()}.py").read_text(encoding="utf-8")
    docstring = re.sub(r"\s+", " ", source.split('"""')[1])
    assert f'"{reference["title"]}"' in docstring
    assert str(reference["year"]) in docstring
    names = [author["family-names"] for author in reference["authors"] if "family-names" in author]
    assert ", ".join(names) in docstring
