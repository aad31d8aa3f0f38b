"""Trackers and callbacks, each a process that reads a run folder as it grows (started by fl_app/server/trackers.py)."""
