"""Simulate a run that never happened: the real model and the real GRPO step on fake (shape-only) tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memprof.config.settings import Settings, read_settings

if TYPE_CHECKING:
    from memprof.simulate.run import simulate

__all__ = ["Settings", "read_settings", "simulate"]


def __getattr__(name: str) -> Any:
    """Load ``simulate`` on first use: settings are read without torch."""
    if name != "simulate":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from memprof.simulate.run import simulate

    return simulate
