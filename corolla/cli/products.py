"""Commands for trained models: `corolla export`, `verify` and `predict`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from corolla.api.console import console, errors, warn
from corolla.api.settings import look_for_plugins
from corolla.api.waiting import waiting
from corolla.cli.completion import clients_of
from corolla.cli.options import JsonOption, QuietOption, checked_set, parse_set
from corolla.cli.output import show_json, show_table
from corolla.experiments.exported.run_models import client_id
from corolla.experiments.runs import RecordedRun, existing
from fl_app import exit_codes
from fl_app.data.site_columns import SiteColumns
from fl_app.errors import UserError, counted, listed, size
from fl_app.files import no_such, publish_text
from fl_app.server.run_folder import CLIENTS, MODELS, NAME, PLUGINS, SUMMARY, read_clients
from fl_app.site_directory import site_directory
from strategies import METHODS

Exported = Annotated[
    Path, typer.Argument(metavar="FILE", help="A file written by `corolla export`, with its card FILE.json beside it.")
]


OnnxOption = Annotated[
    bool, typer.Option("--onnx", help="Write ONNX, from pixels or rows to predictions (needs corolla[onnx]).")
]
PeftOption = Annotated[
    bool, typer.Option("--peft", help="Write the adapter of a model with peft into a folder (needs corolla[peft]).")
]
MergedOption = Annotated[
    bool, typer.Option("--merged", help="Write a model with peft, its adapter merged into it, into a folder.")
]


class OnError(Enum):
    """What becomes of rows that do not fit a model."""

    refuse = "refuse"
    row = "row"


def export(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    client: Annotated[
        str | None,
        typer.Option(
            metavar="CLIENT",
            shell_complete=clients_of,
            help="A client's number or name (id:3 is always its number): export the model this client uses (default: the "
            "global model).",
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="File to write (default: in the current directory).")] = None,
    to: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Directory to write the client's model into; without --client, each client's."
        ),
    ] = None,
    onnx: OnnxOption = False,
    peft: PeftOption = False,
    merged: MergedOption = False,
    data_path: Annotated[str, typer.Option(help="For dataset node: path of the node's data.")] = "",
    quiet: QuietOption = False,
) -> None:
    """Write one of a run's final models as a PyTorch state dict, ONNX or an adapter of peft, with its card."""
    form = _form(onnx, peft, merged)
    if to is not None and output is not None:
        raise UserError("--to and --output exclude each other")
    if to is not None and data_path and client is None:
        raise UserError("--data-path is one client's: choose it with --client")
    run = existing(run)
    if client is not None:
        # before the imports, which take seconds
        client_id(RecordedRun(run), client)
    look_for_plugins(run / PLUGINS)
    if data_path:
        from deploy import site
        from deploy.supernode import use_rules

        use_rules(site.find())
    with waiting(errors) as shown:
        shown.step("importing the packages of the model and writing it", brief=True)
        # imported here because torch takes seconds
        from corolla.experiments.exported.export import FileForm, export_each, own_files
        from corolla.experiments.exported.export import export as write

        failed: dict[str, str] = {}
        if to is None:
            written = [write(run, METHODS, client, output, form=FileForm[form], data_path=data_path)]
        else:
            written, failed = export_each(run, METHODS, client, to, form=FileForm[form], data_path=data_path)
    for path, card in written:
        _show(path, card, own_files(path))
    _warn_of_rounding(form, written)
    for name, why in failed.items():
        errors.print(escape(f"{name}: not exported: {why}"), soft_wrap=True)
    if failed:
        raise typer.Exit(exit_codes.FAILED)


def _form(onnx: bool, peft: bool, merged: bool) -> str:
    """Return the name of the FileForm that options ask for. Raises UserError if they ask for several."""
    asked = [name for name, is_asked in (("onnx", onnx), ("peft", peft), ("merged", merged)) if is_asked]
    if len(asked) > 1:
        raise UserError(f"{' and '.join(f'--{name}' for name in asked)} exclude each other")
    return asked[0] if asked else "pytorch"


def _show(path: Path, card: Mapping[str, Any], own: Path) -> None:
    console.print(escape(f"{path}\nsha256 {card['sha256']}, in its card {path}.json"), soft_wrap=True)
    if own.is_dir():
        console.print(escape(f"your own files that the run used, for predict: {own}"), soft_wrap=True)


def _warn_of_rounding(form: str, written: Sequence[tuple[Path, Mapping[str, Any]]]) -> None:
    """Say once that adapters of peft were trained beside a base model with less precision (`frozen-dtype`)."""
    if form == "peft" and any(card["settings"].get("frozen-dtype") == "bfloat16" for _, card in written):
        warn(
            "the run has frozen-dtype = bfloat16: peft's adapter gives its outputs on a base model whose matrices are rounded "
            "to bfloat16; --merged writes both in one"
        )


def node_export(
    run: Annotated[
        str | None, typer.Argument(help="A run's name or experiment id; without it the last run that this site was in.")
    ] = None,
    to: Annotated[Path, typer.Option(metavar="DIR", help="Directory to write the model into.")] = Path(),
    name: Annotated[str, typer.Option("--name", help="The site's name, for the file and its card.")] = "",
    onnx: OnnxOption = False,
    peft: PeftOption = False,
    merged: MergedOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write this site's own model of a run, which stays here, with its card. Its directory: $COROLLA_SITE_DIR, or site.toml's."""
    form = _form(onnx, peft, merged)
    # it imports flwr, which takes seconds
    from deploy import exporting
    from deploy import site as rules
    from deploy.supernode import use_rules

    found = use_rules(rules.find())
    if found.confine and not exporting.is_inside():
        words = [*([run] if run else []), "--name", name, *[f"--{form}"] * (onnx or peft or merged)]
        for path in exporting.export_inside(found, words, to):
            console.print(escape(str(path)), soft_wrap=True)
        return
    last = _kept_of(run)
    look_for_plugins(last / PLUGINS)
    with waiting(errors) as shown:
        shown.step("importing the packages of the model and writing it", brief=True)
        # imported here because torch takes seconds
        from corolla.experiments.exported.export import FileForm, export_each, own_files

        client = int(last.parent.name.rpartition("-")[2])
        if name:
            entry = {**read_clients(last)[str(client)], NAME: name}
            publish_text(last / CLIENTS, json.dumps({str(client): entry}) + "\n")
        written, _ = export_each(last, METHODS, client, to, form=FileForm[form])
    for path, card in written:
        _show(path, card, own_files(path))
    _warn_of_rounding(form, written)


def _kept_of(run: str | None) -> Path:
    """Return the folder of the last run that this site keeps a model of. run: its name or experiment id, or None for any."""
    held = {path.parent: path.stat().st_mtime for path in (site_directory() / MODELS).glob(f"*/*/{SUMMARY}")}
    known = {folder.name for folder in held} | {folder.parent.name.rpartition("-")[0] for folder in held}
    chosen = {folder for folder in held if run in (None, folder.name, folder.parent.name.rpartition("-")[0])}
    if not chosen:
        there = f"; there are {', '.join(sorted(known))}" if known else ""
        raise UserError(key=site_directory(), rule=f"this site keeps no model of {run or 'any run'}{there}")
    return max(chosen, key=lambda folder: held[folder])


def _name_code(files: Sequence[Path]) -> None:
    """Name Python files on standard error before they run."""
    errors.print(escape(f"running Python code of {listed([str(file) for file in files])}"), soft_wrap=True)


def verify(file: Exported, as_json: JsonOption = False, quiet: QuietOption = False) -> None:
    """Check that an exported model and its card are unchanged, byte for byte."""
    from fl_app import model_card

    found = model_card.read(file)
    run = found["run"]
    if as_json:
        show_json({"file": str(file), **found})
        return
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
        list[Path],
        typer.Argument(
            metavar="IMAGES...|TABLE.csv|DATA.npz",
            help="Image files, a table with the run's columns, or an .npz with x (and y).",
        ),
    ],
    given: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Read the table another way than the run did: separator or na-values.",
            callback=checked_set,
        ),
    ] = None,
    on_error: Annotated[
        OnError,
        typer.Option(
            help="A row that does not fit the model. refuse: no row is predicted; row: it comes back empty, with its reason, and "
            "columns that the model does not know are ignored."
        ),
    ] = OnError.refuse,
    site: Annotated[
        Path | None,
        typer.Option(
            metavar="site.toml",
            help="Read the table as this site's `[data]` says, and ignore columns that the model does not know (default: as the "
            "card says, of a model that a site exported).",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print an exported model's predictions for images, a table's rows or an .npz: class and probability, or numbers."""
    for path in (file, *inputs):
        if not path.exists():
            raise UserError(no_such(path))
    with waiting(errors) as waited:
        waited.step("asking the model", brief=True)
        from corolla.experiments.exported import loading, predict
        from corolla.experiments.exported.export import own_files
        from fl_app import model_card

        # not in the file's own folder, where a downloaded model may lie beside any code
        look_for_plugins(own_files(file), told=_name_code)
        known = model_card.read(file)
        reading = {key: str(value) for key, value in parse_set(given or []).items()}
        own = None
        if site:
            from deploy.site import read_site

            own = SiteColumns.of(read_site(site).data)
        asked = predict.read_inputs(inputs, known, reading, on_error.value, own)
        names = [name for k, name in enumerate(asked.names) if k not in asked.bad]
        outputs, predictions = predict.ask(loading.open_file(file, known, METHODS), asked.samples, known)
    own_data = predict.are_own_data(inputs, known)
    measured = None if asked.targets is None else predict.measure(outputs, asked.targets, known)
    rows, by_row = predict.predictions_rows(names, predictions, known), on_error is OnError.row
    if by_row:
        rows = predict.rows_with_bad_ones(rows, asked)
    if as_json:
        figure = {"metric": measured[0].name, "value": measured[1], "samples": len(names)} if measured else None
        show_json({"predictions": rows, "measured": figure, "own-data": own_data})
    else:
        show_table(predict.predictions_table(rows, known, by_row))
    if asked.how:
        warn(f"the table is read as {site or f'the card of {file}'} says: {asked.how}")
    if asked.ignored:
        warn(f"columns that the model does not know are ignored: {listed(list(asked.ignored))}")
    if asked.remark:
        warn(asked.remark)
    if measured and not as_json:
        metric, value = measured
        if math.isnan(value):
            shown = f"n/a ({metric.undefined or 'not defined'})"
        else:
            shown = f"{metric.text(value)} %" if metric.ratio else metric.text(value)
        told = f"{metric.name} {shown} on {counted(len(names), 'sample')}"
        typer.echo("; ".join([told, *[predict.on_own_data(known)] * bool(own_data)]))
    elif own_data and not as_json:
        warn(predict.on_own_data(known))
