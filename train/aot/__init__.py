"""Compiles a run for devices that are not there: `python -m train.aot`."""
