"""Fill the document that every renderer reads from a report."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from shlex import quote
from typing import TYPE_CHECKING

from memprof.reports.document.blocks import Column, Fact, HeadlineBlock, TableBlock, TableRow, table
from memprof.reports.document.checks import checks_of
from memprof.reports.document.model import Document, Individuals, RequestMark, TimelineSeries, TimelineSpan
from memprof.reports.document.page_title import base_name, title_of
from memprof.reports.document.ranks import ranks_of
from memprof.reports.document.summary import capacity_of, room_of, summary_of
from memprof.reports.document.tables import SMALLEST_BOX, allocation_rows, call_site, group_rows, icicle
from memprof.reports.document.text import (
    HISTORY_WORDS,
    STACK_ORDER,
    category_label,
    signed_gib,
    size,
    thousands,
    where_words,
)
from msgspec.structs import replace

from memprof._version import __version__
from memprof.analysis.allocations.alike import TimedGroup, fold
from memprof.analysis.headline import headline_of, is_dump
from memprof.analysis.host_growth import PARTS as HOST_PARTS
from memprof.analysis.source_files import SourceText, recorded_texts
from memprof.report import Report
from memprof.report.allocations import AllocationGroup
from memprof.report.base import known
from memprof.report.peaks import Growth
from memprof.report.run import Host, OutOfMemory, Source, StepGrowth
from memprof.vocabulary import Kind

if TYPE_CHECKING:
    from memprof.analysis.analysis import Analysis
    from memprof.analysis.curves import Series


# How many groups of alike allocations a document looks at: the page's icicle wants more than the JSON lists.
_MAX_GROUPS = 2000
_MAX_ROWS = 60
_MAX_ELSEWHERE = 150


# Up to so many events a document's timeline has every one; beyond, about so many points, no peak missing.
_EXACT_EVENTS = 250_000
_MAX_POINTS = 60_000


def document_of(
    analysis: Analysis,
    label: str | None = None,
    redact: bool = False,
    exact: int = _EXACT_EVENTS,
    report: Report | None = None,
    texts: Mapping[str, SourceText] | None = None,
) -> Document:
    """Fill the document of an analysis, with its timeline and every allocation worth drawing.

    Args:
        analysis: what :func:`memprof.analyze` returned.
        label: a title; see :func:`build_document`.
        redact: leave out what says who made it where (see :mod:`memprof.redact`).
        exact: up to how many events the timeline has every one.
        report: the report if it says more than the analysis alone (the other ranks), redacted already.
        texts: of the program's files, by path; default: those that were recorded.
    """
    found, others, individual = report or analysis.report, analysis.explain_phases(), analysis.individual()
    groups: tuple[TimedGroup, ...] = analysis.largest(_MAX_GROUPS)
    if redact:
        from msgspec import to_builtins

        from memprof.report.codec import redacted, redacted_parts

        told = to_builtins(analysis.snapshot.run_without_sources)
        found = report or redacted(found, told)
        groups, others = redacted_parts(groups, told), redacted_parts(others, told)
        individual = dataclasses.replace(individual, groups=redacted_parts(individual.groups, told))
    if texts is None:
        texts = {} if redact else recorded_texts(analysis.snapshot.run.sources)
    document = build_document(found, _series(analysis, exact), label, groups, fold(others), texts)
    rows = allocation_rows(individual.groups, found.peak.active_bytes, timed=found.source.timed)
    individuals = Individuals(rows, individual) if document.timeline else None
    return document._replace(segments=analysis.segment_maps, individuals=individuals)


def timeline_of(analysis: Analysis) -> TimelineSeries | None:
    """Return the timeline that the document of an analysis has; None for a dump without history."""
    return _timeline(_series(analysis), analysis.report)


def _series(analysis: Analysis, exact: int = _EXACT_EVENTS) -> Series:
    return analysis.series(exact if analysis.timeline.n_events < exact else _MAX_POINTS)


def build_document(
    report: Report,
    series: Series | None = None,
    label: str | None = None,
    allocations: Sequence[AllocationGroup] | None = None,
    elsewhere: Sequence[AllocationGroup] = (),
    texts: Mapping[str, SourceText] | None = None,
) -> Document:
    """Fill the document of a report.

    Args:
        report: the report.
        series: the timeline's points; without them the document has no timeline.
        label: a title of the reader's choice; default: the model and step, or the file's name.
        allocations: groups of those alive at the peak, if more are known than the report lists.
        elsewhere: groups of the largest at other phases' peaks, for the timeline's panel.
        texts: of the program's files, by path.
    """
    peak, timed = report.peak, report.source.timed
    if allocations is None:  # a report of an older memprof lists single allocations only
        allocations = peak.largest or fold(peak.allocations)
    rows = allocation_rows(allocations, peak.active_bytes, timed=timed)
    shown = summary_of(report, rows)
    bad = report.oom is not None or (report.fit is not None and not report.fit.fits)
    return Document(
        report=report,
        title=label or title_of(report),
        headline=HeadlineBlock.of(report.headline or headline_of(report), bad=bad),
        summary=shown,
        rows=group_rows(report),
        allocations=rows[:_MAX_ROWS],
        # Those of the table, and those that get a box in the icicle.
        openable=tuple(r for i, r in enumerate(rows) if i < _MAX_ROWS or r.bytes * SMALLEST_BOX >= peak.active_bytes),
        elsewhere=allocation_rows(elsewhere, peak.active_bytes, timed=timed)[:_MAX_ELSEWHERE],
        icicle=icicle(peak, rows, shown.moment),
        timeline=_timeline(series, report) if series else None,
        grown_by=_grown_by(report.device_peak.grown_by),
        checks=checks_of(report),
        notes=notes_of(report),
        ranks=ranks_of(report),
        room=None if report.fit else room_of(report),  # a verdict says it
        texts=texts or {},
    )


def badge_of(source: Source) -> str:
    """Return ``simulated`` or ``measured``."""
    return "simulated" if source.kind == Kind.SIMULATED else "measured"


def notes_of(report: Report) -> tuple[str, ...]:
    """Return the report's notes as sentences, and what an estimated time rests on."""
    time = report.estimated_time
    assumed = (f"Estimated time: {'; '.join(time.assumptions)}",) if time else ()
    return tuple(_sentence(note) for note in (*report.notes, *assumed))


def _sentence(note: str) -> str:
    """Write a note as a sentence: a capital first, but for the name of a file or a setting, and a full stop last."""
    words = note.strip()
    first = words.partition(" ")[0].rstrip(",.:;")
    begin = words[:1].upper() if first.isalpha() else words[:1]
    return begin + words[1:] + ("" if words.endswith((".", "!", "?")) else ".")


def _grown_by(grown_by: Sequence[Growth]) -> tuple[Growth, ...]:
    """Add up growth by phase and call site, the largest first; the stack is that of the largest entry."""
    merged: dict[tuple[str, str], Growth] = {}
    for grown in sorted(grown_by, key=lambda growth: -growth.bytes):
        key = grown.phase or "", call_site(grown.stack)
        known = merged.get(key)
        merged[key] = replace(known, bytes=known.bytes + grown.bytes) if known else grown
    return tuple(sorted(merged.values(), key=lambda growth: -growth.bytes))


def oom_sentence(oom: OutOfMemory) -> str:
    """Say what was requested when memory ran out, and what was free."""
    asked, free = oom.requested_bytes, oom.device_free_bytes
    sentence = f"Out of memory in {where_words(oom.phase, oom.step)}: {size(asked)} were asked for"
    if free is not None:
        segment = oom.segment_bytes or 0
        piece = f", which needs {size(segment)} of contiguous memory" if asked <= free < segment else ""
        sentence += f"{piece}, {size(free)} were free on the device"
    sentence += f".{_limited(oom)}"
    if (fits := oom.fits_defragmented) is not None:
        idle = (oom.cached_bytes or 0) + (oom.inactive_split_bytes or 0)
        verdict = "Joined to it, the request would fit." if fits else "Even joined to it, the request would not fit."
        sentence += f" {size(idle)} lay free inside the allocator. {verdict}"
    return f"{sentence} The step {oom.ahead.words}." if oom.ahead else sentence


def _limited(oom: OutOfMemory) -> str:
    """Say which limit of the process refused the request; nothing if none did."""
    if not oom.limited:
        return ""
    by = "torch.cuda.set_per_process_memory_fraction, or memprof's capacity"
    if not isinstance(limit := oom.limit_bytes, int):
        return f" The device had room, so a per-process memory limit was reached ({by})."
    held = size(oom.reserved_bytes or 0)
    return f" A per-process memory limit was reached: {held} of {size(limit)} ({by})."


def has_trend(growth: StepGrowth | None) -> bool:
    """Tell whether the steps show a trend: the first builds the optimizer's state, so two show nothing."""
    return growth is not None and (len(growth.steps) >= 3 or bool(growth.left_behind))


def steps_table(growth: StepGrowth) -> TableBlock | None:
    """List each step's peak and what its end leaves."""
    counted = any(step.tokens is not None for step in growth.steps)
    lines = []
    for step in growth.steps:
        seen = ("–" if step.tokens is None else thousands(step.tokens),) if counted else ()
        lines.append(TableRow((str(step.step), step.peak_bytes, step.end_bytes, *seen)))
    tokens = (Column("Tokens", right=True),) if counted else ()
    columns = ("Step", Column("Peak", right=True), Column("Left at its end", right=True), *tokens)
    return table(columns, lines, "steps")


def growth_words(growth: StepGrowth) -> str:
    """Say how memory changes from step to step."""
    slope, explained = growth.end_bytes_per_step, growth.explained_by_tokens
    if slope is None:
        return "Too few steps to see a trend."
    words = f"Memory left when a step ends changes by {signed_gib(round(slope))} GiB a step"
    if explained is not None:
        words += f"; the number of tokens explains {100 * explained:.0f}% of the difference between peaks"
    return words + "."


def host_facts(host: Host | None) -> tuple[Fact, ...]:
    """List the process's memory on the host."""
    if host is None:
        return ()
    labels = (
        ("Resident memory of the process", host.rss_bytes, "RSS"),
        ("Pinned memory", host.pinned_bytes, "the pinned allocator rounds up to powers of two"),
        ("Pinned memory requested", host.pinned_requested_bytes, ""),
        ("Managed memory", host.managed_bytes, "paged optimizer state"),
    )
    facts = [Fact(label, size(n), note, n) for label, n, note in labels if n is not None]
    offloaded = host.offloaded or {}
    facts += [Fact(f"Offloaded: {category_label(c).lower()}", size(n), "", n) for c, n in offloaded.items()]
    if growth := host.growth:
        facts.append(Fact(f"Grown in {growth.steps} steps", size(growth.bytes), growth.sentence))
        parts = growth.parts.items()
        facts += [Fact(f"of it {HOST_PARTS.get(f'host_{part}', part)}", size(n), "", n) for part, n in parts]
    return tuple(facts)


def _commands(source: Source) -> list[Fact]:
    """Return what makes this report again; of a simulation that saved no snapshot, from its own JSON."""
    if source.kind == Kind.SIMULATED and not source.files and "recipe" in (source.config or {}):
        note = "memprof-report.json stands for this report's JSON: Download JSON on the page, or --json"
        return [Fact("Command", "memprof simulate --like memprof-report.json -o report.html", note)]
    file = quote(base_name(source.files[0])) if source.files else "SNAPSHOT"
    return [
        Fact("Command", f"memprof report {file} -o report.html"),
        Fact("Every allocation", f"memprof explain {file} --all"),
    ]


def reproduce_facts(source: Source) -> tuple[Fact, ...]:
    """Say what makes this report again, and from what."""
    facts = [*_commands(source), Fact("History", HISTORY_WORDS[source.history]), Fact("memprof", __version__)]
    versions = {**source.versions, "torch": source.versions.get("torch", source.torch)}
    facts += [Fact(name, version) for name, version in versions.items() if version and name != "memprof"]
    recorder = source.versions.get("memprof")
    if recorder and recorder != __version__:
        facts.append(Fact("recorded with memprof", recorder))
    facts.append(Fact("Units", "1 GiB = 2³⁰ bytes", "below 1 GiB in MiB; in GiB columns below 0.005 as <0.01"))
    words = {"marks": "marks in the recording", "stacks": "stacks (inferred)", "none": "nothing"}
    facts.append(Fact("Phases known by", words.get(source.phases_known_by, source.phases_known_by)))
    return tuple(facts)


# ---- over time: categories in stacking order, and the phases' spans over them ----------------------------------------


def _timeline(series: Series, report: Report) -> TimelineSeries | None:
    """Fill the timeline from a series; None for a dump: its one moment would be a flat line that is labelled a peak."""
    source = report.source
    if not series.time_us or is_dump(source):
        return None
    start, n_points = series.time_us[0], len(series.time_us)
    used = {str(c): tuple(values) for c in STACK_ORDER if any(values := series.categories.get(c, []))}
    total = tuple(map(sum, zip(*used.values(), strict=True))) if used else (0,) * n_points
    spans = tuple(
        TimelineSpan(span.phase, span.step, span.start_point, span.end_point)
        for span in series.spans
        if span.end_point > span.start_point
    )
    found = TimelineSeries(
        clock_us=start,
        time_us=tuple(time - start for time in series.time_us),
        phase_x=_phase_axis(n_points, spans),
        spans=spans,
        categories=used,
        reserved=None if series.reserved is None else tuple(series.reserved),
        total=total,
        peak_point=series.peak_point,
        timed=source.timed,
        instants=tuple(series.instants),
        failed=_failed_request(report.oom, series, total),
    )
    capacity = capacity_of(report)
    near = capacity is not None and found.highest_bytes * _NEAR >= capacity
    return found._replace(capacity_bytes=capacity) if near else found


# A GPU with more than so many times the highest memory would leave the picture nearly empty: it is not drawn.
_NEAR = 2


def _failed_request(oom: OutOfMemory | None, series: Series, total: Sequence[int]) -> RequestMark | None:
    """Place the request that failed; one without a time ended the recording."""
    if oom is None or not oom.requested_bytes:
        return None
    time, last = known(oom.time_us), len(series.time_us) - 1
    point = last if time is None else max(bisect_right(series.time_us, time) - 1, 0)
    base = total[point] if series.reserved is None else max(series.reserved[point], total[point])
    return RequestMark(oom.requested_bytes, point, base)


# What is between the phases gets less room than they do.
_NARROW = {"other": 0.3}


def _phase_axis(n_points: int, spans: Sequence[TimelineSpan]) -> tuple[float, ...]:
    """Place each point on an axis where every phase is one unit wide, its points spread evenly over it.

    Without spans the whole recording is one unit.
    """
    import numpy as np  # which a report's JSON is drawn without

    edges = [0, *(s.start_point for s in spans), *(s.end_point for s in spans), max(n_points - 1, 0)]
    stops = np.array(sorted(set(edges)))
    widths = {s.start_point: _NARROW.get(s.phase, 1.0) for s in spans}
    wide = [widths.get(stop, 0.0) if spans else 1.0 for stop in stops.tolist()]
    # One more stop at the end, so that the last point divides by no zero.
    x, stops = np.array([0.0, *accumulate(wide)]), np.append(stops, stops[-1] + 1)
    points = np.arange(n_points)
    at = np.searchsorted(stops, points, side="right") - 1
    places = x[at] + (x[at + 1] - x[at]) * (points - stops[at]) / (stops[at + 1] - stops[at])
    return tuple(places.tolist())
