"""Attacks on a run, over real processes and gRPC: every one must be contained."""
