"""Fill the ranks from a merged report's ``ranks`` and ``across_ranks``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from memprof.reports.document.blocks import Column, TableBlock, TableRow, TextCell, table
from memprof.reports.document.model import RankCell, RankRow, RanksView
from memprof.reports.document.text import STACK_ORDER, category_label, phase_label, size, where_words

from memprof.report import Report
from memprof.report.ranks import (
    AcrossRanks,
    Difference,
    MissingRank,
    NodeSpread,
    PhaseSpread,
    RankSummary,
    Recording,
    Spread,
)
from memprof.text import number_ranges, numbered
from memprof.vocabulary import Category

_HEATS = 8
# A cell is marked where it stands above the median by this part of the median rank's whole peak.
_CLEARLY = 0.02
_MOST_MISSING = 8
# A category that nowhere comes to this part of the highest peak shares a column with the others like it.
_WORTH_A_COLUMN = 0.01
# Peaks that lie this close together are alike.
_ALIKE = 0.005
# What a page calls its tables of phases and nodes in its styles.
_SPREAD = "rank-spread"


def ranks_of(report: Report) -> RanksView | None:
    """Fill the ranks of a report; ``None`` if it is of one process alone."""
    ranks, across = report.ranks, report.across_ranks
    if not ranks or across is None:
        return None
    peak, shown = across.peak, report.source.rank
    spreads = {spread.category: spread for spread in across.categories}
    worth = {c for c, spread in spreads.items() if spread.highest_bytes >= _WORTH_A_COLUMN * peak.highest_bytes}
    columns = [c for c in STACK_ORDER if c in worth]
    most = max((spread.highest_bytes for spread in spreads.values()), default=0)
    scale = _Scale(columns, spreads, most, _CLEARLY * peak.median_bytes)
    rows = sorted((_row(r, shown, scale, peak) for r in ranks), key=lambda r: (not r.oom, -r.peak_bytes, r.rank))
    nodes = sorted(across.nodes, key=lambda node: -node.highest_bytes)
    rest = [("", "Everything else")] if len(columns) < len(spreads) else []
    return RanksView(
        finding=_finding(across),
        sentence=_sentence(across, len(ranks), shown, rows),
        in_full=_in_full(shown, peak, rows),
        missing=_missing(across.missing),
        differences=tuple(_difference(d) for d in across.differences),
        count=len(ranks),
        world_size=across.world_size or len(ranks),
        columns=(*((c, category_label(c)) for c in columns), *rest),
        rows=tuple(rows),
        phases=table(_OF_PHASES, [_phase(phase) for phase in across.phases], _SPREAD),
        nodes=table(_OF_NODES, [_node(node) for node in nodes], _SPREAD),
        several_nodes=len(nodes) > 1,
    )


_OF_PHASES = (
    "Phase", Column("Highest", right=True), Column("by rank", right=True), Column("Median", right=True),
    Column("Lowest", right=True), Column("by rank", right=True), Column("Above the mean", right=True),
)  # fmt: skip
_OF_NODES = (
    "Node", "Ranks", Column("Highest rank", right=True), Column("by rank", right=True), Column("Mean", right=True),
    Column("Together", right=True),
)  # fmt: skip
_OF_RECORDINGS = (
    Column("Dump", wraps=True), "Rank", "Role, process", Column("Step, time", wide=True, on="mp"),
    Column("GiB", right=True), Column("Here", wraps=True),
)  # fmt: skip


def recordings_table(report: Report) -> TableBlock | None:
    """List every recording of a folder if not all of them are shown, those that are first."""
    rows = sorted(report.recordings or (), key=lambda row: not row.shown)
    return table(_OF_RECORDINGS, [_recording(row) for row in rows], "ranks")


def _recording(row: Recording) -> TableRow:
    role = row.role or "role not known"
    if row.role_from == "content":
        role += " (by its contents)"
    process = f"process {row.pid}" if row.pid is not None else ""
    step = f"step {row.step}" if row.step is not None else ""
    file = TextCell(row.file, "code", ("out of memory",) if row.out_of_memory else ())
    who, when = ", ".join(filter(None, (role, process, row.label))), ", ".join(filter(None, (step, row.time)))
    rank = "–" if row.rank is None else str(row.rank)
    because = "shown" if row.shown else row.because or ""
    return TableRow((file, rank, who, when or "–", row.peak_bytes, because), row.shown)


@dataclass(frozen=True)
class _Scale:
    """What cells are measured against: each column's spread, the largest cell, and what is clearly above."""

    columns: Sequence[Category]
    spreads: Mapping[Category, Spread]
    most: int
    clearly: float

    def cell(self, column: Category, n: int) -> RankCell:
        """Make a rank's cell in one column."""
        spread = self.spreads[column]
        marked = n - spread.median_bytes > self.clearly
        return RankCell(n, ceil(_HEATS * n / self.most), self.shade(spread, n), marked)

    def shade(self, spread: Spread, n: int) -> int:
        """Place a figure between the lowest and the highest of its spread: 1 to 8, 0 if they hardly differ."""
        low, high = spread.lowest_bytes, spread.highest_bytes
        return 1 + round((_HEATS - 1) * (n - low) / (high - low)) if high - low > self.clearly else 0


def _row(rank: RankSummary, shown: int | None, scale: _Scale, peaks: Spread) -> RankRow:
    peak, device = rank.peak, rank.device_peak
    reserved = device.reserved_bytes
    cells = [scale.cell(c, peak.categories.get(c, 0)) for c in scale.columns]
    if len(scale.columns) < len(scale.spreads):
        rest = peak.active_bytes - sum(cell.bytes for cell in cells)
        cells.append(RankCell(rest, ceil(_HEATS * rest / scale.most), 0, False))
    return RankRow(
        rank=rank.rank,
        node=rank.node or "",
        where=where_words(peak.phase, peak.step),
        peak_bytes=peak.active_bytes,
        shade=scale.shade(peaks, peak.active_bytes),
        held_bytes=None if reserved is None else reserved + (device.non_torch_bytes or 0),
        oom=rank.oom is not None,
        shown=rank.rank == shown,
        cells=tuple(cells),
    )


def _finding(across: AcrossRanks) -> str:
    """Say by how much the highest-memory rank is above the median: ``rank 5 uses 3.10 GiB more than the median``."""
    peak = across.peak
    more = peak.highest_bytes - peak.median_bytes
    if more <= _ALIKE * peak.highest_bytes:
        return ""
    return f"rank {peak.highest_rank} uses {size(more)} more than the median"


def _sentence(across: AcrossRanks, count: int, shown: int | None, rows: Sequence[RankRow]) -> str:
    peak, failed = across.peak, sorted(row.rank for row in rows if row.oom)
    words = f"{numbered('Rank', failed)} ran out of memory. " if failed else ""
    if count == 1:
        return f"{words}Only rank {shown} is here; it peaks at {size(peak.highest_bytes)}."
    if peak.highest_bytes - peak.lowest_bytes <= _ALIKE * peak.highest_bytes:
        which = f"The {count} ranks here" if across.missing else f"All {count} ranks"
        return f"{words}{which} peak alike, at {size(peak.highest_bytes)}."
    first = next(row for row in rows if row.rank == peak.highest_rank)
    return (
        f"{words}Rank {first.rank} peaks highest: {size(first.peak_bytes)} in {first.where}, "
        f"{100 * peak.imbalance:.1f}% above the mean of {count} ranks; "
        f"rank {peak.lowest_rank} lowest: {size(peak.lowest_bytes)}."
    )


def _in_full(shown: int | None, peak: Spread, rows: Sequence[RankRow]) -> str:
    """Name the rank that the rest of the page is about, and why that one."""
    failed = any(row.shown and row.oom for row in rows)
    fullest = shown == peak.highest_rank and peak.lowest_bytes < (1 - _ALIKE) * peak.highest_bytes
    why = ", which ran out of memory," if failed else ", which uses the most memory," if fullest else ""
    return f"Rank {shown}{why} in full"


def _missing(missing: Sequence[MissingRank]) -> str:
    if not missing:
        return ""
    known = [rank for rank in missing if rank.last_step is not None]
    words = f"No readable recording of {numbered('rank', (rank.rank for rank in missing))}."
    for rank in known[:_MOST_MISSING]:
        peak = f", highest {size(rank.peak_allocated_bytes)} allocated" if rank.peak_allocated_bytes else ""
        words += f" Rank {rank.rank} last counted step {rank.last_step}{peak}."
    return words


def _difference(found: Difference) -> str:
    what = "memory outside torch" if found.category == "non_torch" else category_label(found.category)
    phase = f" in {phase_label(found.phase).lower()}" if found.phase else ""
    reason = f": {found.reason}" if found.reason else ""
    return f"Rank {found.rank} uses {size(found.bytes)} more {what.lower()} than the median rank{phase}{reason}."


def _phase(spread: PhaseSpread) -> TableRow:
    alike = spread.highest_bytes == spread.lowest_bytes
    high, low = ("all" if alike else str(rank) for rank in (spread.highest_rank, spread.lowest_rank))
    name = TextCell(phase_label(spread.phase), phase=spread.phase)
    figures = (spread.highest_bytes, high, spread.median_bytes, spread.lowest_bytes, low)
    return TableRow((name, *figures, f"{100 * spread.imbalance:.1f}%"))


def _node(spread: NodeSpread) -> TableRow:
    figures = (spread.highest_bytes, str(spread.highest_rank), spread.mean_bytes, spread.total_bytes)
    return TableRow((spread.node or "not known", ", ".join(number_ranges(spread.ranks)), *figures))
