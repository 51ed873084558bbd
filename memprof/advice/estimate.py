"""Estimate savings from recorded sizes alone: instant, without torch, so that every page can name them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from memprof.advice.candidate import Candidate
from memprof.advice.candidates import candidates_for
from memprof.advice.ranking import enough_together, is_enough, ranked, with_words
from memprof.advice.recorded_run import AdvisedRun, Effect, PhaseMaximum, bounded, run_of
from memprof.advice.training_moments import TRANSIENT, moments
from memprof.errors import UsageError
from memprof.report import Report
from memprof.report.advice import Advice
from memprof.vocabulary import Category, Phase

if TYPE_CHECKING:
    from memprof.analysis.views import Views
    from memprof.config.settings import Settings

# How many changes a page lists.
MOST = 8
# A change that saves less than this share of the peak is not worth a line.
_WORTH = 0.005


# Recipes whose loss is TRL's, of any release.
_RECIPES = {"trl", "trl-full-logits", "trl-in-place-logits", "trl-0.14"}
# Settings that these formulas follow.
_FOLLOWED = {
    "gradient_checkpointing", "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation",
    "num_generations", "completion_length", "prompt_length", "dtype", "lora_r", "lora_target_modules", "load_in_4bit",
    "recipe",
}  # fmt: skip


@dataclass(frozen=True)
class Estimate:
    """A candidate with what it would save at the peak, and the peak that is left; ``bytes`` is None if unknown."""

    candidate: Candidate
    saves: int | None
    left: PhaseMaximum


def estimated_advice(report: Report, analysis: Views | None = None) -> tuple[Advice, ...]:
    """List the entries of a report's ``advice`` (``basis: estimated``), those that save most first.

    Args:
        report: the report, whatever advice it has.
        analysis: what the report is of, whose allocations can be replayed under other settings of the allocator.
            Without it the result of such a replay comes from the report's own ``advice``.
    """
    run = run_of(report, analysis)
    found = [e for e in estimate(run) if e.saves is not None and worth(e.saves, run)]
    found += idle_estimates(report, run, analysis)
    rows = [_with_promise(with_time(entry(e, run), report), e, found, run, report) for e in found]
    return tuple(with_words(ranked(rows, report)[:MOST], report))


def _with_promise(advice: Advice, of: Estimate, others: Sequence[Estimate], run: AdvisedRun, report: Report) -> Advice:
    """Add ``enough`` and, where one change alone is not, the ids of those that are enough together with it."""
    oom, effect = report.oom, of.candidate.effect
    if oom is None or effect is None or of.candidate.device:
        return advice
    enough = is_enough(effect, run, oom)
    if enough is not False:
        return msgspec.structs.replace(advice, enough=enough)
    pairs = [(o.candidate.id, o.candidate.effect) for o in others if o is not of and not o.candidate.device]
    together = tuple(name for name, e in pairs if e is not None and enough_together(effect, e, run, oom))
    return msgspec.structs.replace(advice, enough=enough, enough_with=together)


def estimate(run: AdvisedRun) -> list[Estimate]:
    """Estimate every candidate of a run, in no order."""
    found = []
    for candidate in candidates_for(run):
        if not _possible(candidate, run):
            continue
        if candidate.effect is None:
            found.append(Estimate(candidate, None, run.peak))
            continue
        left = run.after(refined(candidate.effect, candidate.changes))
        found.append(Estimate(candidate, run.peak.bytes - left.bytes, left))
    return found


def _possible(candidate: Candidate, run: AdvisedRun) -> bool:
    """Tell whether the changed settings go together: some shardings, for one, leave little choice."""
    if run.settings is None:
        return True
    try:
        run.settings.with_(**candidate.changes)
    except UsageError:
        return False
    return True


def worth(saves: int, run: AdvisedRun) -> bool:
    """Tell whether a saving is large enough to be named."""
    return saves > _WORTH * run.peak.bytes


def entry(found: Estimate, run: AdvisedRun) -> Advice:
    """Return an estimate as it stands in a report's ``advice``."""
    candidate, saves = found.candidate, int(found.saves or 0)
    advice = candidate.advice(saves, "estimated")
    if candidate.device:
        return advice
    if candidate.effect is not None:
        took = bounded(run.peak, refined(candidate.effect, candidate.changes)(run, run.peak))
        advice = msgspec.structs.replace(advice, takes={category: n for category, n in took.items() if n > 0})
    return msgspec.structs.replace(
        advice,
        # Counted from the allocated peak, which is the figure beside it.
        peak_after_bytes=max(0, run.peak.bytes - run.pending_bytes - saves),
        moves_to=found.left.phase if found.left.phase != run.peak.phase else None,
    )


# What a change adds to an estimated step (1) or takes from it (-1), as a phase's time.
_PRICE = {
    "checkpointing": (Phase.FORWARD, 1),
    "no_reference": (Phase.REFERENCE_LOGPROBS, -1),
    "precomputed_reference": (Phase.REFERENCE_LOGPROBS, -1),
    "generate_elsewhere": (Phase.GENERATE, -1),
}


def with_time(advice: Advice, report: Report) -> Advice:
    """Add the ratio of the changed step's time to the unchanged one's, where the report's estimate tells it."""
    time, price = report.estimated_time, _PRICE.get(advice.id or "")
    if time is None or price is None or not time.step_s or price[0] not in time.phases:
        return advice
    phase, sign = price
    return msgspec.structs.replace(advice, time_ratio=round(1 + sign * time.phases[phase] / time.step_s, 3))


def idle_estimates(report: Report, run: AdvisedRun, analysis: Views | None = None) -> list[Estimate]:
    """Estimate what growing segments take from the device's peak, by replay; nothing where they would not lower it."""
    about = [c for c in candidates_for(run) if c.device and c.effect is not None]
    if not about or not run.idle_bytes:
        return []
    saves = saved_by_growing(analysis) if analysis is not None else _said(report, about[0].id)
    return [Estimate(c, saves, run.peak) for c in about if saves and worth(saves, run)]


def saved_by_growing(analysis: Views) -> int | None:
    """Return the bytes by which growing segments would have lowered the reserved peak (below zero: raised it).

    The recorded allocations are replayed; None where that is not possible. Idle memory between blocks says little:
    growing segments close such gaps, but they take memory from the device in pages of 20 MiB for each stream and pool
    (2 MiB for small blocks), where an ordinary segment is as large as its first block. A small run, or one with many
    streams, can need more with them.

    Blocks older than the recording are laid out anew, without gaps. All memory reserved when it began counts as needed:
    how much of it was in use is not known.
    """
    # Half a model of the allocator and its replay, which a report without idle memory does not need.
    from memprof.allocator.model import AllocatorOutOfMemory
    from memprof.allocator.native import reserved_within
    from memprof.allocator.settings import settings_of

    timeline = analysis.timeline
    if timeline.reserved is None or not timeline.n_events:
        return None
    device = analysis.snapshot.device_facts(timeline.device)
    recorded = settings_of(analysis.snapshot.settings).on_device(device.total_bytes)
    if recorded.expandable_segments:
        return None
    settings = replace(recorded, expandable_segments=True)
    try:
        needed = max(reserved_within(timeline.program(), settings, None), int(timeline.reserved[0]))
    except AllocatorOutOfMemory:  # of what the process's memory fraction allows
        return None
    return int(timeline.reserved.max()) - needed


def _said(report: Report, candidate: str) -> int | None:
    """Return what a change saves of the device's peak, by the report's own advice."""
    return next((e.saves_bytes for e in report.advice if e.id == candidate and e.peak == "device"), None)


# -- what comes and goes within a pass, reckoned moment by moment ------------------------------------------------------


def refined(effect: Effect, changes: Mapping[str, Any]) -> Effect:
    """Recompute an effect's transient categories with :func:`moments`, where these hold for the run."""

    def better(run: AdvisedRun, peak: PhaseMaximum) -> Mapping[Category, int]:
        saved = dict(effect(run, peak))
        s, m = run.settings, run.shape
        if s is None or m is None or peak.phase not in (Phase.FORWARD, Phase.BACKWARD):
            return saved
        if not m.layers or not _holds(s, changes):
            return saved
        loss = run.own_peaks.get(Category.LOSS_LOGITS, peak.of(Category.LOSS_LOGITS))
        left = loss - min(loss, _share(saved.get(Category.LOSS_LOGITS, 0), peak.of(Category.LOSS_LOGITS), loss))
        was = moments(s, m, loss)[peak.phase]
        now = moments(s.with_(**changes), m, left)[peak.phase]
        return saved if was == now else _least(peak, saved, was, now)

    return better


def _least(
    peak: PhaseMaximum,
    saved: Mapping[Category, int],
    was: Mapping[str, dict[Category, int]],
    now: Mapping[str, dict[Category, int]],
) -> Mapping[Category, int]:
    """Return what the changed run's highest moment saves, from the moment that the recorded peak looks like."""
    standing = {name: n for name, n in saved.items() if name not in TRANSIENT}
    here = min(was.values(), key=lambda m: sum(abs(m.get(c, 0) - peak.of(c)) for c in TRANSIENT))
    recorded = sum(peak.of(c) for c in TRANSIENT)
    found = []
    for name, moment in now.items():
        scaled = _scaled(moment, here, peak)
        change = {c: peak.of(c) - scaled[c] for c in TRANSIENT}
        # No moment of the unchanged run was higher than its recorded peak, whatever the formulas say.
        change[Category.ACTIVATIONS] += max(0, sum(_scaled(was.get(name, {}), here, peak).values()) - recorded)
        found.append({**standing, **change})
    return min(found, key=lambda each: sum(bounded(peak, each).values()))


def _scaled(moment: Mapping[Category, int], here: Mapping[Category, int], peak: PhaseMaximum) -> dict[Category, int]:
    """Scale a moment's bytes, each category by what was recorded of it, so that what no formula counts is there too.

    Gradients pile up from layer to layer, so that what is not counted of them is added and not scaled.
    """
    found = {}
    for c in TRANSIENT:
        recorded, reckoned = peak.of(c), here.get(c, 0)
        scale = recorded / reckoned if reckoned and c != Category.GRADIENTS else 1
        found[c] = round(moment.get(c, 0) * scale)
    found[Category.GRADIENTS] = max(
        0, found[Category.GRADIENTS] + peak.of(Category.GRADIENTS) - here.get(Category.GRADIENTS, 0)
    )
    return found


def _holds(s: Settings, changes: Mapping[str, Any]) -> bool:
    whole = not s.divided
    after = changes.get("recipe", s.recipe)
    whole = whole and s.trainer != "dpo"
    return whole and set(changes) <= _FOLLOWED and {s.recipe, after} <= _RECIPES


def _share(saved: int, of: int, whole: int) -> int:
    """Scale ``saved`` bytes of ``of`` to ``whole``."""
    return round(whole * saved / of) if of else 0
