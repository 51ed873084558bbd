"""Runs that never happened: the real model, the real GRPO step, on tensors without values."""

from memprof.simulate.settings import Settings, read_settings

__all__ = ["Settings", "read_settings"]
