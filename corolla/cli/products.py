"""Trained models that leave: `corolla export`, `verify` and `predict`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from corolla.api.console import console, errors
from corolla.api.settings import look_for_plugins
from corolla.api.waiting import waiting
from corolla.cli.tables import show_table, size
from fl_app.server.run_folder import PLUGINS
from strategies import METHODS

Exported = Annotated[
    Path, typer.Argument(metavar="FILE", help="What `corolla export` wrote, its card FILE.json beside it.")
]


def export(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    client: Annotated[
        int | None, typer.Option(help="Client id: the model it uses, be it the global one; without it that.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="File to write (default: in the current directory).")] = None,
    onnx: Annotated[
        bool, typer.Option("--onnx", help="ONNX, from pixels or rows to predictions (corolla[onnx]).")
    ] = False,
    data_path: Annotated[str, typer.Option(help="Dataset node: the data of the node the model is for.")] = "",
) -> None:
    """Write one of a run's final models, a PyTorch state dict or ONNX, and its card."""
    look_for_plugins(run / PLUGINS)
    with waiting(errors) as shown:
        shown.step("writing the model", brief=True)
        # here, for torch takes seconds
        from corolla.experiments.exported.export import export as write
        from corolla.experiments.exported.export import own_files

        path, card = write(run, METHODS, client, output, onnx=onnx, data_path=data_path)
    console.print(escape(f"{path}\nsha256 {card['sha256']}, in its card {path}.json"), soft_wrap=True)
    if (own := own_files(path)).is_dir():
        console.print(escape(f"your own files that the run used, for predict: {own}"), soft_wrap=True)


def verify(file: Exported) -> None:
    """Compare an exported model, and its card, with what was written: one changed byte is found."""
    from corolla.experiments.exported import model_card

    found = model_card.read(file)
    run = found["run"]
    console.print(
        escape(
            f"{file}: sound ({size(found['bytes'])}, sha256 {found['sha256']}): {found['model']} of run {run['name']}, method "
            f"{found['method']}, digest {run['digest']}"
        ),
        soft_wrap=True,
    )


def predict(
    file: Exported,
    inputs: Annotated[
        list[Path], typer.Argument(metavar="IMAGES...|DATA.npz", help="Image files, or an .npz with x (and y).")
    ],
) -> None:
    """Print what an exported model says of images or of an .npz: class and probability, or the numbers it was trained to find."""
    with waiting(errors) as waited:
        waited.step("asking the model", brief=True)
        from corolla.experiments.exported import loading, model_card, predict
        from corolla.experiments.exported.export import own_files

        look_for_plugins(own_files(file), file.parent)
        known = model_card.read(file)
        names, samples, targets = predict.read_inputs(inputs, known)
        outputs, predictions = predict.ask(loading.open_file(file, known, METHODS), samples, known)
    show_table(predict.predictions_table(names, predictions, known))
    if targets is not None:
        metric, value = predict.measure(outputs, targets, known)
        shown = f"{metric.text(value)} %" if metric.ratio else metric.text(value)
        typer.echo(f"{metric.name} {shown} on {len(targets)} samples")
