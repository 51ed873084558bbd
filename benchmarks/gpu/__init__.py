"""Check what only a GPU shows: ``python -m benchmarks.gpu.run``."""
