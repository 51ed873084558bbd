"""Run the callback under several versions of TRL: ``python -m benchmarks.versions``."""
