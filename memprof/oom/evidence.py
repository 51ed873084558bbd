"""Collect what is known of one failure, by the names that the knowledge files use."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

from memprof.allocator.settings import AllocatorSettings, settings_of
from memprof.oom.arithmetic import Parts, free_bytes, missing_bytes
from memprof.oom.expressions import Scope, functions_over, place_of_frame
from memprof.oom.failure import Failure
from memprof.oom.framework_settings import PLAIN, Names
from memprof.oom.knowledge_files import table

# The allocator's settings where the log shows them, in a command line, a script or a list of the environment.
_CONF = re.compile(r"PYTORCH_(?:CUDA_|HIP_)?ALLOC_CONF['\"]?\]?\s{0,3}[=:,]\s{0,3}['\"]?([\w:.,\[\]>]{3,400})")
# What torch's own message proposes is not what was set.
_PROPOSED = re.compile(
    r"try\s{1,4}setting\s{1,4}\S{1,80}|use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0\.0|consider \S{1,80}"
    r"|please set \S{1,80}",
    re.I,
)
_TORCH = re.compile(r"\b(?:py)?torch(?: version)?(?:==|[ :=@v-]{1,3})(\d)\.(\d{1,2})(?!\d)", re.I)


def scope_of(failure: Failure, parts: Parts, phase: str | None, logits: bool, names: Names) -> Scope:
    """Return the numbers, flags, settings' names and functions that conditions and templates may ask for."""
    surroundings = _PROPOSED.sub(" ", f"{failure.head}\n{failure.around}")
    values = {
        **failure.facts,
        **_numbers(failure, parts, _allocator_in(surroundings)),
        **{f"setting_{word}": text for word, text in {**PLAIN.words, **names.words}.items()},
        "form": failure.form.id,
        "kind": failure.kind,
        "program": failure.form.program,
        "backend": failure.backend,
        "phase": phase,
        "logits": logits,
        "rank": failure.rank,
        "framework": names.framework or None,
        "framework_kind": names.kind if names.framework else None,
        "engine_sleeps": names.sleeps,
        "torch": _version("\n".join([*map(place_of_frame, failure.frames), failure.text, surroundings])),
        "torch_most": _oldest_wording(failure),
    }
    if names.framework:  # another framework's words would be foreign to it
        own = {f"setting_{word}" for word in (*names.words, "micro_batch", "checkpointing", "optimizer", "offload")}
        values = {k: v for k, v in values.items() if not k.startswith("setting_") or k in own}
    if failure.kind != "device":
        values.update({name: failure.facts[name] for name in ("total", "free") if name in failure.facts})
    functions = functions_over(failure.frames, failure.text, surroundings, values)
    flags = table("flags")["flag"]
    told = Scope({**values, "total": failure.total}, functions).within(flags)
    return Scope({**values, **{name: told[name] for name in flags}}, functions)


def _allocator_in(text: str) -> AllocatorSettings:
    """Return the allocator's settings that a log shows; torch's defaults where it shows none."""
    found = _CONF.search(text)
    return settings_of({"PYTORCH_CUDA_ALLOC_CONF": found[1].rstrip(".,")} if found else {})


def _numbers(failure: Failure, parts: Parts, allocator: AllocatorSettings) -> dict[str, Any]:
    asked, allocated = failure.requested, parts.allocated
    return {
        **{k: v for k, v in asdict(parts).items() if k not in ("processes", "contradictions", "own_process")},
        "asked": asked,
        "total": failure.total,
        "free": free_bytes(failure),
        "allowed": failure.allowed,
        "other": failure.other,
        "private_pools": failure.private_pools,
        "missing": missing_bytes(failure),
        "idle": parts.cached or 0,
        "live": None if not failure.total or allocated is None else allocated / failure.total,
        "piece": None if asked is None else allocator.segment_size(allocator.round_size(asked)),
        "processes": len(parts.processes),
        "silent": sum(not held for _, held in parts.processes),
        "pid": parts.processes[0][0] if len(parts.processes) == 1 else failure.facts.get("pid"),
    }


def _version(text: str) -> int | None:
    match = _TORCH.search(text)
    return int(match[1]) * 100 + int(match[2]) if match else None


def _oldest_wording(failure: Failure) -> int | None:
    """Return the newest version that can word it so; None where any can."""
    if failure.backend not in ("CUDA", "HIP"):
        return None
    text = failure.text.lower()
    if "already allocated" in text:
        return 103 if "cached" in text else 200
    return 201 if "capacty" in text else None
