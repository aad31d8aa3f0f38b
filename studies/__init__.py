"""Replication of the papers' tables: collected runs, sweeps, and the scripts of docs/results.md; see README.md."""
