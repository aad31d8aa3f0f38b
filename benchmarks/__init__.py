"""Benchmarks: run each as `python -m benchmarks.<name>`; see docs/performance.md."""
