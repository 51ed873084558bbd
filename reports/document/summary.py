"""Fill the first screen: the peak, what it is made of, what else the device held, and the figures beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from memprof.reports.document.model import Fact, Part, Summary
from memprof.reports.document.prediction import prediction_facts
from memprof.reports.document.tables import call_site, category_parts
from memprof.reports.document.text import gib, percent, where_words

__all__ = ["summary_of"]


_MOST_DEVICES = 8


def summary_of(report: Mapping[str, Any]) -> Summary:
    """Fill the first screen from one report (``memprof.report/1``)."""
    source, peak = report["source"], report["peak"]
    has_device = peak["reserved_bytes"] is not None
    capacity = source["device_total_bytes"] if has_device else None
    unknown = source.get("phases_known_by") == "none" and peak["phase"] == "other"
    bar = category_parts(peak["categories"])
    rest = _rest_of_device(peak, capacity) if has_device else ()
    shown = sum(p.bytes for p in (*bar, *rest))
    return Summary(
        peak_bytes=peak["allocated_bytes"],
        peak_word={"trace": "Peak tensor memory", "simulated": "Simulated peak"}.get(
            source["kind"], "Peak allocated memory"
        ),
        where=where_words(None if unknown else peak["phase"], peak["step"]),
        cause=_cause(report, bar),
        capacity_bytes=capacity,
        scale_bytes=max(shown, 1),
        facts=_facts(report, capacity),
        bar=bar,
        rest=rest,
    )


def _rest_of_device(peak: Mapping[str, Any], capacity: int | None) -> tuple[Part, ...]:
    parts = [
        Part("cached", "Cached, free", peak["cached_bytes"]),
        Part("inactive_split", "Split, free", peak["inactive_split_bytes"]),
        Part("private_pools", "Private pools, free", peak["private_pool_bytes"]),
        Part("non_torch", "Outside torch", peak["non_torch_bytes"] or 0),
    ]
    if capacity:
        parts.append(Part("free", "Free", capacity - peak["reserved_bytes"] - (peak["non_torch_bytes"] or 0)))
    return tuple(p for p in parts if p.bytes > 0)


# Categories that are simply there; the others come and go with the phase.
_STANDING = {
    "weights", "adapters", "reference_model", "reward_model", "value_model", "optimizer_state", "inference_engine",
    "workspace",
}  # fmt: skip


def _cause(report: Mapping[str, Any], bar: Sequence[Part]) -> str:
    """Name the largest category and, where it is held in every phase, the largest of those that come and go."""
    if not bar:
        return "Nothing was allocated."
    active = report["peak"]["active_bytes"]
    largest = max(bar, key=lambda p: p.bytes)
    passing = max((p for p in bar if p.id not in _STANDING), key=lambda p: p.bytes, default=None)
    sentence = (
        f"Largest: {largest.label.lower()}, {gib(largest.bytes)} GiB, {percent(largest.bytes, active)} of the peak"
    )
    if passing is None or passing is largest:
        return f"{sentence}{_made_at(report, largest.id)}."
    share = percent(passing.bytes, active)
    also = f"largest that comes and goes: {passing.label.lower()}, {gib(passing.bytes)} GiB, {share}"
    return f"{sentence}; {also}{_made_at(report, passing.id)}."


def _made_at(report: Mapping[str, Any], category: str) -> str:
    listed = (a for a in report["peak"]["allocations"] if a["category"] == category and a.get("stack"))
    first = next(listed, None)
    site = call_site(first["stack"]) if first else ""
    return f", made at {site}" if site else ""


def _facts(report: Mapping[str, Any], capacity: int | None) -> tuple[Fact, ...]:
    peak, device = report["peak"], report.get("device_peak") or {}
    facts = []
    reserved = device.get("reserved_bytes")
    if reserved is not None:
        held = reserved + (device["non_torch_bytes"] or 0)
        if capacity:
            note = f"left of {gib(capacity)} at the device peak" if held <= capacity else "more than the device has"
            facts.append(Fact("Headroom", f"{gib(capacity - held)} GiB", note, capacity - held))
        idle = peak["reserved_bytes"] - peak["active_bytes"]
        note = f"{gib(idle)} of {gib(peak['reserved_bytes'])} not in use at the allocated peak"
        facts.append(Fact("Highest reserved", f"{gib(reserved)} GiB", note, reserved))
    generation = [p["peak_bytes"] for p in report["phases"] if p["phase"] == "generate"]
    if generation:
        top = max(generation)
        note = "generation sets the peak" if peak["phase"] == "generate" else "another phase sets the peak"
        facts.append(Fact("Generation's peak", f"{gib(top)} GiB", note, top))
    if reserved is not None:
        outside = peak["non_torch_bytes"]
        note = "not measured" if outside is None else "CUDA context, NCCL, other allocators"
        facts.append(Fact("Outside torch", "–" if outside is None else f"{gib(outside)} GiB", note, outside))
    unknown = peak["categories"].get("unattributed", 0)
    facts.append(
        Fact("Unattributed", f"{gib(unknown)} GiB", f"{percent(unknown, peak['active_bytes'])} of the peak", unknown)
    )
    if missing := peak.get("not_in_history_bytes"):
        note = f"{percent(missing, peak['active_bytes'])} of the peak: the allocator counted it, the recording lost it"
        facts.append(Fact("Not in the history", f"{gib(missing)} GiB", note, missing))
    facts += _other_devices(report)
    if reserved is None:
        facts.insert(0, _floor(report))
    return (*prediction_facts(report), *facts)


def _other_devices(report: Mapping[str, Any]) -> Iterator[Fact]:
    """Yield the peaks of the devices that the rest of the report is not about, and of all together."""
    devices = [d for d in report.get("devices") or [] if d["shown"] or d["peak"]["allocated_bytes"]]
    others = [d for d in devices if not d["shown"]]
    for device in others[:_MOST_DEVICES]:
        peak = device["peak"]
        largest = max(category_parts(peak["categories"]), key=lambda p: p.bytes, default=None)
        words = f"its own peak, in {where_words(peak['phase'], peak['step'])}"
        words += f"; largest: {largest.label.lower()}, {gib(largest.bytes)} GiB" if largest else ""
        note = f"{words}; --device {device['device']} reports it"
        bytes_ = peak["allocated_bytes"]
        yield Fact(f"Device {device['device']}", f"{gib(bytes_)} GiB", note, bytes_)
    if others:
        total = sum(d["peak"]["allocated_bytes"] for d in devices)
        yield Fact(f"All {len(devices)} devices", f"{gib(total)} GiB", "the sum of their own peaks", total)


def _floor(report: Mapping[str, Any]) -> Fact:
    """Count, where there is no device, what is held in every phase."""
    floor = min((p["peak_bytes"] for p in report["phases"]), default=report["peak"]["active_bytes"])
    return Fact("Lowest phase peak", f"{gib(floor)} GiB", "held in every phase", floor)
