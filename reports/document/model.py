"""What is shown of a report beyond the report itself: the first screen, tables of ranks, the icicle, thinned series.

Sizes are bytes, times microseconds. Strings are as the report has them: renderers escape them for HTML, Markdown or the
terminal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from memprof.reports.document.blocks import BarPart, Fact, HeadlineBlock, TableBlock
from memprof.reports.document.text import category_label, humanise, phase_label

from memprof.analysis.source_files import SourceText
from memprof.report import Report
from memprof.report.allocations import AllocationGroup
from memprof.report.peaks import Growth
from memprof.units import amount
from memprof.vocabulary import GUESSES, Category

if TYPE_CHECKING:
    from memprof.analysis.allocations.individual import IndividualAllocations
    from memprof.analysis.allocations.segment_map import SegmentMap

# ---- the first screen ------------------------------------------------------------------------------------------------


class Summary(NamedTuple):
    """The first screen below the headline.

    ``capacity_bytes`` is the device's memory, ``None`` if it is not known. ``bar`` is the composition at the allocated
    peak, ``rest`` what else the device held; ``scale_bytes`` is the bar's full width. ``where`` is the instant of the
    peak. ``guessed`` counts what is inferred from lifetimes, shapes or sets of sizes, and what else it could be.
    """

    peak_bytes: int
    peak_word: str
    where: str
    capacity_bytes: int | None
    scale_bytes: int
    facts: tuple[Fact, ...]
    bar: tuple[BarPart, ...]
    rest: tuple[BarPart, ...]
    guessed: Fact | None = None

    @property
    def moment(self) -> str:
        """Name the instant of the figures: without a history only the dump's is known."""
        return "dump" if self.peak_word.endswith(" dump") else "peak"


class Room(NamedTuple):
    """How far a run was from out of memory: one bar of ``scale_bytes``, the GPU ending at ``capacity_bytes``.

    ``parts`` are memory in use, memory that the allocator cached, non-PyTorch memory, and either the request that
    failed or free memory. ``capacity_bytes`` is ``None`` if no GPU is known.
    """

    parts: tuple[BarPart, ...]
    scale_bytes: int
    capacity_bytes: int | None
    sentence: str


# ---- the ranks -------------------------------------------------------------------------------------------------------


class RankCell(NamedTuple):
    """One rank's bytes of one category.

    ``heat`` runs from 0 (nothing) to 8 (the most of any rank and category), ``shade`` from 1 (the lowest rank) to 8
    (the highest) if the category's spread is worth showing, otherwise it is 0; ``above``: clearly above the median.
    """

    bytes: int
    heat: int
    shade: int
    above: bool


class RankRow(NamedTuple):
    """One rank at its own peak. ``cells`` follow the columns; ``held_bytes`` is its device's peak, if known.

    ``shade`` runs from 1 (the lowest peak) to 8 (the highest), 0 if peaks hardly differ.
    """

    rank: int
    node: str
    where: str
    peak_bytes: int
    shade: int
    held_bytes: int | None
    oom: bool
    shown: bool
    cells: tuple[RankCell, ...]


@dataclass(frozen=True)
class RanksView:
    """Everything shown of the ranks in addition to the one that the report is about.

    ``columns`` are ``(category id, label)``, the last with the id "" for all that is nowhere worth a column of its own;
    ``finding`` says which rank stands out, "" if none does.
    ``rows`` and ``nodes`` have the highest first, a rank that ran out of memory before all. ``in_full`` is the heading
    of what concerns that one rank.
    """

    finding: str
    sentence: str
    in_full: str
    missing: str
    differences: tuple[str, ...]
    count: int
    world_size: int
    columns: tuple[tuple[str, str], ...]
    rows: tuple[RankRow, ...]
    phases: TableBlock | None
    nodes: TableBlock | None
    several_nodes: bool


# ---- what the peak is made of ----------------------------------------------------------------------------------------


class PublishedRow(NamedTuple):
    """One row of the published table, one of its categories, or one of a category's details.

    ``own_peak`` is the highest over the run, ``None`` if that is not known (a group's categories peak at different
    times; details are counted at the peak only).
    """

    id: str
    label: str
    words: str
    at_peak: int
    own_peak: int | None
    children: tuple[PublishedRow, ...] = ()
    guessed: int = 0

    @property
    def marked(self) -> str:
        """The label, with the mark of its :class:`BarPart`."""
        return BarPart(self.id, self.label, self.at_peak, self.guessed).marked


@dataclass(frozen=True)
class AllocationRow:
    """A line of similar allocations: the report's ``group`` in words.

    ``share`` is of the peak; ``why`` says how the category is known. ``lives`` holds ``(born_us, died_us)`` of each
    block: ``None`` is before the recording began, and not freed. ``stack`` is what is shown of the group's.
    """

    group: AllocationGroup
    shape: str
    share: float
    why: str
    lives: tuple[tuple[int | None, int | None], ...]
    lifetime: str
    site: str
    stack: tuple[str, ...]

    @property
    def bytes(self) -> int:
        return self.group.bytes

    @property
    def count(self) -> int:
        return self.group.count

    @property
    def category(self) -> Category:
        return self.group.category

    @property
    def address(self) -> str:
        """The first block's address in hexadecimal."""
        return hex(self.group.address)

    @property
    def name(self) -> str:
        return self.group.name or ""

    @property
    def detail(self) -> str:
        return humanise(self.group.detail or "")

    @property
    def label(self) -> str:
        """The category in words."""
        return category_label(self.group.category)

    @property
    def phase_label(self) -> str:
        return phase_label(self.group.phase) if self.group.phase else ""

    @property
    def guessed(self) -> bool:
        """Whether only a lifetime, a shape or a set of sizes says what this is."""
        return self.group.evidence in GUESSES


class Node(NamedTuple):
    """A rectangle of the icicle: category, then the frames of a call site (or a module's path), then tensor.

    ``shorter`` are labels for narrow boxes, the longest first; a tensor's box knows its ``allocation``.
    """

    label: str
    category: str
    bytes: int
    children: tuple[Node, ...] = ()
    shorter: tuple[str, ...] = ()
    allocation: AllocationRow | None = None


# ---- over time -------------------------------------------------------------------------------------------------------


class TimelineSpan(NamedTuple):
    """One phase's stretch of the timeline; ``start_point``/``end_point`` index the timeline's points."""

    phase: str
    step: int | None
    start_point: int
    end_point: int


class RequestMark(NamedTuple):
    """The request of ``bytes`` that failed at ``point``, on top of the ``base_bytes`` that were reserved then."""

    bytes: int
    point: int
    base_bytes: int

    @property
    def label(self) -> str:
        return f"{amount(self.bytes)} failed"


class TimelineSeries(NamedTuple):
    """The thinned series: the same instants for every category, the peak and every phase's peak among them.

    ``time_us`` is counted from the first point, which is at ``clock_us`` on the recording's clock. ``categories`` maps
    ids to bytes, bottom of the stack first, without those that are never used. ``phase_x`` puts every point on an axis
    where each span is one unit wide. If ``timed`` is False, the clock counts events. ``instants`` are the numbers of
    events before each point. ``capacity_bytes`` is the GPU's memory, if it is known and not far above what is drawn.
    """

    clock_us: int
    time_us: tuple[int, ...]
    phase_x: tuple[float, ...]
    spans: tuple[TimelineSpan, ...]
    categories: dict[str, tuple[int, ...]]
    reserved: tuple[int, ...] | None
    total: tuple[int, ...]
    peak_point: int
    timed: bool = True
    instants: tuple[int, ...] = ()
    capacity_bytes: int | None = None
    failed: RequestMark | None = None

    @property
    def highest_bytes(self) -> int:
        """The most that a picture shows."""
        failed = self.failed.base_bytes + self.failed.bytes if self.failed else 0
        return max(max(self.total), max(self.reserved or (0,)), failed, self.capacity_bytes or 0)

    @property
    def unit(self) -> int:
        """What the clock counts in one unit of the axis: microseconds in a second, or an event."""
        return 1_000_000 if self.timed else 1


class Individuals(NamedTuple):
    """The allocations that are drawn one by one; ``rows`` describe their groups, ``found`` has a row for each."""

    rows: tuple[AllocationRow, ...]
    found: IndividualAllocations


# ---- all of it -------------------------------------------------------------------------------------------------------


class Check(NamedTuple):
    """One sum, spelled out. ``ok`` is ``None`` if there is nothing to compare with."""

    label: str
    value: str
    note: str
    ok: bool | None


class Document(NamedTuple):
    """A report and what views show of it; renderers take everything else from ``report`` itself.

    ``allocations`` are the lines of the table, ``openable`` these and all others large enough for a box in the icicle.
    ``elsewhere`` are the largest allocations at other phases' peaks that are not alive at the run's. ``grown_by`` is
    the device peak's, added up by phase and line of code. ``segments`` are maps of the moments that matter,
    ``individuals`` the allocations that the timeline draws one by one. ``texts`` are the program's own files, by path.
    """

    report: Report
    title: str
    headline: HeadlineBlock
    summary: Summary
    rows: tuple[PublishedRow, ...]
    allocations: tuple[AllocationRow, ...]
    openable: tuple[AllocationRow, ...]
    elsewhere: tuple[AllocationRow, ...]
    icicle: Node
    timeline: TimelineSeries | None
    grown_by: tuple[Growth, ...]
    checks: tuple[Check, ...]
    notes: tuple[str, ...]
    ranks: RanksView | None
    room: Room | None
    segments: tuple[SegmentMap, ...] = ()
    individuals: Individuals | None = None
    texts: Mapping[str, SourceText] = MappingProxyType({})
