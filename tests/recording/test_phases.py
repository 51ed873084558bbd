"""Phase marks: spans, nesting, and what happens when nothing records."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import sys
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memprof.errors import UsageError
from memprof.recording import phase, record
from memprof.recording.phases import ACTIVE, PhaseLog
from memprof.recording.session import Session
from memprof.recording.trace.clock import Clock
from memprof.recording.trace.tensor_trace import TensorTrace
from memprof.snapshot import load_snapshot
from memprof.vocabulary import Phase


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
        ("other", 5, 5, None),
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
    for _ in range(60):
        log.enter("other", None)
    assert [s["phase"] for s in log.to_plain(50, 60) if s["phase"] == "forward"] == []


def test_a_time_at_which_nothing_watched_is_no_phase() -> None:
    """It used to be ``other``: from 1970 on, if that is where somebody's window begins."""
    log = PhaseLog(Clock().tick)
    assert log.to_plain(0, 2**62) == []
    log.exit(log.enter("forward", 1))
    assert [s["phase"] for s in log.to_plain(0, 10)] == []
    spans = log.to_plain(0, 2**62)
    assert [s["phase"] for s in spans] == ["forward", "other"]
    assert spans[-1]["end_us"] - spans[0]["start_us"] < 10**7
    log = PhaseLog(Clock().tick)
    log.begin()
    log.enter("forward", 1)
    assert [s["phase"] for s in log.to_plain(0, 2**62)] in (["forward"], ["other", "forward"])


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


def test_phases_of_two_threads_overlap_and_keep_their_lengths() -> None:
    """Reward functions in a pool, marked by a decorator: leaving one thread's phase closes none of another's."""
    clock = iter(range(1, 100))
    log = PhaseLog(lambda: next(clock))
    with ThreadPoolExecutor(1) as other:
        outer = log.enter("generate", 3)
        reward = other.submit(log.enter, "reward", None).result()
        assert (log.current, log.newest, log.depth) == (outer, reward, 1)
        assert log.open == [outer, reward]
        assert log.exit(outer) == [outer]
        assert (log.current, log.newest, log.depth) == (None, reward, 0)
        nested = other.submit(log.enter, "forward", None).result()
        assert log.exit(reward) == [nested, reward]  # on whichever thread
        assert (log.open, log.exit(reward)) == ([], [])
    spans = [(s["phase"], s["start_us"], s["end_us"], s["step"]) for s in log.to_plain(1, 6)]
    assert spans == [("generate", 1, 3, 3), ("reward", 2, 6, None), ("forward", 4, 5, None)]


def _spans(path: Path) -> dict[str, Any]:
    """The marked spans of a recording by phase."""
    rows = pickle.loads(path.read_bytes())["memprof"]["phases"]
    return {row["phase"]: row for row in rows if row["phase"] != "other"}


def test_phases_of_two_tasks_overlap_and_keep_their_lengths(tmp_path: Path) -> None:
    """Leaving one task's phase closes none of another's; a task's phases lie within those of who started it."""
    seen: list[str] = []

    @phase("reward")
    async def reward(begun: asyncio.Event, go: asyncio.Event) -> None:
        begun.set()
        await go.wait()
        with phase("forward"):
            seen.append("forward")

    async def main() -> None:
        begun, go = asyncio.Event(), asyncio.Event()
        with phase("evaluate", step=3):
            task = asyncio.create_task(reward(begun, go))
            with phase("generate"):
                await begun.wait()
            seen.append("generate")
        go.set()
        await task

    with record(tmp_path / "r.pickle", stacks=None) as session:
        asyncio.run(main())
        assert session.phases.open == []
    spans = _spans(tmp_path / "r.pickle")
    assert seen == ["generate", "forward"]
    order = [(spans[n]["start_us"], n) for n in ("evaluate", "generate", "reward", "forward")]
    assert sorted(order) == order
    ends = [(spans[n]["end_us"], n) for n in ("generate", "evaluate", "forward", "reward")]
    assert sorted(ends) == ends
    assert {n: (row["step"], row["within"]) for n, row in spans.items()} == {
        "evaluate": (3, None),
        "generate": (3, "evaluate"),
        "reward": (3, "evaluate"),
        "forward": (3, "evaluate"),
    }


def test_one_mark_entered_by_two_tasks_is_left_by_each() -> None:
    one = phase("reward")

    async def enter(wait: float) -> None:
        with one:
            await asyncio.sleep(wait)

    async def main() -> None:
        await asyncio.gather(enter(0.02), enter(0.0))

    session = Session(TensorTrace(torch.device("cpu"), stacks=None))
    session.start()
    asyncio.run(main())
    session.stop()
    first, second = (m for m in session.to_raw()["memprof"]["phases"] if m["phase"] == "reward")
    assert first["start_us"] < second["start_us"] < second["end_us"] < first["end_us"]
    assert one._marks == {}


def test_a_decorated_generator_is_refused() -> None:
    """The mark would end before the generator's first line."""

    def rows() -> Any:
        yield 1

    with pytest.raises(UsageError, match=r"rows is a generator; use `with phase\('reward'\):` inside it"):
        phase("reward")(rows)


def test_many_threads_mark_phases_while_one_writes(tmp_path: Path) -> None:
    def work() -> None:
        for _ in range(400):
            with phase("reward"):
                marked()

    @phase("forward")
    def marked() -> None:
        pass

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with warnings.catch_warnings(), record(tmp_path / "r.pickle", stacks=None) as session:
            warnings.simplefilter("error")
            with ThreadPoolExecutor(4) as threads:
                done = [threads.submit(work) for _ in range(4)]
                for _ in range(20):
                    session.set_step(7)
                    session.to_raw()
                for one in done:
                    one.result()
            torch.ones(1000)
    finally:
        sys.setswitchinterval(before)
    assert session.guard.failure is None
    raw = pickle.loads((tmp_path / "r.pickle").read_bytes())["memprof"]
    counted = Counter(span["phase"] for span in raw["phases"])
    assert (counted["reward"], counted["forward"]) == (1600, 1600)
    assert all(span["end_us"] is not None for span in raw["phases"])
    assert Counter(row["phase"] for row in raw["counters"])["reward"] == 1600


def test_a_peak_counts_for_the_open_phase_that_began_last(tmp_path: Path) -> None:
    with record(tmp_path / "r.pickle", stacks=None) as session, ThreadPoolExecutor(1) as other:
        generate = session.enter_phase("generate")
        reward = other.submit(session.enter_phase, "reward").result()
        torch.ones(2**20)
        assert generate is not None
        assert reward is not None
        session.exit_phase(generate)
        torch.ones(2**18)
        other.submit(session.exit_phase, reward).result()
    rows = {row["phase"]: row for row in pickle.loads((tmp_path / "r.pickle").read_bytes())["memprof"]["counters"]}
    assert rows["reward"]["allocated_peak"] - rows["generate"]["allocated_peak"] == 4 * 2**20


@pytest.mark.parametrize("step", [10**30, 2**31, -(2**31) - 1, 1.5, "3"])
def test_a_step_that_no_reader_accepts_is_refused(tmp_path: Path, step: Any) -> None:
    with pytest.raises(UsageError, match="is not a step; use an integer below"):
        phase("reward", step=step)
    with record(tmp_path / "r.pickle", stacks=None) as session:
        session.set_step(np.int64(4))
        with phase("reward"):
            pass
        with pytest.warns(UserWarning, match="is not a step.*recorded without a step"):
            session.set_step(step)
        with phase("forward"):
            pass
    steps = {mark.phase: mark.step for mark in load_snapshot(tmp_path / "r.pickle").run.phases}
    assert (steps[Phase.REWARD], steps[Phase.FORWARD]) == (4, None)
