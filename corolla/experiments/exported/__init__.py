"""Models that leave a run: exported, described, loaded, and used for predictions."""
