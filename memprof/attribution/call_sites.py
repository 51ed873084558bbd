"""Tell by the call site why a model ran, where no phase is named: policy, old policy, reference or generation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from memprof.attribution.rules import LOGPROBS
from memprof.attribution.stack_index import StackIndex
from memprof.snapshot.model import Trace, distinct
from memprof.timeline.timeline import Timeline
from memprof.vocabulary import Phase

PASS = -2  # a log-prob pass; its call site decides the phase
RUN = -3  # a model runs for an unknown purpose; its call site decides the phase
_OTHER, _FORWARD, _BACKWARD = Phase.OTHER.code, Phase.FORWARD.code, Phase.BACKWARD.code
_OLD, _REFERENCE = Phase.OLD_LOGPROBS.code, Phase.REFERENCE_LOGPROBS.code
_OPTIMIZER, _GENERATE = Phase.OPTIMIZER_STEP.code, Phase.GENERATE.code
_DECODES = 3  # decoding runs the model at least so many times in a row without a backward
_KEPT = 4  # a cache of two layers
_PREFILL = 4  # and its longest input (the prompt's) is at least so many times the median one
_EMBEDS = ("torch/nn/modules/sparse.py:forward", "torch/nn/functional.py:embedding", "*:*embed*", "*embed*.py:*")
_WRAPPERS = "torch/nn/parallel/"
_PARAMETER_BYTES = 4096  # smaller blocks do not show a second copy of a model

Codes = NDArray[np.int64]


def resolve_passes(code: Codes, births: Codes, trace: Trace, stacks: StackIndex, timeline: Timeline) -> Codes:
    """Replace ``PASS`` by the phase of each log-prob pass: old policy, reference or policy, by its call site.

    A site whose passes lead straight into a backward is the training forward. Of the other sites, the first in a
    cycle is the old policy and the second the reference. A single other site is the reference if adapters are
    switched off in it or a second copy of the trained parameters is in memory; otherwise it is the old policy.
    """
    passes = code == PASS
    if not passes.any():
        return code
    patterns = tuple(p for r in stacks.rules.phases if r.phase == LOGPROBS for p in r.frames)
    site = call_site(stacks, patterns)[trace.stack[births]]
    return _settle(code, passes, site, births, trace, stacks, timeline)


def resolve_runs(code: Codes, births: Codes, trace: Trace, stacks: StackIndex, timeline: Timeline) -> Codes:
    """Replace ``RUN`` by the phase of each model run in code of unknown names.

    Such a run is training, unless other call sites train. In a loop that generates, and whose log-prob passes
    have no names, call sites decide as they do for named passes. Allocations outside every phase that follow
    such a run (the loss in a training script's main) belong to it.
    """
    runs = code == RUN
    if not runs.any():
        return code
    # Some programs call a model's forward by name: the outermost forward is the model's.
    of_stack, paths = caller_path(stacks, (*stacks.rules.sets.get("module", ()), "*:forward"))
    site = of_stack[trace.stack[births]]
    code = _find_decoding(code, runs, site, births, trace, stacks, paths, timeline)
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
    paths: list[list[str]],
    timeline: Timeline,
) -> Codes:
    """Find unnamed generation: one call site runs the model again and again on far shorter inputs than others do.

    Each of these passes begins with the embedding of its token ids; images or states are no tokens. The function's own
    longest input is the prompt, or its passes keep keys and values for the next: an evaluation does neither.

    All that its function allocates outside the model is generation too: caches made up front, sampling.
    """
    if (code == _GENERATE).any():
        return code
    out: Codes = code.copy()
    backwards = np.cumsum(np.diff(code == _BACKWARD, prepend=False) & (code == _BACKWARD))
    calls = {}
    for where in distinct(site[runs & (site >= 0)]):
        mine = np.flatnonzero(runs & (site == where))
        # The first stack to allocate (the embedding) does so once per call.
        calls[where] = mine[trace.stack[births[mine]] == trace.stack[births[mine[0]]]]
    trained = _sites(code, site, runs)[0]
    longest = max((trace.size[births[c]].max() for c in calls.values()), default=0)
    for where, mine in calls.items():
        in_a_row = np.unique(backwards[mine], return_counts=True)[1].max()
        if in_a_row < _DECODES or longest < _PREFILL * np.median(trace.size[births[mine]]):
            continue
        # A decoding step is one token a sequence, so its inputs are alike; batches of graphs or images are not. And a
        # wrapper of torch's own is no function that generates.
        embeds = stacks.having(stacks.frames_matching(_EMBEDS))[trace.stack[births[mine[0]]]]
        alike = embeds and np.unique(trace.size[births[mine]], return_counts=True)[1].max() >= len(mine) / 2
        if not alike or _WRAPPERS in paths[int(where)][0]:
            continue
        function = paths[int(where)][0]
        own = [mine, *(c for s, c in calls.items() if paths[int(s)][0] == function and int(s) not in trained)]
        own_longest = max(int(trace.size[births[c]].max()) for c in own)
        whole = np.flatnonzero(runs & (site == where))
        if own_longest < _PREFILL * np.median(trace.size[births[mine]]) and not _keeps(whole, mine, births, timeline):
            continue
        mine = whole
        out[mine] = _GENERATE
        # A function that training passes are made in too does not generate: the first that is decoding's own does.
        shared = {name for other in trained if other != where for name in paths[other]}
        function = next((name for name in paths[int(where)] if name not in shared), None)
        if function is not None:
            of_function = with_function(stacks, function)[trace.stack[births]]
            out[of_function & np.isin(code, (_OTHER, RUN))] = _GENERATE
    return out


def _keeps(rows: Codes, starts: Codes, births: Codes, timeline: Timeline) -> bool:
    """Tell whether passes leave as many blocks for the next one as keys and values of two layers."""
    row_of_event = np.full(timeline.n_events, -1, np.int64)
    born = timeline.alloc_event >= 0
    row_of_event[timeline.alloc_event[born]] = np.flatnonzero(born)
    freed = timeline.free_event[row_of_event[births[rows]]]
    turn = np.searchsorted(starts, rows, side="right")
    following = births[starts[np.minimum(turn, len(starts) - 1)]]
    kept = np.bincount(turn[(turn < len(starts)) & (freed > following)], minlength=2)[1:]
    return bool(np.median(kept[: len(starts) - 1] if len(starts) > 1 else kept) >= _KEPT)


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
    """Return the call sites whose passes lead into a backward, and all sites in order of appearance."""
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
    """Tell whether a pass runs other lines of the adapter layers than training does; None without such layers."""
    adapter = stacks.frames_matching(("peft/tuners/*:forward",))

    def lines(rows: NDArray[np.bool_]) -> set[int]:
        used = distinct(trace.stack[births[rows]])
        return {f for s in used for f in stacks.table.stacks[int(s)] if adapter[f]}

    training = lines(code == _FORWARD)
    if not training:
        return None
    return not (training & lines(mine)) or len(lines(mine)) < len(training)


def _copies_of_trained(code: Codes, births: Codes, timeline: Timeline, at: int) -> int:
    """Count the copies of the gradients' multiset of sizes in memory at birth number ``at``.

    Optimizer state looks like two more copies. Only blocks alive at that birth count, so state made later
    in the trace does not.
    """
    row_of_event = np.full(timeline.n_events, -1, np.int64)
    born = timeline.alloc_event >= 0
    row_of_event[timeline.alloc_event[born]] = np.flatnonzero(born)
    backward = np.flatnonzero(code == _BACKWARD)
    if not len(backward):
        return 0
    # Blocks that outlive the first unbroken backward are gradients.
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
    """Tell whether optimizer state is older than the trace: no step in the trace precedes the first forward."""
    steps, forwards = np.flatnonzero(code == _OPTIMIZER), np.flatnonzero(code == _FORWARD)
    return not len(steps) or not len(forwards) or steps[0] > forwards[0]


def call_site(stacks: StackIndex, patterns: tuple[str, ...]) -> Codes:
    """Find for each stack the frame that called the outermost match of ``patterns``; -1 where there is none."""
    out = np.full(stacks.n, -1, np.int64)
    for number, callers in _callers(stacks, patterns):
        out[number] = callers[0] if callers else -1
    return out


def caller_path(stacks: StackIndex, patterns: tuple[str, ...]) -> tuple[Codes, list[list[str]]]:
    """Number the distinct call paths to the outermost match of ``patterns``, transparent frames left out.

    Returns:
        A number for each stack (-1 without a match or a caller), and for each number the ``file:function`` of its
        callers, the nearest first.
    """
    ids: dict[tuple[int, ...], int] = {}
    out = np.full(stacks.n, -1, np.int64)
    for number, callers in _callers(stacks, patterns):
        out[number] = ids.setdefault(callers, len(ids)) if callers else -1
    frames = stacks.table.frames
    return out, [[f"{frames[f].file}:{frames[f].function}" for f in path] for path in ids]


def _callers(stacks: StackIndex, patterns: tuple[str, ...]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield each stack with a match, and the non-transparent frames that called the outermost match, nearest first."""
    hits = stacks.frames_matching(patterns)
    for number in np.flatnonzero(stacks.having(hits)):
        stack = stacks.table.stacks[number]
        last = max(k for k, f in enumerate(stack) if hits[f])
        yield int(number), tuple(f for f in stack[last + 1 :] if stacks.telling[f])


def with_function(stacks: StackIndex, function: str) -> NDArray[np.bool_]:
    """Tell for each stack whether it has a frame in this ``file:function``, at any line."""
    hits = np.array([f"{f.file}:{f.function}" == function for f in stacks.table.frames] + [False], bool)
    return stacks.having(hits)
