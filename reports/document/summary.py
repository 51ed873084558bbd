"""Fill the first screen: the peak, what it is made of, what else the device held, how far it was from out of memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from memprof.reports.document.blocks import GUESS, BarPart, Fact
from memprof.reports.document.model import AllocationRow, Room, Summary
from memprof.reports.document.prediction import prediction_facts, reserving
from memprof.reports.document.tables import category_parts
from memprof.reports.document.text import category_label, sentence_list, size, where_words

from memprof.analysis.headline import is_dump, peak_phase, peak_words
from memprof.report import Report
from memprof.report.peaks import Peak
from memprof.report.run import Capacity, OutOfMemory
from memprof.units import GIB, gib, percent
from memprof.vocabulary import Category, Phase

_MOST_DEVICES = 8
# What a CUDA context takes, as memprof.config.fits counts it where nobody looked.
_CONTEXT = 600 * 2**20


def summary_of(report: Report, allocations: Sequence[AllocationRow] = ()) -> Summary:
    """Fill the first screen from a report; ``allocations`` say what inferred bytes could also be."""
    source, peak = report.source, report.peak
    has_device = peak.reserved_bytes is not None
    capacity = capacity_of(report)
    bar = category_parts(peak.categories, peak.guessed)
    rest = _rest_of_device(peak, capacity) if has_device else ()
    return Summary(
        peak_bytes=peak.allocated_bytes,
        peak_word=peak_words(source),
        where=where_words(peak_phase(report), peak.step),
        capacity_bytes=capacity,
        scale_bytes=max(sum(part.bytes for part in (*bar, *rest)), 1),
        facts=_facts(report, capacity, moment="the dump" if is_dump(source) else "the peak"),
        bar=bar,
        rest=rest,
        guessed=_guessed(peak, allocations),
    )


def capacity_of(report: Report) -> int | None:
    """Return the GPU's memory; None if it is not known, or if no allocator served the recording."""
    if report.peak.reserved_bytes is None:
        return None
    return report.capacity.bytes if report.capacity else report.source.device_total_bytes


def _guessed(peak: Peak, allocations: Sequence[AllocationRow]) -> Fact | None:
    """Count what is inferred, and name the two other categories that most of it could be."""
    n_bytes = sum(peak.guessed.values())
    if not n_bytes:
        return None
    others: Counter[str] = Counter()
    for allocation in allocations:
        for category in allocation.group.alternatives if allocation.guessed else ():
            others[category_label(category).lower()] += allocation.bytes
    words = sentence_list(label for label, n in others.most_common(2) if n >= n_bytes / 100)
    note = f"could be {words}" if words else "by lifetime, shape or size alone"
    return Fact(f"Inferred (rows marked{GUESS})", f"{gib(n_bytes)} GiB", note, n_bytes)


def _rest_of_device(peak: Peak, capacity: int | None) -> tuple[BarPart, ...]:
    outside = peak.non_torch_bytes or 0
    parts = [
        BarPart("cached", "Cached, free", peak.cached_bytes),
        BarPart("inactive_split", "Split, free", peak.inactive_split_bytes),
        BarPart("private_pools", "Private pools, free", peak.private_pool_bytes),
        BarPart("non_torch", "Non-PyTorch memory", outside),
    ]
    if capacity:
        parts.append(BarPart("free", "Free", capacity - (peak.reserved_bytes or 0) - outside))
    return tuple(part for part in parts if part.bytes > 0)


def _facts(report: Report, capacity: int | None, moment: str) -> tuple[Fact, ...]:
    peak, reserved = report.peak, report.device_peak.reserved_bytes
    facts = []
    if reserved is not None and peak.reserved_bytes is not None:
        held = reserved + (report.device_peak.non_torch_bytes or 0)
        if capacity:
            note = f"left of {gib(capacity)} at the device peak" if held <= capacity else "more than the device has"
            facts.append(Fact("Headroom", f"{gib(capacity - held)} GiB", note, capacity - held))
        idle = peak.reserved_bytes - peak.active_bytes
        label, when = ("Highest reserved", "the allocated peak") if moment == "the peak" else ("Reserved", moment)
        note = f"{gib(idle)} of {gib(peak.reserved_bytes)} not in use at {when}"
        facts.append(Fact(label, f"{gib(reserved)} GiB", note, reserved))
    if generation := [phase.peak_bytes for phase in report.phases if phase.phase == Phase.GENERATE]:
        top = max(generation)
        note = "generation sets the peak" if peak.phase == Phase.GENERATE else "another phase sets the peak"
        facts.append(Fact("Generation's peak", f"{gib(top)} GiB", note + reserving(report.fit), top))
    if reserved is not None and (outside := peak.non_torch_bytes) is not None:
        facts.append(Fact("Non-PyTorch memory", f"{gib(outside)} GiB", "CUDA context, NCCL, other allocators", outside))
    unknown = peak.categories.get(Category.UNATTRIBUTED, 0)
    share = f"{percent(unknown, peak.active_bytes)} of {moment}"
    facts.append(Fact("Unattributed", f"{gib(unknown)} GiB", share, unknown))
    if missing := peak.not_in_history_bytes:
        note = f"{percent(missing, peak.active_bytes)} of the peak: the allocator counted it, the recording lost it"
        facts.append(Fact("Not in the history", f"{gib(missing)} GiB", note, missing))
    facts += _other_devices(report)
    if reserved is None:
        facts.insert(0, _floor(report))
    return (*prediction_facts(report), *facts)


def _other_devices(report: Report) -> Iterator[Fact]:
    """Yield the peaks of the devices that the rest of the report is not about, and of all together."""
    devices = [d for d in report.devices if d.shown or d.peak.allocated_bytes]
    others = [d for d in devices if not d.shown]
    for device in others[:_MOST_DEVICES]:
        peak = device.peak
        largest = max(category_parts(peak.categories), key=lambda part: part.bytes, default=None)
        words = f"its own peak, in {where_words(peak.phase, peak.step)}"
        words += f"; largest: {largest.label.lower()}, {gib(largest.bytes)} GiB" if largest else ""
        note, n = f"{words}; --device {device.device} reports it", peak.allocated_bytes
        yield Fact(f"Device {device.device}", f"{gib(n)} GiB", note, n)
    if others:
        total = sum(d.peak.allocated_bytes for d in devices)
        yield Fact(f"All {len(devices)} devices", f"{gib(total)} GiB", "the sum of their own peaks", total)


def _floor(report: Report) -> Fact:
    """Count what is allocated in every phase, if there is no device."""
    floor = min((phase.peak_bytes for phase in report.phases), default=report.peak.active_bytes)
    return Fact("Lowest phase peak", f"{gib(floor)} GiB", "in use in every phase", floor)


# ---- how far from out of memory: what torch uses and caches, non-PyTorch memory, what failed, and the GPU -----------


_FROM = {
    "device": "the GPU",
    "other": "the other run's GPU",
    "machine": "this machine's memory",
    "option": "the GPU given",
    "limit": "what this process may reserve",
    "oom": "the GPU at least, by what was free when memory ran out",
}


def room_of(report: Report, others: bool = False) -> Room | None:
    """Fill the bar of a report; ``None`` if neither a GPU nor a failed request is known.

    At an out-of-memory error the figures are those of that moment, else those of the device peak. A CPU recording has
    no allocator: its bar is the peak alone, and the sentence says so. ``others``: the GPU is another run's.
    """
    oom, card = report.oom, report.capacity or _recorded_card(report)
    if card is None and not (oom and oom.reserved_bytes):
        return None
    held, cached, outside = _at_failure(oom, report, card, others) if oom else _at_device_peak(report)
    request = oom.requested_bytes if oom else 0
    needed = held + cached + outside + request
    parts = [
        BarPart("held", "Allocated", held),
        BarPart("cached", "Cached by the allocator", cached),
        BarPart("non_torch", "Non-PyTorch memory", outside),
        BarPart("request", "The request that failed", request),
        BarPart("free", "Free", max(0, card.bytes - needed) if card and not request else 0),
    ]
    capacity = card.bytes if card else None
    return Room(
        parts=tuple(part for part in parts if part.bytes > 0),
        scale_bytes=max(needed, capacity or 0, 1),
        capacity_bytes=capacity,
        sentence=_sentence(report, card, needed, request, others),
    )


def _recorded_card(report: Report) -> Capacity | None:
    """Return the GPU of a report that was written before reports had a capacity."""
    total = report.source.device_total_bytes
    return Capacity(bytes=total, source="device") if total and report.peak.reserved_bytes is not None else None


def _at_device_peak(report: Report) -> tuple[int, int, int]:
    device, peak = report.device_peak, report.peak
    if (reserved := device.reserved_bytes) is None:
        return peak.active_bytes, 0, 0
    held = device.active_bytes or 0
    if not held or peak.reserved_bytes == reserved:  # the allocated peak was reached with as much reserved
        held = min(peak.active_bytes, reserved)
    return held, reserved - held, device.non_torch_bytes or 0


def _at_failure(oom: OutOfMemory, report: Report, card: Capacity | None, others: bool) -> tuple[int, int, int]:
    """Return the figures when the request failed; non-PyTorch memory is what the GPU's other figures leave."""
    held, reserved, free = oom.allocated_bytes or report.peak.active_bytes, oom.reserved_bytes, oom.device_free_bytes
    if not isinstance(reserved, int):
        return held, 0, 0
    limited = card is not None and card.source == "limit"  # a limit counts what is reserved
    outside = 0 if limited else report.peak.non_torch_bytes or 0
    if card is not None and card.source == "device" and not others and free is not None:
        outside = max(0, card.bytes - free - reserved)
    return held, max(0, reserved - held), outside


def _outside_is_unknown(report: Report) -> bool:
    """Tell whether an allocator's figures are all there is, for a GPU that holds more than those."""
    device, asked = report.device_peak, report.capacity is not None and report.capacity.source == "option"
    return asked and device.reserved_bytes is not None and device.non_torch_bytes is None


def _sentence(report: Report, card: Capacity | None, needed: int, request: int, others: bool) -> str:
    if card is None:
        return f"{gib(needed)} GiB with the request that failed; the recording does not contain the GPU's memory size."
    of = f"{gib(card.bytes)} GiB ({_FROM['other' if others else card.source]})"
    left = card.bytes - needed
    short = (report.oom.ahead.short_bytes if report.oom and report.oom.ahead else None) or 0
    whole = f" For the whole step {size(short)} were missing." if short > max(0, -left) else ""
    if request and left >= 0:
        return f"{gib(needed)} of {of} with the {size(request)} that failed: free, but not contiguous.{whole}"
    if left < 0:
        with_it = f" with the {size(request)} that failed" if request else ""
        words = f"{gib(needed)} GiB{with_it}, {gib(-left)} more than {of}.{whole}"
    else:
        words = f"{gib(left)} GiB left of {of}, {percent(left, card.bytes)}."
        if left < GIB and _outside_is_unknown(report):
            than = ", more than" if left < _CONTEXT else " of"
            words += f" Non-PyTorch memory was not measured: a CUDA context uses about 0.6 GiB{than} that."
    if report.peak.reserved_bytes is None:
        words += " Tensor memory only: allocator overhead and the CUDA context are not included on CPU."
    return words
