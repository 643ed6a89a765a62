"""Benchmarks of the checkout; not in the wheel."""
