"""Attach memprof to what people already run: trainers, trackers, TensorBoard."""
