"""Measure what recording costs and that it changes nothing: ``python -m benchmarks.recording COMMAND``."""
