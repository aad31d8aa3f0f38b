"""The registry of data sources: what its lines name is there, and documentation says what they say."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

from fl_app.errors import ConfigurationError
from fl_app.sources import NODE, SOURCES, Source, path_in, source_of
from tests.facts import rejected

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_every_source_has_a_function_that_takes_a_request(source: Source) -> None:
    module, _, name = source.prepare.partition(":")
    signature = inspect.signature(getattr(importlib.import_module(module), name))
    assert [parameter.annotation for parameter in signature.parameters.values()] == ["DataRequest"]
    assert signature.return_annotation == "Prepared"


def test_every_function_that_prepares_data_is_registered() -> None:
    files = Path(__file__).parents[2].joinpath("fl_app", "data").glob("[a-z]*.py")
    prepare = re.compile(r"^def ([a-z]\w*)\(request: DataRequest\) -> Prepared:$", re.MULTILINE)
    found = {f"fl_app.data.{file.stem}:{name}" for file in files for name in prepare.findall(file.read_text("utf-8"))}
    registered = {source.prepare for source in SOURCES.values()}
    assert found - registered == set(), "add a line to REGISTERED in fl_app/sources.py"


def test_paths_in_values() -> None:
    assert path_in("dataset", "npz:/a:b.npz") == "/a:b.npz" and path_in("partition", "file:p.npz") == "p.npz"
    for key, value in (("dataset", "digits"), ("dataset", "npz:"), ("dataset", "file:/x"), ("partition", "npz:/x")):
        assert path_in(key, value) == ""
    with rejected(ConfigurationError, "dataset", "'nothing:/x' has no", "source", "there are"):
        source_of("nothing:/x")


def test_documentation_says_what_sources_take_and_tell() -> None:
    own = {f"`dataset={name}:" for name, source in SOURCES.items() if source.path and not source.known}
    data, privacy = ((DOCS / f"{page}.md").read_text() for page in ("data", "privacy"))
    # wherever its lines are broken
    privacy = " ".join(privacy.split())
    assert [start for start in own if f"| {start}" not in data] == [], "docs/data.md, Sources, describes every source"
    assert f"| `dataset={NODE} " in data
    told = privacy[privacy.index("the class names of") :].partition(";")[0]
    assert {name for name in SOURCES if f"`{name}:`" in told} == {
        name for name, source in SOURCES.items() if source.tells_classes
    }, "docs/privacy.md names the sources with `tells_classes` after 'the class names of'"
