"""Mark phases: which part of the run is going on, as time spans that nest."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import ContextDecorator
from dataclasses import dataclass
from typing import Any

from memprof.errors import UsageError
from memprof.recording.guard import Door, way_in
from memprof.vocabulary import Phase

# Enclosing phases a nested span names in its ``within``.
_OUTER = {Phase.EVALUATE.value}
# No phase of its own: a span with this detail, and everything nested in it, names it in ``within``.
REHEARSAL = "rehearsal"


def phase_id(name: str | Phase) -> str:
    """Return the id of a phase; UsageError where there is no such phase."""
    try:
        return Phase(name).value
    except ValueError:
        known = ", ".join(p.value for p in Phase)
        raise UsageError(f"{name!r} is not a phase; use one of {known}.") from None


@dataclass
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
    """Hold the stack of open phases and the newest ``keep`` spans, so that a long run stays bounded."""

    def __init__(self, now_us: Callable[[], int], keep: int = 20_000) -> None:
        self._now = now_us
        self._open: list[PhaseMark] = []
        self._spans: deque[PhaseMark] = deque(maxlen=keep)

    def enter(self, phase: str, step: int | None, detail: str | None = None) -> PhaseMark:
        """Open a span inside whatever is open."""
        if step is None and self._open:
            step = self._open[-1].step
        within = REHEARSAL if detail == REHEARSAL else self._within()
        mark = PhaseMark(phase, self._now(), None, step, within, detail)
        self._open.append(mark)
        self._spans.append(mark)
        return mark

    def _within(self) -> str | None:
        for mark in reversed(self._open):
            if mark.phase in _OUTER:
                return mark.phase
            if mark.detail == REHEARSAL:
                return REHEARSAL
        return None

    def exit(self, mark: PhaseMark) -> list[PhaseMark]:
        """Close ``mark`` and whatever was left open inside it (an exception skips exits); innermost first."""
        if mark not in self._open:
            return []
        closed = []
        while self._open:
            last = self._open.pop()
            last.end_us = self._now()
            closed.append(last)
            if last is mark:
                break
        return closed

    @property
    def current(self) -> PhaseMark | None:
        return self._open[-1] if self._open else None

    @property
    def open(self) -> list[PhaseMark]:
        """Return the open spans, outermost first."""
        return list(self._open)

    @property
    def depth(self) -> int:
        return len(self._open)

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


class phase(ContextDecorator):
    """Mark what the code inside does, for every recording that runs; nothing happens when none does.

    Args:
        name: a phase's id, such as ``"generate"`` or ``"backward"``.
        step: the optimizer step it belongs to; the enclosing phase's where not given.
        detail: free text kept with the mark.

    Also a decorator: ``@phase("reward")``.

    Raises:
        UsageError: there is no such phase.
    """

    def __init__(self, name: str | Phase, step: int | None = None, detail: str | None = None) -> None:
        self._id = phase_id(name)
        self._step = step
        self._detail = detail
        self._marks: list[list[tuple[Any, PhaseMark]]] = []
        self.door = Door(lost=f"the mark of a phase, {self._id}")

    @way_in
    def __enter__(self) -> phase:
        self._marks.append([(s, m) for s in ACTIVE if (m := s.enter_phase(self._id, self._step, self._detail))])
        return self

    @way_in
    def __exit__(self, *exc: object) -> None:
        for session, mark in reversed(self._marks.pop() if self._marks else []):
            session.exit_phase(mark)
