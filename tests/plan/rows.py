"""Rows of simulations that nobody made."""

from __future__ import annotations

from typing import Any

import msgspec

from memprof.plan.simulations import SimulatedRow


def simulated_row(**given: Any) -> SimulatedRow:
    """Return a row with these fields, given as JSON has them."""
    some = {"peak_bytes": 1, "peak_phase": "backward", "device_peak_bytes": 1, "host_bytes": 0}
    return msgspec.convert({**some, **given}, SimulatedRow)
