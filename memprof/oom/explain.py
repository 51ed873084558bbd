"""What a message's numbers say: which of them is the trouble, and what to try, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memprof.oom.parse import Failure, find_failures
from memprof.oom.remedies import remedies
from memprof.oom.stack import makes_logits, own_frame, phase_of
from memprof.units import GIB, format_bytes

__all__ = ["SCHEMA", "explain_log"]

SCHEMA = "memprof.oom/1"
# What a CUDA context with its kernels takes, as a rule: beside torch's figures, and no cause of anything.
_CONTEXT = 3 * GIB // 4
_LARGEST_DEVICE = 2**44


@dataclass(frozen=True)
class _Parts:
    """What the process held, in bytes; None where the message does not say."""

    in_use: int | None
    allocated: int | None
    cached: int | None
    outside: int | None
    others: int | None
    own_process: int | None


def explain_log(log: str) -> dict[str, Any]:
    """Every out-of-memory message of a log explained, as plain data (``memprof.oom/1``); none found: an empty list."""
    failures = find_failures(log)
    notes = []
    ranks = sorted({f.rank for f in failures if f.rank is not None})
    if len(ranks) > 1:
        notes.append(
            f"{len(ranks)} ranks ran out of memory ({', '.join(map(str, ranks[:16]))}): look at the one with the least "
            "free first, the others may only have been as full."
        )
    return {"schema": SCHEMA, "failures": [_explained(failure) for failure in failures], "notes": notes}


def _explained(failure: Failure) -> dict[str, Any]:
    parts = _parts(failure)
    cause, because = _cause(failure, parts)
    phase = phase_of(failure.frames)
    logits = makes_logits(failure.frames)
    tried = remedies(cause, failure.backend, phase, logits, failure.requested)
    return {
        "kind": failure.kind,
        "backend": failure.backend,
        "rank": failure.rank,
        "device": failure.device,
        "line": failure.line,
        "message": failure.text,
        "requested_bytes": failure.requested,
        "device_total_bytes": failure.total,
        "device_free_bytes": failure.free,
        "allowed_bytes": failure.allowed,
        "in_use_bytes": parts.in_use,
        "allocated_bytes": parts.allocated,
        "private_pools_bytes": failure.private_pools,
        "cached_bytes": parts.cached,
        "outside_torch_bytes": parts.outside,
        "other_processes_bytes": parts.others,
        "processes": [{"pid": pid, "bytes": held} for pid, held in failure.processes],
        "missing_bytes": _missing(failure),
        "sum": _sum(parts),
        "cause": cause,
        "because": because,
        "phase": phase,
        "frame": own_frame(failure.frames),
        "numbers": _meanings(failure, parts),
        "try": [{"action": action, "why": why} for action, why in tried],
    }


def _parts(failure: Failure) -> _Parts:
    allocated, cached = failure.allocated, failure.unallocated
    reserved = allocated + cached if allocated is not None and cached is not None else None
    in_use, own, processes = failure.in_use, None, list(failure.processes)
    if in_use is None and reserved is not None and processes:
        # In a container the driver's process numbers are not the program's own, so torch does not know itself.
        fitting = [(held - reserved, pid, held) for pid, held in processes if held >= reserved * 0.999]
        if fitting:
            _, own, in_use = min(fitting)
            processes = [(pid, held) for pid, held in processes if pid != own]
    if in_use is not None and in_use > min(_LARGEST_DEVICE, 2 * (failure.total or _LARGEST_DEVICE)):
        in_use = None  # some drivers (WSL) answer with nonsense
    outside = failure.other
    if in_use is not None and reserved is not None:
        outside = max(0, in_use - reserved)
    others = sum(held for _, held in processes) if processes else None
    if others is None and failure.total is not None and failure.free is not None and reserved is not None:
        rest = failure.total - failure.free - (in_use if in_use is not None else reserved)
        others = rest if rest > GIB // 2 else None
    return _Parts(in_use, allocated, cached, outside, others, own)


def _missing(failure: Failure) -> int | None:
    if failure.requested is None or failure.free is None:
        return None
    return max(0, failure.requested - failure.free)


def _cause(failure: Failure, parts: _Parts) -> tuple[str, str]:
    """Which of the numbers is the trouble, as an id and a sentence."""
    if failure.kind != "device":
        return failure.kind, _OTHER_KINDS[failure.kind]
    asked = failure.requested
    if asked is None:
        return "unknown", "the message gives no numbers; the snapshot or the rest of the log would."
    size = format_bytes
    if failure.total is not None and asked > failure.total:
        return "larger_than_device", (
            f"one tensor of {size(asked)} is larger than the whole device ({size(failure.total)}): no setting of the "
            "allocator helps, its shape has to change."
        )
    if failure.allowed is not None and (parts.allocated or 0) + asked > failure.allowed:
        return "limit", (
            f"this process may use {size(failure.allowed)}, set by set_per_process_memory_fraction or the backend's "
            "watermark, not by the device."
        )
    missing, cached = _missing(failure), parts.cached or 0
    if missing is None:
        beside = f", {size(parts.outside)} beside torch's tensors" if parts.outside else ""
        return "full", f"{size(asked)} more did not fit{beside}."
    if not missing:
        return "refused", (
            f"{size(failure.free or 0)} were free and {size(asked)} were refused all the same: a limit outside torch "
            "(a container, a MIG slice, the driver's address space, pinned host memory), or memory that was given "
            "back while the message was written."
        )
    if cached >= asked:
        return "fragmentation", (
            f"torch holds {size(cached)} that nothing uses, more than the {size(asked)} asked for, but in pieces that "
            "are each too small."
        )
    if parts.others is not None and parts.others >= missing:
        return "other_processes", (
            f"other processes hold {size(parts.others)} of this device; without them the {size(missing)} that are "
            "missing would be there."
        )
    if cached >= missing:
        return "fragmentation", (
            f"{size(missing)} are missing, and torch holds {size(cached)} that nothing uses: with what is free it "
            "would be enough in one piece."
        )
    outside = parts.outside or 0
    if outside - _CONTEXT >= missing and outside > _CONTEXT:
        return "outside_torch", (
            f"{size(outside)} of this process are outside torch's allocator, where a CUDA context takes about half a "
            "GiB: NCCL buffers, an engine's own pools, CUDA graphs, other libraries."
        )
    held = f"{size(parts.allocated)} are in tensors" if parts.allocated is not None else "tensors hold the rest"
    return "full", f"the device is full: {held}, {size(missing)} more are needed, and no idle memory makes up for it."


_OTHER_KINDS = {
    "driver": "the driver refused an allocation that torch's allocator did not make (a context, a kernel, NCCL).",
    "library": "a CUDA library found no room for its handle or workspace: the device was full before it was called.",
    "cpu": "host memory, not the device's: the machine or its container has no such block left.",
    "host": "host memory, not the device's: Python or numpy asked for more than the machine or its limits allow.",
    "killed": "the process was killed from outside: on Linux mostly the kernel, because host memory ran out.",
    "engine": "the inference engine found too little room for its cache when it started.",
}


def _sum(parts: _Parts) -> str | None:
    """``14.43 GiB in use = 11.82 allocated + 2.41 cached + 0.20 outside torch``."""
    if parts.in_use is None or parts.allocated is None or parts.cached is None or parts.outside is None:
        return None
    gib = [f"{n / GIB:.2f}" for n in (parts.in_use, parts.allocated, parts.cached, parts.outside)]
    return f"{gib[0]} GiB in use = {gib[1]} allocated + {gib[2]} cached + {gib[3]} outside torch"


def _meanings(failure: Failure, parts: _Parts) -> list[dict[str, Any]]:
    """Each number of the message with what it means."""
    who = "" if parts.own_process is None else f" (process {parts.own_process}, seen from outside its container)"
    rows = [
        (failure.requested, "asked for", "the block that did not fit, rounded up as the allocator does"),
        (failure.total, "device", "all memory of the device, or of the MIG slice"),
        (failure.free, "free", "what no process has taken, by the driver"),
        (failure.allowed, "allowed", "the limit set for this process"),
        (parts.in_use, "in use", f"what this process holds on the device, by the driver{who}"),
        (parts.allocated, "allocated", "in tensors that are alive"),
        (failure.private_pools, "private pools", "of that, kept by CUDA graphs or an engine's pool for themselves"),
        (parts.cached, "cached", "torch's, used by no tensor; whole unused segments go back first, so: gaps between"),
        (parts.outside, "outside torch", "CUDA context and kernels, NCCL, cuBLAS handles, other allocators"),
        (parts.others, "others", "other processes on the device, as far as the message tells"),
    ]
    return [{"name": name, "bytes": n, "meaning": meaning} for n, name, meaning in rows if n is not None]
