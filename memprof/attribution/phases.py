"""Find the phase at every event.

Recorded marks decide first, then per-allocation tags. In a snapshot without either, stacks decide. Inferred
phases change at allocations only. A free belongs to the phase that runs when it happens, whatever function
its object dies in, so every phase's peak was reached by the phase itself.

An allocation without Python frames comes from a thread without any. Inside training that is the autograd
engine's thread, so after a forward it starts ``backward``. Elsewhere it belongs to the phase around it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memprof.attribution.call_sites import PASS, RUN, Codes, resolve_passes, resolve_runs
from memprof.attribution.result import PhaseSpan, PhaseTrack
from memprof.attribution.stack_index import StackIndex, named_frame
from memprof.attribution.tags import TagColumns
from memprof.snapshot.model import Action, Snapshot, Trace, distinct, is_among
from memprof.snapshot.recorded_run import PhaseMark
from memprof.timeline.timeline import Timeline
from memprof.vocabulary import Phase

_CODES = {p.value: p.code for p in Phase}
_OTHER, _LOAD, _FORWARD, _BACKWARD = (_CODES[n] for n in ("other", "load", "forward", "backward"))
_OLD, _REFERENCE = Phase.OLD_LOGPROBS.code, Phase.REFERENCE_LOGPROBS.code
_OPTIMIZER, _GENERATE = Phase.OPTIMIZER_STEP.code, Phase.GENERATE.code
_SILENT = -1  # no Python frame: the allocations around it decide
_GRADIENT_BYTES = 1 << 16  # smaller blocks that reach a step may be inputs
_STRAY = 4  # fewer allocations without frames than this, in the middle of a forward, are no backward


def phase_track(snapshot: Snapshot, timeline: Timeline, stacks: StackIndex, tags: TagColumns) -> PhaseTrack:
    """Return the phase and step at every event of the timeline's device."""
    trace = snapshot.traces.get(timeline.device)
    n = timeline.n_events
    within = np.zeros(n, np.int64)
    if snapshot.run.phases:
        phase, step, within, names = _from_marks(snapshot.run.phases, timeline, snapshot)
        source = "marks"
    else:
        names = ["", "evaluate"]
        phase, source = _from_stacks(snapshot, timeline, stacks, tags, trace)
        step = _tagged_steps(trace, tags) if trace is not None and np.any(tags.step >= 0) else _count_steps(phase)
        if trace is not None and source != "none":
            evaluation = next((r.frames for r in stacks.rules.phases if r.phase == "evaluate" and r.frames), ())
            within = (stacks.count(evaluation) > 0)[trace.stack].astype(np.int64)
            within[phase == _CODES["evaluate"]] = 0
    spans = _spans(phase, step, within, names, timeline)
    return PhaseTrack(phase.astype(np.uint8), step.astype(np.int32), spans, source)


# ------------------------------------------------------------------------------------ recorded marks


def _from_marks(
    marks: Sequence[PhaseMark], timeline: Timeline, snapshot: Snapshot
) -> tuple[Codes, Codes, Codes, list[str]]:
    """Give each event the phase of the mark that contains its time; of several, the one that started last."""
    n = timeline.n_events
    phase, step, within = np.full(n, _OTHER), np.full(n, -1), np.zeros(n, np.int64)
    names = [""]
    for entry in snapshot.run.steps:
        first = int(np.searchsorted(timeline.event_us, entry.start_us))
        last = int(np.searchsorted(timeline.event_us, entry.end_us, "right"))
        step[first:last] = entry.step
    for mark in sorted(marks, key=lambda mark: mark.start_us):
        first = int(np.searchsorted(timeline.event_us, mark.start_us))
        end = mark.end_us
        last = n if end is None else int(np.searchsorted(timeline.event_us, end, "right"))
        phase[first:last] = mark.phase.code
        if mark.step is not None:
            step[first:last] = mark.step
        name = mark.within or ""
        if name not in names:
            names.append(name)
        within[first:last] = names.index(name)
    return phase, step, within, names


# -------------------------------------------------------------------------------------- from stacks


def _from_stacks(
    snapshot: Snapshot, timeline: Timeline, stacks: StackIndex, tags: TagColumns, trace: Trace | None
) -> tuple[Codes, str]:
    n = timeline.n_events
    if trace is None or not n:
        return np.full(n, _OTHER), "none"
    is_birth = trace.action == Action.ALLOC
    births = np.flatnonzero(is_birth)
    if not len(births):
        return np.full(n, _OTHER), "none"
    code = _said(stacks)[trace.stack[births]]
    if np.any(tags.phase >= 0):
        tagged = tags.phase[trace.metadata[births]]
        code = np.where(tagged >= 0, tagged, code)
    steps = _annotated_steps(snapshot, timeline)
    code = _annotated(code, births, steps, timeline)
    if (code == _SILENT).all():
        return np.full(n, _OTHER), "none"
    if np.isin(code, (_SILENT, _OPTIMIZER)).all() and not stacks.has_python[trace.stack[births]].any():
        code = _around_steps(code, births, steps, timeline)
    code = _fill_silent(code)
    code = resolve_passes(code, births, trace, stacks, timeline)
    code = resolve_runs(code, births, trace, stacks, timeline)
    code = _own_steps(code, births, trace, stacks, timeline)
    # Each event takes the phase of the last allocation before it; events before the first take the first's.
    return code[np.maximum(np.cumsum(is_birth) - 1, 0)], "stacks"


def _said(stacks: StackIndex) -> Codes:
    """Return for each stack a phase code, OTHER, or one of the two open answers (PASS, RUN)."""
    rule = stacks.phase_rule()
    last = max((r.rank for r in stacks.rules.phases), default=0)
    codes = np.array(
        [RUN if r.rank == last > 0 else _CODES.get(r.phase, PASS) for r in stacks.rules.phases] + [_OTHER], np.int64
    )
    said = codes[rule]
    said[(rule < 0) & ~stacks.has_python] = _SILENT
    return said


def _annotated_steps(snapshot: Snapshot, timeline: Timeline) -> list[tuple[int, int]]:
    """Return the start and end time of each annotated optimizer step."""
    starts: list[int] = []
    found = []
    for note in snapshot.annotations:
        if not note.name.startswith("Optimizer.step#") or note.device not in (timeline.device, -1, None):
            continue
        if note.stage == "START":
            starts.append(note.time_us)
        elif note.stage == "END" and starts:
            found.append((starts.pop(), note.time_us))
    return found


def _annotated(code: Codes, births: Codes, steps: Sequence[tuple[int, int]], timeline: Timeline) -> Codes:
    """Place allocations whose stacks show no phase by ``Optimizer.step#...`` annotations."""
    code = code.copy()
    times = timeline.event_us[births]
    for start, end in steps:
        here = code[np.searchsorted(times, start) : np.searchsorted(times, end, side="right")]
        here[(here == _SILENT) | (here == _OTHER)] = _OPTIMIZER
    return code


def _around_steps(code: Codes, births: Codes, steps: Sequence[tuple[int, int]], timeline: Timeline) -> Codes:
    """Find forward and backward between annotated optimizer steps by lifetimes, where no stack was recorded.

    What is made first and lives to the end is the model. A forward makes what dies before the step; the first block
    that reaches the step is a gradient, and in front of it stands the gradient of the forward's last output.
    """
    code = code.copy()
    row_of_event = np.full(timeline.n_events, -1, np.int64)
    born = timeline.alloc_event >= 0
    row_of_event[timeline.alloc_event[born]] = np.flatnonzero(born)
    rows = row_of_event[births]
    death, size = timeline.free_event[rows], timeline.requested[rows]
    times = timeline.event_us[births]
    first = 0
    for number, (start, end) in enumerate([*sorted(steps), (np.iinfo(np.int64).max, 0)]):
        last = int(np.searchsorted(times, start))
        if number == 0:
            ends = np.flatnonzero(death[first:last] < timeline.n_events)
            code[first : first + (int(ends[0]) if len(ends) else 0)] = _OTHER
            first += int(ends[0]) if len(ends) else 0
        step_event = int(np.searchsorted(timeline.event_us, start))
        reaching = np.flatnonzero((death[first:last] >= step_event) & (size[first:last] >= _GRADIENT_BYTES))
        turn = first + int(reaching[0]) if len(reaching) else last
        while turn - 1 > first and size[turn - 1] == size[turn - 2]:
            turn -= 1
        code[first:turn], code[turn:last] = _FORWARD, _BACKWARD
        first = int(np.searchsorted(times, end, side="right"))
    return code


def _fill_silent(code: Codes) -> Codes:
    """Give allocations without frames the phase around them; after a forward they are its backward."""
    silent = code == _SILENT
    if not silent.any():
        return code
    n = len(code)
    position = np.arange(n)
    before = np.maximum.accumulate(np.where(silent, -1, position))
    after = np.minimum.accumulate(np.where(silent, n, position)[::-1])[::-1]
    length = after - before - 1
    previous = np.where(before >= 0, code[before], _OTHER)
    following = np.where(after < n, code[np.minimum(after, n - 1)], _OTHER)
    # After "other" (a scalar, a log line) the phase before it counts.
    solid = np.maximum.accumulate(np.where(silent | (code == _OTHER), -1, position))
    context = np.where(solid >= 0, code[solid], _OTHER)
    answer = np.where(previous == _OTHER, context, previous)
    trains = np.isin(answer, (_FORWARD, PASS, RUN))
    stray = (length < _STRAY) & (following == answer)
    answer = np.where(trains & ~stray, _BACKWARD, answer)
    # A history that begins without frames begins in a backward, if a step follows.
    ahead = code[~silent & (code != _OTHER)]
    if len(ahead) and ahead[0] in (_BACKWARD, _OPTIMIZER):
        answer = np.where(before < 0, _BACKWARD, answer)
    return np.where(silent, answer, code)


def _own_steps(code: Codes, births: Codes, trace: Trace, stacks: StackIndex, timeline: Timeline) -> Codes:
    """Find the steps of a loop's own optimizer, where no name shows a step.

    Its lines allocate only between a backward and the next pass, mostly blocks of the gradients' sizes.
    """
    if (code == _OPTIMIZER).any() or not (code == _BACKWARD).any() or not (code == _OTHER).any():
        return code
    position = np.arange(len(code))
    solid = np.maximum.accumulate(np.where(code == _OTHER, -1, position))
    after_backward = (code == _OTHER) & (solid >= 0) & (code[np.maximum(solid, 0)] == _BACKWARD)
    sizes = trace.size[births]
    like_gradient = is_among(sizes, _gradient_sizes(code, births, timeline))
    line = named_frame(stacks)[trace.stack[births]]
    out: Codes = code.copy()
    for frame in distinct(line[after_backward & like_gradient & (line >= 0)]):
        mine = line == frame
        if after_backward[mine].all() and sizes[mine & like_gradient].sum() > 0.5 * sizes[mine].sum():
            out[mine] = _OPTIMIZER
    # Between two such lines of one step lie its scalars.
    found = np.where(out == _OPTIMIZER, position, -1)
    before = np.maximum.accumulate(found)
    after = np.minimum.accumulate(np.where(found < 0, len(code), found)[::-1])[::-1]
    between = after_backward & (before > solid) & (after < len(code))
    between &= solid[np.minimum(after, len(code) - 1)] == solid
    out[between] = _OPTIMIZER
    return out


def _gradient_sizes(code: Codes, births: Codes, timeline: Timeline) -> Codes:
    """Return the sizes of what backwards leave behind."""
    row_of_event = np.full(timeline.n_events, -1, np.int64)
    born = timeline.alloc_event >= 0
    row_of_event[timeline.alloc_event[born]] = np.flatnonzero(born)
    backward = np.flatnonzero(code == _BACKWARD)
    last = backward[np.flatnonzero(np.diff(backward, append=len(code) + 1) > 1)]
    ends = last[np.searchsorted(last, backward)]
    following = births[np.minimum(ends + 1, len(births) - 1)]
    rows = row_of_event[births[backward]]
    kept = (rows >= 0) & (timeline.free_event[rows] > following) & (ends + 1 < len(births))
    return distinct(timeline.requested[rows[kept]])


# ------------------------------------------------------------------------------------ steps and spans


def _tagged_steps(trace: Trace, tags: TagColumns) -> Codes:
    step = tags.step[trace.metadata]
    last = np.maximum.accumulate(np.where(step >= 0, np.arange(len(step)), -1))
    return np.where(last >= 0, step[last], -1)


def _count_steps(phase: Codes) -> Codes:
    """Count steps from 1: a new one begins where work resumes after an optimizer step; loading has none."""
    if not len(phase):
        return phase
    starts = np.flatnonzero(np.diff(phase, prepend=-1))
    runs = phase[starts]
    context = np.maximum.accumulate(np.where(runs == _OTHER, -1, np.arange(len(runs))))
    settled = np.where(context >= 0, runs[context], _OTHER)
    previous = np.r_[_OTHER, settled[:-1]]
    fresh = (previous == _OPTIMIZER) & np.isin(settled, [_GENERATE, _FORWARD, _OLD, _REFERENCE])
    step = 1 + np.cumsum(fresh)
    started = np.maximum.accumulate(~np.isin(settled, [_LOAD, _OTHER]))
    return np.repeat(np.where(started, step, -1), np.diff(starts, append=len(phase)))


def _spans(phase: Codes, step: Codes, within: Codes, names: list[str], timeline: Timeline) -> list[PhaseSpan]:
    n = timeline.n_events
    if not n:
        return []
    change = (phase[1:] != phase[:-1]) | (step[1:] != step[:-1]) | (within[1:] != within[:-1])
    starts = np.r_[0, np.flatnonzero(change) + 1]
    ends = np.r_[starts[1:], n]
    ids = [p.value for p in Phase]
    return [
        PhaseSpan(
            ids[int(phase[a])], int(step[a]) if step[a] >= 0 else None, int(a), int(b),
            int(timeline.event_us[a]), int(timeline.event_us[b - 1]), names[int(within[a])] or None,
        )
        for a, b in zip(starts, ends, strict=True)
    ]  # fmt: skip
