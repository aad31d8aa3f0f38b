"""The gallery's scripts as the page starts them, in this process, and the claims that stand beside their pictures."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GALLERY = ROOT / "docs" / "gallery"
MOST_BYTES = 60_000


@pytest.fixture
def output(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> str:
    """The output of a script, which also draws its picture."""
    matplotlib = pytest.importorskip("matplotlib")
    script, picture = request.param
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COROLLA_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setattr(sys, "argv", [script, "--picture", picture])
    # the scripts set matplotlib's defaults, as a process of their own may
    with matplotlib.rc_context():
        runpy.run_path(str(ROOT / "examples" / f"{script}.py"), run_name="__main__")
    assert 0 < Path(picture).stat().st_size <= MOST_BYTES
    return capsys.readouterr().out


def of(script: str, picture: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("output", [(script, picture)], indirect=True)


def rows(text: str) -> dict[str, list[float]]:
    """Return the numbers of each line by its first word."""
    return {line.split()[0]: [float(n) for n in re.findall(r"-?\d+\.\d+", line)] for line in text.splitlines()}


@pytest.mark.nightly
@of("label_skew", "label-skew.svg")
def test_label_skew(output: str) -> None:
    found = rows(output)
    fedcac, fedavg, local = (found[name][0] for name in ("fedcac", "fedavg", "local"))
    assert fedavg < fedcac - 0.2 and abs(fedcac - local) < 0.02


@pytest.mark.nightly
@of("hospitals", "hospitals.svg")
def test_hospitals(output: str) -> None:
    found = {name: auc for name, auc in rows(output).items() if auc}
    local, fedavg, ditto = (found[name] for name in ("local", "fedavg", "ditto"))
    assert len(local) == 4 and fedavg[0] - local[0] > 4 and 1 < ditto[0] - local[0] < fedavg[0] - local[0]
    assert all(0 < ours - alone < 2 for ours, alone in zip(fedavg[1:], local[1:], strict=True))


@of("masks", "masks.png")
def test_masks(output: str) -> None:
    contrasts = [float(n) for n in re.findall(r"overlap by (\S+) more", output)]
    assert len(contrasts) == 3 and min(contrasts) > 0.05


@pytest.mark.nightly
@of("private", "private.svg")
def test_private(output: str) -> None:
    found = rows(output)
    plain, private = found["plain"][0], found["private"][0]
    assert abs(plain - private) < 3
    sizes = [int(size.replace(",", "")) for size in re.findall(r"([\d,]+) bytes per upload", output)]
    assert sizes[0] < sizes[1] <= 2 * sizes[0]


def test_every_script_of_the_page_has_its_small_picture() -> None:
    page = (GALLERY / "index.md").read_text(encoding="utf-8")
    pictures = re.findall(r"!\[[^\]]+\]\((\S+)\)", page)
    assert len(pictures) == 4
    for name in pictures:
        assert (GALLERY / name).stat().st_size <= MOST_BYTES
        assert f"examples/{Path(name).stem.replace('-', '_')}.py" in page
