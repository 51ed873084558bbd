"""The document of a report: everything that is shown of it, in the order a page shows it.

Frozen and plain, in bytes and microseconds; named tuples, which cost a tenth of a dataclass when they are defined, but
for those with a ``count``, which tuples have of their own. Every string is one harmless line (see
:func:`memprof.reports.document.text.plain`). Renderers escape it for HTML, Markdown or the terminal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from memprof.reports.document.blocks import Fact, Headline, Part, Table

from memprof.vocabulary import GUESSES

# ---- the first screen ------------------------------------------------------------------------------------------------


class Summary(NamedTuple):
    """The first screen below the headline.

    ``capacity_bytes`` is the device's memory, ``None`` where it has none worth naming. ``bar`` is the composition at
    the allocated peak followed by what else the device held; ``scale_bytes`` is the bar's full width. ``where`` says
    when the peak was. ``guessed`` counts what only lifetimes, shapes or sets of sizes speak for, and says what else it
    could be.
    """

    peak_bytes: int
    peak_word: str
    where: str
    capacity_bytes: int | None
    scale_bytes: int
    facts: tuple[Fact, ...]
    bar: tuple[Part, ...]
    rest: tuple[Part, ...]
    guessed: Fact | None = None

    @property
    def moment(self) -> str:
        """Name the moment that the figures are of: without a history no peak is known, only the dump."""
        return "dump" if self.peak_word.endswith(" dump") else "peak"


class Room(NamedTuple):
    """How far a run was from out of memory: one bar of ``scale_bytes``, the card ending at ``capacity_bytes``.

    ``parts`` are what torch held, what its allocator cached, what was outside torch, and either the request that failed
    or what was free. ``capacity_bytes`` is None where no card is known.
    """

    parts: tuple[Part, ...]
    scale_bytes: int
    capacity_bytes: int | None
    sentence: str


class Oom(NamedTuple):
    """The request that failed."""

    sentence: str
    stack: tuple[str, ...]


class Advice(NamedTuple):
    """A change that would lower the peak.

    ``after_bytes`` is what it leaves; of ``of_bytes``, where that is not the peak but all that a failed step needs.
    ``limit`` says where the peak is then, if not where it was; ``also`` what else there is to know (host memory, which
    of the two peaks this is about).
    """

    action: str
    saves_bytes: int
    costs: str
    basis: str
    setting: str = ""
    exact: bool = False
    after_bytes: int | None = None
    of_bytes: int | None = None
    limit: str = ""
    also: str = ""


class Combination(NamedTuple):
    """Changes that together make a run fit, or come nearest to it."""

    sentence: str
    fits: bool
    settings: tuple[str, ...]


class Advised(NamedTuple):
    """*What would lower the peak*: all changes, and how they were found."""

    changes: tuple[Advice, ...]
    basis: str
    combination: Combination | None = None


class Prediction(NamedTuple):
    """What a simulated run says of a GPU and of itself; ``fits`` is None where no GPU was named.

    ``needs`` says what each phase holds and what the device must have for it, ``lengths`` what other lengths need.
    """

    fits: bool | None
    verdict: str
    error: str
    needs: Table | None
    lengths: Table | None
    lengths_sentence: str


# ---- the ranks -------------------------------------------------------------------------------------------------------


class RankCell(NamedTuple):
    """One rank's bytes of one category.

    ``heat`` runs from 0 (nothing) to 8 (the most any rank holds of anything), ``shade`` from 1 (the lowest rank)
    to 8 (the highest) where the category's spread is worth showing, and is 0 elsewhere; ``above`` says that it stands
    clearly above the median rank's.
    """

    bytes: int
    heat: int
    shade: int
    above: bool


class RankRow(NamedTuple):
    """One rank at its own peak. ``cells`` follow the columns; ``held_bytes`` is what its device held, where known.

    ``shade`` runs from 1 (the lowest peak) to 8 (the highest), 0 where peaks hardly differ.
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
class Ranks:
    """Everything shown of the ranks beside the one that the document is about.

    ``columns`` are ``(category id, label)``, the last with the id "" for all that is nowhere worth a column of its own;
    ``rows`` and ``nodes`` stand fullest first, a rank that ran out of memory before all. ``in_full`` is the heading of
    what concerns that one rank.
    """

    sentence: str
    in_full: str
    missing: str
    differences: tuple[str, ...]
    count: int
    world_size: int
    columns: tuple[tuple[str, str], ...]
    rows: tuple[RankRow, ...]
    phases: Table | None
    nodes: Table | None
    several_nodes: bool


# ---- what the peak is made of ----------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One row of the published table, one of its categories, or one of a category's details.

    ``own_peak`` is the highest it reached at any time, ``None`` where that is not known (a group's categories peak
    at different times; details are counted at the peak only).
    """

    id: str
    label: str
    words: str
    at_peak: int
    own_peak: int | None
    children: tuple[Row, ...] = ()
    guessed: int = 0

    @property
    def marked(self) -> str:
        """The label, with the mark of its :class:`Part`."""
        return Part(self.id, self.label, self.at_peak, self.guessed).marked


@dataclass(frozen=True)
class Allocation:
    """Blocks alive at the peak that are alike: same size, category, evidence, phase, stack, and name but for digits.

    ``bytes`` is the sum of all ``count``; ``address`` the first one's; ``why`` says in words how the category is known.
    ``lives`` holds ``(born_us, died_us)`` of each on the recording's clock: ``None`` is before it began, and not freed.
    ``stack`` folds C++ frames, ``whole_stack`` has every frame.
    """

    address: str
    name: str
    shape: str
    count: int
    bytes: int
    each_bytes: int
    share: float
    category: str
    category_label: str
    detail: str
    evidence: str
    why: str
    alternatives: tuple[str, ...]
    phase: str
    phase_label: str
    lives: tuple[tuple[int | None, int | None], ...]
    lifetime: str
    retained: bool
    held_by: tuple[str, ...]
    site: str
    stack: tuple[str, ...]
    whole_stack: tuple[str, ...] = ()

    @property
    def guessed(self) -> bool:
        """Tell whether nothing but a lifetime, a shape or a set of sizes says what this is."""
        return any(self.evidence == str(kind) for kind in GUESSES)


class Node(NamedTuple):
    """A rectangle of the icicle: category, then the frames of a call site (or a module's path), then tensor.

    ``shorter`` are labels for narrow boxes, the longest first; a tensor's box knows its ``allocation``.
    """

    label: str
    category: str
    bytes: int
    children: tuple[Node, ...] = ()
    shorter: tuple[str, ...] = ()
    allocation: Allocation | None = None


# ---- over time -------------------------------------------------------------------------------------------------------


class Span(NamedTuple):
    """One phase's stretch of the timeline; ``start_point``/``end_point`` index the timeline's points."""

    phase: str
    label: str
    short: str
    step: int | None
    start_point: int
    end_point: int


class Timeline(NamedTuple):
    """The decimated series: the same instants for every category, the peak and every phase's peak among them.

    ``time_us`` is counted from the first point, which is at ``clock_us`` on the recording's clock. ``categories`` maps
    ids to bytes, bottom of the stack first, those that are never used left out. ``phase_x`` puts every point on an
    axis where each span is one unit wide. Where nothing ran (``timed`` is False) the clock counts events.
    """

    clock_us: int
    time_us: tuple[int, ...]
    phase_x: tuple[float, ...]
    spans: tuple[Span, ...]
    categories: dict[str, tuple[int, ...]]
    reserved: tuple[int, ...] | None
    total: tuple[int, ...]
    peak_point: int
    timed: bool = True

    @property
    def unit(self) -> int:
        """Return what the clock counts in one unit of the axis: microseconds in a second, or an event."""
        return 1_000_000 if self.timed else 1


class Growth(NamedTuple):
    """Segments one stack made the allocator take from the device while it set new records."""

    bytes: int
    phase: str
    site: str
    stack: tuple[str, ...]
    whole_stack: tuple[str, ...] = ()


class DevicePeak(NamedTuple):
    """The highest reserved (+ outside torch): what decides an OOM."""

    reserved_bytes: int
    non_torch_bytes: int | None
    where: str
    grown_by: tuple[Growth, ...]


class Leftover(NamedTuple):
    """Bytes one stack left behind in several steps."""

    bytes: int
    bytes_per_step: float
    steps: int
    category: str
    category_label: str
    held_by: tuple[str, ...]
    site: str
    stack: tuple[str, ...]
    whole_stack: tuple[str, ...] = ()


class Steps(NamedTuple):
    """Memory over the optimizer steps, in a sentence and in figures: each step's highest, and what its end leaves."""

    sentence: str
    steps: Table | None
    left_behind: tuple[Leftover, ...]


# ---- how it is known -------------------------------------------------------------------------------------------------


class EvidenceShare(NamedTuple):
    """Bytes at the peak whose category is known in one way."""

    id: str
    words: str
    bytes: int
    share: float


class Check(NamedTuple):
    """One sum, spelled out. ``ok`` is ``None`` where there is nothing to compare with."""

    label: str
    value: str
    note: str
    ok: bool | None


class AddsUp(NamedTuple):
    """*Does it add up?*: every check, and whether all hold."""

    checks: tuple[Check, ...]
    ok: bool


# ---- all of it -------------------------------------------------------------------------------------------------------


class Document(NamedTuple):
    """Everything a page, a table or a file shows about one snapshot. ``report`` is the JSON it was made from.

    ``allocations`` are the lines of the table, ``openable`` these and all others large enough for a box in the icicle.
    ``elsewhere`` are the largest allocations at other phases' peaks that are not alive at the run's.
    """

    title: str
    subtitle: tuple[str, ...]
    badge: str
    headline: Headline
    summary: Summary
    oom: Oom | None
    advice: Advised
    rows: tuple[Row, ...]
    phases: Table | None
    timeline: Timeline | None
    icicle: Node
    allocations: tuple[Allocation, ...]
    allocations_bytes: int
    allocations_listed: int
    openable: tuple[Allocation, ...]
    elsewhere: tuple[Allocation, ...]
    device_peak: DevicePeak | None
    steps: Steps | None
    evidence: tuple[EvidenceShare, ...]
    adds_up: AddsUp
    host: tuple[Fact, ...]
    reproduce: tuple[Fact, ...]
    config: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    prediction: Prediction | None
    report: dict[str, Any]
    ranks: Ranks | None = None
    recordings: Table | None = None
    outside: tuple[Fact, ...] = ()
    switches: Table | None = None
    room: Room | None = None
