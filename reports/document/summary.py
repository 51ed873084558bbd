"""Fill the first screen: the peak, what it is made of, what else the device held, how far it was from out of memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from memprof.reports.document.blocks import GUESS, Fact, Part
from memprof.reports.document.model import Allocation, Room, Summary
from memprof.reports.document.prediction import prediction_facts, reserving
from memprof.reports.document.tables import category_parts
from memprof.reports.document.text import sentence_list, size, where_words

from memprof.analysis.headline import peak_phase, peak_words
from memprof.report import Report
from memprof.report.codec import from_builtins
from memprof.units import GIB, gib, percent

_MOST_DEVICES = 8
# What a CUDA context takes, as memprof.config.fits counts it where nobody looked.
_CONTEXT = 600 * 2**20


def summary_of(report: Mapping[str, Any], allocations: Sequence[Allocation] = ()) -> Summary:
    """Fill the first screen from one report (``memprof.report/1``); ``allocations`` say what guesses could also be."""
    source, peak, typed = report["source"], report["peak"], from_builtins(report, Report)
    has_device = peak["reserved_bytes"] is not None
    card = report.get("capacity") or {"bytes": source["device_total_bytes"]}
    capacity = card["bytes"] if has_device else None
    word = peak_words(typed.source)
    bar = category_parts(peak["categories"], peak.get("guessed"))
    rest = _rest_of_device(peak, capacity) if has_device else ()
    shown = sum(p.bytes for p in (*bar, *rest))
    return Summary(
        peak_bytes=peak["allocated_bytes"],
        peak_word=word,
        where=where_words(peak_phase(typed), peak["step"]),
        capacity_bytes=capacity,
        scale_bytes=max(shown, 1),
        facts=_facts(report, capacity, moment="the dump" if word.endswith(" dump") else "the peak"),
        bar=bar,
        rest=rest,
        guessed=_guessed(peak, allocations),
    )


def _guessed(peak: Mapping[str, Any], allocations: Sequence[Allocation]) -> Fact | None:
    """Count what is guessed, and name the two other answers that most of it leaves open."""
    n_bytes = sum((peak.get("guessed") or {}).values())
    if not n_bytes:
        return None
    others: Counter[str] = Counter()
    for allocation in allocations:
        for label in allocation.alternatives if allocation.guessed else ():
            others[label.lower()] += allocation.bytes
    words = sentence_list(label for label, n in others.most_common(2) if n >= n_bytes / 100)
    note = f"could be {words}" if words else "by lifetime, shape or size alone"
    return Fact(f"Guessed (rows marked{GUESS})", f"{gib(n_bytes)} GiB", note, n_bytes)


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


def _facts(report: Mapping[str, Any], capacity: int | None, moment: str) -> tuple[Fact, ...]:
    peak, device = report["peak"], report.get("device_peak") or {}
    facts = []
    reserved = device.get("reserved_bytes")
    if reserved is not None and peak["reserved_bytes"] is not None:
        held = reserved + (device["non_torch_bytes"] or 0)
        if capacity:
            note = f"left of {gib(capacity)} at the device peak" if held <= capacity else "more than the device has"
            facts.append(Fact("Headroom", f"{gib(capacity - held)} GiB", note, capacity - held))
        idle = peak["reserved_bytes"] - peak["active_bytes"]
        label, when = ("Highest reserved", "the allocated peak") if moment == "the peak" else ("Reserved", moment)
        note = f"{gib(idle)} of {gib(peak['reserved_bytes'])} not in use at {when}"
        facts.append(Fact(label, f"{gib(reserved)} GiB", note, reserved))
    generation = [p["peak_bytes"] for p in report["phases"] if p["phase"] == "generate"]
    if generation:
        top = max(generation)
        note = "generation sets the peak" if peak["phase"] == "generate" else "another phase sets the peak"
        facts.append(Fact("Generation's peak", f"{gib(top)} GiB", note + reserving(report), top))
    if reserved is not None and (outside := peak["non_torch_bytes"]) is not None:
        note = "CUDA context, NCCL, other allocators"
        facts.append(Fact("Outside torch", f"{gib(outside)} GiB", note, outside))
    unknown = peak["categories"].get("unattributed", 0)
    facts.append(
        Fact("Unattributed", f"{gib(unknown)} GiB", f"{percent(unknown, peak['active_bytes'])} of {moment}", unknown)
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


# ---- how far from out of memory: what torch holds and caches, what is outside it, what failed, and the card ---------


_FROM = {
    "device": "the card",
    "other": "the other run's card",
    "machine": "this machine's memory",
    "option": "the card asked about",
    "limit": "what this process may reserve",
    "oom": "the card at least, by what was free when memory ran out",
}


def room_of(report: Mapping[str, Any]) -> Room | None:
    """Fill the bar of a report; None where neither a card nor a failed request is known.

    At an out-of-memory error the figures are those of that moment, else those of the device's highest moment. A tensor
    trace has no allocator: its peak stands there alone, and the sentence says so.
    """
    oom = report.get("oom")
    card = report.get("capacity") or _recorded_card(report)
    if card is None and not (oom and oom.get("reserved_bytes")):
        return None
    held, cached, outside = _at_failure(oom, report, card) if oom else _at_device_peak(report)
    request = int(oom["requested_bytes"]) if oom else 0
    needed = held + cached + outside + request
    parts = [
        Part("held", "Held", held),
        Part("cached", "Cached by the allocator", cached),
        Part("non_torch", "Outside torch", outside),
        Part("request", "The request that failed", request),
        Part("free", "Free", max(0, card["bytes"] - needed) if card and not request else 0),
    ]
    capacity = int(card["bytes"]) if card else None
    return Room(
        parts=tuple(p for p in parts if p.bytes > 0),
        scale_bytes=max(needed, capacity or 0, 1),
        capacity_bytes=capacity,
        sentence=_sentence(report, card, needed, request),
    )


def _recorded_card(report: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the card of a report that was written before reports had a capacity."""
    total = report["source"]["device_total_bytes"]
    return {"bytes": total, "from": "device"} if total and report["peak"]["reserved_bytes"] is not None else None


def _at_device_peak(report: Mapping[str, Any]) -> tuple[int, int, int]:
    device, peak = report.get("device_peak") or {}, report["peak"]
    reserved = device.get("reserved_bytes")
    if reserved is None:
        return int(peak["active_bytes"]), 0, 0
    held = int(device.get("active_bytes") or 0)
    if not held or peak["reserved_bytes"] == reserved:  # the allocated peak was reached with as much reserved
        held = min(int(peak["active_bytes"]), int(reserved))
    return held, int(reserved) - held, int(device["non_torch_bytes"] or 0)


def _at_failure(
    oom: Mapping[str, Any], report: Mapping[str, Any], card: Mapping[str, Any] | None
) -> tuple[int, int, int]:
    """Return the figures when the request failed; what is outside torch is what the card's other figures leave."""
    held, reserved, free = int(oom.get("allocated_bytes") or 0), oom.get("reserved_bytes"), oom["device_free_bytes"]
    if not held:
        held = int(report["peak"]["active_bytes"])
    if reserved is None:
        return held, 0, 0
    limited = card is not None and card["from"] == "limit"  # a limit counts what is reserved
    outside = 0 if limited else report["peak"]["non_torch_bytes"] or 0
    if card is not None and card["from"] == "device" and free is not None:
        outside = max(0, card["bytes"] - free - reserved)
    return held, max(0, int(reserved) - held), int(outside)


def _outside_is_unknown(report: Mapping[str, Any]) -> bool:
    """Tell whether an allocator's figures are all there is, for a card that holds more than those."""
    asked = (report.get("capacity") or {}).get("from") == "option"
    device = report.get("device_peak") or {}
    return asked and device.get("reserved_bytes") is not None and device.get("non_torch_bytes") is None


def _sentence(report: Mapping[str, Any], card: Mapping[str, Any] | None, needed: int, request: int) -> str:
    if card is None:
        return f"{gib(needed)} GiB with the request that failed; the recording does not say how large the card is."
    of = f"{gib(card['bytes'])} GiB ({_FROM[card['from']]})"
    left = card["bytes"] - needed
    short = ((report.get("oom") or {}).get("ahead") or {}).get("short_bytes") or 0
    whole = f" For the whole step {size(short)} were missing." if short > max(0, -left) else ""
    if request and left >= 0:
        return f"{gib(needed)} of {of} with the {size(request)} that failed: free, but not in one piece.{whole}"
    if left < 0:
        with_it = f" with the {size(request)} that failed" if request else ""
        words = f"{gib(needed)} GiB{with_it}, {gib(-left)} more than {of}.{whole}"
    else:
        words = f"{gib(left)} GiB left of {of}, {percent(left, card['bytes'])}."
        if left < GIB and _outside_is_unknown(report):
            than = ", more than" if left < _CONTEXT else " of"
            words += f" What is outside torch was not measured: a CUDA context takes about 0.6 GiB{than} that."
    if report["peak"]["reserved_bytes"] is None:
        words += " Tensors alone: what an allocator and a CUDA context add is not in a tensor trace."
    return words
