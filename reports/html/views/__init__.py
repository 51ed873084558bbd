"""Draw where memory lies: the segments, and individual allocations over time."""
