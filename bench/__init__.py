"""Benchmarks: `python -m bench`, `pytest bench/ops.py` and `python -m bench.report`."""
