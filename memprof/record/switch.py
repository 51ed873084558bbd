"""The switch in the environment that turns all of memprof's watching off."""

from __future__ import annotations

import os

__all__ = ["switched_off"]


def switched_off() -> bool:
    """Whether ``MEMPROF=0`` is set."""
    return os.environ.get("MEMPROF", "").strip().lower() in ("0", "off", "false", "no")
