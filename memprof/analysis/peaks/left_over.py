"""Find what earlier passes left behind: blocks of a model's call that are still held while the next call runs.

An output, a loss or a tensor in a list stays as long as a Python name holds it: in a loop, until the next pass has made
its successor. A pass is a call of the outermost module from one place in the program. What autograd keeps for backward
dies there; a cache that the next call replaces dies inside that call; what a later pass makes no successor of is kept
on purpose. None of these is left over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from memprof.analysis.allocations.places import place_of, users_line
from memprof.report.allocations import Finding
from memprof.snapshot.model import I64, Action, distinct
from memprof.vocabulary import Category, Phase

if TYPE_CHECKING:
    from memprof.analysis.views import Views
    from memprof.timeline.timeline import Timeline

_PASSING = [c.code for c in (Category.ACTIVATIONS, Category.LOSS_LOGITS, Category.TEMPORARIES)]
# A dump without a history tells passes by numbers of blocks: three kinds of numbers, all multiples of at least three.
_FEWEST = 3
_CATEGORIES = list(Category)


def left_over(views: Views) -> Finding | None:
    """Return what earlier passes left at the peak as a finding (see :mod:`memprof.analysis.peaks.findings`)."""
    line = views.timeline
    trace = views.snapshot.traces.get(line.device)
    calls, pythons = views.outermost_calls
    if trace is None or line.n_events < 2:
        return _by_numbers(views, calls)
    rows, over, since = _rows(views, calls, pythons)
    if not len(rows):
        return None
    along, then = _freed_along(views, pythons, (rows, over, since))
    rows, over, since = np.r_[rows, along], np.r_[over, then], np.r_[since, then]
    at = views.peak.instant
    alive = (since < at) & (at <= line.free_event[rows])
    held = rows[alive]
    if not len(held):
        return None
    # Without the name each would go when its pass is over, not when the next begins.
    saves, passes = line.saved_without(rows, over), len(distinct(since[alive]))
    found = _found(views, held, int(line.size[held].sum()), saves, passes)
    return replace(found, holds_bytes=int(line.size[held[np.isin(held, along)]].sum()))


def _freed_along(views: Views, pythons: I64, left: tuple[I64, I64, I64]) -> tuple[I64, I64]:
    """Return older rows that the program frees in one burst with what is left over, and when the next pass begins.

    Each has a successor that was made between the two passes: it is what a graph holds, such as an input, and would be
    gone by then without the name.
    """
    line, trace = views.timeline, views.snapshot.traces[views.timeline.device]
    frees = np.isin(trace.action, (int(Action.FREE_REQUESTED), int(Action.FREE_COMPLETED)))
    place = np.where(frees, pythons[trace.stack], -1)
    # One number for each run of frees of one place; what is not freed has none.
    burst = np.r_[np.cumsum(np.r_[True, place[1:] != place[:-1]]), -1]
    burst = burst[np.minimum(line.release_event, len(trace))]
    of_left = {int(burst[row]): (row, end, begin) for row, end, begin in zip(*(c.tolist() for c in left), strict=True)}
    of_left.pop(-1, None)
    made = pythons[line.stack]
    found: list[tuple[int, int]] = []
    for row in np.setdiff1d(np.flatnonzero(np.isin(burst, list(of_left))), left[0]).tolist():
        of, end, begin = of_left[int(burst[row])]
        between = (line.alloc_event > end) & (line.alloc_event < begin) & (made == made[row])
        if 0 <= line.alloc_event[row] < line.alloc_event[of] and between.any():
            found.append((row, begin))
    return np.array([row for row, _ in found], np.int64), np.array([begin for _, begin in found], np.int64)


def pass_returned(views: Views) -> bool:
    """Tell whether a pass of the outermost module was seen to return: the program makes or frees something after it."""
    trace = views.snapshot.traces.get(views.timeline.device)
    if trace is None or not len(trace):
        return False
    bare = np.array([not stack for stack in views.snapshot.stacks.stacks], bool)
    acts = ((trace.action == int(Action.ALLOC)) | (trace.action == int(Action.FREE_REQUESTED))) & ~bare[trace.stack]
    call = views.outermost_calls[0][trace.stack[acts]]
    return bool((call >= 0).any() and (call[int(np.argmax(call >= 0)) :] != call[call >= 0][0]).any())


def _found(views: Views, rows: I64, held: int, saves: int, passes: int) -> Finding:
    line, category = views.timeline, views.attribution.category[rows]
    most = int(np.argmax(np.bincount(category, line.size[rows])))
    of_most = rows[category == most].tolist()
    trace = views.snapshot.traces.get(line.device)

    def held_at(row: int) -> str:
        freed, made = int(line.release_event[row]), users_line(views.stacks.of(int(line.stack[row])))
        # Where the name lets go of it, a program holds it; frees may have no stack.
        known = trace is not None and freed < len(trace)
        return (users_line(views.stacks.of(int(trace.stack[freed]))) if known and trace is not None else "") or made

    return Finding(
        kind="left_over",
        category=_CATEGORIES[most],
        bytes=held,
        count=len(rows),
        saves_bytes=max(0, saves),
        frame=_most(line, of_most, lambda row: place_of(views.stacks.of(int(line.stack[row])))),
        held_at=_most(line, of_most, held_at),
        passes=passes,
    )


def _most(line: Timeline, rows: list[int], frame_of: Callable[[int], str]) -> str:
    """Return the frame that most bytes of the rows have."""
    sums: dict[str, int] = {}
    for row in rows:
        frame = frame_of(row)
        sums[frame] = sums.get(frame, 0) + int(line.size[row])
    return max(sums, key=lambda frame: sums[frame])


@dataclass(frozen=True)
class _Passes:
    """Hold the passes of every call, in order of time: ``begin`` and ``end`` are their first and last births.

    ``following`` is the next pass of the same call that begins with the same stack, -1 where there is none.
    """

    of_event: I64
    begin: I64
    end: I64
    following: I64


def _passes(views: Views, calls: I64, pythons: I64) -> _Passes:
    trace = views.snapshot.traces[views.timeline.device]
    bare = np.array([not stack for stack in views.snapshot.stacks.stacks], bool)
    # A free may complete much later, under the stack of the block's birth; autograd's births may have no stack.
    born = trace.action == int(Action.ALLOC)
    acting = np.flatnonzero(born | ((trace.action == int(Action.FREE_REQUESTED)) & ~bare[trace.stack]))
    call = calls[trace.stack[acting]]
    number = np.cumsum(np.r_[True, call[1:] != call[:-1]]) - 1 if len(call) else np.zeros(0, np.int64)
    of_event = np.full(len(trace), -1, np.int64)
    births = born[acting] & (call >= 0)
    kept, inverse = np.unique(number[births], return_inverse=True)
    of_event[acting[births]] = inverse.reshape(-1)
    events = acting[births]
    first = np.searchsorted(of_event[events], np.arange(len(kept)))
    last = np.searchsorted(of_event[events], np.arange(len(kept)), side="right") - 1
    following = np.full(len(kept), -1, np.int64)
    before: dict[tuple[int, int], int] = {}
    for i, stack in enumerate(trace.stack[events[first]].tolist()):
        key = (int(calls[stack]), int(pythons[stack]))
        if key in before:
            following[before[key]] = i
        before[key] = i
    return _Passes(of_event, events[first], events[last], following)


def _rows(views: Views, calls: I64, pythons: I64) -> tuple[I64, I64, I64]:
    """Return the rows that outlive their pass for no reason, the events at which it ends and the next begins."""
    line, found = views.timeline, views.attribution
    passes = _passes(views, calls, pythons)
    rows = np.flatnonzero((line.alloc_event >= 0) & np.isin(found.category, _PASSING))
    own = passes.of_event[line.alloc_event[rows]]
    rows, own = rows[own >= 0], own[own >= 0]
    rows, own = rows[passes.following[own] >= 0], own[passes.following[own] >= 0]
    after = passes.following[own]
    # A successor: the next pass makes a block at the same stack, and the first is freed later than all that pass makes.
    born = np.flatnonzero(line.alloc_event >= 0)
    made = passes.of_event[line.alloc_event[born]] * (int(pythons.max(initial=0)) + 1) + pythons[line.stack[born]]
    replaced = np.isin(after * (int(pythons.max(initial=0)) + 1) + pythons[line.stack[rows]], made)
    keep = replaced & (line.free_event[rows] > passes.end[after])
    rows, own, after = rows[keep], own[keep], after[keep]
    died = np.minimum(line.free_event[rows], max(line.n_events - 1, 0))
    freed = line.free_event[rows] < line.n_events
    backward = found.track.phase == Phase.BACKWARD.code
    in_backward = freed & backward[died]
    twice = passes.following[after]
    again = (twice >= 0) & (line.free_event[rows] > passes.end[twice])
    # What the next pass reads is made between the two; without that the block itself may be its input.
    fresh = _made_between(line.alloc_event[born], line.free_event[born], passes.end[own], passes.begin[after])
    trained = np.r_[0, np.cumsum(backward)]
    over = trained[passes.begin[after]] > trained[passes.end[own]]
    alike = distinct(pythons[line.stack[rows[freed & ~in_backward]]])
    known = freed | over | again | np.isin(pythons[line.stack[rows]], alike)
    chosen = ~in_backward & known & (fresh | again)
    return rows[chosen], passes.end[own[chosen]] + 1, passes.begin[after[chosen]]


def _made_between(births: I64, deaths: I64, ends: I64, begins: I64) -> NDArray[np.bool_]:
    """Tell for each end of a pass and begin of another whether some block is made between and alive at the second."""
    order = np.argsort(births, kind="stable")
    births, deaths = births[order], deaths[order]
    pairs, which = np.unique(np.stack([ends, begins]), axis=1, return_inverse=True)
    bounds = np.searchsorted(births, pairs + np.array([[1], [0]]))
    found = [deaths[a:b].max(initial=-1) > begin for a, b, begin in zip(*bounds.tolist(), pairs[1], strict=True)]
    return np.array(found, bool)[which.reshape(-1)]


def _by_numbers(views: Views, calls: NDArray[np.int64]) -> Finding | None:
    """Tell passes in a dump by how many equal blocks each stack holds.

    Layers alone would give one number for all, and what a pass makes once would stand among them.
    """
    line, found = views.timeline, views.attribution
    rows = views.peak.rows
    rows = rows[np.isin(found.category[rows], _PASSING) & (calls[line.stack[rows]] >= 0)]
    of_call = calls[line.stack[rows]]
    for call in np.unique(of_call).tolist():
        mine = rows[of_call == call]
        kinds = np.stack([line.stack[mine].astype(np.int64), line.requested[mine]])
        counts = np.unique(kinds, axis=1, return_counts=True)[1]
        passes = int(np.gcd.reduce(counts))
        if passes >= _FEWEST and len(np.unique(counts)) >= _FEWEST:
            held = int(line.size[mine].sum()) * (passes - 1) // passes
            return _found(views, mine, held, held, passes)
    return None
