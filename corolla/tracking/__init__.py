"""Trackers: a process each, which reads a run folder as it grows (started by fl_app/server/trackers.py)."""
