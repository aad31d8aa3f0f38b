"""`corolla flower init`: a Flower app of one's own with a method of Corolla."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from corolla.api.console import console
from corolla.cli.options import QuietOption
from fl_app.errors import UserError
from fl_app.keys import nearest
from fl_app.transport.app_bundle import APP_DIRECTORY

if TYPE_CHECKING:
    from corolla.flower.abilities import Ability

app = typer.Typer(no_args_is_help=True, help="Flower apps of your own with a method of Corolla.")
# in a clone and in a wheel
_PLACES = APP_DIRECTORY / "examples" / "flower", APP_DIRECTORY / "corolla" / "flower" / "examples"
_STRATEGY = "FedCAC(beta=3, "
# where the example has what a method needs
_FACTS = {
    "learning_rate": 'float(config["learning-rate"])',
    "batch_size": 'int(config["batch-size"])',
    "local_epochs": 'int(config["local-epochs"])',
    "validation_ratio": "0",
    "other_arrays": "[ArrayRecord(Net().state_dict()) for _ in range({others})]",
}
# what the lines of a loop replace
_LINES = {
    "objective": ("loss.backward()", "corolla.flower.objective(loss, net).backward()"),
    "epochs": ("range(epochs)", "range(corolla.flower.epochs(epochs))"),
}


@app.command("init", epilog="Example: corolla flower init my-app --method fedcac")
def init(
    directory: Annotated[Path, typer.Argument(help="The app's directory, which is made.")],
    method: Annotated[str, typer.Option(help="A method of `corolla methods`.")] = "fedcac",
    quiet: QuietOption = False,
) -> None:
    """Write a Flower app in PyTorch whose server uses a method, and whose client app has its mod."""
    from corolla.flower.abilities import ability
    from corolla.flower.method_strategy import name_of
    from corolla.flower.training_loop import beyond_app
    from strategies import METHODS

    if method not in METHODS:
        rule = "must be a method of `corolla methods`"
        raise UserError(key="method", rule=rule, value=method, hint=nearest(method, METHODS))
    found = ability(method)
    if found.beyond:
        raise beyond_app(method, found.beyond)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(key="DIRECTORY", rule="must not exist, or be empty", value=str(directory))
    place = next(place for place in _PLACES if place.is_dir()) / "pytorch"
    for path in sorted(place.rglob("*")):
        if path.suffix in (".py", ".toml"):
            target = directory / path.relative_to(place)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(_with_method(path.read_text("utf-8"), name_of(method), found), "utf-8")
    start = f"flwr run {directory} --stream --federation-config 'num-supernodes=10'"
    lines = ["export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1", start]
    console.print(
        escape("\n".join([f"{directory}: a Flower app with {name_of(method)}; start it by", *lines])), soft_wrap=True
    )


def _with_method(text: str, name: str, found: Ability) -> str:
    """Return a file of the example with another strategy, and with the lines and arguments that this needs."""
    if name not in _STRATEGY:
        facts = "".join(f"{fact}={_FACTS[fact].format(others=found.others)}, " for fact in found.facts)
        text = text.replace(_STRATEGY, f"{name}({facts}").replace("import FedCAC", f"import {name}")
    for line in found.lines:
        before, after = _LINES[line]
        if before in text and "import corolla.flower\n" not in text:
            text = text.replace("\nimport numpy", "\nimport corolla.flower\nimport numpy", 1)
        text = text.replace(before, after)
    return text
