"""Which steps are recorded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from memprof.integrations.callback.schedule import Cycle, RecordingSchedule

from memprof.errors import UsageError


def recorded(schedule: RecordingSchedule, last: int, cycle: Cycle, first: int = 1) -> list[list[int]]:
    """Recordings, each a list of its steps, of a train() from ``first`` to ``last`` (the trainer is new)."""
    found: list[list[int]] = []
    going = False
    for step in range(first, last + 1):
        going = going and schedule.goes_on(step)
        if schedule.begins(step, first, last, lambda at=step: (cycle, (at - first) * cycle.accumulation)):
            found.append([])
            going = True
        if going:
            found[-1].append(step)
    return found


ALIKE = Cycle()


def cases() -> Iterator[tuple[Cycle, int, list[list[int]]]]:
    yield ALIKE, 10, [[2]]
    yield ALIKE, 1, [[1]]  # too short: what there is
    yield Cycle(micro_steps=8, accumulation=2), 12, [[5, 6, 7, 8]]  # generates at 1, 5, 9
    yield Cycle(micro_steps=8, accumulation=2), 4, [[1, 2, 3, 4]]  # never generates again
    yield Cycle(micro_steps=8, accumulation=2), 6, [[5, 6]]
    yield Cycle(micro_steps=2, accumulation=8), 5, [[2]]  # four generations a step
    yield Cycle(micro_steps=3, accumulation=2), 9, [[2, 3]]  # at micro 3, in the middle of step 2


@pytest.mark.parametrize(("cycle", "last", "expected"), list(cases()))
def test_by_default_one_cycle_after_the_first_step(cycle: Cycle, last: int, expected: list[list[int]]) -> None:
    assert recorded(RecordingSchedule(), last, cycle) == expected


def test_a_resumed_run_counts_from_its_own_first_step() -> None:
    assert recorded(RecordingSchedule(), 9, ALIKE, first=6) == [[7]]


def test_chosen_steps() -> None:
    assert recorded(RecordingSchedule([2, 3, 7]), 9, ALIKE) == [[2], [3], [7]]
    assert recorded(RecordingSchedule(4), 9, Cycle(8, 2)) == [[4]]
    assert recorded(RecordingSchedule([99]), 9, ALIKE) == []


def test_every_records_whole_cycles() -> None:
    assert recorded(RecordingSchedule(every=4), 9, ALIKE) == [[4], [8]]
    assert recorded(RecordingSchedule(every=4), 12, Cycle(4, 2)) == [[4, 5], [8, 9], [12]]


@pytest.mark.parametrize("steps", [0, [1, -2], ["2"]])
def test_steps_that_are_none(steps: object) -> None:
    with pytest.raises(UsageError, match="counted from 1"):
        RecordingSchedule(steps)  # type: ignore[arg-type]


def test_every_that_is_none() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        RecordingSchedule(every=0)
