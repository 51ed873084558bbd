"""Measure what reading a recording costs: ``python -m benchmarks.reading COMMAND``."""
