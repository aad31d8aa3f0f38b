"""Models that leave a run: exporting, describing, loading and predicting."""
