"""Define the input of every stage of attribution (:class:`AllocationFacts`) and its output (:class:`Draft`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memprof.attribution.result import PhaseTrack
from memprof.attribution.stack_index import StackIndex
from memprof.attribution.tags import TagColumns
from memprof.files import read_toml
from memprof.snapshot.model import Action, Snapshot, order_by_event
from memprof.timeline.timeline import Timeline
from memprof.vocabulary import GUESSES, Category, Evidence, Phase

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

# cuBLAS: 32 MiB from compute capability 9 on, 4096 KiB x 2 + 16 KiB x 8 before (ATen's
# getChosenWorkspaceSize); hipBLASLt's default is 76 MiB.
WORKSPACE_BYTES = (32 << 20, 8_519_680, 76 << 20)


_WHOLE_NUMBERS = ("int64", "int32", "int16", "uint8", "int8", "bool")


def codes_of(*phases: Phase) -> list[int]:
    """Return the codes of phases, for ``np.isin``."""
    return [p.code for p in phases]


@dataclass
class AllocationFacts:
    """Hold read-only columns for the timeline's rows. Ghosts are rows older than the trace."""

    snapshot: Snapshot
    timeline: Timeline
    stacks: StackIndex
    tags: TagColumns
    track: PhaseTrack
    _spans: dict[tuple[Phase, ...], list[tuple[int, int]]] = field(default_factory=dict)

    @cached_property
    def ghost(self) -> Bools:
        """Flag rows older than the trace."""
        return self.timeline.alloc_event < 0

    @cached_property
    def size(self) -> Ints:
        """Return requested bytes; the block's bytes where the request is not known."""
        t = self.timeline
        return np.where(t.requested > 0, t.requested, t.size).astype(np.int64)

    @cached_property
    def phase(self) -> Ints:
        """Return the phase code at birth; LOAD for ghosts."""
        return self._at(self.timeline.alloc_event, self.track.phase, Phase.LOAD.code, self.ghost)

    @cached_property
    def step(self) -> Ints:
        """Return the step at birth; -1 for ghosts and where unknown."""
        return self._at(self.timeline.alloc_event, self.track.step, -1, self.ghost)

    @cached_property
    def death(self) -> Ints:
        """Return the phase code at death; -1 for rows still alive at the end."""
        return self._at(self.timeline.free_event, self.track.phase, -1, self.survivor)

    @cached_property
    def survivor(self) -> Bools:
        """Flag rows alive at the last allocation; later frees only tear the program down."""
        births = self.timeline.alloc_event
        last = int(births.max()) if len(births) else -1
        return self.timeline.free_event > last

    def _at(self, event: Ints, column: NDArray[Any], default: int, without: Bools) -> Ints:
        if not len(column):
            return np.full(len(event), default, np.int64)
        values = column[np.clip(event, 0, len(column) - 1)].astype(np.int64)
        return np.where(without, default, values)

    @cached_property
    def module(self) -> Bools:
        """Flag rows born inside a module's forward, by stack or tag."""
        of_tag = np.array([r in ("forward", "no_grad", "recompute") for r in self.tags.column("region")], bool)
        # Some programs call a module's forward by name. So does a custom function, whose forward is a module's no more.
        by_name = (self.stacks.count(("*:forward",)) > 0) & (self.stacks.count(("torch/autograd/function.py:*",)) == 0)
        inside: Bools = (self.stacks.any_of("module") | by_name)[self.timeline.stack] | of_tag[self.timeline.metadata]
        return inside

    @cached_property
    def whole_numbers(self) -> Bools:
        """Flag rows whose recorded dtype is of whole numbers or bytes: these are no logits or hidden states."""
        of_tag = np.isin(np.array(self.tags.column("dtype")), _WHOLE_NUMBERS)
        found: Bools = of_tag[self.timeline.metadata]
        return found

    @cached_property
    def first_run(self) -> int:
        """Return the event at which the first phase other than loading begins; -1 where none does."""
        return next((s.start_event for s in self.track.spans if s.phase not in ("load", "other")), -1)

    @cached_property
    def raw_bytes(self) -> Bools:
        """Flag rows recorded as a flat run of bytes: a kernel's scratch, or a buffer cut up by hand."""
        of_tag = np.array([d == "uint8" for d in self.tags.column("dtype")], bool) & (self.tags.rank == 1)
        found: Bools = of_tag[self.timeline.metadata]
        return found

    @cached_property
    def in_autograd(self) -> Bools:
        """Flag the stacks that a phase rule places in backward; stacks without frames are not among them."""
        return self._autograd_stacks[self.timeline.stack]

    @cached_property
    def _autograd_stacks(self) -> Bools:
        backward = np.array([r.phase == Phase.BACKWARD.value for r in self.stacks.rules.phases] + [False], bool)
        found: Bools = backward[self.stacks.phase_rule()]
        return found

    @cached_property
    def freed_by_program(self) -> Bools:
        """Flag rows whose free was requested under a Python frame outside the autograd engine and functorch's."""
        transform = self.stacks.count(("torch/_functorch/*:*",)) > 0
        return self._freed_under(self.stacks.has_python & ~self._autograd_stacks & ~transform)

    @cached_property
    def linear(self) -> Bools:
        """Flag rows born in a product with a parameter."""
        return self.stacks.inner_in("linear")[self.timeline.stack]

    @cached_property
    def module_depth(self) -> Ints:
        """Count the modules' forwards on each stack."""
        calls = self.stacks.count(("torch/nn/modules/module.py:_call_impl",))
        return calls[self.timeline.stack]

    @cached_property
    def birth_order(self) -> Ints:
        """Return the rows born in the trace, in order of birth."""
        rows = np.flatnonzero(~self.ghost)
        return rows[np.argsort(self.timeline.alloc_event[rows], kind="stable")]

    def freed_by(self, patterns: tuple[str, ...]) -> Bools:
        """Flag rows whose free was requested under a matching frame."""
        return self._freed_under(self.stacks.count(patterns) > 0)

    def _freed_under(self, under: Bools) -> Bools:
        t = self.timeline
        trace = self.snapshot.traces.get(t.device)
        if trace is None or not len(trace):
            return np.zeros(len(t), bool)
        event = np.clip(t.release_event, 0, len(trace) - 1)
        freed = np.isin(trace.action[event], (int(Action.FREE_REQUESTED), int(Action.FREE_COMPLETED)))
        return under[trace.stack[event]] & freed & (t.free_event < t.n_events)

    def spans_of(self, *phases: Phase) -> list[tuple[int, int]]:
        """Return the stretches of some phases as ``[start, end)`` events, neighbours joined."""
        if phases not in self._spans:
            wanted = {p.value for p in phases}
            out: list[tuple[int, int]] = []
            for span in self.track.spans:
                if span.phase not in wanted:
                    continue
                if out and out[-1][1] == span.start_event:
                    out[-1] = (out[-1][0], span.end_event)
                else:
                    out.append((span.start_event, span.end_event))
            self._spans[phases] = out
        return self._spans[phases]

    def born_in(self, span: tuple[int, int]) -> Ints:
        """Return the rows born in one stretch, in order of birth. The cost follows the stretch, not the history."""
        births, rows = self._births
        found: Ints = rows[np.searchsorted(births, span[0]) : np.searchsorted(births, span[1])]
        return found

    def next_birth(self, event: int) -> int:
        """Return the first event from ``event`` on at which a row is born; the number of events where none is."""
        births = self._births[0]
        place = int(np.searchsorted(births, event))
        return int(births[place]) if place < len(births) else self.timeline.n_events

    @cached_property
    def _births(self) -> tuple[Ints, Ints]:
        rows = self.birth_order
        return self.timeline.alloc_event[rows], rows

    def freed_in(self, span: tuple[int, int]) -> Ints:
        """Return the rows freed in one stretch, in order of their frees. The cost follows the stretch."""
        frees, rows = self._frees
        found: Ints = rows[np.searchsorted(frees, span[0]) : np.searchsorted(frees, span[1])]
        return found

    @cached_property
    def _frees(self) -> tuple[Ints, Ints]:
        rows = order_by_event(self.timeline.free_event, n_events=self.timeline.n_events)
        return self.timeline.free_event[rows], rows

    def has_phase(self, phase: Phase) -> bool:
        """Tell whether the phase occurs in this history."""
        return any(s.phase == phase.value for s in self.track.spans)


@dataclass
class Draft:
    """Hold the columns while stages fill them. A stage writes only rows that no stronger one has written."""

    n: int
    category: Ints = field(init=False)
    evidence: Ints = field(init=False)
    detail: Ints = field(init=False)
    rule: Ints = field(init=False)
    name: Ints = field(init=False)
    alternatives: Ints = field(init=False)
    details: list[str] = field(default_factory=lambda: [""])
    rules: list[str] = field(default_factory=lambda: [""])
    names: list[str] = field(default_factory=lambda: [""])
    alternative_sets: list[tuple[str, ...]] = field(default_factory=lambda: [()])
    _ids: dict[tuple[int, Any], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.category = np.full(self.n, -1, np.int64)
        self.evidence = np.full(self.n, Evidence.NONE.code, np.int64)
        for column in ("detail", "rule", "name", "alternatives"):
            setattr(self, column, np.zeros(self.n, np.int64))

    @property
    def open(self) -> Bools:
        """Flag rows that no stage has decided."""
        return self.category < 0

    def fill(
        self,
        rows: NDArray[Any],
        category: Category,
        evidence: Evidence,
        rule: str,
        detail: str = "",
        alternatives: Iterable[Category] = (),
    ) -> None:
        """Decide those of ``rows`` (a mask or indices) that are open. With alternatives, an answer is inferred."""
        index = np.flatnonzero(rows) if rows.dtype == bool else rows
        index = index[self.category[index] < 0]
        if not len(index):
            return
        alternatives = [c for c in alternatives if c is not category]
        if alternatives and evidence not in GUESSES:
            evidence = Evidence.FINGERPRINT
        self.category[index] = category.code
        self.evidence[index] = evidence.code
        self.rule[index] = self.intern(self.rules, rule)
        self.detail[index] = self.intern(self.details, detail)
        others = tuple(c.value for c in alternatives)
        self.alternatives[index] = self.intern(self.alternative_sets, others)

    def decide(self, rows: NDArray[Any], category: Category, rule: str) -> None:
        """Decide those of ``rows`` that are still open by a rule of ``inferred.toml``."""
        said = inferred()[rule][str(category)]
        others = map(Category, said.get("alternatives", ()))
        self.fill(rows, category, Evidence(said["evidence"]), rule, said.get("detail", ""), others)

    def intern(self, table: list[Any], value: Any) -> int:
        """Return the index of ``value`` in one of the tables; add it if it is new."""
        key = (id(table), value)
        if key not in self._ids:
            if value in table:
                self._ids[key] = table.index(value)
            else:
                table.append(value)
                self._ids[key] = len(table) - 1
        return self._ids[key]


@cache
def inferred() -> dict[str, dict[str, dict[str, Any]]]:
    """Return ``inferred.toml``: by rule and category what a decision rests on."""
    return read_toml(Path(__file__).with_name("inferred.toml"))


def multiset(sizes: NDArray[Any]) -> Counter[int]:
    """Count how often each size occurs."""
    values, counts = np.unique(sizes, return_counts=True)
    return Counter(dict(zip(values.tolist(), counts.tolist(), strict=True)))
