"""Report the device memory beside torch's own, as far as its parts can be told apart.

The driver gives one figure per process. The part of it beside torch's reserved memory is split by *when* it came: what
was there when recording began (CUDA's context, the modules so far, libraries' handles), and what came since (NCCL's
communicators, more modules and handles, other allocators in the process). Drivers tell no more. The growth divided by
the number of NCCL groups bounds what one group holds; a context that the driver did not report is estimated.
"""

from __future__ import annotations

from collections.abc import Iterable

from memprof.report.run import NonTorchMemory, OtherProcess, Switch
from memprof.snapshot.recorded_run import EngineSwitch, MemorySample, OutsideTorch
from memprof.vocabulary import Phase

_MOST_PROCESSES = 64


def outside_report(noted: OutsideTorch | None, samples: Iterable[MemorySample]) -> NonTorchMemory | None:
    """Return the ``outside`` part of a report, sizes in bytes; None where the recording did not ask the driver.

    Args:
        noted: the ``outside`` part of the snapshot.
        samples: its ``samples``.
    """
    if noted is None:
        return None
    beside = [
        sample.process_bytes - sample.reserved_bytes
        for sample in samples
        if sample.process_bytes is not None and sample.reserved_bytes is not None
    ]
    own, reserved = noted.first_own_bytes, noted.first_reserved_bytes
    at_first = None if own is None or reserved is None else max(0, own - reserved)
    highest = max([n for n in beside if n >= 0], default=at_first)
    used, own, others = noted.used_bytes, noted.own_bytes, noted.others_bytes
    unnamed = max(0, used - own - others) if used is not None and own is not None and others is not None else None
    groups = noted.process_groups
    grown = None if at_first is None or highest is None else max(0, highest - at_first)
    processes = _processes(noted)
    contexts = sum(process.bytes is None for process in processes) + (highest is None)
    return NonTorchMemory(
        reason=noted.reason or None,
        mig=noted.mig,
        capacity_bytes=noted.capacity_bytes,
        highest_used_bytes=used,
        own_bytes=own,
        others_bytes=others,
        unnamed_bytes=unnamed,
        at_start_bytes=at_first,
        highest_bytes=highest,
        grown_bytes=grown,
        estimated_bytes=_contexts_bytes(contexts) if contexts else None,
        process_groups=groups,
        group_at_most_bytes=grown // groups if grown is not None and groups else None,
        allocators=noted.allocators,
        processes=tuple(processes),
    )


def _processes(noted: OutsideTorch) -> list[OtherProcess]:
    """Return the other processes on the device when it was fullest, the largest first."""
    others = [process for process in noted.processes if process.pid != noted.this_process]
    largest = sorted(others, key=lambda process: -(process.bytes or 0))[:_MOST_PROCESSES]
    return [OtherProcess(pid=process.pid, bytes=process.bytes) for process in largest]


def switches_report(switches: Iterable[EngineSwitch]) -> tuple[Switch, ...]:
    """List the switches between rollout and training, in order, with torch's figures and the resident bytes after each.

    ``resident_bytes`` is torch's reserved (allocated, where there is no allocator) bytes minus the pages that an
    engine has given back and torch still counts.
    """
    return tuple(map(_switch, switches))


def _switch(switch: EngineSwitch) -> Switch:
    counted = switch.allocated_bytes if switch.reserved_bytes is None else switch.reserved_bytes
    unmapped = switch.unmapped_bytes or 0
    return Switch(
        time_us=switch.time_us,
        phase=Phase(switch.phase),
        step=switch.step,
        allocated_bytes=switch.allocated_bytes,
        reserved_bytes=switch.reserved_bytes,
        unmapped_bytes=unmapped,
        resident_bytes=None if counted is None else max(0, counted - unmapped),
        device_used_bytes=switch.device_used_bytes,
    )


def _contexts_bytes(count: int) -> int:
    """Return the usual size of so many CUDA contexts."""
    from memprof.config.gpus import CONTEXT_BYTES

    return CONTEXT_BYTES * count
