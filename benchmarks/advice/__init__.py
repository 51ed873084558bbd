"""Compare what advice predicts with what following it saves: ``python -m benchmarks.advice COMMAND``."""
