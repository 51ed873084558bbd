"""Write a run's report as plain data: schema ``memprof.report/1``, documented in ``docs/report-json.md``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import UNSET, json
from msgspec.structs import replace

from memprof.analysis.curves import highest_allocated
from memprof.analysis.growth import growth
from memprof.analysis.host.growth import host_report
from memprof.analysis.outside_torch import outside_report, switches_report
from memprof.analysis.peaks.by_device import devices_note
from memprof.analysis.peaks.counter_check import unseen_note
from memprof.analysis.peaks.findings import findings, weights_bits
from memprof.analysis.peaks.left_over import pass_returned
from memprof.frame_paths import short_path
from memprof.report.base import Model
from memprof.snapshot.recorded_run import Device, FailedAllocation, RecordedRun, SurvivedFailure
from memprof.timeline.block_sizes import segment_for
from memprof.units import format_bytes
from memprof.vocabulary import Kind

if TYPE_CHECKING:
    from memprof.analysis.breakdown import Breakdown
    from memprof.analysis.views import Views
    from memprof.snapshot.validation import Setting

_MAX_GROWTH = 50
_MAX_LEFTOVERS = 10
_MAX_LARGEST = 30
_MAX_SEEN = {"batches": 64, "lengths": 256}


def report_dict(analysis: Views, allocations: int | None, devices: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the report of one run without its advice; sizes in bytes, times in microseconds.

    Args:
        analysis: the device that the report is about.
        allocations: how many of those alive at the peak are listed; None for all.
        devices: every device of the snapshot where there are several (see :mod:`memprof.analysis.peaks.by_device`).
    """
    snapshot, device = analysis.snapshot, analysis.timeline.device
    run = snapshot.run if snapshot.recorder_asked_about(device) else replace(snapshot.run, outside=None, switches=())
    host, of_host = host_report(run.host, snapshot.path, run.rank)
    return {
        "schema": "memprof.report/1",
        "source": _source(analysis),
        "peak": _peak(analysis, allocations),
        "device_peak": _device_peak(analysis),
        "devices": devices,
        "max_requested_bytes": analysis.max_requested,
        "own_peaks": analysis.own_peaks,
        "group_own_peaks": analysis.group_own_peaks,
        "phases": [_phase(analysis, breakdown) for breakdown in analysis.phases],
        "host": host,
        "outside": outside_report(run.outside, run.samples),
        "switches": switches_report(run.switches),
        "oom": (oom := _oom(analysis)),
        "capacity": capacity_of(snapshot.device_facts(device), oom),
        "growth": _growth(analysis),
        "advice": [],
        "ranks": [],
        "notes": _notes(analysis) + [n for n in (devices_note(devices), of_host) if n is not None],
        **_prediction(run),
    }


def _prediction(run: RecordedRun) -> dict[str, Any]:
    """Return what only a simulated run has: its expected error, its time, whether it fits, and other lengths."""
    parts: dict[str, Model | None] = {
        "expected_error": run.expected_error,
        "estimated_time": run.estimated_time,
        "fit": run.fit,
        "lengths": run.lengths,
    }
    return {name: json.decode(json.encode(part)) for name, part in parts.items() if part is not None}


def _files(path: str | None, redacted: bool) -> list[str]:
    """Return the file's path; its name alone for a redacted recording."""
    return [short_path(path) if redacted else path] if path else []


def _source(analysis: Views) -> dict[str, Any]:
    snapshot, run = analysis.snapshot, analysis.snapshot.run
    device = snapshot.device_facts(analysis.timeline.device)
    return {
        "files": _files(snapshot.path, run.redacted),
        "kind": str(snapshot.kind),
        "device": analysis.timeline.device,
        "device_name": device.name,
        "device_total_bytes": device.total_bytes,
        "torch": snapshot.torch,
        "versions": dict(run.versions),
        "events": analysis.timeline.n_events,
        "dropped_events": run.recorded.dropped_events or 0,
        "history": str(analysis.timeline.history),
        "timed": analysis.timed,
        "phases_known_by": analysis.attribution.track.source,
        "devices": snapshot.devices,
        "rank": run.rank,
        "world_size": run.world_size,
        "node": run.node,
        "config": run.config,
        "setup": _setup(run.setup),
        "alloc_conf": _alloc_conf(snapshot.settings),
    }


def _setup(setup: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the settings a simulation needs, with only the latest of the lengths seen, as a long run has many."""
    if setup is None:
        return None
    latest = {name: setup[name][-most:] for name, most in _MAX_SEEN.items() if isinstance(setup.get(name), list)}
    return {**setup, **latest}


def _alloc_conf(settings: Mapping[str, Setting]) -> str | None:
    """Return the allocator's settings as the environment gave them; None where the file has none."""
    text = settings.get("PYTORCH_CUDA_ALLOC_CONF")
    return text if isinstance(text, str) else None


# What a breakdown says of itself under these names, in the report's order.
_COMPOSITION = (
    "allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes", "time_us", "step", "phase", "categories",
    "categories_requested", "details", "groups", "evidence", "guessed", "rounding_bytes", "pending_free_bytes",
)  # fmt: skip


def _composition(breakdown: Breakdown) -> dict[str, Any]:
    return {
        **{name: getattr(breakdown, name) for name in _COMPOSITION},
        **_idle(breakdown),
        "unmapped_bytes": breakdown.unmapped_bytes,
        "not_in_history_bytes": breakdown.not_in_history_bytes,
    }


def _idle(breakdown: Breakdown) -> dict[str, int]:
    split = breakdown.reserved_split
    return {
        "cached_bytes": split["cached"],
        "inactive_split_bytes": split["inactive_split"],
        "private_pool_bytes": split["private_pools"],
    }


def _peak(analysis: Views, allocations: int | None) -> dict[str, Any]:
    return {
        **_composition(analysis.peak),
        "non_torch_bytes": analysis.non_torch_bytes,
        "findings": findings(analysis),
        "weights_bits": weights_bits(analysis),
        "pass_returned": pass_returned(analysis),
        "allocations": analysis.explain("peak", top=allocations),
        "largest": [_group(found) for found in analysis.largest(None if allocations is None else _MAX_LARGEST)],
    }


def _group(found: dict[str, Any]) -> dict[str, Any]:
    """Return one entry of ``largest``: the times of every block become the first birth and the last death."""
    lives = found.pop("lives")
    return {**found, "born_us": _outer(min, (b for b, _ in lives)), "died_us": _outer(max, (d for _, d in lives))}


def _outer(pick: Callable[[list[int]], int], times: Iterable[int | None]) -> int | None:
    """Pick the outermost time; None, which is beyond the recording, where one of them is."""
    listed = list(times)
    known = [t for t in listed if t is not None]
    return pick(known) if len(known) == len(listed) else None


def _phase(analysis: Views, breakdown: Breakdown) -> dict[str, Any]:
    span = breakdown.span
    assert span is not None, "every entry of Analysis.phases is a phase's peak"
    return {
        "phase": span.phase,
        "step": span.step,
        "within": span.within,
        "start_us": span.start_us,
        "end_us": span.end_us,
        "peak_bytes": breakdown.active_bytes,
        "peak_allocated_bytes": max(highest_allocated(analysis.timeline, span), breakdown.allocated_bytes),
        "not_in_history_bytes": breakdown.not_in_history_bytes,
        "peak_reserved_bytes": breakdown.reserved_bytes,
        "peak_time_us": breakdown.time_us,
        "categories": {category: n for category, n in breakdown.categories.items() if n},
    }


def _device_peak(analysis: Views) -> dict[str, Any]:
    peak = analysis.device_peak
    names = ("reserved_bytes", "active_bytes", "non_torch_bytes", "time_us", "step", "phase")
    if peak is None:
        return {**dict.fromkeys(names), "grown_by": []}
    grown = [
        {"bytes": g.bytes, "phase": g.phase, "stack": analysis.stacks.of(g.stack)} for g in peak.grown_by[:_MAX_GROWTH]
    ]
    # Smaller entries stay in the sum, merged by phase.
    tail: dict[str, int] = {}
    for rest in peak.grown_by[_MAX_GROWTH:]:
        tail[rest.phase] = tail.get(rest.phase, 0) + rest.bytes
    grown += [{"bytes": n, "phase": phase, "stack": []} for phase, n in tail.items()]
    return {**{name: getattr(peak, name) for name in names}, "grown_by": grown}


def _oom(analysis: Views) -> dict[str, Any] | None:
    line = analysis.timeline
    recorded = analysis.snapshot.run.oom
    if recorded is not None and recorded.device not in (None, line.device):
        recorded = None
    event = _fatal_event(analysis)
    if event is None:
        return None if recorded is None else _recorded_failure(analysis, recorded)
    trace = analysis.snapshot.traces[line.device]
    at = analysis.breakdown(event + 1)
    requested, told = int(trace.size[event]), int(trace.address[event])
    free = max(told, 0)  # below 0: the event does not say how much was free
    limit = None if recorded is None or recorded.limit_bytes is UNSET else recorded.limit_bytes
    unlimited = recorded is not None and recorded.limit_bytes is None
    room, limited = (free, False) if unlimited else _room(analysis, at, requested, free, limit)
    return {
        "requested_bytes": requested,
        "device_free_bytes": None if told < 0 else free,
        "limit_bytes": limit,
        "limited": limited,
        "reserved_bytes": at.reserved_bytes,
        # Would it fit if that room and the idle parts of torch's segments were one piece?
        "fits_defragmented": requested <= room + sum(at.reserved_split.values()),
        "phase": at.phase,
        "step": at.step,
        "stack": analysis.stacks.of(int(trace.stack[event])),
        "time_us": at.time_us,
        "allocated_bytes": at.allocated_bytes,
        "categories": {category: n for category, n in at.categories.items() if n},
        **_idle(at),
        "segment_bytes": segment_for(analysis.snapshot, requested),
    }


def _recorded_failure(analysis: Views, recorded: FailedAllocation) -> dict[str, Any]:
    """Return an allocation that failed without an event of its own, as in a CPU recording."""
    optional = {"time_us": recorded.time_us, "limit_bytes": recorded.limit_bytes}
    return {
        "requested_bytes": recorded.requested_bytes,
        "device_free_bytes": recorded.device_free_bytes,
        "phase": recorded.phase,
        "step": recorded.step,
        "stack": list(recorded.stack),
        **{name: value for name, value in optional.items() if value is not UNSET},
        **({} if recorded.device is None else {"device": recorded.device}),
        **_held_at(analysis, None if recorded.time_us is UNSET else recorded.time_us),
    }


def capacity_of(device: Device, oom: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the memory of the card (of the machine, for a run on a CPU), and where that is known from.

    Without a recorded total, what torch had reserved when memory ran out and what was free then are a lower bound:
    memory outside torch is not in it. A limit of the process that refused a request stands for its card. None where
    nothing tells.
    """
    if oom and oom.get("limited") and oom.get("limit_bytes"):
        return {"bytes": oom["limit_bytes"], "from": "limit"}
    if device.total_bytes:
        return {"bytes": device.total_bytes, "from": "machine" if device.type == "cpu" else "device"}
    if oom and oom.get("reserved_bytes") and oom["device_free_bytes"] is not None:
        return {"bytes": oom["reserved_bytes"] + oom["device_free_bytes"], "from": "oom"}
    return None


def _room(analysis: Views, at: Breakdown, requested: int, free: int, limit: int | None) -> tuple[int, bool]:
    """Return the bytes that torch could still have reserved, and whether a limit of the process stopped it.

    A limit counts what is reserved, not what is allocated, and it holds whatever the device has free. A limit that was
    not recorded shows where the device still had room for the segment that such a request takes.
    """
    piece = segment_for(analysis.snapshot, requested)
    if limit is None:
        return (0, True) if free >= piece else (free, False)
    left = max(0, limit - (at.reserved_bytes or 0))
    return min(free, left), left < piece and left < free


def _fatal_event(analysis: Views) -> int | None:
    """Return the last event at which an allocation failed; None where none did, or where the run went on after it."""
    line = analysis.timeline
    if not len(line.oom_events):
        return None
    event = int(line.oom_events[-1])
    return None if analysis.snapshot.survived(int(line.event_us[event])) else event


def _survived_notes(survived: Iterable[SurvivedFailure]) -> Iterator[str]:
    """Say which allocations failed in a run that went on."""
    for failure in survived:
        where = f"{failure.phase or 'an unknown phase'}{'' if failure.step is None else f' of step {failure.step}'}"
        yield (
            f"An allocation of {format_bytes(failure.requested_bytes)} failed in {where}; the error was caught and the "
            "run went on"
        )


def _held_at(analysis: Views, time_us: int | None) -> dict[str, Any]:
    """Return the memory held when an allocation failed without an event of its own, as in a tensor trace."""
    if time_us is None or not analysis.timeline.n_events:
        return {}
    at = analysis.breakdown(analysis.timeline.instant_at(time_us))
    held = {category: n for category, n in at.categories.items() if n}
    return {"allocated_bytes": at.allocated_bytes, "categories": held}


def _growth(analysis: Views) -> dict[str, Any]:
    tokens = {step.step: step.tokens for step in analysis.snapshot.run.steps if step.tokens}
    found = growth(analysis.timeline, analysis.attribution, tokens)
    for left in (listed := found["left_behind"][:_MAX_LEFTOVERS]):
        left["held_by"] = sorted({who for row in left.pop("rows") for who in analysis.holders.get(row, [])})
        left["stack"] = analysis.stacks.of(left.pop("stack"))
    return {**found, "left_behind": listed}


def _notes(analysis: Views) -> list[str]:
    notes = [*analysis.snapshot.notes, *analysis.timeline.notes, *analysis.attribution.notes]
    if analysis.unseen is not None:
        notes.insert(0, unseen_note(analysis.unseen, analysis.snapshot, analysis.timeline))
    notes += _survived_notes(analysis.snapshot.run.survived)
    if analysis.snapshot.kind is Kind.TRACE:
        notes.append(
            "CPU runs track tensors, not allocator blocks, so allocated, active and requested bytes are equal."
        )
    if analysis.timeline.n_events and not analysis.timed and analysis.snapshot.kind is not Kind.SIMULATED:
        notes.append("The recording has no clock: how long anything took is not known, and its times count events.")
    return list(dict.fromkeys([*notes, *analysis.snapshot.run.notes]))
