"""Compare runs side by side: schema ``memprof.compare/1``, documented in ``docs/report-json.md``.

Every figure is taken from a run's report, or is the difference or quotient of two such figures. All runs are
compared with the first one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from memprof.analysis.allocations.differences import Holdings, surplus
from memprof.analysis.headline import headline_of_comparison
from memprof.config.fits import MARGIN, fits, needed_bytes, wide_margin
from memprof.errors import InputError, UsageError
from memprof.report import Report
from memprof.report.comparison import (
    ChangedSetting,
    ComparedCapacity,
    ComparedCategory,
    ComparedDetail,
    ComparedGroup,
    ComparedLine,
    ComparedRun,
    Comparison,
    Differences,
    Figures,
    OnlyIn,
    Published,
    Ratios,
)
from memprof.report.run import Host
from memprof.vocabulary import CATEGORY_LABELS, GROUP_LABELS, GROUP_OF, Category, Group, Kind, Phase, phase_words

#: Where a column's figures come from.
Badge = Literal["measured", "simulated", "published"]
#: What a run needs of a device, or the total, for which nothing tells what the allocator reserves.
Basis = Literal["device_peak", "total"]

_MAX_ALLOCATIONS = 20

# In a list of differences, the settings that memory depends on come first.
_MATTERS = (
    "model", "model_name_or_path", "_name_or_path", "dtype", "torch_dtype", "attn_implementation", "trainer", "recipe",
    "use_peft", "lora_r", "lora_target_modules", "load_in_4bit", "load_in_8bit", "bf16", "fp16",
    "per_device_train_batch_size", "num_generations", "gradient_accumulation_steps", "steps_per_generation",
    "max_prompt_length", "max_completion_length", "prompt_length", "completion_length", "gradient_checkpointing",
    "beta", "loss_type", "optim", "use_liger_kernel", "use_vllm", "vllm_mode", "vllm_gpu_memory_utilization",
    "fsdp", "deepspeed", "world_size", "memory_budget",
)  # fmt: skip

_HOST: dict[str, tuple[str, Callable[[Host], int | None]]] = {
    "pinned_bytes": ("Host: pinned", lambda host: host.pinned_bytes),
    "managed_bytes": ("Host: managed", lambda host: host.managed_bytes),
    "rss_bytes": ("Host: resident", lambda host: host.rss_bytes),
}


@dataclass(frozen=True)
class ComparisonColumn:
    """Hold one column: a run's report, or rows that were published without a report.

    Args:
        label: the column's heading.
        badge: ``measured``, ``simulated`` or ``published``.
        report: ``None`` for published rows.
        published: ``None`` for a run.
        held: the blocks at its peak, where they are known.
    """

    label: str
    badge: Badge
    report: Report | None = None
    published: Published | None = None
    held: Holdings | None = None


def badge_of(report: Report) -> Badge:
    """Tell whether a report is ``simulated`` or ``measured``."""
    return "simulated" if report.source.kind == Kind.SIMULATED else "measured"


def compare(runs: Sequence[ComparisonColumn], capacity_bytes: int | None = None) -> Comparison:
    """Compare runs.

    Args:
        runs: two or more; all others are compared with the first.
        capacity_bytes: the device memory the runs must fit; default: the runs' own, where they agree.

    Raises:
        UsageError: fewer than two runs.
        InputError: the categories of a report do not add up to its total.
    """
    if len(runs) < 2:
        raise UsageError("A comparison needs two runs or more.")
    for run in runs:
        _check(run)
    found = Comparison(
        runs=tuple(
            ComparedRun(label=run.label, badge=run.badge, report=run.report, published=run.published) for run in runs
        ),
        rows=tuple(_row(runs, group) for group in Group),
        beside=tuple(_beside(runs)),
        capacity=_capacity(runs, capacity_bytes),
        config_diff=tuple(_config_diff(runs)),
        allocations_only_in=tuple(_only_in(runs)),
        notes=tuple(_notes(runs)),
    )
    return replace(found, headline=headline_of_comparison(found))


def over_limit(comparison: Comparison, percent: float) -> list[str]:
    """Return a sentence for each run whose allocated peak exceeds the first run's by more than ``percent`` percent.

    Raises:
        UsageError: the first column is published rows, which have no peak.
    """
    first, *others = comparison.runs
    if first.report is None:
        raise UsageError("--fail-above compares peaks, and the first column is a published sum; put a run first.")
    base = first.report.peak.allocated_bytes
    found = []
    for run in others:
        if run.report is None:
            continue
        peak = run.report.peak.allocated_bytes
        if peak * 100 > base * (100 + percent):
            more = f"{100 * (peak - base) / base:.2f}%" if base else "from nothing"
            found.append(f"the allocated peak of {run.label} is {peak} bytes, {more} above the {base} of {first.label}")
    return found


def _check(run: ComparisonColumn) -> None:
    if run.report is None:
        return
    peak = run.report.peak
    parts = sum(peak.categories.values())
    if parts != peak.active_bytes:
        raise InputError(
            f"{run.label}: the report's categories come to {parts} bytes and its total to {peak.active_bytes}; "
            "it was changed by hand, or not written by memprof."
        )


# ---- rows ------------------------------------------------------------------------------------------------------------


def _row(runs: Sequence[ComparisonColumn], group: Group) -> ComparedGroup:
    at_peak = tuple(_group_peak(run, group) for run in runs)
    return ComparedGroup(
        id=group,
        label=GROUP_LABELS[group],
        at_peak=at_peak,
        own_peak=tuple(_group_own(run, group) for run in runs),
        difference=_differences(at_peak),
        ratio=_ratios(at_peak),
        categories=() if group is Group.TOTAL else tuple(_categories(runs, group)),
    )


def _differences(figures: Differences) -> Differences:
    """Compare each figure with the first."""
    first = figures[0]
    return (None, *(None if f is None or first is None else f - first for f in figures[1:]))


def _ratios(figures: Differences) -> Ratios:
    """Divide each figure by the first; None where that is zero."""
    first = figures[0]
    return (None, *(None if f is None or not first else f / first for f in figures[1:]))


def _group_peak(run: ComparisonColumn, group: Group) -> int | None:
    """Return a group's bytes at the peak, summed over its categories; the published figure for published rows."""
    if run.report is None:
        return None if run.published is None else run.published.groups.get(group)
    if group is Group.TOTAL:
        return run.report.peak.active_bytes
    return sum(run.report.peak.categories.get(c, 0) for c in _members(group))


def _group_own(run: ComparisonColumn, group: Group) -> int | None:
    if run.report is None:
        # A published component is its own peak; the sum of such figures is the peak of no run.
        return None if group is Group.TOTAL else _group_peak(run, group)
    own = run.report.group_own_peaks.get(group)
    if own is not None:
        return own
    if group is Group.TOTAL:
        return run.report.peak.active_bytes
    held = [n for c in _members(group) if (n := run.report.own_peaks.get(c, 0))]
    return sum(held) if len(held) < 2 else None


def _members(group: Group) -> list[Category]:
    return [category for category, of in GROUP_OF.items() if of is group]


def _categories(runs: Sequence[ComparisonColumn], group: Group) -> list[ComparedCategory]:
    rows = []
    for category in _members(group):
        at_peak = tuple(None if r.report is None else r.report.peak.categories.get(category, 0) for r in runs)
        own = tuple(None if r.report is None else r.report.own_peaks.get(category, 0) for r in runs)
        if any(at_peak) or any(own):
            rows.append(
                ComparedCategory(
                    id=category,
                    label=CATEGORY_LABELS[category],
                    at_peak=at_peak,
                    own_peak=own,
                    difference=_differences(at_peak),
                    ratio=_ratios(at_peak),
                    details=tuple(_details(runs, category, at_peak)),
                )
            )
    return sorted(rows, key=lambda row: -max(n or 0 for n in row.at_peak))


def _details(runs: Sequence[ComparisonColumn], category: Category, whole: Figures) -> list[ComparedDetail]:
    """List sub-ids and the bytes that no sub-id covers; only at the peak, where they are counted."""
    per_run = [{} if run.report is None else run.report.peak.details.get(category, {}) for run in runs]
    names = dict.fromkeys(name for details in per_run for name, n in details.items() if n)
    rows = [
        _detail(
            name,
            name.replace("_", " "),
            tuple(_if_known(n, d.get(name, 0)) for n, d in zip(whole, per_run, strict=True)),
        )
        for name in names
    ]
    rest = tuple(_if_known(n, (n or 0) - sum(d.values())) for n, d in zip(whole, per_run, strict=True))
    return [*rows, _detail("", "not broken down", rest)] if rows and any(rest) else rows


def _if_known(whole: int | None, part: int) -> int | None:
    return None if whole is None else part


def _detail(identifier: str, label: str, at_peak: Differences) -> ComparedDetail:
    return ComparedDetail(
        id=identifier, label=label, at_peak=at_peak, difference=_differences(at_peak), ratio=_ratios(at_peak)
    )


# ---- beside the sum --------------------------------------------------------------------------------------------------


def _beside(runs: Sequence[ComparisonColumn]) -> list[ComparedLine]:
    """List the device peak, the phases' highest and host memory, shown below the total and never part of it.

    Unknown rows are left out. Phases stand there where the runs peak in different ones.
    """
    lines: list[tuple[str, str, Figures]] = [
        ("device_peak", "Device peak", tuple(_device_peak(run) for run in runs)),
        ("reserved", "of which reserved by PyTorch", tuple(_reserved(run) for run in runs)),
        ("non_torch", "of which non-PyTorch", tuple(_non_torch(run) for run in runs)),
    ]
    for phase in _apart(runs):
        highest = tuple(_highest_in(run, phase) for run in runs)
        lines.append((f"phase:{phase}", f"Highest in {phase_words(phase)}", highest))
    hosts = [None if run.report is None else run.report.host for run in runs]
    lines += [(key, label, tuple(None if h is None else of(h) for h in hosts)) for key, (label, of) in _HOST.items()]
    return [
        ComparedLine(id=key, label=label, values=values, difference=_differences(values), ratio=_ratios(values))
        for key, label, values in lines
        if any(n is not None for n in values)
    ]


def _apart(runs: Sequence[ComparisonColumn]) -> list[Phase]:
    """List the phases in which the runs peak, where these differ: peaks are then two moments that do not compare."""
    found = dict.fromkeys(run.report.peak.phase for run in runs if run.report is not None)
    return [phase for phase in found if phase] if len(found) > 1 else []


def _highest_in(run: ComparisonColumn, phase: Phase) -> int | None:
    """Return the highest active bytes in one phase; None for a run without it."""
    if run.report is None:
        return None
    return max((p.peak_bytes for p in run.report.phases if p.phase == phase), default=None)


def _reserved(run: ComparisonColumn) -> int | None:
    return None if run.report is None else run.report.device_peak.reserved_bytes


def _non_torch(run: ComparisonColumn) -> int | None:
    return None if run.report is None else run.report.device_peak.non_torch_bytes


def _device_peak(run: ComparisonColumn) -> int | None:
    reserved = _reserved(run)
    return None if reserved is None else reserved + (_non_torch(run) or 0)


def _device_need(run: ComparisonColumn) -> int | None:
    """Return what a run needs of a device, plus a CUDA context where memory outside torch was not recorded."""
    reserved = _reserved(run)
    return None if reserved is None else needed_bytes(reserved, _non_torch(run))


def _margin(run: ComparisonColumn, basis: Basis) -> float:
    """Return the margin above a run's need: its own prediction's, or for a total that of a run never compared."""
    told = None if run.report is None else run.report.expected_error
    if told is not None and told.margin is not None:
        return told.margin
    return MARGIN if basis == "device_peak" else wide_margin()


def _fits(run: ComparisonColumn, capacity: int, need: int, margin: float) -> bool:
    """Judge a run by its own verdict on that card or, on the device that it was recorded on, by whether it ran out."""
    report = run.report
    if report is not None and report.fit is not None and report.fit.total_bytes == capacity:
        return report.fit.fits
    if report is not None and run.badge == "measured" and report.source.device_total_bytes == capacity:
        return report.oom is None
    return fits(need, capacity, margin)


def _capacity(runs: Sequence[ComparisonColumn], asked: int | None) -> ComparedCapacity | None:
    """Tell which runs fit the device (:mod:`memprof.config.fits`): by the device peak where it is known, by the total
    otherwise, for which nothing tells what the allocator reserves.
    """
    own = {run.report.source.device_total_bytes for run in runs if run.report and _device_peak(run) is not None}
    own.discard(None)
    capacity = asked if asked is not None else own.pop() if len(own) == 1 else None
    if capacity is None:
        return None
    needs: list[int] = []
    basis: list[Basis] = []
    kept = []
    for run in runs:
        device = _device_need(run)
        needs.append(device if device is not None else needed_bytes(_group_peak(run, Group.TOTAL) or 0, None))
        basis.append("device_peak" if device is not None else "total")
        kept.append(_margin(run, basis[-1]))
    return ComparedCapacity(
        bytes=capacity,
        source="device" if asked is None else "option",
        needs=tuple(needs),
        basis=tuple(basis),
        left=tuple(capacity - need for need in needs),
        margins=tuple(kept),
        fits=tuple(_fits(run, capacity, need, more) for run, need, more in zip(runs, needs, kept, strict=True)),
    )


# ---- configuration ---------------------------------------------------------------------------------------------------


def _config_diff(runs: Sequence[ComparisonColumn]) -> list[ChangedSetting]:
    """List the settings that differ, those that memory depends on first, and then other differences of the runs.

    ``None`` stands for a missing setting. Runs without a configuration, such as published rows, are left out.
    """
    configs = [None if run.report is None else run.report.source.config for run in runs]
    present = [config for config in configs if config]
    keys = sorted({key for config in present for key in config} - {"assumed"})
    first = [k for k in _MATTERS if k in keys]
    settings = [*first, *[k for k in keys if k not in first]]
    found = [
        ChangedSetting(
            setting=key, of="config", matters=key in _MATTERS, values=tuple((c or {}).get(key) for c in configs)
        )
        for key in settings
        if _differ(config.get(key) for config in present)
    ]
    return found + [line for line in _circumstances(runs) if _differ(v for v in line.values if v is not None)]


def _differ(values: Iterable[object]) -> bool:
    held = list(values)
    return any(value != held[0] for value in held[1:])


def _circumstances(runs: Sequence[ComparisonColumn]) -> list[ChangedSetting]:
    """List the device, versions and other circumstances of each recording."""
    sources = [None if run.report is None else run.report.source for run in runs]
    versions = [{} if source is None else source.versions for source in sources]
    names = sorted({name for found in versions for name in found} - {"torch"})
    lines = [
        ChangedSetting(setting=key, of="source", matters=False, values=tuple(s and getattr(s, key) for s in sources))
        for key in ("kind", "device_name", "torch", "history", "world_size")
    ]
    lines += [
        ChangedSetting(setting=name, of="versions", matters=False, values=tuple(found.get(name) for found in versions))
        for name in names
    ]
    return lines


# ---- allocations -----------------------------------------------------------------------------------------------------


def _only_in(runs: Sequence[ComparisonColumn]) -> list[OnlyIn]:
    """List, for the first run and each other one, the blocks that one holds at its peak and the other does not."""
    pairs = [(0, i) for i in range(1, len(runs)) if runs[0].held and runs[i].held]
    return [entry for a, b in pairs for entry in (_surplus(runs, b, a), _surplus(runs, a, b))]


def _surplus(runs: Sequence[ComparisonColumn], here: int, there: int) -> OnlyIn:
    one, other = runs[here].held, runs[there].held
    assert one is not None
    assert other is not None
    found = surplus(one, other)
    return OnlyIn(
        in_run=here,
        not_in_run=there,
        bytes=sum(s.bytes for s in found),
        above_bytes=max(one.cutoff, other.cutoff),
        allocations=tuple(found[:_MAX_ALLOCATIONS]),
    )


def _notes(runs: Sequence[ComparisonColumn]) -> list[str]:
    notes = [f"{run.label}: {note}" for run in runs if run.published is not None for note in run.published.notes]
    silent = [run.label for run in runs if run.report is not None and not run.report.source.config]
    if silent:
        verb = "carries" if len(silent) == 1 else "carry"
        notes.append(f"{', '.join(silent)} {verb} no configuration, so differences in settings are not known.")
    kinds = {run.report.source.kind for run in runs if run.report is not None}
    if Kind.TRACE in kinds and len(kinds) > 1:
        notes.append(
            "A CPU recording counts requested bytes; the other runs count the allocator's larger blocks."
        )
    return list(dict.fromkeys(notes))


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return each path's file name without its endings, with the folder that differs where names are equal."""
    names = [_bare(path) for path in paths]
    return [
        name if names.count(name) == 1 else _longer(path, paths, name) for path, name in zip(paths, names, strict=True)
    ]


def _bare(path: Path) -> str:
    """Return the file name without the endings that only name its format."""
    name = re.sub(r"(?i)\.gz$", "", path.name)
    return re.sub(r"(?i)\.(?:pickle|pkl|json)$", "", name) or path.name


def _longer(path: Path, paths: Sequence[Path], name: str) -> str:
    """Return the last folder in which ``path`` differs from others of the same name, followed by its name."""
    rivals = [other for other in paths if other != path and _bare(other) == name]
    for folder in path.parents:
        depth = len(path.parts) - len(folder.parts) - 1
        others = {other.parents[depth].name for other in rivals if depth < len(other.parents)}
        if folder.name and others != {folder.name}:
            return f"{folder.name}/{name}"
    return path.name


def distinct(labels: Sequence[str]) -> list[str]:
    """Return the labels with repeats numbered: ``run``, ``run (2)``."""
    found: list[str] = []
    for label in labels:
        n = sum(1 for i, other in enumerate(labels[: len(found)]) if other == label)
        found.append(label if not n else f"{label} ({n + 1})")
    return found
