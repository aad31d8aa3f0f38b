"""The server: Corolla's strategy where Flower's FedAvg would stand."""

from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from corolla.flower import FedDAC
from sklearn_app.task import model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    start = model()
    strategy = FedDAC(alpha=8)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord({"coef": Array(start.coef_), "intercept": Array(start.intercept_)}),
        num_rounds=int(context.run_config["num-server-rounds"]),
    )
