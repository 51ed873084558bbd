"""Facts and values that follow from a failure's numbers, by name: what causes, remedies and templates ask for.

Sizes are bytes. An unknown number is NaN here: no comparison with it holds, and every sum with it is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from memprof.units import GIB

MIB, EIB = 2**20, 2**60
_HOST_TABLES, _DEVICE_TABLES = ("kernel", "ps"), ("nvidia_smi", "rocm_smi", "npu_smi")
_CONTEXT = 0.8 * GIB  # a CUDA context and what cuDNN holds


class Numbers(Protocol):
    """A failure's numbers as attributes, NaN if unknown; see :class:`memprof.oom.facts.FailureFacts`."""

    def __getattr__(self, name: str) -> float: ...

    def or_0(self, *names: str) -> float: ...

    def has(self, name: str) -> bool: ...

    def text(self, name: str) -> str | None: ...

    def code_line(self, pattern: str) -> str | None: ...

    def largest(self, *tables: str) -> tuple[float, str, str]: ...


def _told(n: Numbers) -> bool:
    """Say whether the processes named are other processes: a single one may be this one, seen from outside."""
    return n.processes > 0 and not (n.processes == 1 and math.isnan(n.reserved) and math.isnan(n.in_use))


def _contexts(n: Numbers) -> bool:
    """A CUDA context is not what fills a device that is full of live tensors."""
    return n.live >= 0.85 and n.others <= _CONTEXT * n.processes


def _unaccounted(n: Numbers) -> bool:
    """What a context, cuDNN and a desktop hold is not what fills a device that is full of live tensors."""
    return n.unexplained >= n.missing + 0.75 * GIB and not (n.live >= 0.8 and n.unexplained <= 1.25 * GIB)


#: Names whose values are bytes, written with their unit.
SIZES = frozenset(
    {
        "asked", "total", "free", "allowed", "in_use", "allocated", "cached", "idle", "reserved", "outside", "others",
        "other", "missing", "unexplained", "private_pools", "piece", "held_by_torch", "gaps",
    }
)  # fmt: skip

#: Facts by comparison of numbers.
BY_NUMBERS: dict[str, Callable[[Numbers], bool]] = {
    "short": lambda n: n.missing > 0,
    "nothing_short": lambda n: n.missing == 0,
    "asked_below_1_mib": lambda n: n.asked < MIB,
    "asked_1_gib_or_more": lambda n: n.asked >= GIB,
    "asked_4_gib_or_more": lambda n: n.asked >= 4 * GIB,
    "asked_below_1_eib": lambda n: n.asked < EIB,
    "asked_1_percent": lambda n: n.asked >= 0.01 * n.total,
    "asked_2_percent": lambda n: n.asked >= 0.02 * n.total,
    "asked_much_of_device": lambda n: n.asked >= 0.02 * n.or_0("total", "allowed") > 0,
    "asked_above_host": lambda n: n.asked > GIB * n.or_0("host_shown", "host_said") > 0,
    "reserved_above_total": lambda n: n.reserved > 1.02 * n.total,
    "held_elsewhere": lambda n: n.total - n.free - n.in_use >= max(2 * GIB, 0.1 * n.total),
    "table_names_another": lambda n: n.largest_row > max(2 * n.or_0("anon"), GIB / 4),
    "asked_quarter_of_device": lambda n: 0.25 * n.total <= n.asked <= n.total,
    "asked_above_total": lambda n: n.asked > n.total,
    "asked_above_limit": lambda n: n.or_0("allocated") + n.or_0("other") + n.asked > n.allowed - GIB / 50,
    "segment_above_limit": lambda n: n.or_0("reserved", "allocated") + n.or_0("other") + n.piece > n.allowed - GIB / 50,
    "near_limit": lambda n: n.allocated + n.or_0("other") >= 0.9 * n.allowed,
    "absurd_request": lambda n: n.asked >= 16384 * GIB,
    "beyond_any_device": lambda n: n.asked >= 16384 * GIB and not (n.asked < EIB and n.asked <= n.total),
    "absurd_host_request": lambda n: n.asked >= 2**50,
    "unreserved_covers_asked": lambda n: n.total - n.or_0("reserved") > n.asked,
    "unreserved_outweighs_idle": lambda n: n.total - n.or_0("reserved") > 8 * max(n.idle, n.asked),
    "far_from_full": lambda n: math.isnan(n.missing) and n.reserved + n.asked <= 0.8 * n.total,
    "live_above_total": lambda n: n.allocated > 1.02 * n.total,
    "mostly_live": lambda n: n.live >= 0.85,
    "live_below_70_percent": lambda n: n.live < 0.7,
    "live_95_percent": lambda n: n.live >= 0.95,
    "almost_all_live": lambda n: n.live >= 0.96,
    "idle_covers_asked": lambda n: n.idle >= n.asked,
    "idle_below_asked": lambda n: n.idle < n.asked,
    "idle_covers_missing": lambda n: n.idle >= n.missing,
    "idle_covers_half": lambda n: n.idle >= n.asked / 2,
    "idle_above_a_tenth": lambda n: n.idle > n.allocated / 10,
    # Gaps of a fiftieth of the device are what every run has.
    "hardly_any_gaps": lambda n: n.live >= 0.97 or (n.live >= 0.8 and n.idle < 0.02 * n.total),
    "hardly_idle": lambda n: n.cached < 0.005 * n.allocated and n.asked >= 0.004 * n.allocated,
    "others_named": lambda n: n.processes > 0,
    "others_hold_missing": lambda n: _told(n) and n.others >= n.missing and not _contexts(n),
    "silent_processes_hold_missing": lambda n: _told(n) and n.silent > 0 and n.unexplained >= n.missing,
    "others_outweigh_idle": lambda n: n.processes > 0 and max(n.or_0("others"), n.or_0("unexplained")) > 8 * n.idle,
    "others_are_contexts": lambda n: n.processes >= 2 and 0.1 * GIB < n.others / n.processes <= _CONTEXT,
    "unaccounted_covers_missing": _unaccounted,
    "unaccounted_outweighs_idle": lambda n: n.unexplained > 8 * n.idle,
    "outside_covers_missing": lambda n: n.outside >= max(n.missing + 0.75 * GIB, 2 * GIB, 0.06 * n.or_0("total")),
    "outside_outweighs_idle": lambda n: n.outside - 0.75 * GIB > 8 * n.idle,
    "private_pools_fill_device": lambda n: n.private_pools >= max(n.total / 2, 8 * n.idle),
    "uses_private_pools": lambda n: n.private_pools > 0,
    "other_above_half": lambda n: n.other > n.or_0("allocated") / 2,
    "whole_gibs_from_32": lambda n: n.total >= 32 * GIB and n.total % GIB == 0,
    "program_is_small": lambda n: n.whole_program < 0.25 * GIB,
    "split_too_small": lambda n: n.or_0("largest_piece", "largest_free") < n.asked <= n.free,
    "half_precision_too_large": lambda n: n.whole / 2 > n.total,
    "share_is_high": lambda n: n.share_set >= 0.94,
    "far_below_pool_limit": lambda n: n.in_use + 2 * n.asked <= 0.5 * n.limit_bytes,
    "counted_above_wanted": lambda n: n.available_tokens > n.wanted_tokens,
    "table_explains": lambda n: n.users >= 0.2 * n.used,
    "low_threshold": lambda n: n.threshold < 0.9,
    "torch_before_1_9": lambda n: n.torch_at_most < 109,
    "torch_before_1_10": lambda n: n.torch_at_most < 110,
    "torch_before_1_12": lambda n: n.torch_at_most < 112,
    "torch_before_2_1": lambda n: n.torch_at_most < 201,
    "torch_before_2_11": lambda n: n.torch_at_most < 211,
}

#: Values of templates: sizes, counts and texts; None or NaN where unknown.
VALUES: dict[str, Callable[[Numbers], float | str | None]] = {
    "live_percent": lambda n: 100 * n.live,
    "asked_percent": lambda n: 100 * n.asked / n.total,
    "attention_tokens": lambda n: math.sqrt(n.asked / 64),  # attention scores of 32 heads in 16 bits
    "logits_tokens": lambda n: n.asked / 600_000,  # fp32 logits of 150,000 words
    "held_by_torch": lambda n: n.or_0("reserved", "allocated"),
    "in_piece": lambda n: n.piece if n.piece > 2 * n.asked else None,
    "more": lambda n: pages if (pages := math.ceil(n.asked / (20 * MIB)) * 20 * MIB) > n.free else None,
    "outside_too": lambda n: n.outside if n.outside >= 2 * GIB else None,
    "taken": lambda n: n.total - n.free,
    "elsewhere": lambda n: n.total - n.free - n.in_use,
    "unmapped": lambda n: n.reserved - (n.total - n.or_0("free")),
    "host_size": lambda n: GIB * n.or_0("host_shown", "host_said") or 4096 * n.or_0("pages_of_ram") or None,
    "largest_row": lambda n: n.largest(*_HOST_TABLES)[0],
    "users": lambda n: n.largest("ray", "ray_old")[0],
    "user": lambda n: n.largest("ray", "ray_old")[1] or None,
    "smi_size": lambda n: n.largest(*_DEVICE_TABLES)[0],
    "smi_name": lambda n: n.largest(*_DEVICE_TABLES)[1] or None,
    "smi_pid": lambda n: n.largest(*_DEVICE_TABLES)[2] or None,
    "mlx_peak": lambda n: 1e9 * n.mlx_peak_gb if n.has("backend:MPS") else None,
    "used": lambda n: n.or_0("memory_current") or None,
    "in_use": lambda n: n.pool_used if n.has("kind:driver") else None,
    "limit_bytes": lambda n: n.pool_limit,
    "limit": lambda n: n.or_0("memory_max", "job_limit", "container_limit") or None,
    "largest_name": lambda n: n.largest(*_HOST_TABLES)[1] or None,
    "gaps": lambda n: n.cached if n.has("cause:fragmentation") else None,
    "large": lambda n: n.asked if n.has("cause:refused") else None,
    "whole": lambda n: 100 * n.allocated / n.shards if 5 <= n.shards < 100 and n.allocated >= 0.5 * n.total else None,
    "line": lambda n: n.code_line("."),
    "logits_line": lambda n: n.code_line("logits|logp|softmax|entropy|float"),
    "share_fits": lambda n: math.floor(100 * n.free_gib / n.total_gib) / 100,
    "taken_gib": lambda n: n.total_gib - n.free_gib,
    "length_fits": lambda n: n.or_0("fitting_tokens") or math.floor(n.wanted_tokens * n.available_gib / n.needed_gib),
    "first_gib": lambda n: n.initial / GIB if n.initial > 1e6 else n.initial,
    "now_gib": lambda n: n.current / GIB if n.current > 1e6 else n.current,
    "doing": lambda n: f if (f := n.text("function")) != "resume" else None,
    "largest": lambda n: n.or_0("largest_piece", "largest_free") or None,
    "small": lambda n: n.task_used if n.task_used < 0.25 * n.used else None,
    "victim": lambda n: f"process {pid}" if (pid := n.text("pid")) else None,
    "alone": lambda n: n.anon if n.anon < GIB and n.has("memory_group") else None,
    "who": lambda n: f"local rank {rank}" if (rank := n.text("rank")) else None,
}
