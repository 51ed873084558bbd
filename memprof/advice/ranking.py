"""Put the entries of advice in order, and promise which is enough alone after memory ran out.

Enough is promised only where all that the run still makes is counted: every phase that was seen, the whole optimizer
state beside each of them (from the second step on it is there in generation, forward and backward too), the request
that failed, the free parts between blocks as they were, and a margin. A failed optimizer step follows all other phases,
and a later step follows a whole one; for a run that fails sooner nothing is promised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from memprof.advice.recorded_run import AdvisedRun, Effect, PhaseMaximum
from memprof.config.optimizers import optimizer
from memprof.errors import InputError
from memprof.report import Report
from memprof.report.advice import Advice
from memprof.report.base import known
from memprof.report.run import OutOfMemory
from memprof.vocabulary import Category, Phase

if TYPE_CHECKING:
    from memprof.plan.simulations import SimulatedRow

#: The share of torch's room kept free: lengths, blocks and their gaps vary from step to step.
MARGIN = 0.1
# A change that keeps the gradients goes first if it saves at least this share of what the best one saves.
_NEAR = 0.4
# One that costs nothing either, from this share on.
_FREE = 0.2
# Of those that save at least this share of the best of them, the one that asks for least goes first.
_ALIKE = 0.75


def ranked(entries: Sequence[Advice], report: Report) -> list[Advice]:
    """Order a report's ``advice``: row 1 is the first thing to change, the others follow by what they save.

    Where memory ran out, the first is the change that asks for least among those that are enough for the whole step.
    Elsewhere it keeps the gradients and asks for least among those that save nearly most; where all that saves much
    changes the training, it changes it least.
    """
    rows = sorted(entries, key=lambda row: (-row.saves_bytes, _cost_rank(row)))
    if not rows:
        return []
    first = _after_failure(rows, report.oom) if report.oom is not None else None
    first = first or _in_general(rows)
    return [first, *(row for row in rows if row is not first)]


def _after_failure(rows: Sequence[Advice], oom: OutOfMemory) -> Advice | None:
    """Choose a change that suffices alone, or None. Freeing idle memory suffices only where that was the trouble."""
    ahead = known(oom.ahead)
    short = (ahead.short_bytes or 0) if ahead is not None else 0
    if oom.fits_defragmented and not short:
        gaps = [row for row in rows if row.peak == "device" and row.enough is not False]
        if gaps:
            return min(gaps, key=_cost_rank)
    missing = max(short, oom.requested_bytes - (oom.device_free_bytes or 0))
    open_ = [row for row in rows if row.peak != "device"]
    promised = [row for row in open_ if row.enough is True]
    enough = promised or [row for row in open_ if row.saves_bytes >= missing > 0]
    return min(enough, key=lambda row: (_cost_rank(row), row.saves_bytes), default=None)


def _in_general(rows: Sequence[Advice]) -> Advice:
    open_ = [row for row in rows if row.peak != "device"] or list(rows)
    best = max(row.saves_bytes for row in open_)
    kept = [r for r in open_ if r.exact and r.saves_bytes >= (_NEAR if _cost_rank(r) else _FREE) * best]
    if not kept:  # every one changes the training: begin with the one that changes it least
        return min((r for r in open_ if r.saves_bytes >= _NEAR * best), key=lambda r: (_cost_rank(r), -r.saves_bytes))
    most = max(row.saves_bytes for row in kept)
    near = [row for row in kept if row.saves_bytes >= _ALIKE * most]
    return min(near, key=lambda row: (_cost_rank(row), -row.saves_bytes))


def _cost_rank(row: Advice) -> int:
    return row.toll or 0


def is_enough(effect: Effect, run: AdvisedRun, oom: OutOfMemory | None) -> bool | None:
    """Tell whether a run with a change gets through every step; None where what it still makes is not known."""
    from memprof.config.fits import fits

    following, room = _following(run, oom), _room(oom)
    if following is None or room is None:
        return None
    return fits(following.after(effect).bytes, room, MARGIN)


def enough_together(first: Effect, second: Effect, run: AdvisedRun, oom: OutOfMemory | None) -> bool | None:
    """Tell the same of two changes; of a category both lower, only the larger saving counts."""

    def both(run: AdvisedRun, peak: PhaseMaximum) -> Mapping[Category, int]:
        one, other = first(run, peak), second(run, peak)
        return {category: max(one.get(category, 0), other.get(category, 0)) for category in {**one, **other}}

    return is_enough(both, run, oom)


def simulated_is_enough(row: SimulatedRow, oom: OutOfMemory | None) -> bool | None:
    """Tell whether a simulated run, which executes all phases with the state of a step before, would have had room."""
    from memprof.config.fits import fits

    if oom is None or (room := _room(oom)) is None:
        return None
    reserved, reserved_then = row.device_peak_bytes, known(oom.reserved_bytes)
    if reserved is None or not reserved_then:
        return fits(row.peak_bytes, room, MARGIN)
    idle = max(0, reserved_then - (oom.allocated_bytes or 0))
    return fits(reserved - row.non_torch_bytes, room + idle, MARGIN)


def _following(run: AdvisedRun, oom: OutOfMemory | None) -> AdvisedRun | None:
    """Return the run with the whole optimizer state beside each phase; None where it is not known.

    A failed optimizer step follows generation, forward and backward; one that fails later follows a whole step.
    """
    if oom is None or (state := _whole_state(run, oom)) is None:
        return None
    return replace(run, peaks=tuple(_to_come(peak, run, oom, state) for peak in run.peaks))


def _to_come(peak: PhaseMaximum, run: AdvisedRun, oom: OutOfMemory, state: int) -> PhaseMaximum:
    """Return a phase's peak with the whole state, the request that failed there, and a foreach step's scratch."""
    more = max(0, state - peak.of(Category.OPTIMIZER_STATE))
    request = oom.requested_bytes if peak.phase == oom.phase else 0
    scratch = 0
    if peak.phase == Phase.OPTIMIZER_STEP and run.settings is not None and optimizer(run.settings.optim).foreach:
        scratch = max(0, peak.of(Category.GRADIENTS) - peak.of(Category.TEMPORARIES))
    added = {Category.OPTIMIZER_STATE: more, Category.TEMPORARIES: scratch}
    categories = {**peak.categories, **{name: peak.of(name) + n for name, n in added.items()}}
    return PhaseMaximum(peak.phase, peak.bytes + more + max(scratch, request), categories)


def _whole_state(run: AdvisedRun, oom: OutOfMemory) -> int | None:
    """Return the bytes of the optimizer's whole state; None where the step was not seen whole before it failed."""
    held = (oom.categories or {}).get(Category.OPTIMIZER_STATE, 0)
    if run.whole_step:
        return max([held, *(peak.of(Category.OPTIMIZER_STATE) for peak in run.peaks)])
    if oom.phase != Phase.OPTIMIZER_STEP:
        return None
    ahead = known(oom.ahead)
    still = None if ahead is None else ahead.still.get(Category.OPTIMIZER_STATE)
    return None if run.settings is None and still is None else held + (still or 0)


def _room(oom: OutOfMemory | None) -> int | None:
    """Return what a program could have held: what it held and what was free, without the gaps between its blocks."""
    if oom is None or oom.allocated_bytes is None:
        return None
    free, limit = oom.device_free_bytes, known(oom.limit_bytes)
    if limit is not None:
        left = max(0, limit - (known(oom.reserved_bytes) or oom.allocated_bytes))
        free = left if free is None else min(free, left)
    elif oom.limited:
        free = 0
    return None if free is None else oom.allocated_bytes + free


def with_words(rows: Sequence[Advice], report: Report) -> list[Advice]:
    """Return the ranked rows, the first with ``enough_words``: whether it is enough alone, and with which other."""
    if not rows or report.oom is None:
        return list(rows)
    first, *others = rows
    if first.enough is True:
        words = f"That alone is sufficient: later allocations of the run are counted, {100 * MARGIN:.0f}% margin."
    elif first.enough is False:
        words = f"Not enough alone{_beside(first, others)}."
    else:
        words = "Whether that is enough alone is not known: the step was not recorded completely."
        words += f" {_simulating(report)}"
    return [msgspec.structs.replace(first, enough_words=words), *others]


def _simulating(report: Report) -> str:
    """Name what simulates the whole step, if that is possible; otherwise say why it is not."""
    from memprof.config.from_recording import settings_like  # here: only runs that ran out of memory need it

    try:
        settings_like(msgspec.to_builtins(report.source))
    except InputError as error:
        words = str(error)
        return f"{words[:1].upper()}{words[1:]}."
    return "`memprof advise` simulates the whole step."


def _beside(first: Advice, others: Sequence[Advice]) -> str:
    """Say what is enough together with the first change, as far as that was looked at."""
    if first.enough_with is None:  # simulations try changes one by one
        return ""
    other = next((row for row in others if row.id in first.enough_with), None)
    return f": also {other.action[:1].lower()}{other.action[1:]}" if other else ", nor with any one other"
