"""A SuperNode that lies within the format, over real gRPC: left out by name, in the record and on the screen; the run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import Cluster, corolla, rounds, settings, summary

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

CLIENTS, LIAR = 4, 3
METHOD = f"""
import dataclasses
import numpy as np
from fl_app.keys import NoParams
from fl_app.layout import Model
from strategies.base import LocalUpdate, Method, all_tensors
from strategies.baselines.fedavg import FedAvg

class Update(LocalUpdate[NoParams]):
    def upload(self, before, after, state, ctx):
        honest = super().upload(before, after, state, ctx)
        if ctx.client_id != {LIAR}:
            return honest
        return dataclasses.replace(honest, model=Model(honest.model.params * np.float32(1e6), honest.model.buffers))

METHOD = Method("liar", NoParams, FedAvg[NoParams], Update, all_tensors)
"""


@pytest.mark.usefixtures("warm_cluster")
def test_a_liar_is_left_out_by_name(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "liar.py").write_text(METHOD)
    cluster.start(CLIENTS)
    config = {"method": "liar:METHOD", "num-server-rounds": 2, "max-update-norm": 3.0}
    config |= {"state-dir": str(tmp_path / "state"), "run-name": "run"}
    done = corolla(
        "run",
        "--clients",
        str(CLIENTS),
        "--superlink",
        "test",
        "--output-dir",
        str(tmp_path),
        *settings(config),
        environment=cluster.environment,
        directory=tmp_path,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    for record in rounds(tmp_path / "run"):
        ((client, cause),) = [(failure["client"], failure["cause"]) for failure in record["failures"]]
        assert client == LIAR and cause.startswith("its parameters lie") and list(record["clients"]) == ["0", "1", "2"]
        assert f"round {record['round']}: client {LIAR} dropped: {cause}" in " ".join(done.stdout.split())
    assert summary(tmp_path / "run")["digest"]
