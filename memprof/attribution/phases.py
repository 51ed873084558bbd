"""The phase at every event.

Recorded marks decide where there are any, then per-allocation tags; a snapshot without them is read
from its stacks. Inferred phases change at allocations only: a free belongs to the phase that runs when
it happens, whatever function its object dies in, so a phase's peak is always one that it reached itself.

An allocation without Python frames comes from a thread that has none: inside training that is the
autograd engine's, so after a forward it opens ``backward``; elsewhere it belongs to what surrounds it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memprof.attribution.result import PhaseSpan, PhaseTrack
from memprof.attribution.rules import LOGPROBS
from memprof.attribution.stack_index import StackIndex
from memprof.attribution.tags import Tags
from memprof.snapshot.model import Action, Snapshot, Trace
from memprof.timeline.timeline import Timeline
from memprof.vocabulary import Phase

__all__ = [
    "PASS",
    "RUN",
    "phase_track",
    "resolve_passes",
    "resolve_runs",
]

PASS = -2  # a log-prob pass: its call site decides
RUN = -3  # a model runs, nothing says what for: its call site decides
_CODES = {p.value: p.code for p in Phase}
_OTHER, _LOAD, _FORWARD, _BACKWARD = (_CODES[n] for n in ("other", "load", "forward", "backward"))
_OLD, _REFERENCE = Phase.OLD_LOGPROBS.code, Phase.REFERENCE_LOGPROBS.code
_OPTIMIZER, _GENERATE = Phase.OPTIMIZER_STEP.code, Phase.GENERATE.code
_DECODES = 5  # calls in a row without a backward, on inputs this much shorter than the longest (a prompt's)
_PREFILL = 4
_PARAMETER_BYTES = 4096  # smaller blocks are no evidence of a second copy of a model

Codes = NDArray[np.int64]


def resolve_passes(code: Codes, births: Codes, trace: Trace, stacks: StackIndex, timeline: Timeline) -> Codes:
    """Old, reference or policy: a pass is known by its call site.

    A site whose passes run straight into a backward is the training forward. Of the others the first
    in a cycle is the old policy and the second the reference; a lone one is the reference if the adapters
    are switched off in it or a second copy of the trained parameters is in memory, else the old policy.
    """
    passes = code == PASS
    if not passes.any():
        return code
    patterns = tuple(p for r in stacks.rules.phases if r.phase == LOGPROBS for p in r.frames)
    site = stacks.call_site(patterns)[trace.stack[births]]
    return _settle(code, passes, site, births, trace, stacks, timeline)


def resolve_runs(code: Codes, births: Codes, trace: Trace, stacks: StackIndex, timeline: Timeline) -> Codes:
    """A model called by code that no name explains: training, unless other call sites are what trains.

    In a loop that generates and whose log-prob passes have no names, call sites tell as for named passes. What
    follows such a run outside every phase (the loss in a training script's main) belongs to it.
    """
    runs = code == RUN
    if not runs.any():
        return code
    of_stack, callers = stacks.caller_path(stacks.rules.frames.sets.get("module", ()))
    site = of_stack[trace.stack[births]]
    code = _find_decoding(code, runs, site, births, trace, stacks, callers)
    runs = code == RUN
    trained, order = _sites(code, site, runs)
    named = np.isin(code, (_OLD, _REFERENCE)).any()
    if trained and len(order) > len(trained) and not named and (code == _GENERATE).any():
        out = _settle(code, runs, site, births, trace, stacks, timeline)
    else:
        out = np.where(runs, _FORWARD, code)
    position = np.arange(len(code))
    solid = np.maximum.accumulate(np.where(code == _OTHER, -1, position))
    adopted = (code == _OTHER) & (solid >= 0) & runs[np.maximum(solid, 0)]
    return np.where(adopted, out[np.maximum(solid, 0)], out)


def _find_decoding(
    code: Codes,
    runs: NDArray[np.bool_],
    site: Codes,
    births: Codes,
    trace: Trace,
    stacks: StackIndex,
    callers: list[str],
) -> Codes:
    """Generation without a name: one call site runs the model again and again, on inputs far shorter than others.

    All that its function allocates outside the model belongs to it too: caches made up front, sampling.
    """
    if (code == _GENERATE).any():
        return code
    out: Codes = code.copy()
    backwards = np.cumsum(np.diff(code == _BACKWARD, prepend=False) & (code == _BACKWARD))
    calls = {}
    for where in np.unique(site[runs & (site >= 0)]):
        mine = np.flatnonzero(runs & (site == where))
        # The first stack to allocate (the embedding) does so once a call.
        calls[where] = mine[trace.stack[births[mine]] == trace.stack[births[mine[0]]]]
    longest = max((trace.size[births[c]].max() for c in calls.values()), default=0)
    for where, mine in calls.items():
        in_a_row = np.unique(backwards[mine], return_counts=True)[1].max()
        if in_a_row < _DECODES or longest < _PREFILL * np.median(trace.size[births[mine]]):
            continue
        mine = np.flatnonzero(runs & (site == where))
        own = stacks.with_function(callers[int(where)])[trace.stack[births]]
        out[mine] = _GENERATE
        out[own & np.isin(code, (_OTHER, RUN))] = _GENERATE
    return out


def _settle(
    code: Codes,
    passes: NDArray[np.bool_],
    site: Codes,
    births: Codes,
    trace: Trace,
    stacks: StackIndex,
    timeline: Timeline,
) -> Codes:
    """Give each call site of ``passes`` its phase."""
    trained, order = _sites(code, site, passes)
    answer = dict.fromkeys(trained, _FORWARD)
    free = [s for s in order if s not in answer]
    if len(free) >= 2:
        answer[free[0]] = _OLD
        answer.update(dict.fromkeys(free[1:], _REFERENCE))
    elif free:
        mine = passes & (site == free[0])
        reference = _adapters_off(mine, code, births, trace, stacks)
        if reference is None:
            reference = _copies_of_trained(code, births, timeline, int(np.flatnonzero(mine)[0])) >= 2
        answer[free[0]] = _REFERENCE if reference else _OLD
    out: Codes = code.copy()
    for where, phase in answer.items():
        out[passes & (site == where)] = phase
    return out


def _sites(code: Codes, site: Codes, passes: NDArray[np.bool_]) -> tuple[list[int], list[int]]:
    """Call sites whose passes lead into a backward, and all sites in order of appearance."""
    solid = np.flatnonzero(code != _OTHER)
    key = np.where(passes, site, -10 - code)[solid]
    edges = np.flatnonzero(np.r_[True, key[1:] != key[:-1]])
    into_backward: Counter[int] = Counter()
    total: Counter[int] = Counter()
    for i, edge in enumerate(edges):
        if key[edge] < -1 or not passes[solid[edge]]:
            continue
        where = int(key[edge])
        total[where] += 1
        if i + 1 < len(edges) and key[edges[i + 1]] == -10 - _BACKWARD:
            into_backward[where] += 1
    return [s for s in total if into_backward[s] * 2 > total[s]], list(total)


def _adapters_off(mine: NDArray[np.bool_], code: Codes, births: Codes, trace: Trace, stacks: StackIndex) -> bool | None:
    """Whether the pass goes through other lines of the adapter layers than training does; None without any."""
    adapter = stacks.frames_matching(("peft/tuners/*:forward",))

    def lines(rows: NDArray[np.bool_]) -> set[int]:
        used = np.unique(trace.stack[births[rows]])
        return {f for s in used for f in stacks.table.stacks[int(s)] if adapter[f]}

    training = lines(code == _FORWARD)
    if not training:
        return None
    return not (training & lines(mine)) or len(lines(mine)) < len(training)


def _copies_of_trained(code: Codes, births: Codes, timeline: Timeline, at: int) -> int:
    """How many times the multiset of gradients is in memory when birth number ``at`` happens.

    Optimizer state that existed before recording began would look like two more copies: state born
    in the trace is counted out by taking what is alive at that moment.
    """
    row_of_event = np.full(timeline.n_events, -1, np.int64)
    born = timeline.alloc_event >= 0
    row_of_event[timeline.alloc_event[born]] = np.flatnonzero(born)
    backward = np.flatnonzero(code == _BACKWARD)
    if not len(backward):
        return 0
    # The first unbroken backward: what outlives it is a gradient.
    breaks = np.flatnonzero(np.diff(backward) > 1)
    run = backward[: breaks[0] + 1] if len(breaks) else backward
    rows = row_of_event[births[run]]
    end = births[run[-1]]
    kept = rows[(rows >= 0) & (timeline.free_event[rows] > end + 1)]
    kept = kept[timeline.requested[kept] >= _PARAMETER_BYTES]
    if not len(kept):
        return 0
    alive = timeline.alive_at(int(births[at]))
    sizes, trained = np.unique(timeline.requested[kept], return_counts=True)
    have = Counter(timeline.requested[alive].tolist())
    weight = sizes * trained
    copies = np.array([have[int(s)] / c for s, c in zip(sizes, trained, strict=True)])
    order = np.argsort(copies)
    middle = np.searchsorted(np.cumsum(weight[order]), weight.sum() / 2)
    found = int(copies[order][middle])
    return found if found < 3 or not _state_is_older(code) else found - 2


def _state_is_older(code: Codes) -> bool:
    """Whether optimizer state was there before the trace: no step in it precedes the first forward."""
    steps, forwards = np.flatnonzero(code == _OPTIMIZER), np.flatnonzero(code == _FORWARD)
    return not len(steps) or not len(forwards) or steps[0] > forwards[0]


_SILENT = -1  # no Python frame: the surroundings decide
_STRAY = 4  # this many frameless allocations in the middle of a forward are no backward



def phase_track(snapshot: Snapshot, timeline: Timeline, stacks: StackIndex, tags: Tags) -> PhaseTrack:
    """The phase and step at every event of the timeline's device."""
    trace = snapshot.traces.get(timeline.device)
    n = timeline.n_events
    within = np.zeros(n, np.int64)
    marks = _marks(snapshot)
    if marks:
        phase, step, within, names = _from_marks(marks, timeline, snapshot)
        source = "marks"
    else:
        names = ["", "evaluate"]
        phase, source = _from_stacks(snapshot, timeline, stacks, tags, trace)
        step = _tagged_steps(trace, tags) if trace is not None and tags.has("step") else _count_steps(phase)
        if trace is not None and source != "none":
            evaluation = next((r.frames for r in stacks.rules.phases if r.phase == "evaluate" and r.frames), ())
            within = (stacks.count(evaluation) > 0)[trace.stack].astype(np.int64)
            within[phase == _CODES["evaluate"]] = 0
    spans = _spans(phase, step, within, names, timeline)
    return PhaseTrack(phase.astype(np.uint8), step.astype(np.int32), spans, source)


# ------------------------------------------------------------------------------------ recorded marks


def _marks(snapshot: Snapshot) -> list[dict[str, Any]]:
    marks = snapshot.extra.get("phases")
    if not isinstance(marks, list):
        return []
    return [m for m in marks if isinstance(m, dict) and m.get("phase") in _CODES and isinstance(m.get("start_us"), int)]


def _from_marks(
    marks: list[dict[str, Any]], timeline: Timeline, snapshot: Snapshot
) -> tuple[Codes, Codes, Codes, list[str]]:
    """The latest-started mark that contains an event's time is its phase."""
    n = timeline.n_events
    phase, step, within = np.full(n, _OTHER), np.full(n, -1), np.zeros(n, np.int64)
    names = [""]
    for entry in snapshot.extra.get("steps") or []:
        if isinstance(entry, (list, tuple)) and len(entry) >= 3:
            first = int(np.searchsorted(timeline.event_us, entry[1]))
            last = int(np.searchsorted(timeline.event_us, entry[2], "right"))
            step[first:last] = entry[0]
    for mark in sorted(marks, key=lambda m: m["start_us"]):
        first = int(np.searchsorted(timeline.event_us, mark["start_us"]))
        end = mark.get("end_us")
        last = n if end is None else int(np.searchsorted(timeline.event_us, end, "right"))
        phase[first:last] = _CODES[mark["phase"]]
        if isinstance(mark.get("step"), int):
            step[first:last] = mark["step"]
        name = mark.get("within") or ""
        if name not in names:
            names.append(name)
        within[first:last] = names.index(name)
    return phase, step, within, names


# -------------------------------------------------------------------------------------- from stacks


def _from_stacks(
    snapshot: Snapshot, timeline: Timeline, stacks: StackIndex, tags: Tags, trace: Trace | None
) -> tuple[Codes, str]:
    n = timeline.n_events
    everything_other = np.full(n, _OTHER, np.int64)
    if trace is None or not n:
        return everything_other, "none"
    births = np.flatnonzero(trace.action == Action.ALLOC)
    if not len(births):
        return everything_other, "none"
    code = _said(stacks)[trace.stack[births]]
    if tags.has("phase"):
        tagged = tags.phase[trace.metadata[births]]
        code = np.where(tagged >= 0, tagged, code)
    code = _annotated(code, births, snapshot, timeline)
    if (code == _SILENT).all():
        return everything_other, "none"
    code = _fill_silent(code)
    code = resolve_passes(code, births, trace, stacks, timeline)
    code = resolve_runs(code, births, trace, stacks, timeline)
    filled = np.full(n, -1, np.int64)
    filled[births] = code
    # Each event takes the phase of the last allocation before it, the first ones that of the first.
    last = np.maximum.accumulate(np.where(filled >= 0, np.arange(n), -1))
    return np.where(last >= 0, filled[last], code[0]), "stacks"


def _said(stacks: StackIndex) -> Codes:
    """What each stack says: a phase code, OTHER, or one of the two open answers."""
    rule = stacks.phase_rule()
    last = max((r.rank for r in stacks.rules.phases), default=0)
    codes = np.array(
        [RUN if r.rank == last > 0 else _CODES.get(r.phase, PASS) for r in stacks.rules.phases] + [_OTHER], np.int64
    )
    said = codes[rule]
    said[(rule < 0) & ~stacks.has_python] = _SILENT
    return said


def _annotated(code: Codes, births: Codes, snapshot: Snapshot, timeline: Timeline) -> Codes:
    """``Optimizer.step#...`` annotations place allocations whose stacks say nothing."""
    code = code.copy()
    times = timeline.event_us[births]
    starts: list[int] = []
    for note in snapshot.annotations:
        if not str(note.get("name", "")).startswith("Optimizer.step#") or note.get("device") not in (
            timeline.device,
            -1,
            None,
        ):
            continue
        if note.get("stage") == "START":
            starts.append(int(note.get("time_us", 0)))
        elif note.get("stage") == "END" and starts:
            first = np.searchsorted(times, starts.pop())
            last = np.searchsorted(times, int(note.get("time_us", 0)), side="right")
            here = code[first:last]
            here[(here == _SILENT) | (here == _OTHER)] = _OPTIMIZER
    return code


def _fill_silent(code: Codes) -> Codes:
    """Give frameless allocations the phase of their surroundings; after a forward they are its backward."""
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
    # Behind "other" (a scalar, a log line) the phase before it counts.
    solid = np.maximum.accumulate(np.where(silent | (code == _OTHER), -1, position))
    context = np.where(solid >= 0, code[solid], _OTHER)
    answer = np.where(previous == _OTHER, context, previous)
    trains = np.isin(answer, (_FORWARD, PASS, RUN))
    stray = (length < _STRAY) & (following == answer)
    answer = np.where(trains & ~stray, _BACKWARD, answer)
    # A history that opens without frames opens in a backward, if a step follows.
    ahead = code[~silent & (code != _OTHER)]
    if len(ahead) and ahead[0] in (_BACKWARD, _OPTIMIZER):
        answer = np.where(before < 0, _BACKWARD, answer)
    return np.where(silent, answer, code)


# ------------------------------------------------------------------------------------ steps and spans


def _tagged_steps(trace: Trace, tags: Tags) -> Codes:
    step = tags.step[trace.metadata]
    last = np.maximum.accumulate(np.where(step >= 0, np.arange(len(step)), -1))
    return np.where(last >= 0, step[last], -1)


def _count_steps(phase: Codes) -> Codes:
    """Steps counted from 1: a new one begins where work resumes after an optimizer step; loading has none."""
    solid = np.where(phase == _OTHER, -1, np.arange(len(phase)))
    context = np.maximum.accumulate(solid)
    settled = np.where(context >= 0, phase[context], _OTHER)
    previous = np.r_[_OTHER, settled[:-1]]
    fresh = (previous == _OPTIMIZER) & np.isin(settled, [_GENERATE, _FORWARD, _OLD, _REFERENCE])
    step = 1 + np.cumsum(fresh)
    started = np.maximum.accumulate(~np.isin(settled, [_LOAD, _OTHER])) if len(phase) else np.zeros(0, bool)
    return np.where(started, step, -1)


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
