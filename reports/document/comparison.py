"""Lay out a comparison: a column a run, a line a component, what differs in settings, what only one run allocates."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from shlex import quote

from memprof.reports.document.blocks import (
    BarPart,
    Cell,
    Column,
    Fact,
    Figure,
    HeadlineBlock,
    TableBlock,
    TableRow,
    TextCell,
    table,
)
from memprof.reports.document.build import build_document
from memprof.reports.document.model import Document, Room
from memprof.reports.document.page_title import base_name, subtitle_of
from memprof.reports.document.summary import room_of
from memprof.reports.document.tables import call_site, nothing_in, shown_stack, site_words
from memprof.reports.document.text import (
    CATEGORY_WORDS,
    GROUP_WORDS,
    category_label,
    group_label,
    humanise,
    short_path,
    signed_gib,
    size,
)
from msgspec.structs import replace

from memprof._version import __version__
from memprof.analysis.allocations.differences import StackDifference, by_stack
from memprof.analysis.headline import change_words, fit_words, headline_of_comparison
from memprof.report.advice import Unchanged
from memprof.report.comparison import (
    ChangedSetting,
    ComparedCapacity,
    ComparedCategory,
    ComparedDetail,
    ComparedGroup,
    ComparedLine,
    ComparedRun,
    Comparison,
    OnlyIn,
    Surplus,
)
from memprof.report.run import Capacity
from memprof.units import amount, gib
from memprof.vocabulary import Group


@dataclass(frozen=True)
class RunColumn:
    """One run in a comparison.

    ``document`` is ``None`` for a published table; ``facts`` say what it is, ``parts`` what it is made of, ``room`` how
    far it was from out of memory.
    """

    run: ComparedRun
    document: Document | None
    facts: tuple[str, ...]
    parts: tuple[BarPart, ...]
    room: Room | None = None

    @property
    def label(self) -> str:
        return self.run.label


@dataclass(frozen=True)
class ChangedStacks:
    """What two runs allocate differently at their peaks: a line for each stack that grew, shrank, is new or gone."""

    title: str
    note: str
    stacks: TableBlock


@dataclass(frozen=True)
class ComparisonDocument:
    """Runs side by side. ``scale_bytes`` is the one scale of every bar.

    ``totals`` are the runs' own, ``rows`` has a line for each component, with a terminal's and a page's figures.
    ``verdicts`` say of each run whether it fits, and by how much. ``settings`` differ and memory is known to depend on
    them, ``others`` differ too. ``changed`` has an entry for each later run. ``unchanged`` is the error of the
    simulation of a recorded run, or empty.
    """

    comparison: Comparison
    title: str
    headline: HeadlineBlock
    unchanged: str
    columns: tuple[RunColumn, ...]
    totals: tuple[int | None, ...]
    rows: TableBlock
    capacity_bytes: int | None
    device: str
    verdicts: tuple[tuple[bool, str], ...]
    scale_bytes: int
    settings: TableBlock | None
    others: TableBlock | None
    changed: tuple[ChangedStacks, ...]
    legend: tuple[BarPart, ...]
    reproduce: tuple[Fact, ...]
    notes: tuple[str, ...]


# A published row has no categories: it is drawn in the colour of the only or main one it is made of; training memory,
# which is many, in a colour of its own.
_COLOUR_OF = {
    Group.TRAINING: "training",
    Group.GRPO_LOSS: "loss_logits",
    Group.REFERENCE_AND_REWARD: "reference_model",
    Group.INFERENCE: "inference_engine",
    Group.KV_CACHE: "kv_cache",
}


def build_comparison(comparison: Comparison, documents: Sequence[Document | None] = ()) -> ComparisonDocument:
    """Lay out a comparison.

    Args:
        comparison: the comparison.
        documents: one a run, if the caller has them with their timelines; others are made from the reports.
    """
    runs, capacity = comparison.runs, comparison.capacity
    known = list(documents) or [None] * len(runs)
    columns = tuple(_column(run, known[i], capacity, i) for i, run in enumerate(runs))
    labels, totals = [run.label for run in runs], comparison.rows[-1].at_peak
    beside = _beside_rows(comparison.beside)
    devices = [n for row in beside if row.id == "device_peak" for n in row.values]
    scale = max(1, *(n or 0 for n in (*totals, *devices)))
    verdicts, device = _verdicts(capacity), _device(capacity)
    return ComparisonDocument(
        comparison=comparison,
        title=_title(comparison),
        headline=HeadlineBlock.of(comparison.headline or headline_of_comparison(comparison)),
        unchanged=_unchanged(comparison.unchanged),
        columns=columns,
        totals=totals,
        rows=_Rows(columns, scale, capacity, device, verdicts).table(comparison.rows, beside),
        capacity_bytes=capacity.bytes if capacity else None,
        device=device,
        verdicts=verdicts,
        scale_bytes=scale,
        settings=_settings("What changed", labels, [line for line in comparison.config_diff if line.matters]),
        others=_settings("Setting", labels, [line for line in comparison.config_diff if not line.matters]),
        changed=_changed_stacks(comparison.allocations_only_in, labels),
        legend=_legend(columns),
        reproduce=_reproduce(comparison),
        # What is not in the table, the comparison's own, then each run's under its label.
        notes=(
            *filter(None, [nothing_in([row.label for row in _unused(comparison.rows)])]),
            *comparison.notes,
            *[f"{c.label}: {note}" for c in columns if c.document for note in c.document.notes],
        ),
    )


def _title(comparison: Comparison) -> str:
    """Name the runs; of published rows also what was measured, which is seldom the model they stand beside."""
    runs, labels = comparison.runs, [run.label for run in comparison.runs]
    title = " and ".join(labels) if len(labels) < 3 else f"{labels[0]} and {len(labels) - 1} others"
    settings = dict.fromkeys(run.published.setting for run in runs if run.published)
    if not settings or all(run.report is None for run in runs):
        return title
    return f"{title} (published for {'; '.join(settings)})"


def _column(run: ComparedRun, document: Document | None, capacity: ComparedCapacity | None, index: int) -> RunColumn:
    if run.report is None:
        published = run.published
        sizes = published.groups if published else {}
        parts = tuple(BarPart(colour, group_label(g), n) for g, colour in _COLOUR_OF.items() if (n := sizes.get(g, 0)))
        return RunColumn(run, None, (published.setting, published.source) if published else (), parts)
    made, report, others = document or build_document(run.report, label=run.label), run.report, False
    if capacity is not None:  # the GPU that runs are measured against may be another run's
        report = replace(report, capacity=Capacity(bytes=capacity.bytes, source=capacity.source))
        others = capacity.source == "device" and report.source.device_total_bytes != capacity.bytes
    room = _as_judged(room_of(report, others), capacity, index)
    return RunColumn(run, made, subtitle_of(made.report), made.summary.bar, room)


def _as_judged(room: Room | None, capacity: ComparedCapacity | None, index: int) -> Room | None:
    """Draw a run's room with all that its verdict counts, so that both give the same number.

    A verdict adds a CUDA context where none was recorded. What failed for want of memory needs no verdict.
    """
    if room is None or capacity is None or any(part.id == "request" for part in room.parts):
        return room
    need, total = capacity.needs[index], capacity.bytes
    used = tuple(part for part in room.parts if part.id != "free")
    assumed = need - sum(part.bytes for part in used)
    if assumed < 0:
        return room
    added = (BarPart("non_torch", "CUDA context, assumed", assumed),) if assumed else ()
    free = (BarPart("free", "Free", total - need),) if need < total else ()
    context = f", {amount(assumed)} of it for a CUDA context, which was not measured" if assumed else ""
    sentence = f"needs {gib(need)} of {gib(total)} GiB{context}: {fit_words(capacity, index)}."
    return Room((*used, *added, *free), max(need, total, 1), total, sentence)


def _legend(columns: Sequence[RunColumn]) -> tuple[BarPart, ...]:
    """List every colour once, under the name it has in the first run that shows it."""
    parts: dict[str, BarPart] = {}
    for column in columns:
        for part in column.parts:
            if part.bytes:
                parts.setdefault(part.id, part)
    return tuple(parts.values())


def _reproduce(comparison: Comparison) -> tuple[Fact, ...]:
    runs, capacity = comparison.runs, comparison.capacity
    files = [name for run in runs if run.report for name in run.report.source.files[:1]]
    shown = [quote(base_name(name)) for name in files]
    shown += [f"--published {quote(name)}" for name in dict.fromkeys(r.published.set for r in runs if r.published)]
    shown += [f"--capacity {_sized(capacity.bytes)}"] if capacity and capacity.source == "option" else []
    return (
        Fact("Command", f"memprof compare {' '.join(shown)} -o compare.html"),
        Fact("memprof", __version__),
        Fact("Units", "1 GiB = 2³⁰ bytes", "below 1 GiB in MiB; in GiB columns below 0.005 as <0.01"),
    )


def _sized(n_bytes: int) -> str:
    """Write a size as the command line takes it, exact."""
    for factor, unit in ((2**30, "GiB"), (10**9, "GB"), (10**6, "MB")):
        if n_bytes % factor == 0:
            return f"{n_bytes // factor}{unit}"
    return f"{n_bytes}B"


# ---- rows ------------------------------------------------------------------------------------------------------------

# Groups that can hold one category only: where each line costs one, the group says it all.
_ALONE = ("grpo_loss", "inference", "kv_cache")
# Sums and figures of the device: their bars are plain.
_PLAIN = ("total", "device_peak", "reserved", "non_torch")

_Row = ComparedGroup | ComparedCategory | ComparedDetail | ComparedLine


def _unused(rows: Sequence[ComparedGroup]) -> list[ComparedGroup]:
    """List the rows that no run ever used; what is unattributed is shown even so."""
    always = (Group.UNATTRIBUTED, Group.TOTAL)
    return [row for row in rows if not (any(row.at_peak) or any(row.own_peak)) and row.id not in always]


def _beside_rows(rows: Sequence[ComparedLine]) -> list[ComparedLine]:
    """Leave out reserved memory if non-PyTorch memory is not known."""
    outside = any(row.id == "non_torch" for row in rows)
    return [row for row in rows if outside or row.id != "reserved"]


def _below(row: _Row) -> Sequence[ComparedCategory | ComparedDetail]:
    """Return the parts of a row; nothing is below ``unattributed``."""
    if row.id == Group.UNATTRIBUTED:
        return ()
    if isinstance(row, ComparedGroup):
        return row.categories
    return row.details if isinstance(row, ComparedCategory) else ()


@dataclass(frozen=True)
class _Rows:
    """Draw up the components: a line each, its categories and their details below it, what is in no total last."""

    runs: tuple[RunColumn, ...]
    highest: int
    capacity: ComparedCapacity | None
    device: str
    verdicts: tuple[tuple[bool, str], ...]

    @property
    def scale(self) -> int:
        """Count the bytes of a full bar, the capacity among them unless everything would look tiny beside it."""
        capacity = self.capacity.bytes if self.capacity else 0
        return max(self.highest, capacity if capacity <= 4 * self.highest else 0)

    def table(self, rows: Sequence[ComparedGroup], beside: Sequence[ComparedLine]) -> TableBlock:
        lines = [line for row in rows if row not in _unused(rows) for line in self._lines(row, GROUP_WORDS, ())]
        lines += [line for row in beside for line in self._lines(row, {}, (), "beside")]
        lines += [self._fits()] if self.capacity else []
        limit = self.capacity.bytes if self.capacity else None
        columns = tuple(self._columns())
        return TableBlock(columns, tuple(lines), "components compared", scale=self.scale, capacity=limit, units=False)

    def _columns(self) -> Iterator[Column]:
        two = len(self.runs) == 2
        yield Column("GiB at the peak", page="Component", least=26)
        for i, column in enumerate(self.runs):
            yield Column(column.label, right=True, note=column.run.badge, group=i, named=True)
            if column.document:
                yield Column("per-category peak", right=True, wide=True, rank=3, group=i)
        for i, column in enumerate(self.runs[1:], 1):
            note = "" if two else column.label
            yield Column("Difference", right=True, rank=2, on="tm", group=i, note=note)
            yield Column("Difference", right=True, on="p" if two else "", group=i, note=note)
            yield Column("Ratio", right=True, rank=4, wide=True, on="tmp" if two else "tm", group=i, note=note)
            yield Column("Change", rank=1, whole=True, on="tm", group=i, note=note)
            yield Column("Change", on="p" if two else "", group=i, note=note)

    def _lines(self, row: _Row, words: Mapping[str, str], above: tuple[str, ...], kind: str = "") -> Iterator[TableRow]:
        figures = row.values if isinstance(row, ComparedLine) else row.at_peak
        own = row.own_peak if isinstance(row, (ComparedGroup, ComparedCategory)) else (None,) * len(self.runs)
        path, below = (*above, row.id), _below(row)
        cells: list[Cell] = [TextCell(row.label, category=path[-1] if len(path) == 2 else "")]
        for i, (column, n) in enumerate(zip(self.runs, figures, strict=True)):
            small = f"{_difference(figures, i)}, {_change(figures, own, i)}" if i and len(self.runs) > 2 else ""
            small = "" if small.endswith((", –", ", same")) else small
            cells.append(Figure(n, self._parts(path, row.label, n, below, i), small, path[-1] in _PLAIN[:2]))
            cells += ["" if (most := own[i]) is None else most] if column.document else []
        for i in range(1, len(self.runs)):
            change = row.difference[i]
            cells += ["–" if change is None else signed_gib(change), _difference(figures, i)]
            cells += [ratio_words(row.ratio[i]), change_words(figures[0], figures[i], own[0], own[i])]
            cells.append(_change(figures, own, i))
        kind = "total" if path == ("total",) else kind or ("" if any(figures) or any(own) else "zero")
        alone = len(path) > 2 or (len(path) == 2 and path[0] in _ALONE)
        parts, hint = tuple(child.id for child in below), words.get(path[-1], "")
        yield TableRow(tuple(cells), path=path, parts=parts, kind=kind, hint=hint, on="p" if alone else "tmp")
        for child in below:
            yield from self._lines(child, CATEGORY_WORDS, path)

    def _parts(
        self,
        path: tuple[str, ...],
        label: str,
        n: int | None,
        below: Sequence[ComparedCategory | ComparedDetail],
        run: int,
    ) -> tuple[BarPart, ...]:
        """Draw a figure: a group's bar is made of its categories, the total's and the device's are plain."""
        if not n or path[-1].endswith("_bytes"):
            return ()
        if path[-1] in _PLAIN or path[-1].startswith("phase:"):
            return (BarPart("total", label, n),)
        if len(path) == 1 and any(child.at_peak[run] for child in below):
            return tuple(BarPart(child.id, child.label, child.at_peak[run] or 0) for child in below)
        if len(path) == 1 and self.runs[run].document is None:
            return tuple(part for part in self.runs[run].parts if part.label == label)
        return (BarPart(path[1] if len(path) > 2 else path[-1], label, n),)

    def _fits(self) -> TableRow:
        limit = self.capacity.bytes if self.capacity else 0
        small = "the dashed line" if limit <= self.scale else ""
        cells: list[Cell] = [TextCell(f"Fits in {self.device}", small=small, short=f"Fits {gib(limit)}")]
        for column, (fits, words) in zip(self.runs, self.verdicts, strict=True):
            tone, short = ("ok", "yes") if fits else ("bad", "no")
            cells += [TextCell(words, tone, short=short), *([""] if column.document else [])]
        return TableRow((*cells, *[""] * (5 * (len(self.runs) - 1))), kind="fits")


def _difference(figures: Sequence[int | None], run: int) -> str:
    """Write how much more a later run holds than the first, with its unit; ``–`` where one is not known."""
    first, other = figures[0], figures[run]
    if first is None or other is None:
        return "–"
    return f"+{amount(other - first)}" if other > first else amount(other - first)


def _change(figures: Sequence[int | None], own: Sequence[int | None], run: int) -> str:
    """Put in words how a later run differs from the first, sizes with their unit."""
    return change_words(figures[0], figures[run], own[0], own[run], amount)


def ratio_words(ratio: float | None) -> str:
    """Write a ratio as ``0.11×``; ``–`` where there is nothing to divide by."""
    if ratio is None:
        return "–"
    if 0 < ratio < 0.005:
        return "<0.01×"
    return f"{ratio:.2f}×" if ratio < 10 else f"{ratio:.1f}×"


# ---- sentences -------------------------------------------------------------------------------------------------------


def _unchanged(found: Unchanged | None) -> str:
    """Say, of a recorded run that was simulated, how far off the simulator is on the run as it was."""
    if found is None:
        return ""
    measured, simulated = found.measured_bytes, found.simulated_bytes
    error = f"{100 * (simulated - measured) / measured:+.2f}%".replace("-", "−") if measured else "not known"
    figures = f"{size(simulated)} simulated, {size(measured)} measured"
    return f"The simulator's error on the unchanged run: {error} of the allocated peak ({figures})."


def _device(capacity: ComparedCapacity | None) -> str:
    """Write the capacity as it was given: 24 GB are not 24 GiB."""
    n = capacity.bytes if capacity else 0
    return f"{n / 1e9:g} GB" if n % 10**8 == 0 else f"{gib(n)} GiB"


def _verdicts(capacity: ComparedCapacity | None) -> tuple[tuple[bool, str], ...]:
    return tuple((fits, fit_words(capacity, i)) for i, fits in enumerate(capacity.fits)) if capacity else ()


def _settings(title: str, labels: Sequence[str], lines: Sequence[ChangedSetting]) -> TableBlock | None:
    """List settings that differ, a column a run."""
    return table((title, *map(Column, labels)), [_setting(line) for line in lines], "settings")


def _setting(line: ChangedSetting) -> TableRow:
    name = line.setting if line.of == "config" else f"{line.setting} ({line.of})"
    values = [TextCell("–") if value is None else TextCell(str(value), "code") for value in line.values]
    return TableRow((TextCell(name, "code"), *values))


# ---- allocations -----------------------------------------------------------------------------------------------------



def _changed_stacks(entries: Sequence[OnlyIn], labels: Sequence[str]) -> tuple[ChangedStacks, ...]:
    """Compare each later run with the first, by stack."""
    pairs = {(entry.not_in_run, entry.in_run): entry for entry in entries}
    found = []
    for (first, other), gained in pairs.items():
        lost = pairs.get((other, first))
        if first < other and lost and (gained.allocations or lost.allocations):
            found.append(_stacks(lost, gained, labels[first], labels[other]))
    return tuple(found)


def _stacks(lost: OnlyIn, gained: OnlyIn, first: str, other: str) -> ChangedStacks:
    note = f"{amount(lost.bytes)} differ at the peak of {first}, {amount(gained.bytes)} at that of {other}"
    listed = sum(surplus.bytes for entry in (lost, gained) for surplus in entry.allocations)
    if listed < lost.bytes + gained.bytes:
        note += f"; {amount(lost.bytes + gained.bytes - listed)} in smaller blocks are not listed"
    if gained.above_bytes:
        note += f"; blocks of up to {amount(gained.above_bytes)} are not compared: a report does not list them all"
    columns = (
        Column("Difference", right=True), Column("", page="Change", whole=True), Column(first, whole=True, wide=True),
        Column(other, whole=True, wide=True), Column("Category", on="tm"),
        Column("Category", wide=True, on="p"), Column("Allocated at", wide=True, on="t"),
        Column("Allocated at", on="mp"),
    )  # fmt: skip
    lines = [_stack(change) for change in by_stack(lost.allocations, gained.allocations)]
    found = table(columns, lines, "changed-stacks")
    assert found is not None
    return ChangedStacks(f"{first} → {other}, by stack", note, dataclasses.replace(found, units=False))


def _stack(change: StackDifference) -> TableRow:
    largest, n = change.largest, change.difference
    words = "new" if not change.before else "gone" if not change.after else "grew" if n > 0 else "shrank"
    if change.before and change.after and not n:
        words = "other sizes"
    detail = f", {humanise(largest.detail)}" if largest.detail else ""
    category = TextCell(category_label(largest.category) + detail, category=largest.category)
    # Without a stack the tensor's name says where it was made; of several like it, with stars for the digits.
    several = len(change.before) + len(change.after) > 1 or largest.count_in - largest.count_not_in > 1
    name = re.sub(r"\d+", "*", largest.name or "") if several else largest.name or ""
    site = site_words(call_site(largest.stack) or name, largest.stack)
    made = TextCell(site, "code", folded=shown_stack(largest.stack))
    signed = TextCell(f"{'+' if n > 0 else '−' if n < 0 else ''}{amount(abs(n))}", bytes=n)
    blocks = (_blocks(change.before), _blocks(change.after))
    return TableRow((signed, words, *blocks, category, category, short_path(site, 1), made))


# So many sizes of one stack are listed.
_SIZES = 2


def _blocks(entries: Sequence[Surplus]) -> str:
    """Write ``2 × 1.19 GiB``, for each size of one stack, the largest sum first."""
    counts: dict[int, int] = {}
    for entry in entries:
        counts[entry.each_bytes] = counts.get(entry.each_bytes, 0) + entry.count_in - entry.count_not_in
    largest = sorted(counts.items(), key=lambda item: -item[0] * item[1])
    words = [f"{n} × {amount(each)}" if n > 1 else amount(each) for each, n in largest[:_SIZES]]
    more = len(counts) - _SIZES
    return ", ".join(words) + (f" and {more} more size{'' if more == 1 else 's'}" if more > 0 else "") or "–"
