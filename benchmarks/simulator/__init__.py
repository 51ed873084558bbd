"""Compare predictions with what runs really need: ``python -m benchmarks.simulator COMMAND``."""
