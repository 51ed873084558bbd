"""Decide what a program's own constructors make before anything runs: parameters, and optimizer state like them.

A line (the innermost named frame) that makes a block for every trained parameter, size for size, makes a set of
parameters or of state. The first such set is the model, where no other rule knows the model; an optimizer is given
parameters that exist. A later set is the optimizer's state if a stack shows that (torch's optimizer classes, or a file
whose other functions work between a backward and the next pass), or if the run trains and no other state is seen.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from memprof.attribution.facts import Bools, Draft, Facts, Ints, multiset
from memprof.attribution.gradients import trained_sizes
from memprof.attribution.stack_index import named_frame
from memprof.snapshot.model import distinct, is_among
from memprof.vocabulary import Category, Evidence, Phase

_SMALLEST = 512
_MOST = 0.9  # a set has at least this share of the parameters' bytes
_NOTICEABLE = 0.02  # a line that makes less than this share of the parameters' bytes is no set
_DTYPES = (1.0, 2.0, 0.5)


def apply_early_tensors(
    facts: Facts, draft: Draft, built_by_modules: Bools, trained: Counter[int], parameters: Counter[int]
) -> None:
    """Decide the sets that the program's own lines make.

    Args:
        facts, draft: as for every stage.
        built_by_modules: rows that a loader's or torch's module code makes; other rules know them as parameters.
        trained: how many trained parameters have each size in bytes, empty where no gradient was seen.
        parameters: the same of all known parameters.
    """
    sizes = trained or parameters
    total = sum(s * c for s, c in sizes.items() if s >= _SMALLEST)
    if not total:
        return
    rows = np.flatnonzero(_candidates(facts, draft) & ~built_by_modules)
    if not len(rows):
        return
    line = named_frame(facts.stacks)[facts.timeline.stack[rows]]
    steps = _files_of_steps(facts)
    known = Counter[int](multiset(facts.size[built_by_modules & (facts.size >= _SMALLEST)]))
    # Ghosts are parameters too, where the recording began after the model was there.
    known += multiset(facts.size[facts.ghost & (facts.size >= _SMALLEST)])
    has_model = _common(known, sizes) >= _MOST * total
    other_state = _state_is_known(facts, draft)
    if not has_model:
        model = _model_of_many_lines(facts, rows, line, sizes, total)
        draft.decide(model, Category.WEIGHTS, "constructor.parameters")
        has_model = len(model) > 0
        rows, line = rows[draft.open[rows]], line[draft.open[rows]]
    for frame in _in_order(line[line >= 0]):
        mine = rows[line == frame]
        copies, factor = _copies(multiset(facts.size[mine]), sizes, total)
        whole = copies > 0
        own = frame in steps
        if whole and not has_model and factor == 1.0 and facts.stacks.table.frames[frame].function != "step":
            model = _first_copy(facts, mine, sizes)
            draft.decide(model, Category.WEIGHTS, "constructor.parameters")
            has_model, mine = True, np.setdiff1d(mine, model, assume_unique=True)
            whole = len(mine) > 0
        if not whole and not _is_part(multiset(facts.size[mine]), sizes, total):
            continue
        constructed = facts.stacks.table.frames[frame].function == "__init__"
        if own:
            draft.fill(mine, Category.OPTIMIZER_STATE, Evidence.STACK, "constructor.of-optimizer")
        elif (whole and not other_state) or constructed:
            draft.decide(mine, Category.OPTIMIZER_STATE, "constructor.state-of-parameters")


def _model_of_many_lines(facts: Facts, rows: Ints, line: Ints, sizes: Counter[int], total: int) -> Ints:
    """Return the first set of parameters, where each kind of layer makes its own at a line of its own.

    A line that makes a whole set before any of them makes the model itself; then there are none.
    """
    none = np.zeros(0, np.int64)
    whole = np.zeros(len(rows), bool)
    for frame in _in_order(line[line >= 0]):
        whole[line == frame] = _copies(multiset(facts.size[rows[line == frame]]), sizes, total)[0] > 0
    parts = rows[~whole & (line >= 0) & is_among(facts.size[rows], np.array(sorted(sizes), np.int64))]
    if _common(multiset(facts.size[parts]), sizes) < _MOST * total:
        return none
    births = facts.timeline.alloc_event
    if whole.any() and births[rows[whole]].min() < births[parts].min():
        return none
    return _first_copy(facts, parts, sizes)


def _candidates(facts: Facts, draft: Draft) -> Bools:
    """Flag open rows with a stack, made outside modules, that live to the end or that an optimizer step replaces."""
    t = facts.timeline
    first = next((s.start_event for s in facts.track.spans if s.phase not in (Phase.LOAD, Phase.OTHER)), t.n_events)
    replaced = facts.death == Phase.OPTIMIZER_STEP.code
    lasting = facts.survivor | (t.free_event > t.n_events * _MOST) | replaced
    early = (t.alloc_event < first) | (facts.survivor & np.isin(facts.phase, (Phase.LOAD.code, Phase.OTHER.code)))
    found: Bools = (
        ~facts.ghost & early & lasting & draft.open & ~facts.module & (facts.size >= _SMALLEST)
    ) & facts.stacks.has_python[t.stack]
    return found


def _in_order(lines: Ints) -> list[int]:
    """Return distinct numbers in order of appearance."""
    return list(dict.fromkeys(lines.tolist()))


def _copies(have: Counter[int], sizes: Counter[int], total: int) -> tuple[int, float]:
    """Return how many whole sets of ``sizes`` there are, and their bytes per byte of parameter; (0, 1.0) for none."""
    for factor in _DTYPES:
        wanted = Counter({int(s * factor): c for s, c in sizes.items() if s >= _SMALLEST})
        excess = sum(s * c for s, c in have.items() if s not in wanted)
        # A few large matrices can be most of the bytes; a whole set has the small parameters too.
        many = sum((have & wanted).values()) >= _MOST * sum(wanted.values())
        if many and _common(have, wanted) >= _MOST * total * factor and excess <= (1 - _MOST) * total * factor:
            counts = [have[s] // c for s, c in wanted.items() if have[s]]
            return max(min(counts), 1), factor
    return 0, 1.0


def _is_part(have: Counter[int], sizes: Counter[int], total: int) -> bool:
    """Tell whether a line makes a block for every parameter of some sizes: state of the matrices alone, say."""
    fits = all(sizes[s] and c % sizes[s] == 0 for s, c in have.items())
    return fits and sum(have.values()) >= 2 and sum(s * c for s, c in have.items()) >= _NOTICEABLE * total


def _first_copy(facts: Facts, rows: Ints, sizes: Counter[int]) -> Ints:
    """Return the rows of the first set that a line makes."""
    seen = Counter[int]()
    first = []
    for row in rows[np.argsort(facts.timeline.alloc_event[rows], kind="stable")].tolist():
        size = int(facts.size[row])
        seen[size] += 1
        if seen[size] <= max(sizes[size], 1):
            first.append(row)
    return np.array(first, np.int64)


def _files_of_steps(facts: Facts) -> set[int]:
    """Return the frames in files whose other functions allocate in optimizer steps, and torch's optimizers' own."""
    frames, stacks = facts.stacks.table.frames, facts.stacks
    born = np.concatenate([facts.born_in(s) for s in facts.spans_of(Phase.OPTIMIZER_STEP)] or [np.zeros(0, np.int64)])
    named = named_frame(stacks)
    working = {int(f) for f in named[distinct(facts.timeline.stack[born]).astype(np.int64)] if f >= 0}
    functions = {(frames[f].file, frames[f].function) for f in working}
    files = {file for file, function in functions if function != "__init__"}
    torch = stacks.frames_matching(("torch/optim/*:*",))
    return {
        f
        for f in range(len(frames))
        if torch[f] or (frames[f].file in files and (frames[f].file, frames[f].function) not in functions)
    }


def _state_is_known(facts: Facts, draft: Draft) -> bool:
    """Tell whether some of the run's optimizer state has another origin: recorded, or made in a step and kept."""
    if (draft.category == Category.OPTIMIZER_STATE.code).any():
        return True
    t = facts.timeline
    grads = sum(s * c for s, c in trained_sizes(facts, draft).items())
    born = np.concatenate([facts.born_in(s) for s in facts.spans_of(Phase.OPTIMIZER_STEP)] or [np.zeros(0, np.int64)])
    kept = born[facts.survivor[born]]
    dead = facts.ghost | (t.alloc_event >= 0)
    replaced = dead & (facts.death == Phase.OPTIMIZER_STEP.code) & ~facts.survivor
    replaced[born] = False
    # A step that frees as much as it keeps replaces what there was.
    return int(facts.size[kept].sum()) - int(facts.size[replaced].sum()) > _MOST * grads > 0


def _common(a: Counter[int], b: Counter[int]) -> int:
    return sum(s * c for s, c in (a & b).items())
