"""Reports of runs that are easily reckoned: a model of round sizes, and what each phase allocates at its peak."""

from __future__ import annotations

import copy
from typing import Any

from memprof.config.settings import Settings
from memprof.vocabulary import Category
from tests.reports.sample import sample

GIB = 2**30

# A dense model of 1.5 billion parameters, most of them in its blocks.
MODEL = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 20,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 64000,
    "tie_word_embeddings": True,
}  # fmt: skip


def report(
    phases: dict[str, dict[str, int]], settings: Settings | None = None, kind: str = "simulated", **peak: Any
) -> dict[str, Any]:
    """A report whose phases peak with these categories (bytes); the highest of them is the run's peak."""
    base = copy.deepcopy(sample()[0])
    highest = max(phases, key=lambda name: sum(phases[name].values()))
    row = base["phases"][0]
    base["phases"] = [
        {**row, "phase": name, "peak_bytes": sum(held.values()), "peak_allocated_bytes": sum(held.values()),
         "categories": held}
        for name, held in phases.items()
    ]  # fmt: skip
    held = {str(c): phases[highest].get(str(c), 0) for c in Category}
    total = sum(held.values())
    base["peak"] |= {"phase": highest, "categories": held, "active_bytes": total, "allocated_bytes": total,
                     "details": {}, **peak}  # fmt: skip
    base["own_peaks"] = {str(c): max(p.get(str(c), 0) for p in phases.values()) for c in Category}
    config = settings.to_dict() if settings is not None else None
    base["source"] |= {"kind": kind, "config": config, "setup": {"model_config": MODEL} if config else None}
    base["advice"] = []
    return base
