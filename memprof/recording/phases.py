"""Mark phases: which part of the run is going on, as time spans that nest."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ContextDecorator
from contextvars import ContextVar
from dataclasses import dataclass
from operator import index
from typing import Any, TypedDict, TypeVar

from memprof.errors import UsageError
from memprof.recording.guard import FailureGuard, guarded
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


class PlainMark(TypedDict):
    """A span as the snapshot's ``phases`` have it."""

    phase: str
    start_us: int
    end_us: int | None
    step: int | None
    within: str | None
    detail: str | None


@dataclass(eq=False)
class PhaseInterval:
    """One span; ``end_us`` is None while it is open."""

    phase: str
    start_us: int
    end_us: int | None
    step: int | None
    within: str | None
    detail: str | None

    def to_plain(self) -> PlainMark:
        return {
            "phase": self.phase,
            "start_us": self.start_us,
            "end_us": self.end_us,
            "step": self.step,
            "within": self.within,
            "detail": self.detail,
        }


_F = TypeVar("_F", bound=Callable[..., Any])
# The open phases of this thread or task, outermost first: a task begins with those of the one that starts it.
_AROUND: ContextVar[tuple[PhaseInterval, ...]] = ContextVar("memprof_phases", default=())


def _flow() -> object:
    """Return what phases nest in: the asyncio task that runs, or else the thread's number."""
    asyncio = sys.modules.get("asyncio")
    try:
        task = None if asyncio is None else asyncio.current_task()
    except RuntimeError:  # no loop runs on this thread
        task = None
    return threading.get_ident() if task is None else task


#: Sessions that run now, oldest first; ``phase`` marks all of them.
ACTIVE: list[Any] = []
#: What ends recordings that nobody asked for: called, and taken out, when somebody asks for one.
STANDING_BY: list[Callable[[], None]] = []


class PhaseLog:
    """Hold the open phases of every thread and the newest ``keep`` spans, so that a long run stays bounded.

    Phases nest in their own thread or asyncio task; those of several may overlap. Not safe to call from several threads
    at once: a session does so under its lock.
    """

    def __init__(self, now_us: Callable[[], int], keep: int = 20_000) -> None:
        self._now = now_us
        # By thread or task, outermost first; only those with open phases.
        self._open: dict[object, list[PhaseInterval]] = {}
        self._spans: deque[PhaseInterval] = deque(maxlen=keep)
        self._since: int | None = None

    def begin(self) -> None:
        """Watch from now on; by default from the first phase on."""
        self._since = self._now()

    def enter(self, phase: str, step: int | None, detail: str | None = None) -> PhaseInterval:
        """Open a span inside whatever this thread or task has open."""
        around = [mark for mark in _AROUND.get() if mark.end_us is None]
        own = self._open.setdefault(_flow(), [])
        outer = own[-1] if own else next((mark for mark in reversed(around) if mark in self.open), None)
        if step is None and outer is not None:
            step = outer.step
        within = REHEARSAL if detail == REHEARSAL else _within(outer)
        mark = PhaseInterval(phase, self._now(), None, step, within, detail)
        self._since = mark.start_us if self._since is None else self._since
        _AROUND.set((*around, mark))
        own.append(mark)
        self._spans.append(mark)
        return mark

    def exit(self, mark: PhaseInterval) -> list[PhaseInterval]:
        """Close ``mark``, from whichever thread, and what was left open inside it (an exception skips exits); innermost
        first."""
        found = next(((flow, marks) for flow, marks in self._open.items() if any(m is mark for m in marks)), None)
        if found is None:
            return []
        flow, marks = found
        closed = []
        while marks:
            last = marks.pop()
            last.end_us = self._now()
            closed.append(last)
            if last is mark:
                break
        if not marks:
            del self._open[flow]
        return closed

    @property
    def current(self) -> PhaseInterval | None:
        """Return the innermost phase of this thread or task."""
        marks = self._open.get(_flow())
        return marks[-1] if marks else None

    @property
    def newest(self) -> PhaseInterval | None:
        """Return the phase that was entered last, on whichever thread or task, and is open: memory counts for it."""
        return max((marks[-1] for marks in self._open.values()), key=lambda m: m.start_us, default=None)

    @property
    def open(self) -> list[PhaseInterval]:
        """Return the open spans of all threads and tasks, in the order in which they began."""
        return sorted((m for marks in self._open.values() for m in marks), key=lambda m: m.start_us)

    @property
    def is_open_on_another_thread(self) -> bool:
        own = threading.get_ident()
        return any(isinstance(flow, int) and flow != own for flow in self._open)

    @property
    def depth(self) -> int:
        """Return how many phases this thread or task has open."""
        return len(self._open.get(_flow(), ()))

    def at(self, time_us: int) -> PhaseInterval | None:
        """Return the span that was entered last of those open at a time; None between phases."""
        spans = [m for m in self._spans if m.start_us <= time_us and (m.end_us is None or m.end_us >= time_us)]
        return spans[-1] if spans else None

    def to_plain(self, start_us: int, stop_us: int) -> list[PlainMark]:
        """Return spans that touch ``[start_us, stop_us]``, with ``other`` where none is while the log watched: of what
        lies before its beginning, or after now, nothing is known."""
        start_us = max(start_us, stop_us if self._since is None else self._since)
        stop_us = min(stop_us, self._now())
        rows = [m for m in self._spans if m.start_us <= stop_us and (m.end_us is None or m.end_us >= start_us)]
        covered = start_us
        gaps = []
        for mark in rows:
            if mark.start_us > covered + 1:
                gaps.append(PhaseInterval(Phase.OTHER.value, covered + 1, mark.start_us - 1, mark.step, None, None))
            covered = max(covered, stop_us if mark.end_us is None else mark.end_us)
        if stop_us > covered:
            gaps.append(
                PhaseInterval(Phase.OTHER.value, covered + 1, stop_us, rows[-1].step if rows else None, None, None)
            )
        return [m.to_plain() for m in sorted([*rows, *gaps], key=lambda m: m.start_us)]


def _within(outer: PhaseInterval | None) -> str | None:
    if outer is None or outer.phase in _OUTER:
        return None if outer is None else outer.phase
    return REHEARSAL if outer.detail == REHEARSAL else outer.within


class phase(ContextDecorator):
    """Mark what the code inside does, for every recording that runs; nothing happens when none does.

    Args:
        name: a phase's id, such as ``"generate"`` or ``"backward"``.
        step: the optimizer step it belongs to; the enclosing phase's where not given.
        detail: free text kept with the mark.

    Also a decorator, of coroutines too: ``@phase("reward")``. Phases nest in their own thread or asyncio task; those of
    several may overlap.

    Raises:
        UsageError: there is no such phase or step, or a generator is decorated.
    """

    def __init__(self, name: str | Phase, step: int | None = None, detail: str | None = None) -> None:
        self._id = phase_id(name)
        self._step = None if step is None else step_number(step)
        self._detail = detail
        self._marks: dict[object, list[list[tuple[Any, PhaseInterval]]]] = {}  # by thread or task
        self.guard = FailureGuard(lost=f"the mark of a phase, {self._id}")

    def _recreate_cm(self) -> phase:
        """Return a mark of its own for each call of a decorated function, which several threads may call at once."""
        return phase(self._id, self._step, self._detail)

    def __call__(self, function: _F) -> _F:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise UsageError(f"{function.__name__} is a generator; use `with phase({self._id!r}):` inside it.")
        if not inspect.iscoroutinefunction(function):
            return super().__call__(function)

        @functools.wraps(function)
        async def marked(*args: Any, **kwargs: Any) -> Any:
            with self._recreate_cm():
                return await function(*args, **kwargs)

        return marked  # type: ignore[return-value]

    @guarded
    def __enter__(self) -> phase:
        marks = [(s, m) for s in list(ACTIVE) if (m := s.enter_phase(self._id, self._step, self._detail))]
        self._marks.setdefault(_flow(), []).append(marks)
        return self

    @guarded
    def __exit__(self, *exc: object) -> None:
        flow = _flow()
        if flow not in self._marks:  # a generator that another thread closes
            flow = next(reversed(self._marks), flow)
        entered = self._marks.get(flow, [])
        marks = entered.pop() if entered else []
        if not entered:
            self._marks.pop(flow, None)
        for session, mark in reversed(marks):
            session.exit_phase(mark)
