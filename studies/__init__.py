"""Replication of the papers' tables: collected runs, sweeps, and the scripts of studies/results.md; see README.md."""
