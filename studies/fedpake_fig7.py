"""FedPake's Fig. 7: how lambda, C and S divide a convolution's kernel among nine clients, drawn from a run's uploads.

    corolla run mine.toml --in-process --clients 9
    python -m studies.fedpake_fig7 RUN

mine.toml, for example:

    method = "fedpake"
    model = "cnn"
    num-server-rounds = 2
    train-samples = 50
    keep-uploads = "every 1"
    [fedpake]
    deviations = "scaled"
    delta-meaning = "distance"

Liao, Wang, Yuan, Zhang: "The Key of Parameter Skew in Federated Learning" (2024), Appendix D.1. Its figure shows one
5 x 5 kernel of nine clients as a cuboid. Here a cell is a parameter of a client, and a square of cells is a parameter.

As in the figure, the kernel is divided as if it were a layer. In a run, a layer is a whole tensor. The other parameters
of FedPake are the run's, or the defaults if its method is another one. By default all clients are in one Macro-Class, as
docs/methods/fedpake.md explains. The two keys above give several. Random classes are drawn anew.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from pathlib import Path

import altair as alt
import numpy as np
import pandas
from numpy.typing import NDArray

from corolla.experiments.runs import RecordedRun, existing
from corolla.report import charts
from corolla.report.charts import Chart, Panel
from corolla.report.theme import COLOURS, of_colour
from fl_app.errors import UserError, counted, listed
from fl_app.server import kept_uploads
from strategies import METHOD_PARAMS
from strategies.fedpake import Division, FedPakeParams, divide

MOST_CLIENTS = 9
# a kernel of 1 x 1 or 2 x 2 shows too little
SMALLEST = 3
SYMBOLS = {"threshold": "λ", "num_micro": "C", "num_macro": "S"}
# by hyperparameter: the values drawn; the default is among them
VALUES: dict[str, tuple[float, ...]] = {"threshold": (0.2, 0.5, 1.0), "num_micro": (2, 4, 8), "num_macro": (2, 4, 8)}
LOW = "#d9d9d9"


@dataclass(frozen=True)
class Kernel:
    """One kernel of a convolution on several clients.

    at: its output and input channel. shape: height and width. values: float32 [clients, height * width].
    """

    tensor: str
    at: tuple[int, int]
    shape: tuple[int, int]
    round: int
    clients: list[int]
    values: NDArray[np.float32]


def kernel(run: Path, round: int | None = None, tensor: str = "") -> Kernel:
    """Return the kernel that differs most between the clients: the largest mean standard deviation of its values.

    round: the last kept one if None. tensor: the first convolution if empty. At most nine clients, those of the lowest
    ids. Raises UserError if the run keeps no uploads, none of this round, or no convolution, or if `tensor` is none.
    """
    kept = kept_uploads.rounds(run)
    if not kept:
        raise UserError(f"{run} has no kept uploads: run it with keep-uploads = 'every 1'")
    if round is not None and round not in kept:
        raise UserError(f"round must be one whose uploads {run} keeps ({listed([str(t) for t in kept])}), got {round}")
    round = kept[-1] if round is None else round
    found = kept_uploads.read(run, round)
    if found is None:
        raise UserError(f"{run}: the uploads of round {round} cannot be read")
    convolutions = {s.name: s for s in found.params if len(s.shape) == 4 and min(s.shape[2:]) >= SMALLEST}
    if not convolutions:
        raise UserError(f"{run}: its uploads have no convolution with kernels of {SMALLEST} x {SMALLEST} or more")
    if tensor and tensor not in convolutions:
        raise UserError(
            f"tensor must be a convolution with kernels of {SMALLEST} x {SMALLEST} or more ({listed([*convolutions])}), "
            f"got {tensor}"
        )
    slot = convolutions[tensor or next(iter(convolutions))]
    rows = np.argsort(found.clients, kind="stable")[:MOST_CLIENTS]
    height, width = slot.shape[2:]
    kernels = found.W[rows, slot.start : slot.stop].reshape(len(rows), -1, height * width)
    number = int(kernels.std(axis=0, dtype=np.float64).mean(axis=1).argmax())
    values = np.ascontiguousarray(kernels[:, number])
    at = divmod(number, slot.shape[1])
    return Kernel(slot.name, at, (height, width), found.round, found.clients[rows].tolist(), values)


def cells(division: Division, shape: tuple[int, int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the Macro-Classes and Micro-Classes as pictures, int64 [height * side, width * side].

    A parameter is a square of side x side cells, one per client in reading order. Macro-Classes count from 0; a parameter
    of low dispersion has -1, and cells without a client -2. Micro-Classes are 0 there.
    """
    n, m = division.micro.shape
    side = math.ceil(math.sqrt(n))
    macro, micro = np.full((side**2, m), -2), np.zeros((side**2, m), np.int64)
    macro[:n] = np.where(division.high, division.macro[:, None], -1)
    micro[:n] = division.micro
    height, width = shape

    def placed(values: NDArray[np.int64]) -> NDArray[np.int64]:
        squares = values.reshape(side, side, height, width).transpose(2, 0, 3, 1)
        return squares.reshape(height * side, width * side)

    return placed(macro), placed(micro)


def picture(found: Kernel, params: FedPakeParams) -> Panel:
    """Return the figure: a row per hyperparameter, and a picture per value."""
    side = math.ceil(math.sqrt(len(found.clients)))
    order = "; ".join(" ".join(map(str, found.clients[i : i + side])) for i in range(0, len(found.clients), side))
    caption = (
        f"Colour: the Macro-Class of a client. Number: its Micro-Class. Grey: low dispersion, where the server takes the "
        f"mean of all clients. A square is a parameter of the kernel, and its cells are the clients, row by row: {order}."
    )
    return Panel("fedpake-fig7", "The effect of FedPake's hyperparameters", caption, lambda: _drawn(found, params))


def _drawn(found: Kernel, params: FedPakeParams) -> Chart:
    every = []
    for field, values in VALUES.items():
        for value in values:
            varied = replace(params, **{field: value})  # type: ignore[arg-type]
            others = ", ".join(f"{SYMBOLS[name]} = {getattr(params, name):g}" for name in VALUES if name != field)
            chart = _squares(cells(divide(found.values, varied), found.shape), found)
            every.append(chart.properties(title=f"{SYMBOLS[field]} = {value:g}  ({others})"))
    text = (
        f"{found.tensor}{list(found.at)}, round {found.round}, {counted(len(found.clients), 'client')}; "
        f"deviations {params.deviations}, δ = {params.delta:g} ({params.delta_meaning}), cv {params.cv}"
    )
    return charts.beside(*every, columns=3, independent=[]).properties(title=text)


def _squares(divided: tuple[NDArray[np.int64], NDArray[np.int64]], found: Kernel) -> Chart:
    """Return the cells of one picture: colours by Macro-Class, and Micro-Classes as numbers."""
    macro, micro = divided
    side = len(macro) // found.shape[0]
    up, across = np.nonzero(macro > -2)
    # a gap between parameters
    x, y = (place + 0.4 * (place // side) for place in (across, up))
    kinds = ["low dispersion: mean of all clients", *(f"Macro-Class {j + 1}" for j in range(len(COLOURS)))]
    own = macro[up, across]
    columns = {"x": x, "until": x + 1, "y": y, "below": y + 1, "class": [kinds[k + 1] for k in own]}
    frame = pandas.DataFrame({**columns, "micro": [str(k) if k else "" for k in micro[up, across]]})
    scale = alt.Scale(domain=kinds, range=[LOW, *map(of_colour, COLOURS)])
    bare = {"axis": None, "scale": alt.Scale(nice=False, zero=False)}
    base = alt.Chart(charts.inline(frame))
    box = base.mark_rect(stroke="white", strokeWidth=0.5).encode(
        x=alt.X("x:Q", **bare),
        x2="until",
        y=alt.Y("y:Q", **{**bare, "scale": alt.Scale(nice=False, zero=False, reverse=True)}),
        y2="below",
        color=alt.Color("class:N").scale(scale).title(None).legend(columns=5),
    )
    numbers = base.transform_calculate(at="datum.x + 0.5", height="datum.y + 0.5").mark_text(fontSize=7, color="white")
    return alt.layer(box, numbers.encode(x="at:Q", y="height:Q", text="micro:N")).properties(width=300, height=300)


def main() -> None:
    """Draw the figure of a run."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("run", type=Path, help="a run folder with kept uploads")
    arguments.add_argument("--round", type=int, help="a kept round (default: the last)")
    arguments.add_argument("--tensor", default="", help="name of a convolution's weight (default: the first)")
    arguments.add_argument("--output", type=Path, default=Path("fig7.png"), help="a png, svg or pdf file")
    options = arguments.parse_args()
    kind = options.output.suffix[1:]
    try:
        if kind not in ("png", "svg", "pdf"):
            raise UserError(f"output must be a png, svg or pdf file, got {options.output}")
        run = existing(options.run)
        found = kernel(run, options.round, options.tensor)
        params = RecordedRun(run, METHOD_PARAMS).config.params
        panel = picture(found, params if isinstance(params, FedPakeParams) else FedPakeParams())
        options.output.write_bytes(panel.render(kind))
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
    print(f"{options.output}: {panel.title}. {panel.caption}")


if __name__ == "__main__":
    main()
