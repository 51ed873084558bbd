"""Fill tables from a report: rows of categories, phases, allocations, the icicle."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from memprof.reports.document.blocks import BarPart, Column, TableBlock, TableRow, TextCell, table
from memprof.reports.document.model import AllocationRow, Node, PublishedRow
from memprof.reports.document.text import (
    CATEGORY_WORDS,
    EVIDENCE_WORDS,
    GROUP_WORDS,
    STACK_ORDER,
    category_label,
    duration,
    group_label,
    humanise,
    phase_label,
    sentence_list,
    short_path,
    thousands,
    time_heading,
    time_taken,
)

from memprof.analysis.allocations.alike import TimedGroup, tag_shape
from memprof.analysis.allocations.places import (
    is_library,
    is_native,
    is_torch,
    place_of,
    python_frames,
    starts_command,
)
from memprof.analysis.headline import peak_phase
from memprof.frame_paths import text_path
from memprof.report import Report
from memprof.report.allocations import Allocation, AllocationGroup
from memprof.report.peaks import Peak, PhasePeak
from memprof.units import amount, percent
from memprof.vocabulary import GROUP_OF, Category, Evidence, Group, Kind

#: The icicle draws no box for less than this part of the peak.
SMALLEST_BOX = 250
# A report's JSON has one life for all blocks of a group: repeat it for so many at most, whatever number the file gives.
_MOST_ALIKE = 100_000

# What stands before a package's name in a path.
_INSTALLED = re.compile(r"^\S*[/\\](?:site-packages|dist-packages)[/\\]")


def category_parts(
    categories: Mapping[Category, int], guessed: Mapping[Category, int] | None = None
) -> tuple[BarPart, ...]:
    """List the non-empty categories in the order they are stacked; ``guessed`` of each is inferred."""
    doubt = guessed or {}
    sizes = ((c, n) for c in STACK_ORDER if (n := categories.get(c, 0)))
    return tuple(BarPart(c, category_label(c), n, min(doubt.get(c, 0), n)) for c, n in sizes)


def group_rows(report: Report) -> tuple[PublishedRow, ...]:
    """Fill the published table's rows, the total last; ``unattributed`` has no categories below it."""
    return tuple(_group_row(group, report) for group in Group)


def _group_row(group: Group, report: Report) -> PublishedRow:
    label, words, peaks = group_label(group), GROUP_WORDS[group], report.group_own_peaks
    if group == Group.TOTAL:
        return PublishedRow(group, label, words, report.peak.active_bytes, peaks.get(group))
    children = _category_rows(group, report)
    if group == Group.UNATTRIBUTED:
        return children[0] if children else PublishedRow(group, label, words, 0, 0)
    own = peaks.get(group, _only_own_peak(children))
    return PublishedRow(group, label, words, report.peak.groups.get(group, 0), own, children)


def _only_own_peak(children: Sequence[PublishedRow]) -> int | None:
    """Return a group's own peak if it follows from its categories': at most one of them ever had any bytes."""
    if not children:
        return 0
    return children[0].own_peak if len(children) == 1 else None


def _category_rows(group: Group, report: Report) -> tuple[PublishedRow, ...]:
    peak, rows = report.peak, []
    for category in (c for c, of in GROUP_OF.items() if of == group):
        now, own = peak.categories.get(category, 0), report.own_peaks.get(category, 0)
        if now or own:
            parts, doubt = _details(category, peak), peak.guessed.get(category, 0)
            rows.append(
                PublishedRow(category, category_label(category), CATEGORY_WORDS[category], now, own, parts, doubt)
            )
    return tuple(sorted(rows, key=lambda row: -row.at_peak))


def _details(category: Category, peak: Peak) -> tuple[PublishedRow, ...]:
    rows = [PublishedRow(d, humanise(d), "", n, None) for d, n in peak.details.get(category, {}).items() if n]
    rest = peak.categories.get(category, 0) - sum(row.at_peak for row in rows)
    if rows and rest:
        rows.append(PublishedRow("", "not broken down", "", rest, None))
    return tuple(sorted(rows, key=lambda row: -row.at_peak))


def is_unused(row: PublishedRow) -> bool:
    """Tell whether a row was empty all the time; what is unattributed is shown even so."""
    return not (row.at_peak or row.own_peak or row.children) and row.id not in (Group.UNATTRIBUTED, Group.TOTAL)


def unused_words(rows: Sequence[PublishedRow]) -> str:
    """Name the rows that a table leaves out because they were empty all the time; "" where there are none."""
    return nothing_in([row.label for row in rows if is_unused(row)])


def nothing_in(labels: Sequence[str]) -> str:
    """Say which rows are left out; "" where none is."""
    inside = [label if label[1:2].isupper() else label[:1].lower() + label[1:] for label in labels]
    return f"Not shown, because always zero: {sentence_list(inside)}." if inside else ""


def component_table(rows: Sequence[PublishedRow], moment: str = "peak") -> TableBlock:
    """Draw up the published table's rows, their categories, and for pages their details; the total last.

    Rows that were empty all the time are left out (see :func:`unused_words`).

    At a dump's ``moment`` no row's own peak is known.
    """
    columns: tuple[Column, ...] = (
        Column("GiB", page="Component"), Column(f"At the {moment}", right=True), Column("", wide=True, on="t"),
        Column("Share", wide=True, on="p"), Column(f"of {moment}", right=True, wide=True, page=f"% of {moment}"),
        Column("Highest", right=True),
    )  # fmt: skip
    whole = rows[-1].at_peak
    lines = tuple(line for row in rows if not is_unused(row) for line in _component(row, (), whole))
    if moment != "peak":
        columns, lines = columns[:-1], tuple(line._replace(cells=line.cells[:-1]) for line in lines)
    return TableBlock(columns, lines, "components", scale=whole or 1, units=False)


def _component(row: PublishedRow, above: tuple[str, ...], whole: int) -> Iterator[TableRow]:
    path = (*above, row.id)
    colour = path[1] if len(path) > 2 else row.id
    bar: tuple[BarPart, ...] = (BarPart(colour, row.label, row.at_peak, row.guessed),)
    made = tuple(BarPart(c.id, c.label, c.at_peak, c.guessed) for c in row.children) if len(path) == 1 else ()
    name = TextCell(row.marked, "" if above else "strong", category=row.id if len(path) == 2 else "")
    drawn = bar if above or row.id == Group.UNATTRIBUTED else ()
    cells = (name, row.at_peak, drawn, made or bar, percent(row.at_peak, whole), row.own_peak)
    kind, parts = "total" if row.id == Group.TOTAL else "", tuple(child.id for child in row.children)
    yield TableRow(cells, path=path, parts=parts, kind=kind, hint=row.words, on="p" if len(path) > 2 else "tmp")
    for child in row.children:
        yield from _component(child, path, whole)


def phase_table(report: Report) -> TableBlock | None:
    """List the phases in order of first appearance: how long, how high, and what was alive then.

    Repeats share a row with the highest peak. Without a clock there is no time; if no phase is known, no table.
    """
    if peak_phase(report) is None:
        return None
    runs: dict[str, list[PhasePeak]] = {}
    for phase in report.phases:
        runs.setdefault(phase.phase, []).append(phase)
    times, estimated = _phase_times(report, runs), report.source.kind == Kind.SIMULATED
    timed = estimated or not times.keys().isdisjoint(runs)
    share = "of the step" if estimated else "of the run"
    took = (Column(time_heading(estimated), right=True), Column(share, right=True, wide=True, on="p"))
    columns = (
        "Phase", *(took if timed else ()), Column("Lowest peak", right=True, wide=True, on="p"),
        Column("Peak", right=True), Column("What was alive then", wide=True, on="tp"),
    )  # fmt: skip
    lines = [_phase_line(name, group, times if timed else None, report) for name, group in runs.items()]
    return table(columns, lines, "phases", max((phase.peak_bytes for phase in report.phases), default=0))


def _phase_times(report: Report, runs: Mapping[str, Sequence[PhasePeak]]) -> Mapping[str, int]:
    """Return the microseconds of each phase: measured, or one simulated step's if they are estimated."""
    if report.source.kind != Kind.SIMULATED:
        if not report.source.timed:
            return {}  # the recording has no clock
        return {name: sum(p.end_us - p.start_us for p in group) for name, group in runs.items()}
    estimated = report.estimated_time.phases if report.estimated_time else {}
    return {name: round(seconds * 1e6) for name, seconds in estimated.items()}


def _phase_line(name: str, runs: Sequence[PhasePeak], times: Mapping[str, int] | None, report: Report) -> TableRow:
    worst, peak = max(runs, key=lambda p: p.peak_bytes), report.peak
    holds_peak = any(name == peak.phase and p.start_us <= peak.time_us <= p.end_us for p in runs)
    badges = ([f"×{len(runs)}"] if len(runs) > 1 else []) + (["peak"] if holds_peak else [])
    low, high = min(p.peak_bytes for p in runs), worst.peak_bytes
    took: tuple[str, ...] = ()
    if times is not None:
        us = times.get(name)
        share = "" if us is None else f"{100 * us / (sum(times.values()) or 1):.0f}%"
        took = (time_taken(us, report.source.kind == Kind.SIMULATED), share)
    title = TextCell(phase_label(name), badges=tuple(badges), phase=name)
    cells = (title, *took, low if amount(low) != amount(high) else "", high, category_parts(worst.categories))
    return TableRow(cells, holds_peak)


def evidence_bytes(peak: Peak) -> list[tuple[Evidence, int]]:
    """List the bytes at the peak by how their category is known, strongest evidence first, without empty kinds."""
    return [(kind, n) for kind in Evidence if (n := peak.evidence.get(kind, 0))]


def call_site(stack: Sequence[str]) -> str:
    """Return the user's or the model's line on a stack, shortened; ``place_of`` chooses it."""
    found = place_of(stack)
    return short_path(found) if found else ""


_NO_STACK, _NO_LINE = "no stack recorded", "no line of the program"


def site_words(site: str, stack: Sequence[str]) -> str:
    """Write where something was made. A stack may hold C++ and what started a command only."""
    return site or (_NO_LINE if stack else _NO_STACK)


def shown_stack(stack: Sequence[str]) -> tuple[str, ...]:
    """Shorten a stack: runs of native (C++) frames keep their innermost and say how many more there were."""
    lines: list[str] = []
    for native, run in groupby(stack, key=is_native):
        frames = list(run)
        if native and len(frames) > 2:
            frames = [frames[0], f"… {len(frames) - 1} more C++ frames"]
        lines += frames
    return tuple(lines)


def why(allocation: Allocation) -> str:
    """Say in one line how the category of this allocation is known."""
    evidence, rule = allocation.evidence, allocation.rule
    words = EVIDENCE_WORDS[evidence]
    if rule:
        words = f"rule {rule} matched its stack" if evidence == Evidence.STACK else f"{words} ({rule})"
    if allocation.alternatives:
        words += f"; could also be {sentence_list(category_label(a).lower() for a in allocation.alternatives)}"
    return words


def brief_stack(stack: Sequence[str]) -> tuple[str, ...]:
    """Shorten a stack to what a person looks for, and say how many frames were left out.

    Frames of the interpreter and its library, of click and of memprof go, and native ones. So do torch's, unless there
    is nothing else in Python. Files of packages begin at the package's name. A stack of nothing else is shown as it is.
    """
    python = [frame for frame in stack if not (_is_machinery(frame) or is_native(frame))]
    kept = [frame for frame in python if not is_torch(frame)] or python
    if not kept:
        return shown_stack(stack)
    lines = tuple(_INSTALLED.sub("", frame) for frame in kept)
    left = len(stack) - len(kept)
    return (*lines, f"… {left} more of torch, C++, Python, click and memprof (--full-stacks)") if left else lines


def _is_machinery(frame: str) -> bool:
    file = text_path(frame)
    own = starts_command(frame) or (file.rooted and file.path.startswith("memprof/"))
    return own or frame.startswith("<frozen") or is_library(frame)


def fold_shared(allocations: Sequence[AllocationRow]) -> tuple[tuple[str, ...], tuple[AllocationRow, ...]]:
    """Take the outermost frames that all stacks share out of each, to be said once; the innermost always stays.

    A line that counts what was left out of a stack stays with it.
    """
    stacks = [[frame for frame in a.stack if not frame.startswith("…")] for a in allocations if a.stack]
    if len(stacks) < 2:
        return (), tuple(allocations)
    most = min(len(stack) for stack in stacks) - 1
    same = next((i for i in range(most) if len({stack[-1 - i] for stack in stacks}) > 1), max(most, 0))
    if not same:
        return (), tuple(allocations)
    return tuple(stacks[0][-same:]), tuple(replace(a, stack=_without_outermost(a.stack, same)) for a in allocations)


def _without_outermost(stack: tuple[str, ...], frames: int) -> tuple[str, ...]:
    """Leave out so many of a stack's outermost frames."""
    places = [i for i, frame in enumerate(stack) if not frame.startswith("…")]
    gone = set(places[-frames:])
    return tuple(frame for i, frame in enumerate(stack) if i not in gone)


def allocation_rows(
    groups: Sequence[AllocationGroup],
    whole: int,
    shorten: Callable[[Sequence[str]], tuple[str, ...]] | None = None,
    *,
    timed: bool = True,
) -> tuple[AllocationRow, ...]:
    """Fill one row for each group of similar allocations, in the order given; ``whole`` is 100%.

    Args:
        groups: as the report's ``peak.largest`` and ``Analysis.largest`` have.
        shorten: what is shown of a stack; default: :func:`shown_stack`.
        timed: whether the clock counts microseconds; a simulation's counts events.
    """
    return tuple(_allocation(group, whole or 1, shorten or shown_stack, timed) for group in groups)


def _allocation(
    group: AllocationGroup, whole: int, shorten: Callable[[Sequence[str]], tuple[str, ...]], timed: bool
) -> AllocationRow:
    known = group.lives if isinstance(group, TimedGroup) else ()
    each = known or ((group.born_us, group.died_us),)
    lives = tuple((born, None if died is None or died < 0 else died) for born, died in each)
    return AllocationRow(
        group=group,
        shape=tag_shape(group.tag),
        share=group.bytes / whole,
        why=why(group),
        lives=lives if known else lives * min(group.count, _MOST_ALIKE),
        lifetime=_lifetime(lives, timed),
        site=call_site(group.stack),
        stack=shorten(group.stack),
    )


def _lifetime(lives: Sequence[tuple[int | None, int | None]], timed: bool) -> str:
    """Say how long the blocks lived; the range where they differ."""
    if any(died is None for _, died in lives):
        born_before = all(born is None for born, _ in lives)
        return "the whole recording" if born_before else "to the end"
    if any(born is None for born, _ in lives):
        return "from before recording"
    spans = sorted((died or 0) - (born or 0) for born, died in lives)
    low, high = (duration(span) if timed else thousands(span) for span in (spans[0], spans[-1]))
    if timed:
        return low if low == high else f"{low} to {high}"
    return f"{low if low == high else f'{low} to {high}'} event{'' if spans[-1] == 1 else 's'}"


def icicle(peak: Peak, allocations: Sequence[AllocationRow], moment: str = "peak") -> Node:
    """Nest the peak as rectangles: category, frames, tensor. What is not listed is a node of its own."""
    listed: dict[str, list[AllocationRow]] = defaultdict(list)
    for allocation in allocations:
        listed[allocation.category].append(allocation)
    parts = sorted(category_parts(peak.categories), key=lambda p: -p.bytes)
    children = tuple(Node(p.label, p.id, p.bytes, _places(p, listed[p.id])) for p in parts)
    return Node(moment.capitalize(), "", peak.active_bytes, children)


# Frames of a call site that the icicle shows, the innermost and those that called it.
_FRAMES = 3


def _places(part: BarPart, allocations: Sequence[AllocationRow]) -> tuple[Node, ...]:
    """Nest a category's allocations by where they were made; the rest, which is not listed, comes last."""
    nodes = _nested(part.id, [(_path(a), a) for a in allocations])
    rest = part.bytes - sum(n.bytes for n in nodes)
    return (*nodes, Node("smaller allocations", part.id, rest)) if rest > 0 else nodes


def _nested(category: str, placed: Sequence[tuple[tuple[str, ...], AllocationRow]]) -> tuple[Node, ...]:
    """Nest allocations by their paths, the largest box first."""
    below: dict[str, list[tuple[tuple[str, ...], AllocationRow]]] = defaultdict(list)
    nodes = []
    for path, allocation in placed:
        if path:
            below[path[0]].append((path[1:], allocation))
        else:
            nodes.append(_box(category, allocation))
    for label, group in below.items():
        total = sum(allocation.bytes for _, allocation in group)
        nodes.append(Node(label, category, total, _nested(category, group), _shorter(label)))
    return tuple(sorted(nodes, key=lambda n: -n.bytes))


def _path(allocation: AllocationRow) -> tuple[str, ...]:
    """Say where an allocation was made: its frames, the outermost first; else its module; else that none is known."""
    frames = [frame for frame in python_frames(allocation.group.stack) if not is_torch(frame)]
    if frames or allocation.site:
        inner = [short_path(frame) for frame in frames[:_FRAMES]] or [allocation.site]
        return tuple(dict.fromkeys(reversed(inner)))
    return _module_path(allocation.name) or (site_words("", allocation.group.stack),)


def _module_path(name: str) -> tuple[str, ...]:
    """Split a parameter's name into boxes: ``model.layers.*.mlp.up_proj.weight`` as ``model.layers.*`` and ``mlp``."""
    parts = name.split(".")
    if len(parts) < 3:
        return ()
    repeated = next((i for i, part in enumerate(parts) if part == "*" or part.isdigit()), None)
    split = repeated + 1 if repeated is not None and repeated + 1 < len(parts) - 2 else len(parts) - 2
    return tuple(".".join(piece) for piece in (parts[:split], parts[split:-2]) if piece)


def _shorter(label: str) -> tuple[str, ...]:
    """Shorten a frame's label: without its folder, then ``file:line`` alone; a module's to its last part."""
    location, _, function = label.partition(" ")
    if function and label not in (_NO_STACK, _NO_LINE):
        return (f"{location.rpartition('/')[2]} {function}", location.rpartition("/")[2])
    return (label.rpartition(".")[2],) if "." in label else ()


def _box(category: str, allocation: AllocationRow) -> Node:
    """Name the tensor by the best there is: its own name, its shape, or what and how large it is."""
    parts = (allocation.detail, amount(allocation.group.each_bytes))
    label = allocation.name or allocation.shape or ", ".join(p for p in parts if p)
    many = f" ×{thousands(allocation.count)}" if allocation.count > 1 else ""
    shorter = (".".join(label.split(".")[-2:]) + many,) if allocation.name.count(".") > 1 else ()
    return Node(label + many, category, allocation.bytes, shorter=shorter, allocation=allocation)
