"""The server: Corolla's strategy where Flower's FedAvg would stand."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from corolla.flower import FedPake
from jax_app.task import initial

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    strategy = FedPake()
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord({name: Array(np.asarray(array)) for name, array in initial().items()}),
        num_rounds=int(context.run_config["num-server-rounds"]),
    )
