"""Phase marks: spans, nesting, and what happens when nothing records."""

from __future__ import annotations

import itertools

import pytest

from memprof.errors import UsageError
from memprof.recording import phase
from memprof.recording.phases import ACTIVE, PhaseLog
from memprof.recording.trace.clock import Clock


def log_with(*steps: tuple[str, str]) -> list[tuple[str, int, int, str | None]]:
    """Spans after a sequence of ``("enter"|"exit", name)`` on a clock that counts 1, 2, 3 ..."""
    time = iter(range(1, 100))
    log = PhaseLog(lambda: next(time))
    marks = {}
    for action, name in steps:
        if action == "enter":
            marks[name] = log.enter(name, None)
        else:
            log.exit(marks[name])
    return [(s["phase"], s["start_us"], s["end_us"], s["within"]) for s in log.to_plain(0, 20)]


def test_spans_nest_and_gaps_are_other() -> None:
    spans = log_with(("enter", "evaluate"), ("enter", "generate"), ("exit", "generate"), ("exit", "evaluate"))
    assert spans == [
        ("evaluate", 1, 4, None),
        ("generate", 2, 3, "evaluate"),
        ("other", 5, 20, None),
    ]


def test_leaving_an_outer_phase_closes_what_an_exception_left_open() -> None:
    spans = log_with(("enter", "backward"), ("enter", "forward"), ("exit", "backward"))
    assert spans[:2] == [("backward", 1, 4, None), ("forward", 2, 3, None)]


def test_an_inner_phase_inherits_the_step() -> None:
    log = PhaseLog(Clock().tick)
    log.enter("evaluate", 7)
    assert log.enter("generate", None).step == 7


def test_old_spans_are_dropped() -> None:
    log = PhaseLog(Clock().tick, keep=3)
    for _ in range(10):
        log.exit(log.enter("forward", 1))
    assert sum(s["phase"] == "forward" for s in log.to_plain(0, 2**62)) == 3


def test_a_span_outside_the_window_is_left_out() -> None:
    log = PhaseLog(iter(range(100)).__next__)
    log.exit(log.enter("forward", 1))
    assert [s["phase"] for s in log.to_plain(50, 60)] == ["other"]


def test_phase_does_nothing_when_nothing_records() -> None:
    assert ACTIVE == []
    with phase("generate"), phase("reward", step=3):
        pass


def test_phase_is_a_decorator_and_reenters() -> None:
    @phase("reward")
    def depth(n: int) -> int:
        return 0 if n == 0 else 1 + depth(n - 1)

    assert depth(3) == 3


def test_an_unknown_phase_is_named() -> None:
    with pytest.raises(UsageError, match="'training' is not a phase; use one of load, generate"):
        phase("training")


def test_the_clock_never_stands_still() -> None:
    clock = Clock()
    times = [clock.tick() for _ in range(5000)]
    assert all(b > a for a, b in itertools.pairwise(times))
