"""Hold a run as advice sees it: its settings, its model's shape, and what was alive at each phase's peak."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from memprof.analysis.allocations.places import bytes_by_line, stacks_at_peak, without_folders
from memprof.analysis.peaks.next_step import phases_of_next_step
from memprof.errors import InputError
from memprof.oom.framework_settings import PLAIN, Names, names_in, plain_in
from memprof.report import Report
from memprof.report.allocations import Allocation, Finding
from memprof.report.base import ByCategory, known
from memprof.report.codec import to_builtins
from memprof.report.run import Source
from memprof.vocabulary import Category, Phase

if TYPE_CHECKING:
    from memprof.analysis.views import Views
    from memprof.config.model_shape import ModelShape
    from memprof.config.settings import Settings

_ENGINE = re.compile(r"[/\\](?:vllm|sglang)[/\\]")
# Look at changes of the allocator from this idle share of reserved memory at the device's peak on.
_FRAGMENTED = 0.05
_COPIES = re.compile(r" (?:load|torch_load|load_state_dict|_load_from_state_dict|load_file|deepcopy|__deepcopy__)$")
_LINEAR = re.compile(r"torch[/\\]nn[/\\]modules[/\\]linear\.py|transformers[/\\]|bitsandbytes[/\\]|peft[/\\]")
_FORWARD = re.compile(r" forward$")
# Functions that only infer: what they run needs no gradients.
_INFERS = re.compile(r" (?:generate|inference_mode|no_grad|eval|evaluate|evaluation_loop|infer|inference|predict)$")


@dataclass(frozen=True)
class PhaseMaximum:
    """Hold one phase's highest moment: bytes in all, and by category."""

    phase: Phase
    bytes: int
    categories: ByCategory

    def of(self, category: Category) -> int:
        """Return the bytes of one category."""
        return self.categories.get(category, 0)


@dataclass(frozen=True)
class Made:
    """Hold what one line made of a category: its bytes at the peak, and the line as ``file.py:123 function``."""

    bytes: int
    site: str


@dataclass(frozen=True)
class AdvisedRun:
    """Hold what is known of a run.

    ``settings`` and ``shape`` are None where the file does not say how it was configured. ``peaks`` holds the highest
    peak of every phase; of the highest, ``pending_bytes`` are freed and wait for a stream. ``own_peaks`` is each
    category's highest at any time; ``idle_bytes`` are reserved and not active at the allocated peak. ``made`` has for
    each category the lines that made most of it, largest first; ``names`` are the settings in the words of the
    framework whose frames were seen; ``engine`` tells that vLLM or SGLang is in the process. ``lasting`` has for a
    category the share of its largest blocks that the recording does not see freed; ``failed`` tells that memory ran
    out, ``whole_step`` that all phases of a step before were seen. ``over_batches``: a layer normalises over the batch,
    so that results depend on its size. ``copies``: weights were loaded or copied from others. ``only_infers``: a pass
    was seen to return and no backward followed, or functions that infer are on the stacks. ``has_linear_layers``:
    layers that PEFT finds were seen, or no layer was. ``findings`` and ``weights_bits`` are the report's.
    """

    peaks: tuple[PhaseMaximum, ...]
    settings: Settings | None = None
    shape: ModelShape | None = None
    own_peaks: ByCategory = field(default_factory=dict)
    details: Mapping[Category, Mapping[str, int]] = field(default_factory=dict)
    idle_bytes: int = 0
    pending_bytes: int = 0
    alloc_conf: str = ""
    made: Mapping[Category, tuple[Made, ...]] = field(default_factory=dict)
    names: Names = PLAIN
    engine: bool = False
    lasting: Mapping[Category, float] = field(default_factory=dict)
    failed: bool = False
    whole_step: bool = False
    over_batches: bool = False
    findings: tuple[Finding, ...] = ()
    weights_bits: int | None = None
    only_infers: bool = False
    copies: bool = False
    has_linear_layers: bool = True

    @property
    def peak(self) -> PhaseMaximum:
        """Return the highest of the phases' peaks."""
        return max(self.peaks, key=lambda p: p.bytes)

    def after(self, effect: Effect) -> PhaseMaximum:
        """Return the peak that is left when a change takes ``effect(run, peak)`` bytes from each phase's peak."""
        left = [PhaseMaximum(p.phase, p.bytes - sum(bounded(p, effect(self, p)).values()), {}) for p in self.peaks]
        return max(left, key=lambda p: p.bytes)


def bounded(peak: PhaseMaximum, saved: Mapping[Category, int]) -> dict[Category, int]:
    """Limit ``saved`` to what each category holds."""
    return {category: min(n, peak.of(category)) for category, n in saved.items()}


# Bytes that a change takes from each category at one phase's peak; below zero where it adds some.
Effect = Callable[[AdvisedRun, PhaseMaximum], Mapping[Category, int]]


def highest(rows: Iterable[PhaseMaximum]) -> tuple[PhaseMaximum, ...]:
    """Return the highest peak of every phase."""
    found: dict[Phase, PhaseMaximum] = {}
    for row in rows:
        if row.phase not in found or row.bytes > found[row.phase].bytes:
            found[row.phase] = row
    return tuple(found.values())


# -- read from a report ------------------------------------------------------------------------------------------------


def run_of(report: Report, analysis: Views | None = None) -> AdvisedRun:
    """Read a run from its report; settings and shape where they can be known.

    Args:
        analysis: what the report is of: lines are then added up over all allocations, not over the largest that the
            report lists.
    """
    source, peak = report.source, report.peak
    phases = [*report.phases, *phases_of_next_step(report)]
    rows = [PhaseMaximum(p.phase, p.peak_bytes, p.categories) for p in phases]
    whole = _with_what_is_ahead(PhaseMaximum(peak.phase or Phase.OTHER, peak.active_bytes, peak.categories), report)
    frames = _frames(report)
    run = AdvisedRun(
        peaks=highest([*rows, whole]),
        pending_bytes=max(0, peak.active_bytes - peak.allocated_bytes),
        own_peaks=report.own_peaks,
        details=peak.details,
        idle_bytes=_idle(report),
        alloc_conf=source.alloc_conf or "",
        made=_made(report, analysis),
        names=_names(report),
        engine=_engine(report),
        lasting=_lasting(report),
        failed=report.oom is not None,
        whole_step=_whole_step(report),
        findings=peak.findings,
        weights_bits=peak.weights_bits,
        copies=any(_COPIES.search(frame) for frame in frames),
        only_infers=peak.pass_returned or any(_INFERS.search(frame) for frame in frames),
        has_linear_layers=_has_linear_layers(frames),
        over_batches=any("batchnorm.py" in frame for frame in frames),
    )
    return _configured(run, source) if source.config else run


def _configured(run: AdvisedRun, source: Source) -> AdvisedRun:
    """Add settings and shape, where the report's source has enough of them."""
    # Most recordings have no settings, and these modules are a twentieth of a small report's start.
    from memprof.config.from_recording import settings_like
    from memprof.config.model_shape import ModelShape

    try:
        likeness = settings_like(to_builtins(source))
        counted = (source.config or {}).get("parameters")
        # A quantised layer's packed weight counts half its parameters.
        parameters = counted if isinstance(counted, int) and not likeness.settings.load_in_4bit else None
        shape = ModelShape.of(likeness.model)
    except (InputError, TypeError, ValueError) as error:
        unread = error.__cause__ if isinstance(error, InputError) else error
        if unread is not None:
            words = f"memprof advises without the run's settings, which it could not read: {unread!r}."
            warnings.warn(words, stacklevel=2)
        return run
    settings = likeness.settings
    # Norms beyond two a layer, biases and routers are below a thousandth of a model: estimates leave them out.
    reckoned = shape.embeddings + shape.matrices + (2 * shape.layers + 1) * shape.hidden
    shape = replace(shape, counted=parameters or reckoned)
    return replace(run, settings=settings, shape=shape, alloc_conf=settings.alloc_conf or run.alloc_conf)


def _with_what_is_ahead(peak: PhaseMaximum, report: Report) -> PhaseMaximum:
    """Add the state that a failed optimizer step still had to make: a smaller state saves some of that too."""
    ahead = None if report.oom is None else known(report.oom.ahead)
    if (
        report.oom is None
        or ahead is None
        or report.oom.phase != Phase.OPTIMIZER_STEP
        or peak.phase != report.oom.phase
    ):
        return peak
    categories = {**peak.categories, **{name: peak.of(name) + n for name, n in ahead.still.items()}}
    return PhaseMaximum(peak.phase, peak.bytes + sum(ahead.still.values()), categories)


def _whole_step(report: Report) -> bool:
    """Tell whether some step before the one that ran out of memory was seen from forward to optimizer step."""
    failed = None if report.oom is None else report.oom.step
    seen: dict[int, set[Phase]] = {}
    for row in report.phases:
        if failed is not None and row.step is not None and row.step < failed and not row.within:
            seen.setdefault(row.step, set()).add(row.phase)
    generates = any(Phase.GENERATE in phases for phases in seen.values()) or not any(
        row.phase == Phase.GENERATE for row in report.phases
    )
    return generates and any({Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER_STEP} <= p for p in seen.values())


def _made(report: Report, analysis: Views | None) -> dict[Category, tuple[Made, ...]]:
    """Add up by category and line what the allocations hold, the largest sums first."""
    by_category: dict[Category, list[tuple[Sequence[str], int]]] = {}
    if analysis is not None:
        by_category = {c: stacks_at_peak(analysis, c) for c, n in report.peak.categories.items() if n}
    else:
        for group in _groups(report):
            by_category.setdefault(group.category, []).append((group.stack, group.bytes))
    return {category: _lines(found) for category, found in by_category.items()}


def _lines(found: Iterable[tuple[Sequence[str], int]]) -> tuple[Made, ...]:
    sums: dict[str, int] = {}
    for frame, n in bytes_by_line(found).items():
        site = without_folders(frame)
        sums[site] = sums.get(site, 0) + n
    return tuple(Made(n, site) for site, n in sorted(sums.items(), key=lambda row: -row[1]))


def _lasting(report: Report) -> dict[Category, float]:
    """Return by category the share of the largest allocations' bytes that is alive when the recording ends."""
    held: dict[Category, int] = {}
    kept: dict[Category, int] = {}
    for group in _groups(report):
        lasts = group.born_us is not None and group.died_us is None
        held[group.category] = held.get(group.category, 0) + group.bytes
        kept[group.category] = kept.get(group.category, 0) + (group.bytes if lasts else 0)
    return {category: kept[category] / n for category, n in held.items() if n}


def _groups(report: Report) -> Sequence[Allocation]:
    """Return the largest groups of alike blocks; the largest blocks of a report that was written without groups."""
    return report.peak.largest or report.peak.allocations


def _frames(report: Report) -> list[str]:
    """Return the frames of the largest allocations' stacks."""
    return [frame for group in _groups(report) for frame in group.stack]


def _has_linear_layers(frames: Sequence[str]) -> bool:
    """Tell whether layers of the classes that PEFT's "all-linear" finds run; also where no layer was seen to run."""
    return any(_LINEAR.search(frame) for frame in frames) or not any(_FORWARD.search(frame) for frame in frames)


def _engine(report: Report) -> bool:
    """Tell whether an inference engine holds memory: its category, or its files where keys and values were made."""
    if report.own_peaks.get(Category.INFERENCE_ENGINE):
        return True
    caches = (group.stack for group in _groups(report) if group.category == Category.KV_CACHE)
    return any(_ENGINE.search(frame) for stack in caches for frame in stack)


def _names(report: Report) -> Names:
    """Return the settings' names of the framework whose files the largest allocations' stacks show."""
    # Each frame once: hundreds of stacks share theirs, and every framework's patterns are searched for in all of them.
    text = "\n".join(dict.fromkeys([*_frames(report), *(report.oom.stack if report.oom is not None else ())]))
    return names_in(text) or plain_in(text)


def _idle(report: Report) -> int:
    """Return what the device's peak holds beyond the highest sum of blocks, where it is worth naming.

    Free parts between blocks and whole free segments that no request fitted.
    """
    reserved = max(report.peak.reserved_bytes or 0, report.device_peak.reserved_bytes or 0)
    idle = reserved - report.peak.active_bytes
    return idle if idle > _FRAGMENTED * reserved else 0
