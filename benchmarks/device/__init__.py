"""Checks and timings of one accelerator: `python -m benchmarks.device`."""
