"""The notebook in examples/, executed as Jupyter does; and what a panel looks like there."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

from tests.facts import mentions

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "notebook.ipynb"


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The notebook with its outputs, run in an empty directory by this Python."""
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    from jupyter_client.manager import KernelManager

    directory = tmp_path_factory.mktemp("notebook")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
            patch.setenv(name, str(directory / "jupyter"))
        patch.setenv("COROLLA_STATE_DIR", str(directory / "state"))
        manager = KernelManager()
        manager.kernel_spec.argv[0] = sys.executable
        notebook = nbformat.read(NOTEBOOK, as_version=4)
        nbclient.NotebookClient(
            notebook, km=manager, timeout=240, resources={"metadata": {"path": str(directory)}}
        ).execute()
        yield directory, [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(cell: Any, kind: str) -> list[str]:
    return [str(output["data"][kind]) for output in cell.outputs if kind in output.get("data", {})]


def test_the_notebook_is_committed_without_outputs() -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.outputs and cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")


@pytest.mark.nightly
def test_the_notebook_runs_and_shows_what_it_promises(executed: Any) -> None:
    directory, cells = executed
    first, comparison, metrics, plot, clients, model, report, mistake, summary = cells
    panel, result = outputs(first, "text/html")
    # one panel, drawn anew in its place
    assert "5/5 done" in panel and "fedcac" in panel and "<pre" in panel
    assert "<table>" in result and " %" in result
    assert "verdict" in outputs(comparison, "text/html")[-1] and "fedavg" in outputs(comparison, "text/html")[-1]
    assert "accuracy-before" in outputs(metrics, "text/html")[0] and outputs(plot, "image/png")
    assert "evaluation-accuracy" in outputs(clients, "text/html")[0]
    assert "Linear" in outputs(model, "text/plain")[0]
    assert "report.html" in outputs(report, "text/plain")[0] and list(directory.glob("runs/*/report.html"))
    assert mentions(mistake.outputs[0]["text"], "num-server-round", "unknown key", "did you mean", "num-server-rounds?")
    assert (
        "'final-accuracy'" in outputs(summary, "text/plain")[0]
        and len(list(directory.glob("runs/*/summary.json"))) == 2
    )
    told = "".join(output.get("text", "") for cell in cells for output in cell.outputs)
    # no lines beside the panel, nothing for terminals
    assert "round 1/5" not in told and "\x1b" not in told


@pytest.mark.usefixtures("undrawn")
def test_the_code_of_the_notebook_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it does without a notebook around it."""
    pytest.importorskip("matplotlib").use("agg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COROLLA_STATE_DIR", str(tmp_path / "state"))
    cells = [cell for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}
    for cell in cells:
        exec(compile("".join(cell["source"]), NOTEBOOK.name, "exec"), names)
    assert mentions(capsys.readouterr().out, "num-server-round", "unknown key", "did you mean", "num-server-rounds?")
    assert names["last"]["evaluation-accuracy"].notna().all() and (names["fedcac"].path / "report.html").is_file()
    assert len(list(tmp_path.glob("runs/*/summary.json"))) == 2


def test_a_drawing_is_html_and_text() -> None:
    from corolla.api.waiting import Drawing

    shown = Drawing(Text("a < b", style="bold red"))._repr_mimebundle_()
    assert "a &lt; b" in shown["text/html"] and "style=" in shown["text/html"] and shown["text/plain"] == "a < b\n"
