"""FedPake's Fig. 7: the kernel that is drawn, its classes in an obvious case, and the errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fl_app.errors import UserError
from fl_app.layout import Layout, Model, packed
from fl_app.server import kept_uploads
from strategies.fedpake import Division, FedPakeParams, divide
from studies import fedpake_fig7
from studies.fedpake_fig7 import cells, kernel
from tests.report.builders import folder

# two convolutions: one of 1 x 1 kernels, and one of two 3 x 3 kernels
TENSORS = [("a.weight", (1, 1, 1, 1)), ("b.weight", (2, 1, 3, 3)), ("b.bias", (2,))]


def uploads(run: Path, round: int = 1, tensors: list[tuple[str, tuple[int, ...]]] = TENSORS) -> Path:
    """Keep uploads of ten clients, 10 to 1. Clients 5 to 10 are 1 higher in the second kernel, by 2 in its last value."""
    layout = Layout(packed(tensors), ())
    ids = list(range(10, 0, -1))
    W = np.ones((10, layout.d), np.float32)
    W[:6, 10:19] = 2
    W[:6, 18] = 3
    kept_uploads.save(
        run,
        round,
        layout,
        ids,
        np.ones(10),
        (W, np.zeros((10, 0), np.float32), None),
        lambda i: Model(W[0], np.zeros(0, np.float32)),
    )
    return run


def test_the_kernel_that_differs_most_on_the_clients_of_the_lowest_ids(tmp_path: Path) -> None:
    found = kernel(uploads(tmp_path))
    assert (found.tensor, found.at, found.shape, found.round) == ("b.weight", (1, 0), (3, 3), 1)
    assert found.clients == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert found.values.tolist() == [[1.0] * 9] * 4 + [[2.0] * 8 + [3.0]] * 5


def test_classes_of_the_kernel(tmp_path: Path) -> None:
    W = kernel(uploads(tmp_path)).values
    # only the last value differs more, relative to its mean: all others have the smallest cv. Its mean is 19/9, squared
    # deviations are (10/9)^2 = 1.23 and (8/9)^2 = 0.79. With C = 2 both are in class 2, with C = 4 too: 4 * 0.79 > 3.
    # With C = 5 they are in classes 5 and 4, so the clients have nothing in common
    for num_micro, micro, macro in ((4, (4, 4), [0] * 9), (5, (5, 4), [0] * 4 + [1] * 5)):
        division = divide(W, FedPakeParams(num_micro=num_micro))
        assert division.high.tolist() == [False] * 8 + [True]
        assert division.macro.tolist() == macro
        assert division.micro[:, 8].tolist() == [micro[0]] * 4 + [micro[1]] * 5
        assert not division.micro[:, :8].any()
    # the limit of one cluster, and lambda = 1, which divides nothing
    assert not divide(W, FedPakeParams(num_micro=5, num_macro=1)).macro.any()
    none = divide(W, FedPakeParams(threshold=1, num_micro=5))
    assert not none.high.any() and not none.micro.any() and not none.macro.any()


def test_a_square_of_cells_is_a_parameter() -> None:
    # three clients, 2 x 2 cells, and a kernel of 1 x 2 whose second parameter is of low dispersion
    division = Division(np.array([True, False]), np.array([[3, 0], [1, 0], [2, 0]], np.uint8), np.array([0, 1, 0]))
    macro, micro = cells(division, (1, 2))
    assert macro.tolist() == [[0, 1, -1, -1], [0, -2, -1, -2]]
    assert micro.tolist() == [[3, 1, 0, 0], [2, 0, 0, 0]]


def test_the_command_draws_the_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = uploads(folder(tmp_path / "run", [], num_server_rounds=1, method="fedpake"))
    output = tmp_path / "fig7.png"
    monkeypatch.setattr("sys.argv", ["fig7", str(run), "--output", str(output)])
    fedpake_fig7.main()
    assert "row by row: 1 2 3; 4 5 6; 7 8 9." in capsys.readouterr().out
    with Image.open(output) as image:
        # the colours of low dispersion and of the first Macro-Class
        assert {(217, 217, 217), (0, 114, 178)} <= {colour for _, colour in image.convert("RGB").getcolors(1 << 24)}


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="keep-uploads"):
        kernel(tmp_path)
    uploads(tmp_path)
    with pytest.raises(UserError, match=r"round .*\(1\), got 2"):
        kernel(tmp_path, 2)
    with pytest.raises(UserError, match=r"tensor .*\(b.weight\), got a.weight"):
        kernel(tmp_path, tensor="a.weight")
    uploads(tmp_path, 2, [("c.weight", (3, 7))])
    with pytest.raises(UserError, match="3 x 3"):
        kernel(tmp_path)


@pytest.mark.parametrize(("name", "error"), [("fig7.gif", "png, svg or pdf"), ("fig7.png", "has no kept uploads")])
def test_the_command_ends_with_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: str) -> None:
    run = folder(tmp_path / "run", [], num_server_rounds=1)
    monkeypatch.setattr("sys.argv", ["fig7", str(run), "--output", str(tmp_path / name)])
    with pytest.raises(SystemExit, match=error):
        fedpake_fig7.main()
