"""Simulate how the lean trainer generates: in a rolling batch over a pool, in passes, or all together."""
