"""A Weights & Biases run. WANDB_MODE, WANDB_PROJECT etc. have W&B's meaning; without WANDB_DIR, files lie in RUN/wandb."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import wandb

from corolla.experiments.runs import RecordedRun
from corolla.tracking.follow import FOLDERS, settings
from fl_app.keys import Scalar


def check() -> None:
    """Raise an error if there is no account to which runs can be sent, and W&B is not offline. It asks no server."""
    wandb.login(verify=False)


class Store:
    """One run in the project WANDB_PROJECT, or `corolla`. Its id is the experiment's, so that a resumed run continues it."""

    def __init__(self, run: RecordedRun, after: int) -> None:
        # Send W&B no facts about the machine.
        private = wandb.Settings(
            console="off",
            save_code=False,
            disable_git=True,
            silent=True,
            x_disable_stats=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
        )
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "corolla"),
            name=run.path.name,
            id=str(run.about["experiment"]),
            resume="allow",
            dir=os.environ.get("WANDB_DIR") or str(run.path),
            config=settings(run),
            job_type=str(run.settings["method"]),
            settings=private,
        )
        # names of a sweep's runs contain commas and =
        name = re.sub(r"[^\w.-]", "-", run.path.name, flags=re.ASCII)
        self._files = wandb.Artifact(f"{name[:100]}-{self._run.id}", "model")

    def round(self, number: int, values: Mapping[str, float]) -> None:
        """Log a round's metrics."""
        self._run.log(dict(values), step=number)

    def file(self, path: Path) -> None:
        """Add a file to the run's artifact, under the name of its folder in the run: a model under `models`."""
        name = f"{path.parent.name}/{path.name}" if path.parent.name in FOLDERS else path.name
        self._files.add_file(str(path), name=name, policy="immutable")  # no copy in the user's home

    def end(self, summary: Mapping[str, Scalar] | None) -> None:
        """Log the artifact and the summary, and finish."""
        if summary is not None:
            self._run.summary.update(
                {key: value for key, value in summary.items() if isinstance(value, (int, float, str))}
            )
        self._run.log_artifact(self._files)
        self._run.finish(exit_code=1 if summary is None else 0)
