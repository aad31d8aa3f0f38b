"""Replication of the papers' tables: collected runs, their sweeps, and what makes docs/results.md; see README.md."""
