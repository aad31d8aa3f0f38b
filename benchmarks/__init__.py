"""Benchmarks: run each as `python -m benchmarks.<name>`; see benchmarks/README.md."""
