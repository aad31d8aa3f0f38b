"""The server half of the running app: exchange, checkpoints, records, the run folder."""
