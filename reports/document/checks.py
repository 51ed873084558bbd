"""Fill *Does it add up?*: redo the report's sums from their parts."""

from __future__ import annotations

from memprof.reports.document.model import Check
from memprof.reports.document.text import size, thousands

from memprof.report import Report
from memprof.report.peaks import Peak
from memprof.report.run import Source
from memprof.units import gib
from memprof.vocabulary import Group


def checks_of(report: Report) -> tuple[Check, ...]:
    """Check every total of the report against the sum of its parts, byte by byte."""
    return (*_composition(report.peak), *_device(report), _phases(report), _events(report.source))


def _equal(label: str, parts: int, whole: int, note: str) -> Check:
    if parts == whole:
        return Check(label, f"{gib(whole)} GiB", note, True)
    return Check(label, f"{gib(parts)} GiB", f"{note}; off by {thousands(parts - whole)} bytes", False)


def _composition(peak: Peak) -> list[Check]:
    active, allocated, pending = peak.active_bytes, peak.allocated_bytes, peak.pending_free_bytes
    groups = sum(n for group, n in peak.groups.items() if group != Group.TOTAL)
    held = f"{gib(allocated)} allocated by the program, {gib(pending)} waiting for a stream"
    rounds = f"rounding up to whole blocks uses {size(peak.rounding_bytes)}"
    return [
        _equal("Sum of categories", sum(peak.categories.values()), active, "equals the active bytes"),
        _equal("Sum of groups", groups, peak.groups.get(Group.TOTAL, 0), "equals the total row"),
        _equal("Sum of evidence", sum(peak.evidence.values()), active, "every byte has its evidence"),
        _equal("Allocated + pending free", allocated + pending, active, held),
        _equal("Requested + rounding", peak.requested_bytes + peak.rounding_bytes, allocated, rounds),
    ]


def _device(report: Report) -> list[Check]:
    peak, device = report.peak, report.device_peak
    if peak.reserved_bytes is None:
        return [Check("Reserved", "–", "a CPU recording has no allocator, so nothing is reserved", None)]
    cached, split, pools = peak.cached_bytes, peak.inactive_split_bytes, peak.private_pool_bytes
    words = f"equals reserved: {gib(cached)} cached, {gib(split)} split (fragmentation), {gib(pools)} in private pools"
    whole = peak.active_bytes + cached + split + pools
    checks = [_equal("Active + cached + split + pools", whole, peak.reserved_bytes, words)]
    if device.reserved_bytes is not None and device.grown_by:
        grown = sum(growth.bytes for growth in device.grown_by)
        note = "every segment that raised the device peak has its phase and stack"
        checks.append(_equal("Segments that grew the device peak", grown, device.reserved_bytes, note))
    if (outside := peak.non_torch_bytes) is None:
        return [*checks, Check("Non-PyTorch memory", "–", "not measured in this recording", None)]
    note = "CUDA context, NCCL and other allocators, by NVML"
    return [*checks, Check("Non-PyTorch memory", f"{gib(outside)} GiB", note, None)]


def _phases(report: Report) -> Check:
    count = len(report.phases)
    if wrong := sum(sum(phase.categories.values()) != phase.peak_bytes for phase in report.phases):
        return Check("Phase peaks", f"{wrong} of {count}", "do not equal the sum of their categories", False)
    if not count:
        return Check("Phase peaks", "–", "no phases are known", None)
    return Check("Phase peaks", f"{count} of {count}", "equal the sum of their categories", True)


def _events(source: Source) -> Check:
    dropped = "not counted" if source.dropped_events is None else thousands(source.dropped_events)
    value = f"{thousands(source.events)} / {dropped}"
    return Check("Events recorded / dropped", value, f"history {source.history.replace('_', ' ')}", None)
