"""Measure the lean trainer beside TRL's: ``python -m benchmarks.lean COMMAND``."""
