"""Show the newest counters of a run, by rank, phase and category, for ``memprof watch``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from memprof.reports.document.blocks import (
    BarPart,
    Block,
    Column,
    Curve,
    Paragraph,
    ReportLayout,
    TableBlock,
    TableRow,
    TextCell,
    table,
)
from memprof.reports.document.text import category_label, phase_label

from memprof.analysis.host_growth import host_growth
from memprof.report.base import known
from memprof.units import gib, percent

if TYPE_CHECKING:
    from memprof.analysis.counters import Counters

_QUIET_SECONDS = 120
_LEVELS = (
    ("peak_allocated", "Peak allocated"), ("peak_reserved", "Peak reserved"), ("allocated", "Allocated"),
    ("reserved", "Reserved"), ("cached", "Cached"), ("inactive_split", "Inactive split"),
    ("non_torch", "Non-PyTorch memory"), ("host_rss", "Host, resident"), ("host_rss_peak", "Host, highest"),
    ("host_pinned", "Host, pinned"),
)  # fmt: skip

_OF_RANKS = (
    "Rank", Column("Step", right=True), Column("Peak reserved", right=True), Column("Peak allocated", right=True),
    Column("Resident", right=True),
)  # fmt: skip


def counters(ranks: Sequence[Counters]) -> ReportLayout:
    """Show what is known now."""
    run = ranks[0]
    first: tuple[Block, ...] = (Paragraph("", lead=_title(run)), _state(ranks))
    if run.newest is None:
        return ReportLayout(((*first, Paragraph("No step has ended yet.")),))
    growth = host_growth(run.steps)
    grown = Paragraph(growth.sentence) if growth is not None else None
    return ReportLayout((first, (_levels(run),), (_ranks(ranks),), (_phases(run),), (grown,), (_categories(run),)))


def _title(run: Counters) -> str:
    words = [word for word in (known(run.about.model_name), known(run.about.device)) if word]
    total = known(run.about.device_total_bytes)
    words += [f"{gib(total)} GiB"] if total is not None else []
    words += [f"{run.world_size} ranks"] if run.world_size > 1 else []
    return " · ".join(words) or str(run.path)


def _state(ranks: Sequence[Counters]) -> Paragraph:
    run = ranks[0]
    step, last = 0 if run.newest is None else run.newest.step, known(run.about.max_steps) or 0
    words = f"Step {step}" + (f" of {last}" if last > 0 else "")
    if run.ended is not None:
        return Paragraph(f"{words} · " + ("ended by an error" if known(run.ended.error) else "finished"))
    changed = max((_time(r) or known(r.about.started) or 0.0) for r in ranks)
    age = max(0, round(time.time() - changed))
    quiet = age >= max(_QUIET_SECONDS, 5 * _pace(run))
    stopped = "; it may have been stopped" if quiet else ""
    return Paragraph(f"{words} · last heard {_ago(age)} ago{stopped}", tone="strong" if quiet else "")


def _pace(run: Counters) -> float:
    """Say how many seconds a step has taken so far, loading included."""
    begun, last = known(run.about.started), _time(run)
    return (last - begun) / len(run.steps) if begun is not None and last is not None and run.steps else 0.0


def _levels(run: Counters) -> TableBlock | None:
    lines = []
    for name, label in _LEVELS:
        values = tuple(row.size(name) for row in run.steps)
        if sizes := [v for v in values if v is not None]:
            lines.append(TableRow((label, values[-1], max(sizes), Curve(values))))
    return table(("GiB", Column("Newest", right=True), Column("Highest", right=True), "Of the run"), lines)


def _ranks(ranks: Sequence[Counters]) -> TableBlock | None:
    names = ("peak_reserved", "peak_allocated", "host_rss")
    rows = [(run.rank, run.newest) for run in ranks] if len(ranks) > 1 else []
    lines = [
        TableRow(
            (str(n), "–" if row is None else str(row.step), *(None if row is None else row.size(k) for k in names))
        )
        for n, row in rows
    ]
    return table(_OF_RANKS, lines)


def _phases(run: Counters) -> TableBlock | None:
    """Show the last step that says what its phases peaked at: with no allocator, only recorded steps do."""
    rows = [(row.step, phases) for row in run.steps if (phases := known(row.phases))]
    highest: dict[str, int] = {}
    for _, phases in rows:
        for phase, peak in phases.items():
            highest[phase] = max(peak, highest.get(phase, 0))
    step, newest = rows[-1] if rows else ("", {})
    lines = [
        TableRow((phase_label(phase), peak, highest[phase], (BarPart("total", "", peak),)))
        for phase, peak in newest.items()
    ]
    columns = f"Phase, step {step}", Column("Peak", right=True), Column("Highest", right=True), Column("", wide=True)
    return table(columns, lines, scale=max(highest.values(), default=0))


def _categories(run: Counters) -> TableBlock | None:
    row = run.recorded
    sizes = {} if row is None else {category: n for category, n in row.categories.items() if n}
    step = None if row is None else known(row.step)
    total = sum(sizes.values())
    lines = [
        TableRow(
            (TextCell(category_label(c), category=c), n, percent(n, total), (BarPart(c, category_label(c), n),)),
            path=(c,),
        )
        for c, n in sorted(sizes.items(), key=lambda item: -item[1])
    ]
    head = f"Category at the peak, step {'–' if step is None else step}"
    columns = head, Column("GiB", right=True), Column("Share", right=True), Column("", wide=True)
    return table(columns, [*lines, TableRow(("Total", total, "", ()), strong=True)], scale=total) if lines else None


def _time(run: Counters) -> float | None:
    """Return when the newest line of a step was written."""
    return None if run.newest is None else known(run.newest.time)


def _ago(seconds: int) -> str:
    if seconds < 90:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 5400 else f"{seconds // 3600} h"
