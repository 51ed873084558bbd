"""Fill *Does it add up?*: redo the report's sums from their parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memprof.reports.document.model import AddsUp, Check
from memprof.reports.document.text import size, thousands

from memprof.units import gib


def adds_up(report: Mapping[str, Any]) -> AddsUp:
    """Check every total of the report against the sum of its parts, byte by byte."""
    peak = report["peak"]
    checks = [*_composition(peak), *_device(report), _phases(report), _events(report["source"])]
    return AddsUp(tuple(checks), all(check.ok is not False for check in checks))


def _equal(label: str, parts: int, whole: int, note: str) -> Check:
    if parts == whole:
        return Check(label, f"{gib(whole)} GiB", note, True)
    return Check(label, f"{gib(parts)} GiB", f"{note}; off by {thousands(parts - whole)} bytes", False)


def _composition(peak: Mapping[str, Any]) -> list[Check]:
    active, allocated, pending = peak["active_bytes"], peak["allocated_bytes"], peak["pending_free_bytes"]
    groups = {k: v for k, v in peak["groups"].items() if k != "total"}
    held = f"{gib(allocated)} held by the program, {gib(pending)} waiting for a stream"
    requested, rounding = peak["requested_bytes"], peak["rounding_bytes"]
    rounds = f"rounding up to whole blocks takes {size(rounding)}"
    return [
        _equal("Sum of categories", sum(peak["categories"].values()), active, "equals the active bytes"),
        _equal("Sum of groups", sum(groups.values()), peak["groups"]["total"], "equals the total row"),
        _equal("Sum of evidence", sum(peak["evidence"].values()), active, "every byte has its evidence"),
        _equal("Allocated + pending free", allocated + pending, active, held),
        _equal("Requested + rounding", requested + rounding, allocated, rounds),
    ]


def _device(report: Mapping[str, Any]) -> list[Check]:
    peak = report["peak"]
    if peak["reserved_bytes"] is None:
        return [Check("Reserved", "–", "a tensor trace has no allocator, so nothing is reserved", None)]
    cached, split, pools = (peak[k] for k in ("cached_bytes", "inactive_split_bytes", "private_pool_bytes"))
    checks = [
        _equal(
            "Active + cached + split + pools",
            peak["active_bytes"] + cached + split + pools,
            peak["reserved_bytes"],
            f"equals reserved: {gib(cached)} cached, {gib(split)} split (fragmentation), {gib(pools)} in private pools",
        )
    ]
    device = report.get("device_peak")
    if device and device["reserved_bytes"] is not None and device["grown_by"]:
        grown = sum(g["bytes"] for g in device["grown_by"])
        note = "every segment that raised the device peak has its phase and stack"
        checks.append(_equal("Segments that grew the device peak", grown, device["reserved_bytes"], note))
    outside = peak["non_torch_bytes"]
    note = (
        "CUDA context, NCCL and other allocators, by NVML" if outside is not None else "not measured in this recording"
    )
    checks.append(Check("Outside torch", "–" if outside is None else f"{gib(outside)} GiB", note, None))
    return checks


def _phases(report: Mapping[str, Any]) -> Check:
    phases = report["phases"]
    wrong = [p for p in phases if sum(p["categories"].values()) != p["peak_bytes"]]
    if wrong:
        return Check("Phase peaks", f"{len(wrong)} of {len(phases)}", "do not equal the sum of their categories", False)
    highest = max((p["peak_bytes"] for p in phases), default=None)
    if highest is None:
        return Check("Phase peaks", "–", "no phases are known", None)
    return Check("Phase peaks", f"{len(phases)} of {len(phases)}", "equal the sum of their categories", True)


def _events(source: Mapping[str, Any]) -> Check:
    dropped = source.get("dropped_events")
    known = "not counted" if dropped is None else thousands(dropped)
    value = f"{thousands(source['events'])} / {known}"
    return Check("Events recorded / dropped", value, f"history {source['history'].replace('_', ' ')}", None)
