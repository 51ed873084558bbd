"""Describe a simulated run: whether it fits, its expected error, and what other lengths change."""

from __future__ import annotations

from collections.abc import Sequence

from memprof.reports.document.blocks import Column, Fact, TableBlock, TableRow, TextCell, table
from memprof.reports.document.text import duration, phase_label, thousands

from memprof.report import Report
from memprof.report.simulation import ErrorClass, ErrorRange, EstimatedTime, ExpectedError, Fit, HostNeed, LengthPoint
from memprof.units import gib, percent

_FITS = {True: TextCell("fits", "ok"), False: TextCell("does not fit", "bad"), None: TextCell("–", "muted")}


def needs_table(fit: Fit | None) -> TableBlock | None:
    """Judge each phase; what it reserves and does not use is cached, often by a phase before it."""
    lines = []
    for need in fit.phases if fit else ():
        decides = ("decides",) if fit and need.phase == fit.phase else ()
        cached = fit and not need.fits and need.allocated_bytes <= fit.limit_bytes - fit.non_torch_bytes
        verdict = "It fits only if cached memory is released." if cached else _FITS[need.fits]
        name = TextCell(phase_label(need.phase), badges=decides)
        lines.append(TableRow((name, need.allocated_bytes, need.needed_bytes, verdict)))
    sizes = (Column("Allocated", right=True), Column("Needed", right=True))
    return table(("Does it fit?", *sizes, Column("Alone", wraps=True)), lines)


def lengths_table(points: Sequence[LengthPoint]) -> TableBlock | None:
    """List the runs with other longest completions."""
    lines = [
        TableRow((
            ", ".join(x.names), thousands(x.length), percent(round(1e6 * x.share_below), 1_000_000), x.peak_bytes,
            x.needed_bytes, _FITS[x.fits], TextCell("simulated" if x.executed else "interpolated", "muted"),
        ))
        for x in points
    ]  # fmt: skip
    columns = (
        "Longest completion", Column("Tokens", right=True), Column("Steps so long", right=True),
        Column("Allocated", right=True, wide=True), Column("Needed", right=True), "Verdict", Column("Known", wide=True),
    )  # fmt: skip
    return table(columns, lines)


def prediction_facts(report: Report) -> tuple[Fact, ...]:
    """List what decides the verdict, and how far off the figures may be."""
    facts = []
    if fit := report.fit:
        note = f"{100 * fit.margin:.0f}% of the GPU is reserved as a margin"
        if apart := _apart(fit):
            note += f"; {apart}"
        facts.append(Fact("Decided by", phase_label(fit.phase), note))
        facts += [_host(fit.host)] if fit.host else []
    if error := report.expected_error:
        facts.append(Fact("Expected error", _range(error.allocated), _rests_on(error)))
    if time := report.estimated_time:
        facts.append(Fact("Time per step", f"≈ {duration(round(time.step_s * 1e6))}", _slowest(time)))
    return tuple(facts)


def _rests_on(error: ExpectedError) -> str:
    """Say what an expected error rests on: how many comparisons of what, and what none covers."""
    held, parts = error.allocated, []
    if error.reserved.comparisons and _range(error.reserved) != _range(held):
        parts.append(f"reserved {_range(error.reserved)}")
    whole = ErrorClass(name="comparisons", low=held.low, high=held.high, comparisons=held.comparisons)
    parts += [f"{each.comparisons} {each.name}" for each in error.basis or (whole,)]
    if error.not_compared:
        parts.append(f"never compared: {', '.join(error.not_compared)}")
    return "; ".join(parts)


def _apart(fit: Fit) -> str:
    """Say how far the variants of a run lie apart; nothing if there are none, or all reserve the same."""
    told = fit.ensemble
    if told is None or told.lowest_bytes == told.highest_bytes:
        return ""
    low, high = (gib(n + fit.non_torch_bytes) for n in (told.lowest_bytes, told.highest_bytes))
    return f"{told.members} variants need {low} to {high}" + (f", {told.failed} fail" if told.failed else "")


def reserving(fit: Fit | None) -> str:
    """Say what a simulated generation reserves, and whether the allocator has to free cached memory to go on."""
    if fit is None or (told := fit.generation) is None:
        return ""
    often = "once" if told.flushes == 1 else f"{told.flushes} times"
    flushes = f"cached memory is given back {often} to go on" if told.flushes else "nothing has to be given back"
    return f"; reserves {gib(told.reserved_bytes)}, {flushes}"


def _slowest(time: EstimatedTime) -> str:
    phases = sorted(time.phases.items(), key=lambda item: -item[1])[:2]
    parts = ", ".join(f"{phase_label(name).lower()} {duration(round(s * 1e6))}" for name, s in phases)
    return f"{parts}; estimated from the GPU's published speed, not measured"


def _host(host: HostNeed) -> Fact:
    note = "of all processes on the node; its size is not known"
    if host.total_bytes is not None:
        note = f"of {gib(host.total_bytes)}; {'fits' if host.fits else 'does not fit'}"
    return Fact("Host needs", f"{gib(host.needed_bytes)} GiB", note, host.needed_bytes)


def _range(error: ErrorRange) -> str:
    low, high = (f"{100 * side:+.{0 if abs(side) >= 0.1 else 1}f}" for side in (error.low, error.high))
    return f"{low} to {high}%".replace("-", "−")
