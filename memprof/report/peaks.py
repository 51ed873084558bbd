"""Describe the peaks of a run: the allocated peak, the device peak, each phase's and each device's."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from memprof.report.allocations import Allocation, AllocationGroup, Finding
from memprof.report.base import ByCategory, ByEvidence, ByGroup, Bytes, DetailsByCategory, Model, Stack, written
from memprof.vocabulary import Group, Phase


class Peak(Model, frozen=True, kw_only=True):
    """The allocated peak: the first instant at which allocated memory is highest.

    These sums always hold, to the byte:

        sum(categories) = sum(groups without total) = sum(evidence) = active_bytes
        active_bytes    = allocated_bytes + pending_free_bytes
        allocated_bytes = requested_bytes + rounding_bytes
        reserved_bytes  = active_bytes + cached_bytes + inactive_split_bytes + private_pool_bytes

    Attributes:
        allocated_bytes: allocated blocks, as ``torch.cuda.max_memory_allocated`` counts.
        active_bytes: ``allocated_bytes`` plus blocks waiting for a stream.
        requested_bytes: what the program requested.
        reserved_bytes: segments reserved from the device; ``None`` for a CPU recording.
        time_us: when.
        step: optimizer step.
        phase: phase.
        categories: bytes of each category, every id present.
        categories_requested: the same in requested bytes.
        details: ``{category: {detail: bytes}}``: parts of a category.
        groups: rows of the published table, and their ``total``.
        evidence: bytes by how their category is known.
        guessed: ``{category: bytes}`` whose category is inferred from lifetime, shape or sizes only.
        rounding_bytes: what rounding to whole blocks adds.
        pending_free_bytes: freed by the program, waiting for a stream.
        cached_bytes: free segments that the allocator caches.
        inactive_split_bytes: free parts of used segments (fragmentation).
        private_pool_bytes: free bytes in the pools of CUDA graphs and engines.
        unmapped_bytes: pages that an engine released and torch still counts.
        not_in_history_bytes: counted by the allocator but explained by no recorded allocation; part of
            ``unattributed``, under the detail ``not_in_history``.
        non_torch_bytes: NVML's figure for the process minus ``reserved_bytes``, or ``None``.
        findings: what explains part of the peak beyond its categories.
        weights_bits: 16 or 32 if the sizes of the weights show it.
        pass_returned: whether a forward of the outermost module was seen to return.
        allocations: the largest allocations alive (50; ``--allocations N`` or ``all``).
        largest: all allocations alive, similar ones folded: the 30 largest entries.
    """

    allocated_bytes: Bytes
    active_bytes: Bytes
    requested_bytes: Bytes
    reserved_bytes: Bytes | None
    time_us: int
    step: int | None
    phase: Phase | None
    categories: ByCategory
    categories_requested: ByCategory
    details: DetailsByCategory
    groups: Annotated[ByGroup, msgspec.Meta(extra_json_schema={"required": [str(group) for group in Group]})]
    evidence: ByEvidence
    guessed: ByCategory = written({})
    rounding_bytes: int
    pending_free_bytes: Bytes
    cached_bytes: Bytes
    inactive_split_bytes: Bytes
    private_pool_bytes: Bytes
    unmapped_bytes: Bytes
    not_in_history_bytes: Bytes = written(0)
    non_torch_bytes: Bytes | None
    findings: tuple[Finding, ...] = written(())
    weights_bits: Literal[16, 32] | None = written(None)
    pass_returned: bool = written(False)
    allocations: tuple[Allocation, ...]
    largest: tuple[AllocationGroup, ...] = written(())

    def __post_init__(self) -> None:
        missing = [str(group) for group in Group if group not in self.groups]
        if missing:
            raise ValueError(f"groups without {missing[0]}")


class Growth(Model, frozen=True, kw_only=True):
    """One entry of ``device_peak.grown_by``: reserved memory that one stack added in one phase.

    Attributes:
        bytes: added while reserved memory reached new maxima.
        phase: in which it was reserved.
        stack: of the allocation that caused it; empty if it precedes the recording.
    """

    bytes: Bytes
    phase: Phase | None
    stack: Stack


class DevicePeak(Model, frozen=True, kw_only=True):
    """The highest reserved memory plus non-PyTorch memory: what decides an out-of-memory error.

    Every figure is ``None`` for a CPU recording.

    Attributes:
        reserved_bytes: reserved memory then.
        active_bytes: active memory then.
        non_torch_bytes: non-PyTorch memory then.
        time_us: when.
        step: optimizer step.
        phase: phase.
        grown_by: what made reserved memory grow; the bytes add up to ``reserved_bytes``.
    """

    reserved_bytes: Bytes | None
    active_bytes: Bytes | None = written(None)
    non_torch_bytes: Bytes | None
    time_us: int | None
    step: int | None
    phase: Phase | None
    grown_by: tuple[Growth, ...]


class PhasePeak(Model, frozen=True, kw_only=True):
    """One entry of ``phases``: one stretch of a phase, at its peak.

    Attributes:
        phase: the phase.
        step: optimizer step.
        within: the phase that it is nested in, or ``None``.
        start_us: when it began.
        end_us: when it ended.
        peak_bytes: active memory when the program first requested most.
        peak_allocated_bytes: the allocator's own counter.
        not_in_history_bytes: the part of ``peak_bytes`` that is not in the history.
        peak_reserved_bytes: reserved memory at that moment.
        peak_time_us: that moment.
        categories: bytes of each category then, zeros left out.
    """

    phase: Phase
    step: int | None
    within: str | None = written(None)
    start_us: int
    end_us: int
    peak_bytes: Bytes
    peak_allocated_bytes: Bytes = written(0)
    not_in_history_bytes: Bytes = written(0)
    peak_reserved_bytes: Bytes | None = written(None)
    peak_time_us: int
    categories: ByCategory


class PeakOfDevice(Model, frozen=True, kw_only=True):
    """The peak of one of several devices; fields as in ``peak``."""

    allocated_bytes: Bytes
    active_bytes: Bytes
    reserved_bytes: Bytes | None
    not_in_history_bytes: Bytes = written(0)
    time_us: int
    phase: Phase | None
    step: int | None
    categories: ByCategory


class Device(Model, frozen=True, kw_only=True):
    """One entry of ``devices``. The rest of the report is about the one ``shown``.

    Attributes:
        device: its index.
        device_name: its name, if recorded.
        device_total_bytes: its memory, if recorded.
        shown: whether the report is about it: it ran out of memory, or uses most.
        peak: its own allocated peak.
        device_peak_bytes: the most memory that was reserved on it.
    """

    device: int
    device_name: str | None = written(None)
    device_total_bytes: Bytes | None = written(None)
    shown: bool
    peak: PeakOfDevice
    device_peak_bytes: Bytes | None
