"""An MLflow run, in the store named by MLFLOW_TRACKING_URI; by default in OUTPUT_DIR/mlflow, beside the run folders."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from corolla.experiments.runs import RecordedRun
from corolla.tracking.follow import FOLDERS, numbers, settings
from fl_app.files import lock, make_directory
from fl_app.keys import Scalar, show

DIRECTORY = "mlflow"
# tag by which a resumed run finds its MLflow run
EXPERIMENT = "corolla.experiment"
# MLflow's limits: characters of a parameter, parameters of a batch
_LONGEST, _AT_ONCE = 6000, 100


def check() -> None:
    """Raise an error if no store is of MLFLOW_TRACKING_URI's kind. It asks no server."""
    if uri := os.environ.get("MLFLOW_TRACKING_URI"):
        MlflowClient(uri)


class Store:
    """One MLflow run in the experiment MLFLOW_EXPERIMENT_NAME, or `corolla`."""

    def __init__(self, run: RecordedRun, after: int) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI", "")
        local = run.path.resolve().parent / DIRECTORY
        if uri:
            self._client = MlflowClient(uri)
            experiment = self._experiment()
        else:
            make_directory(local)
            # two runs must not both create the database
            with lock(local / ".lock", wait=True):
                self._client = MlflowClient(f"sqlite:///{local}/mlflow.db")
                experiment = self._experiment((local / "artifacts").as_uri())
        identity = str(run.about["experiment"])
        known = (
            self._client.search_runs([experiment], f"tags.`{EXPERIMENT}` = '{identity}'") if run.about["starts"] else []
        )
        self._had: set[int] = set()
        if known:
            self._id = str(known[0].info.run_id)
            self._had = {metric.step for metric in self._client.get_metric_history(self._id, "failures")}
            self._client.update_run(self._id, status="RUNNING")
            return
        tags = {EXPERIMENT: identity, "corolla.folder": str(run.path)}
        self._id = str(self._client.create_run(experiment, run_name=run.path.name, tags=tags).info.run_id)
        params = [Param(key, show(value)[:_LONGEST]) for key, value in settings(run).items()]
        for start in range(0, len(params), _AT_ONCE):
            self._client.log_batch(self._id, params=params[start : start + _AT_ONCE])

    def _experiment(self, artifacts: str | None = None) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "corolla")
        if (found := self._client.get_experiment_by_name(name)) is None:
            try:
                return str(self._client.create_experiment(name, artifact_location=artifacts))
            except MlflowException:
                found = self._client.get_experiment_by_name(name)
                # else another run has made it meanwhile
                if found is None:
                    raise
        return str(found.experiment_id)

    def round(self, number: int, values: Mapping[str, float]) -> None:
        """Log a round's metrics. Skip a round logged before the run was resumed: it gives the same metrics again."""
        if number not in self._had:
            self._log(number, values)

    def _log(self, number: int, values: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        self._client.log_batch(
            self._id, metrics=[Metric(name, float(value), now, number) for name, value in values.items()]
        )

    def file(self, path: Path) -> None:
        """Log an artifact, under the name of its folder in the run: a model under `models`."""
        self._client.log_artifact(self._id, str(path), path.parent.name if path.parent.name in FOLDERS else None)

    def end(self, summary: Mapping[str, Scalar] | None) -> None:
        """Log the summary's numbers as metrics, its digest as a tag, and the final status of the run."""
        if summary is not None:
            figures = {key: value for key, value in summary.items() if key.startswith(("final-", "best-", "unseen-"))}
            self._log(int(str(summary["rounds"])), numbers(figures))
            self._client.set_tag(self._id, "corolla.digest", str(summary.get("digest")))
        self._client.set_terminated(self._id, "KILLED" if summary is None else "FINISHED")
