"""Report the device memory beside torch's own, as far as its parts can be told apart.

The driver gives one figure per process. The part of it beside torch's reserved memory is split by *when* it came: what
was there when recording began (CUDA's context, the modules so far, libraries' handles), and what came since (NCCL's
communicators, more modules and handles, other allocators in the process). Drivers tell no more. The growth divided by
the number of NCCL groups bounds what one group holds; a context that the driver did not report is estimated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from memprof.config.gpus import CONTEXT_BYTES
from memprof.report.run import NonTorchMemory, OtherProcess, Switch
from memprof.vocabulary import Phase

_SIZES = (
    "capacity_bytes", "used_bytes", "own_bytes", "others_bytes", "first_own_bytes", "first_reserved_bytes",
)  # fmt: skip
_MOST_PROCESSES = 64


def outside_report(noted: Any, samples: Iterable[Any]) -> NonTorchMemory | None:
    """Return the ``outside`` part of a report, sizes in bytes; None where the recording did not ask the driver.

    Args:
        noted: the ``outside`` part of the snapshot.
        samples: its ``samples``; rows of seven figures hold the driver's answers.
    """
    if not isinstance(noted, Mapping):
        return None
    sizes = {name: _size(noted.get(name)) for name in _SIZES}
    rows = [row for row in samples if len(row) >= 7]
    beside = [own - reserved for _, _, own, _, _, _, reserved, *_ in rows if own is not None and reserved is not None]
    own, reserved = sizes["first_own_bytes"], sizes["first_reserved_bytes"]
    at_first = None if own is None or reserved is None else max(0, own - reserved)
    highest = max([n for n in beside if n >= 0], default=at_first)
    used, own, others = sizes["used_bytes"], sizes["own_bytes"], sizes["others_bytes"]
    unnamed = max(0, used - own - others) if used is not None and own is not None and others is not None else None
    groups = _size(noted.get("process_groups")) or 0
    grown = None if at_first is None or highest is None else max(0, highest - at_first)
    processes = _processes(noted)
    contexts = sum(p.bytes is None for p in processes) + (highest is None)
    return NonTorchMemory(
        reason=reason if isinstance(reason := noted.get("reason"), str) and reason else None,
        mig=mig if isinstance(mig := noted.get("mig"), bool) else None,
        capacity_bytes=sizes["capacity_bytes"],
        highest_used_bytes=used,
        own_bytes=own,
        others_bytes=others,
        unnamed_bytes=unnamed,
        at_start_bytes=at_first,
        highest_bytes=highest,
        grown_bytes=grown,
        estimated_bytes=CONTEXT_BYTES * contexts or None,
        process_groups=groups,
        group_at_most_bytes=grown // groups if grown is not None and groups else None,
        allocators=tuple(str(a) for a in noted.get("allocators") or [] if isinstance(a, str)),
        processes=tuple(processes),
    )


def _processes(noted: Mapping[str, Any]) -> list[OtherProcess]:
    """Return the other processes on the device when it was fullest, the largest first."""
    own = noted.get("this_process")
    listed = [p for p in noted.get("processes") or [] if isinstance(p, (list, tuple)) and len(p) == 2]
    others = [OtherProcess(pid=p[0], bytes=_size(p[1])) for p in listed if type(p[0]) is int and p[0] != own]
    return sorted(others, key=lambda p: -(p.bytes or 0))[:_MOST_PROCESSES]


def _size(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def switches_report(rows: Iterable[Any]) -> tuple[Switch, ...]:
    """List the switches between rollout and training, in order, with torch's figures and the resident bytes after each.

    ``resident_bytes`` is torch's reserved (allocated, where there is no allocator) bytes minus the pages that an
    engine has given back and torch still counts.
    """
    return tuple(_switch(*row) for row in rows if len(row) == 7)


def _switch(
    time_us: int,
    phase: str,
    step: int | None,
    allocated: int | None,
    reserved: int | None,
    unmapped: int | None,
    used: int | None,
) -> Switch:
    counted = allocated if reserved is None else reserved
    return Switch(
        time_us=time_us,
        phase=Phase(phase),
        step=step,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        unmapped_bytes=unmapped or 0,
        resident_bytes=None if counted is None else max(0, counted - (unmapped or 0)),
        device_used_bytes=used,
    )
