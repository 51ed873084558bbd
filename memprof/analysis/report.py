"""Build a run's report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import UNSET
from msgspec.structs import replace

from memprof.allocator.settings import conf_text
from memprof.analysis.allocations.alike import without_lives
from memprof.analysis.allocations.source_lines import source_lines
from memprof.analysis.curves import highest_allocated
from memprof.analysis.growth import growth
from memprof.analysis.host_growth import host_report
from memprof.analysis.outside_torch import outside_report, switches_report
from memprof.analysis.peaks.by_device import devices_note
from memprof.analysis.peaks.counter_check import unseen_note
from memprof.analysis.peaks.findings import findings, weights_bits
from memprof.analysis.peaks.left_over import pass_returned
from memprof.frame_paths import short_path
from memprof.report import Report
from memprof.report.base import known
from memprof.report.peaks import Device, DevicePeak, Growth, Peak, PhasePeak
from memprof.report.run import Capacity, OutOfMemory, Source, StepGrowth
from memprof.snapshot.recorded_run import FailedAllocation, RecordedDevice, SurvivedFailure
from memprof.timeline.block_sizes import segment_for
from memprof.timeline.segment_layout import idle_pools
from memprof.units import format_bytes
from memprof.vocabulary import Kind, Phase

if TYPE_CHECKING:
    from memprof.analysis.breakdown import Breakdown
    from memprof.analysis.views import Views

_IDLE_POOL = 0.1  # a private pool's free bytes are worth a note from this share of reserved memory on
_MAX_GROWTH = 50
_MAX_LARGEST = 30
_MAX_SEEN = {"batches": 64, "lengths": 256}


def build_report(analysis: Views, allocations: int | None, devices: Sequence[Device]) -> Report:
    """Return the report of one run without its advice and headline.

    Args:
        analysis: the device that the report is about.
        allocations: how many of those alive at the peak are listed; None for all.
        devices: every device of the snapshot where there are several (see :mod:`memprof.analysis.peaks.by_device`).
    """
    snapshot, device = analysis.snapshot, analysis.timeline.device
    run = snapshot.run if snapshot.recorder_asked_about(device) else replace(snapshot.run, outside=None, switches=())
    host, of_host = host_report(run.host, snapshot.path, run.rank)
    oom = _oom(analysis)
    return Report(
        source=_source(analysis),
        peak=_peak(analysis, allocations),
        device_peak=_device_peak(analysis),
        devices=tuple(devices),
        max_requested_bytes=analysis.max_requested,
        own_peaks=analysis.own_peaks,
        group_own_peaks=analysis.group_own_peaks,
        phases=tuple(_phase(analysis, breakdown) for breakdown in analysis.phases),
        host=host,
        outside=outside_report(run.outside, run.samples),
        switches=switches_report(run.switches),
        oom=oom,
        capacity=capacity_of(snapshot.device_facts(device), oom),
        growth=_growth(analysis),
        advice=(),
        ranks=(),
        notes=(*_notes(analysis), *(n for n in (devices_note(devices), of_host) if n is not None)),
        expected_error=run.expected_error,
        estimated_time=run.estimated_time,
        fit=run.fit,
        lengths=run.lengths,
        source_lines=source_lines(analysis),
    )


def _files(path: str | None, redacted: bool) -> tuple[str, ...]:
    """Return the file's path; its name alone for a redacted recording."""
    return (short_path(path) if redacted else path,) if path else ()


def _source(analysis: Views) -> Source:
    snapshot, run = analysis.snapshot, analysis.snapshot.run
    device = snapshot.device_facts(analysis.timeline.device)
    return Source(
        files=_files(snapshot.path, run.redacted),
        kind=snapshot.kind,
        device=analysis.timeline.device,
        device_name=device.name,
        device_total_bytes=device.total_bytes,
        torch=snapshot.torch,
        versions=run.versions,
        events=analysis.timeline.n_events,
        dropped_events=run.recorded.dropped_events or 0,
        history=analysis.timeline.history,
        timed=analysis.timed,
        phases_known_by=analysis.attribution.track.source,
        devices=tuple(snapshot.devices),
        rank=run.rank,
        world_size=run.world_size,
        node=run.node,
        run_id=run.run_id,
        run_started=run.run_started,
        config=run.config,
        setup=_setup(run.setup),
        alloc_conf=conf_text(snapshot.settings),
    )


def _setup(setup: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the settings a simulation needs, with only the latest of the lengths seen, as a long run has many."""
    if setup is None:
        return None
    latest = {name: setup[name][-most:] for name, most in _MAX_SEEN.items() if isinstance(setup.get(name), list)}
    return {**setup, **latest}


def _peak(analysis: Views, allocations: int | None) -> Peak:
    peak, split = analysis.peak, analysis.peak.reserved_split
    return Peak(
        allocated_bytes=peak.allocated_bytes,
        active_bytes=peak.active_bytes,
        requested_bytes=peak.requested_bytes,
        reserved_bytes=peak.reserved_bytes,
        time_us=peak.time_us,
        step=peak.step,
        phase=peak.phase,
        categories=peak.categories,
        categories_requested=peak.categories_requested,
        details=peak.details,
        groups=peak.groups,
        evidence=peak.evidence,
        guessed=peak.guessed,
        rounding_bytes=peak.rounding_bytes,
        pending_free_bytes=peak.pending_free_bytes,
        cached_bytes=split.cached,
        inactive_split_bytes=split.inactive_split,
        private_pool_bytes=split.private_pools,
        unmapped_bytes=peak.unmapped_bytes,
        not_in_history_bytes=peak.not_in_history_bytes,
        non_torch_bytes=analysis.non_torch_bytes,
        findings=findings(analysis),
        weights_bits=weights_bits(analysis),
        pass_returned=pass_returned(analysis),
        allocations=analysis.explain("peak", top=allocations),
        largest=tuple(without_lives(g) for g in analysis.largest(None if allocations is None else _MAX_LARGEST)),
    )


def _phase(analysis: Views, breakdown: Breakdown) -> PhasePeak:
    span = breakdown.span
    assert span is not None, "every entry of Analysis.phases is a phase's peak"
    return PhasePeak(
        phase=Phase(span.phase),
        step=span.step,
        within=span.within,
        start_us=span.start_us,
        end_us=span.end_us,
        peak_bytes=breakdown.active_bytes,
        peak_allocated_bytes=max(highest_allocated(analysis.timeline, span), breakdown.allocated_bytes),
        not_in_history_bytes=breakdown.not_in_history_bytes,
        peak_reserved_bytes=breakdown.reserved_bytes,
        peak_time_us=breakdown.time_us,
        categories=breakdown.present,
    )


def _device_peak(analysis: Views) -> DevicePeak:
    peak = analysis.device_peak
    if peak is None:
        return DevicePeak(
            reserved_bytes=None,
            active_bytes=None,
            non_torch_bytes=None,
            time_us=None,
            step=None,
            phase=None,
            grown_by=(),
        )
    grown = [
        Growth(bytes=g.bytes, phase=g.phase, stack=tuple(analysis.stacks.of(g.stack)))
        for g in peak.grown_by[:_MAX_GROWTH]
    ]
    # Smaller entries stay in the sum, merged by phase.
    tail: dict[Phase, int] = {}
    for rest in peak.grown_by[_MAX_GROWTH:]:
        tail[rest.phase] = tail.get(rest.phase, 0) + rest.bytes
    grown += [Growth(bytes=n, phase=phase, stack=()) for phase, n in tail.items()]
    return DevicePeak(
        reserved_bytes=peak.reserved_bytes,
        active_bytes=peak.active_bytes,
        non_torch_bytes=peak.non_torch_bytes,
        time_us=peak.time_us,
        step=peak.step,
        phase=peak.phase,
        grown_by=tuple(grown),
    )


def _oom(analysis: Views) -> OutOfMemory | None:
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
    idle = at.reserved_split
    return OutOfMemory(
        requested_bytes=requested,
        device_free_bytes=None if told < 0 else free,
        limit_bytes=limit,
        limited=limited,
        reserved_bytes=at.reserved_bytes,
        # Would it fit if that room and the idle parts of torch's segments were one piece?
        fits_defragmented=requested <= room + idle.total,
        phase=at.phase,
        step=at.step,
        stack=tuple(analysis.stacks.of(int(trace.stack[event]))),
        time_us=at.time_us,
        allocated_bytes=at.allocated_bytes,
        categories=at.present,
        cached_bytes=idle.cached,
        inactive_split_bytes=idle.inactive_split,
        private_pool_bytes=idle.private_pools,
        segment_bytes=segment_for(analysis.snapshot, requested),
    )


def _recorded_failure(analysis: Views, recorded: FailedAllocation) -> OutOfMemory:
    """Return an allocation that failed without an event of its own, as in a CPU recording, with the memory then."""
    oom = OutOfMemory(
        requested_bytes=recorded.requested_bytes,
        device_free_bytes=recorded.device_free_bytes,
        limit_bytes=recorded.limit_bytes,
        phase=recorded.phase,
        step=recorded.step,
        stack=recorded.stack,
        time_us=recorded.time_us,
    )
    time_us = known(recorded.time_us)
    if time_us is None or not analysis.timeline.n_events:
        return oom
    at = analysis.breakdown(analysis.timeline.instant_at(time_us))
    return replace(oom, allocated_bytes=at.allocated_bytes, categories=at.present)


def capacity_of(device: RecordedDevice, oom: OutOfMemory | None) -> Capacity | None:
    """Return the memory of the card (of the machine, for a run on a CPU), and where that is known from.

    Without a recorded total, what torch had reserved when memory ran out and what was free then are a lower bound:
    memory outside torch is not in it. A limit of the process that refused a request stands for its card. None where
    nothing tells.
    """
    if oom is not None and oom.limited and (limit := known(oom.limit_bytes)):
        return Capacity(bytes=limit, source="limit")
    if device.total_bytes:
        return Capacity(bytes=device.total_bytes, source="machine" if device.type == "cpu" else "device")
    if oom is not None and oom.device_free_bytes is not None and (reserved := known(oom.reserved_bytes)):
        return Capacity(bytes=reserved + oom.device_free_bytes, source="oom")
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


def _survived_notes(survived: Iterable[SurvivedFailure], device: int) -> Iterator[str]:
    """Say which allocations failed in a run that went on, and on which device if it is not the report's."""
    for failure in survived:
        where = f"{failure.phase or 'an unknown phase'}{'' if failure.step is None else f' of step {failure.step}'}"
        where += "" if failure.device in (None, device) else f" on device {failure.device}"
        yield (
            f"An allocation of {format_bytes(failure.requested_bytes)} failed in {where}; the error was caught and the "
            "run went on"
        )


def _growth(analysis: Views) -> StepGrowth:
    tokens = {step.step: step.tokens for step in analysis.snapshot.run.steps if step.tokens}
    return growth(analysis.timeline, analysis.attribution, tokens, analysis.stacks.of, analysis.holders)


def _idle_pool_notes(analysis: Views) -> Iterator[str]:
    """Say how much of each private pool lies idle at the peak, where that is much."""
    line = analysis.timeline
    if line.reserved is None:
        return
    at = analysis.peak.instant
    for pool, (total, free) in sorted(idle_pools(line, at).items(), key=lambda item: -item[1][1]):
        if free >= _IDLE_POOL * int(line.reserved[at]):
            owner, number = analysis.snapshot.pools[pool]
            yield (
                f"{format_bytes(free)} of the {format_bytes(total)} in the private pool ({owner}, {number}) are idle "
                "at the peak: only the CUDA graphs or the engine that the pool belongs to can use them"
            )


def _notes(analysis: Views) -> list[str]:
    notes = [*analysis.snapshot.notes, *analysis.timeline.notes, *analysis.attribution.notes]
    if analysis.unseen is not None:
        notes.insert(0, unseen_note(analysis.unseen, analysis.snapshot, analysis.timeline))
    notes += _idle_pool_notes(analysis)
    notes += _survived_notes(analysis.snapshot.run.survived, analysis.timeline.device)
    if analysis.snapshot.kind is Kind.TRACE:
        notes.append(
            "CPU runs track tensors, not allocator blocks, so allocated, active and requested bytes are equal."
        )
    if analysis.timeline.n_events and not analysis.timed and analysis.snapshot.kind is not Kind.SIMULATED:
        notes.append("The recording has no clock: how long anything took is not known, and its times count events.")
    return list(dict.fromkeys([*notes, *analysis.snapshot.run.notes]))
