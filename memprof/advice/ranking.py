"""Put the entries of advice in order, and promise which is enough alone after memory ran out.

Enough is promised only where all that the run still makes is counted: every phase that was seen, the whole optimizer
state beside each of them (from the second step on it is there in generation, forward and backward too), the request
that failed, the free parts between blocks as they were, and a margin. A failed optimizer step follows all other phases,
and a later step follows a whole one; for a run that fails sooner nothing is promised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from memprof.advice.recorded_run import Effect, Peak, Run
from memprof.config.fits import fits
from memprof.config.optimizers import optimizer

#: The share of torch's room kept free: lengths, blocks and their gaps vary from step to step.
MARGIN = 0.1
# A change that keeps the gradients goes first if it saves at least this share of what the best one saves.
_NEAR = 0.4
# One that costs nothing either, from this share on.
_FREE = 0.2
# Of those that save at least this share of the best of them, the one that asks for least goes first.
_ALIKE = 0.75


def ranked(entries: Sequence[dict[str, Any]], report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Order a report's ``advice``: row 1 is the first thing to change, the others follow by what they save.

    Where memory ran out, the first is the change that asks for least among those that are enough for the whole step.
    Elsewhere it keeps the gradients and asks for least among those that save nearly most; where all that saves much
    changes the training, it changes it least.
    """
    rows = sorted(entries, key=lambda row: (-row["saves_bytes"], row.get("toll") or 0))
    if not rows:
        return []
    first = _after_failure(rows, report["oom"]) if report.get("oom") else None
    first = first or _in_general(rows)
    return [first, *(row for row in rows if row is not first)]


def _after_failure(rows: Sequence[dict[str, Any]], oom: Mapping[str, Any]) -> dict[str, Any] | None:
    """Choose a change that suffices alone, or None. Freeing idle memory suffices only where that was the trouble."""
    short = int((oom.get("ahead") or {}).get("short_bytes") or 0)
    if oom.get("fits_defragmented") and not short:
        gaps = [row for row in rows if row.get("peak") == "device" and row.get("enough") is not False]
        if gaps:
            return min(gaps, key=_toll)
    missing = max(short, int(oom["requested_bytes"] or 0) - int(oom["device_free_bytes"] or 0))
    open_ = [row for row in rows if row.get("peak") != "device"]
    promised = [row for row in open_ if row.get("enough")]
    enough = promised or [row for row in open_ if row["saves_bytes"] >= missing > 0]
    return min(enough, key=lambda row: (_toll(row), row["saves_bytes"]), default=None)


def _in_general(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    open_ = [row for row in rows if row.get("peak") != "device"] or list(rows)
    best = max(row["saves_bytes"] for row in open_)
    kept = [r for r in open_ if r["exact"] and r["saves_bytes"] >= (_NEAR if _toll(r) else _FREE) * best]
    if not kept:  # every one changes the training: begin with the one that changes it least
        return min((r for r in open_ if r["saves_bytes"] >= _NEAR * best), key=lambda r: (_toll(r), -r["saves_bytes"]))
    most = max(row["saves_bytes"] for row in kept)
    near = [row for row in kept if row["saves_bytes"] >= _ALIKE * most]
    return min(near, key=lambda row: (_toll(row), -row["saves_bytes"]))


def _toll(row: Mapping[str, Any]) -> int:
    return int(row.get("toll") or 0)


def is_enough(effect: Effect, run: Run, oom: Mapping[str, Any] | None) -> bool | None:
    """Tell whether a run with a change gets through every step; None where what it still makes is not known."""
    following, room = _following(run, oom), _room(oom)
    if following is None or room is None:
        return None
    return fits(following.after(effect).bytes, room, MARGIN)


def enough_together(first: Effect, second: Effect, run: Run, oom: Mapping[str, Any] | None) -> bool | None:
    """Tell the same of two changes; of a category both lower, only the larger saving counts."""

    def both(run: Run, peak: Peak) -> Mapping[str, int]:
        one, other = first(run, peak), second(run, peak)
        return {category: max(one.get(category, 0), other.get(category, 0)) for category in {**one, **other}}

    return is_enough(both, run, oom)


def simulated_is_enough(row: Mapping[str, Any], oom: Mapping[str, Any] | None) -> bool | None:
    """Tell whether a simulated run, which executes all phases with the state of a step before, would have had room."""
    if not oom or (room := _room(oom)) is None:
        return None
    reserved = row.get("device_peak_bytes")
    if reserved is None or not oom.get("reserved_bytes"):
        return fits(int(row["peak_bytes"]), room, MARGIN)
    idle = max(0, int(oom["reserved_bytes"]) - int(oom["allocated_bytes"]))
    outside = int((row.get("verdict") or {}).get("non_torch_bytes", 0))
    return fits(reserved - outside, room + idle, MARGIN)


def _following(run: Run, oom: Mapping[str, Any] | None) -> Run | None:
    """Return the run with the whole optimizer state beside each phase; None where it is not known.

    A failed optimizer step follows generation, forward and backward; one that fails later follows a whole step.
    """
    if not oom or (state := _whole_state(run, oom)) is None:
        return None
    return replace(run, peaks=tuple(_to_come(peak, run, oom, state) for peak in run.peaks))


def _to_come(peak: Peak, run: Run, oom: Mapping[str, Any], state: int) -> Peak:
    """Return a phase's peak with the whole state, the request that failed there, and a foreach step's scratch."""
    more = max(0, state - peak.of("optimizer_state"))
    request = int(oom.get("requested_bytes") or 0) if peak.phase == oom.get("phase") else 0
    scratch = 0
    if peak.phase == "optimizer_step" and run.settings is not None and optimizer(run.settings.optim).foreach:
        scratch = max(0, peak.of("gradients") - peak.of("temporaries"))
    added = {"optimizer_state": more, "temporaries": scratch}
    categories = {**peak.categories, **{name: peak.of(name) + n for name, n in added.items()}}
    return Peak(peak.phase, peak.bytes + more + max(scratch, request), categories)


def _whole_state(run: Run, oom: Mapping[str, Any]) -> int | None:
    """Return the bytes of the optimizer's whole state; None where the step was not seen whole before it failed."""
    held = int((oom.get("categories") or {}).get("optimizer_state", 0))
    if run.whole_step:
        return max([held, *(peak.of("optimizer_state") for peak in run.peaks)])
    still = (oom.get("ahead") or {}).get("still", {})
    known = run.settings is not None or "optimizer_state" in still
    return held + int(still.get("optimizer_state", 0)) if known and oom.get("phase") == "optimizer_step" else None


def _room(oom: Mapping[str, Any] | None) -> int | None:
    """Return what a program could have held: what it held and what was free, without the gaps between its blocks."""
    if not oom or oom.get("allocated_bytes") is None:
        return None
    free, limit = oom.get("device_free_bytes"), oom.get("limit_bytes")
    if limit is not None:
        left = max(0, int(limit) - int(oom.get("reserved_bytes") or oom["allocated_bytes"]))
        free = left if free is None else min(int(free), left)
    elif oom.get("limited"):
        free = 0
    return None if free is None else int(oom["allocated_bytes"]) + int(free)


def with_words(rows: Sequence[dict[str, Any]], report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the ranked rows, the first with ``enough_words``: whether it is enough alone, and with which other."""
    if not rows or not report.get("oom"):
        return list(rows)
    first = dict(rows[0])
    if first.get("enough"):
        words = f"That is enough alone: all the run still makes is counted, {100 * MARGIN:.0f} % kept."
    elif first.get("enough") is None:
        words = "Whether that is enough alone is not known: the step was not seen whole. "
        words += "`memprof advise` simulates the whole step."
    else:
        words = f"Not enough alone{_beside(first, rows[1:])}."
    return [{**first, "enough_words": words}, *rows[1:]]


def _beside(first: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    """Say what is enough together with the first change, as far as that was looked at."""
    if "enough_with" not in first:  # simulations try changes one by one
        return ""
    other = next((row for row in others if row["id"] in first["enough_with"]), None)
    return f": also {other['action'][:1].lower()}{other['action'][1:]}" if other else ", nor with any one other"
