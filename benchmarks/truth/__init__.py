"""Measure attribution on snapshots whose every byte is labelled: ``python -m benchmarks.truth COMMAND``."""
