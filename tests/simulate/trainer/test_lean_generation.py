"""The lean trainer's generation, simulated: its rolling batch beside the real one, and the passes it takes instead."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "trl"):
    pytest.importorskip(package)

from memprof.grpo.paged.schedule import (  # noqa: E402
    CachedPrompt,
    DecodingSchedule,
    PoolSize,
    SequenceProgress,
    actions_at_full_length,
)
from memprof.simulate.generation.simulated_batch import executed, executed_chunks, planned  # noqa: E402

PROMPTS = [[group] * 11 for group in (1, 2) for _ in range(4)]
LONGEST = 60
SIZES = [PoolSize(slots, gathered) for slots, gathered in itertools.product((71, 142, 300, 502), (71, 200, 600))]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_no_slot_is_held_twice_and_none_too_many(size: PoolSize) -> None:
    """Every sequence gets all its tokens, within the pool and what may be gathered."""
    known = {1: CachedPrompt(11), 2: CachedPrompt(11)}
    rows = [SequenceProgress(i, known[ids[0]]) for i, ids in enumerate(PROMPTS)]
    steps, inside = 0, set[int]()
    for action in actions_at_full_length(rows, size, LONGEST):
        if hasattr(action, "steps"):
            end = max(row.held for row in action.rows) + action.steps - 1
            slots = sum(row.slots + action.steps for row in action.rows)
            slots += sum(prompt.length for prompt in known.values() if prompt.users)
            assert action.steps >= 1
            assert slots <= size.slots
            assert len(action.rows) == 1 or len(action.rows) * end <= size.gathered
            assert {row.index for row in action.rows} == inside
            steps += action.steps * len(action.rows)
        else:
            inside ^= {action.row.index}
    assert steps == len(PROMPTS) * (LONGEST - 1)
    assert all(row.ended for row in rows)
    assert not any(prompt.users for prompt in known.values())


def test_a_row_that_ends_early_makes_room_for_one_that_waits() -> None:
    prompt = CachedPrompt(11)
    rows = [SequenceProgress(i, prompt) for i in range(3)]
    order = []
    for action in DecodingSchedule(rows, PoolSize(40, 1000), 28).actions():
        order.append((type(action).__name__, getattr(action, "row", rows[0]).index))
        if hasattr(action, "steps"):
            assert action.steps <= 27
            action.rows[-1].made += 1
            for row in action.rows[:-1]:
                row.made += 1
            action.rows[-1].ended = True
        else:
            action.row.made = max(1, action.row.made)
    assert [name for name, _ in order].count("Leave") == 3


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_highest_of_all_forwards_are_executed(size: PoolSize) -> None:
    plan = planned(PROMPTS, size, LONGEST)
    every = [(s.rows, s.begin + i) for s in plan.stretches for i in range(s.steps)]
    run = [
        (plan.stretches[n].rows, plan.stretches[n].begin + step)
        for n, steps in executed(plan.stretches, learn=False).items()
        for step in steps
    ]
    assert max(rows * length for rows, length in run) == max(rows * length for rows, length in every)
    assert max(rows for rows, _ in run) == max(rows for rows, _ in every)
    assert len(run) <= 2
    chunks = [plan.chunks[n][place] for n, place in executed_chunks(plan.chunks, learn=False)]
    assert max(map(len, chunks)) == max(len(one) for some in plan.chunks for one in some)
    assert sum(len(s) for s in executed(plan.stretches, learn=True).values()) <= 14


@pytest.mark.usefixtures("only_new_tensors")
def test_the_rolling_batch_is_the_real_ones(settings_for: Callable[..., Any], tmp_path: Path) -> None:
    """Beside a tensor trace of the real trainer on a CPU: the peaks, the pool and what is gathered of a layer."""
    from benchmarks.simulator.real_step import births, peaks, run_real
    from memprof.simulate.run import simulate_settings

    settings = settings_for(
        device="cpu", recipe="lean", generation_batch=2, dtype="bfloat16", per_device_train_batch_size=8,
        num_generations=8, completion_length=30,
    )  # fmt: skip
    simulated, real = simulate_settings(settings, stacks=False), run_real(settings, str(tmp_path))
    mine, theirs = peaks(simulated), peaks(real)
    for step in (1, 2):
        assert mine[step, "generate"] == pytest.approx(theirs[step, "generate"], rel=0.005)
        pools = [[n for n, op in births(raw, step, "generate") if "new_empty" in op] for raw in (simulated, real)]
        assert set(pools[0]) == set(pools[1])
        assert len(set(pools[0])) == 2
    (note,) = (note for note in simulated["memprof"]["notes"] if note.startswith("generation: "))
    assert "sequences generate in a rolling batch over a pool of 61 tokens" in note


@pytest.mark.parametrize(
    ("changes", "rolls"),
    [
        ({"generation_batch": 2}, True),
        ({}, False),
        ({"generation_batch": 2, "cache_implementation": "static"}, False),
        ({"generation_batch": 2, "gpus": 2, "sharding": "zero2"}, False),
        ({"generation_batch": 2, "gpus": 2, "sharding": "ddp"}, True),
    ],
    ids=["no room", "room", "static cache", "zero2", "ddp"],
)
def test_the_trainers_own_rule_decides(
    settings_for: Callable[..., Any], changes: dict[str, Any], rolls: bool
) -> None:
    from memprof.simulate.run import simulate_settings

    settings = settings_for(recipe="lean", dtype="bfloat16", lora_r=3, **changes)
    notes = simulate_settings(settings, stacks=False)["memprof"]["notes"]
    assert any("rolling batch" in note for note in notes) == rolls


@pytest.mark.heavy
def test_a_rolling_batch_takes_the_time_of_its_steps(settings_for: Callable[..., Any]) -> None:
    """Little room takes more decode steps than much, and more time; less than as many passes."""
    from memprof.config.gpus import find_gpu
    from memprof.simulate.run import simulate_settings

    same = settings_for(
        recipe="lean", dtype="bfloat16", per_device_train_batch_size=8, num_generations=8, prompt_length=40,
        completion_length=40,
    )  # fmt: skip
    seconds = {}
    for batch in (8, 6, 2):
        raw = simulate_settings(same.with_(generation_batch=batch), gpu=find_gpu("RTX 4090"), stacks=False)
        seconds[batch] = raw["memprof"]["estimated_time"]["phases"]["generate"]
    assert seconds[8] < seconds[6] < seconds[2] < 9 * seconds[8]
