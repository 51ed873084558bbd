"""Say what *fits* means: the one rule that every verdict, search and comparison asks. No torch here.

A run fits a card where three things lie within the card's memory together: what torch reserves, what the process holds
outside torch (the CUDA context), and a margin for what is not known of the run.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import msgspec

from memprof.config.expected_error import PUBLISHED, class_compared, comparisons, expected_error, not_compared
from memprof.config.gpus import CONTEXT_BYTES, Gpu
from memprof.config.trainer_fields import unsimulated_of
from memprof.report.run import KnownSettings
from memprof.report.simulation import ExpectedError

#: Kept above the need of a run whose class was compared on the real allocator and whose lengths were given. Of the
#: 41 bisected edges none was predicted more than 0.4% too low (benchmarks/results/emulated-cuda/edges.json:
#: ``made`` beside ``edge_bytes``).
MARGIN = 0.01
# Kept beside it where no prompt length was given: it depends on the data, and no trainer has a default.
_LENGTHS = 0.02


class MarginPart(NamedTuple):
    """State one part of a margin: the share of the need that is kept, and for what."""

    share: float
    why: str


def fits(needed: int, total: int, margin: float = MARGIN) -> bool:
    """Tell whether a need in bytes, context included, fits a card of ``total`` bytes with the margin kept."""
    return needed <= limit_bytes(total, margin)


def limit_bytes(total: int, margin: float = MARGIN) -> int:
    """Return the bytes that a need must not exceed on a card of ``total`` bytes."""
    return int(total / (1 + margin))


def room_bytes(gpu: Gpu, margin: float = MARGIN) -> int:
    """Return what torch may reserve on a card for a run to be said to fit: its memory less margin and context."""
    return limit_bytes(gpu.total_bytes, margin) - gpu.context_bytes


def needed_bytes(reserved: int, non_torch: int | None) -> int:
    """Return what a device must give: ``non_torch`` is what was recorded outside torch, None where nobody looked."""
    return reserved + (CONTEXT_BYTES if non_torch is None else non_torch)


def kept_for(config: KnownSettings, card: Gpu | None = None) -> list[MarginPart]:
    """List what a verdict keeps above the prediction of a run with these settings, and for what."""
    left_out = [field for field in unsimulated_of(config) if not field.noted]
    if left_out:
        share = wide_margin() + max(0.0, sum(field.high for field in left_out))
        return [MarginPart(share, f"what is not simulated ({', '.join(field.name for field in left_out)})")]
    lacking = not_compared(config, card)
    if lacking or not class_compared(config):
        why = f"{', '.join(lacking)} never compared" if lacking else "a program of a kind that was rarely compared"
        return [MarginPart(wide_margin(), why)]
    found = [MarginPart(MARGIN, "the prediction's error")]
    if "prompt_length" in config.assumed:
        found.append(MarginPart(_LENGTHS, "prompts whose length nobody gave"))
    return found


def margin_of(config: KnownSettings, card: Gpu | None = None) -> float:
    """Return the share that a verdict keeps above the prediction of a run with these settings."""
    return round(sum(part.share for part in kept_for(config, card)), 6)


def stated_error(*configs: KnownSettings, card: Gpu | None = None) -> ExpectedError:
    """Return what is known of the error of predictions with these settings, and the widest ``margin`` kept for it."""
    margin = max(margin_of(config, card) for config in configs)
    return msgspec.structs.replace(expected_error(*configs, card=card), margin=margin)


def words_of(kept: list[MarginPart]) -> str:
    """Say in words what is kept, and for what."""
    first, *others = kept
    if not others:
        return f"{first.share:.0%} margin for {first.why}"
    total = sum(part.share for part in kept)
    return f"{total:.0%} margin: " + ", ".join(f"{part.share:.0%} for {part.why}" for part in kept)


@lru_cache(maxsize=1)
def wide_margin() -> float:
    """Return what is kept where parts of a run were never compared: what the lowest of an exactly known run lacked."""
    exact = [row for row in comparisons() if row.kind != PUBLISHED]
    lacking = max(row.measured_bytes / row.simulated_bytes - 1 for row in exact)
    return max(MARGIN, math.ceil(100 * lacking) / 100)
