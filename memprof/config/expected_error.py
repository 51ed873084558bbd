"""Say how far predictions were off where they could be compared: the one place that every screen quotes.

``python -m benchmarks.simulator table`` writes ``comparisons.json``; its commands ``gpu`` and ``cpu`` run every
comparison again. No torch here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from typing import Any

from memprof.config.gpus import Gpu
from memprof.config.optimizers import TABLE

__all__ = ["MARGIN", "comparisons", "expected_error", "not_compared", "room_bytes"]

# Demanded above the prediction before a run is said to fit. Simulated and recorded reserved bytes differed by about one
# percent on the captures they were compared on (docs/accuracy.md); this is three times that.
MARGIN = 0.03


def room_bytes(gpu: Gpu) -> int:
    """Return what torch may reserve on a card for a run to be said to fit: its memory less margin and context."""
    return int(gpu.total_bytes / (1 + MARGIN)) - gpu.context_bytes


@lru_cache(maxsize=1)
def comparisons() -> tuple[dict[str, Any], ...]:
    """Return every comparison: ``name``, ``where`` (gpu, cpu), ``what`` (peak, reserved, generation), both sizes."""
    text = resources.files("memprof.config").joinpath("comparisons.json").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = json.loads(text)["comparisons"]
    return tuple(rows)


def expected_error(*configs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is known of the error of predictions with these settings, as it stands in the report.

    ``allocated`` and ``reserved`` hold the lowest and highest signed error seen (simulated / measured - 1) and how many
    comparisons there were; ``not_compared`` names what is modelled and nothing real was compared with.
    """
    told = list(dict.fromkeys(part for config in configs for part in not_compared(config)))
    found = {
        "allocated": _range(("peak", "generation")),
        "reserved": _range(("reserved",)),
        "not_compared": told,
    }
    return {**found, "sentence": _sentence(found)}


def _range(kinds: tuple[str, ...]) -> dict[str, Any]:
    errors = [row["simulated_bytes"] / row["measured_bytes"] - 1 for row in comparisons() if row["what"] in kinds]
    return {"low": round(min(errors), 6), "high": round(max(errors), 6), "comparisons": len(errors)}


def not_compared(config: Mapping[str, Any]) -> list[str]:
    """List the parts of a run with these settings that are modelled and were never compared with a real run."""
    optim = str(config.get("optim", ""))
    row = TABLE.get(optim)
    sharding = str(config.get("sharding", "ddp"))
    parts = {
        f"trainer {config.get('trainer')}": config.get("trainer") in ("rloo", "sft", "dpo"),
        "4-bit layers": bool(config.get("load_in_4bit")),
        f"optimizer {optim}": row is not None and row.modelled,
        "vLLM's pool": config.get("generation") == "vllm",
        f"sharding {sharding}": (config.get("gpus") or 1) > 1 and sharding != "ddp",
        "gradient buckets": (config.get("gpus") or 1) > 1 and sharding == "ddp",
        f"checkpointing {config.get('gradient_checkpointing')}": config.get("gradient_checkpointing") == "offloaded",
        f"{config.get('cache_dtype')} keys and values": config.get("cache_dtype") in ("int4", "int2"),
    }
    return [name for name, present in parts.items() if present]


def _sentence(found: Mapping[str, Any]) -> str:
    held, reserved = found["allocated"], found["reserved"]
    count = held["comparisons"] + reserved["comparisons"]
    words = f"Expected error, from {count} comparisons with real runs, none of them TRL on a GPU: "
    words += f"allocated {_percent(held['low'])} to {_percent(held['high'])}, "
    words += f"reserved {_percent(reserved['low'])} to {_percent(reserved['high'])}"
    if found["not_compared"]:
        words += f"; modelled and never compared: {', '.join(found['not_compared'])}"
    return words + "."


def _percent(share: float) -> str:
    """Write a share in percent: signed, two decimals, a true minus."""
    text = f"{100 * share:+.2f} %"
    return text.replace("-", "−")
