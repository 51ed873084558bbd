"""Mark phases: which part of the run is going on, as time spans that nest."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import ContextDecorator
from dataclasses import dataclass
from operator import index
from typing import Any

from memprof.errors import UsageError
from memprof.recording.guard import Door, way_in
from memprof.vocabulary import Phase

# Enclosing phases a nested span names in its ``within``.
_OUTER = {Phase.EVALUATE.value}
# Numbers of steps that a snapshot's reader accepts.
_STEPS = range(-(2**31), 2**31)
# No phase of its own: a span with this detail, and everything nested in it, names it in ``within``.
REHEARSAL = "rehearsal"


def phase_id(name: str | Phase) -> str:
    """Return the id of a phase; UsageError where there is no such phase."""
    try:
        return Phase(name).value
    except ValueError:
        known = ", ".join(p.value for p in Phase)
        raise UsageError(f"{name!r} is not a phase; use one of {known}.") from None


def step_number(step: int) -> int:
    """Return a step's number as a plain integer; UsageError for what a snapshot cannot hold as one."""
    try:
        number = index(step)
    except TypeError:
        number = _STEPS.stop
    if number not in _STEPS:
        raise UsageError(f"{step!r:.60} is not a step; use an integer below 2**31.")
    return number


@dataclass(eq=False)
class PhaseMark:
    """One span; ``end_us`` is None while it is open."""

    phase: str
    start_us: int
    end_us: int | None
    step: int | None
    within: str | None
    detail: str | None

    def to_plain(self) -> dict[str, Any]:
        return dict(vars(self))


#: Sessions that run now, oldest first; ``phase`` marks all of them.
ACTIVE: list[Any] = []
#: What ends recordings that nobody asked for: called, and taken out, when somebody asks for one.
STANDING_BY: list[Callable[[], None]] = []


class PhaseLog:
    """Hold the open phases of every thread and the newest ``keep`` spans, so that a long run stays bounded.

    Phases nest in their own thread; those of several threads may overlap. Not safe to call from several threads at
    once: a session does so under its lock.
    """

    def __init__(self, now_us: Callable[[], int], keep: int = 20_000) -> None:
        self._now = now_us
        self._open: dict[int, list[PhaseMark]] = {}  # by thread, outermost first; only threads with open phases
        self._spans: deque[PhaseMark] = deque(maxlen=keep)

    def enter(self, phase: str, step: int | None, detail: str | None = None) -> PhaseMark:
        """Open a span inside whatever this thread has open."""
        around = self._open.setdefault(threading.get_ident(), [])
        if step is None and around:
            step = around[-1].step
        within = REHEARSAL if detail == REHEARSAL else _within(around)
        mark = PhaseMark(phase, self._now(), None, step, within, detail)
        around.append(mark)
        self._spans.append(mark)
        return mark

    def exit(self, mark: PhaseMark) -> list[PhaseMark]:
        """Close ``mark``, on whichever thread, and what was left open inside it (an exception skips exits); innermost
        first."""
        found = next(((thread, marks) for thread, marks in self._open.items() if any(m is mark for m in marks)), None)
        if found is None:
            return []
        thread, marks = found
        closed = []
        while marks:
            last = marks.pop()
            last.end_us = self._now()
            closed.append(last)
            if last is mark:
                break
        if not marks:
            del self._open[thread]
        return closed

    @property
    def current(self) -> PhaseMark | None:
        """Return the innermost phase of this thread."""
        marks = self._open.get(threading.get_ident())
        return marks[-1] if marks else None

    @property
    def newest(self) -> PhaseMark | None:
        """Return the phase that was entered last, on whichever thread, and is open: memory counts for it."""
        return max((marks[-1] for marks in self._open.values()), key=lambda m: m.start_us, default=None)

    @property
    def open(self) -> list[PhaseMark]:
        """Return the open spans of all threads, in the order in which they began."""
        return sorted((m for marks in self._open.values() for m in marks), key=lambda m: m.start_us)

    @property
    def depth(self) -> int:
        """Return how many phases this thread has open."""
        return len(self._open.get(threading.get_ident(), ()))

    def to_plain(self, start_us: int, stop_us: int) -> list[dict[str, Any]]:
        """Return spans that touch ``[start_us, stop_us]``, with ``other`` between marked ones."""
        rows = [m for m in self._spans if m.start_us <= stop_us and (m.end_us is None or m.end_us >= start_us)]
        covered = start_us
        gaps = []
        for mark in rows:
            if mark.start_us > covered + 1:
                gaps.append(PhaseMark(Phase.OTHER.value, covered + 1, mark.start_us - 1, mark.step, None, None))
            covered = max(covered, stop_us if mark.end_us is None else mark.end_us)
        if stop_us > covered:
            gaps.append(PhaseMark(Phase.OTHER.value, covered + 1, stop_us, rows[-1].step if rows else None, None, None))
        return [m.to_plain() for m in sorted([*rows, *gaps], key=lambda m: m.start_us)]


def _within(around: list[PhaseMark]) -> str | None:
    for mark in reversed(around):
        if mark.phase in _OUTER:
            return mark.phase
        if mark.detail == REHEARSAL:
            return REHEARSAL
    return None


class phase(ContextDecorator):
    """Mark what the code inside does, for every recording that runs; nothing happens when none does.

    Args:
        name: a phase's id, such as ``"generate"`` or ``"backward"``.
        step: the optimizer step it belongs to; the enclosing phase's where not given.
        detail: free text kept with the mark.

    Also a decorator: ``@phase("reward")``. Phases nest in their own thread; those of several threads may overlap.

    Raises:
        UsageError: there is no such phase or step.
    """

    def __init__(self, name: str | Phase, step: int | None = None, detail: str | None = None) -> None:
        self._id = phase_id(name)
        self._step = None if step is None else step_number(step)
        self._detail = detail
        self._marks: dict[int, list[list[tuple[Any, PhaseMark]]]] = {}  # by thread
        self.door = Door(lost=f"the mark of a phase, {self._id}")

    def _recreate_cm(self) -> phase:
        """Return a mark of its own for each call of a decorated function, which several threads may call at once."""
        return phase(self._id, self._step, self._detail)

    @way_in
    def __enter__(self) -> phase:
        marks = [(s, m) for s in list(ACTIVE) if (m := s.enter_phase(self._id, self._step, self._detail))]
        self._marks.setdefault(threading.get_ident(), []).append(marks)
        return self

    @way_in
    def __exit__(self, *exc: object) -> None:
        thread = threading.get_ident()
        if thread not in self._marks:  # a generator that another thread closes
            thread = next(reversed(self._marks), thread)
        entered = self._marks.get(thread, [])
        marks = entered.pop() if entered else []
        if not entered:
            self._marks.pop(thread, None)
        for session, mark in reversed(marks):
            session.exit_phase(mark)
