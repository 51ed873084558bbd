"""Enough is a promise: all that a run still makes is counted, and nothing is promised of a step not seen whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from memprof.advice.ranking import MARGIN, _simulating, simulated_is_enough
from memprof.advice.recorded_run import AdvisedRun, PhaseMaximum
from memprof.config.settings import Settings
from memprof.vocabulary import Category, Phase
from tests.plan.rows import simulated_row
from tests.report.plain import as_oom, as_report, enough_together, is_enough, ranked, run_of, whole_oom, with_words
from tests.reports.sample import sample

GIB = 2**30


def failed(phase: str = "optimizer_step", **changes: Any) -> dict[str, Any]:
    """A step that holds 4 GiB of weights, 4 of gradients and 2 of the 8 of state; 1 GiB is free beside gaps of 1."""
    return {
        "phase": phase, "requested_bytes": 0, "allocated_bytes": 10 * GIB, "device_free_bytes": GIB,
        "reserved_bytes": 11 * GIB, "ahead": {"still": {"optimizer_state": 6 * GIB}},
        "categories": {"weights": 4 * GIB, "gradients": 4 * GIB, "optimizer_state": 2 * GIB}, **changes,
    }  # fmt: skip


def run(generation: int = 0) -> AdvisedRun:
    step = {Category.WEIGHTS: 4 * GIB, Category.GRADIENTS: 4 * GIB, Category.OPTIMIZER_STATE: 8 * GIB}
    cache = {Category.WEIGHTS: 4 * GIB, Category.KV_CACHE: generation}
    return AdvisedRun(
        peaks=(
            PhaseMaximum(Phase.OPTIMIZER_STEP, 16 * GIB, step),
            PhaseMaximum(Phase.GENERATE, 4 * GIB + generation, cache),
        )
    )


def saving(**of: float) -> Any:
    return lambda run, peak: {category: round(n * GIB) for category, n in of.items()}


def test_the_whole_state_and_the_margin_are_counted() -> None:
    """16 GiB are needed and 11 can be had: with a tenth kept, 10 may be used, so 6 must be saved."""
    assert is_enough(saving(optimizer_state=6.1), run(), failed()) is True
    assert is_enough(saving(optimizer_state=5.9), run(), failed()) is False
    assert MARGIN == 0.1


def test_the_next_generation_lies_beside_the_state() -> None:
    """5 GiB of cache beside 4 of weights fitted without state; the second step's lies beside the 1.9 that are left."""
    assert is_enough(saving(optimizer_state=6.1), run(generation=5 * GIB), failed()) is False
    assert is_enough(saving(optimizer_state=6.1, kv_cache=1), run(generation=5 * GIB), failed()) is True


@pytest.mark.parametrize("oom", [None, failed("forward"), failed("backward"), failed("generate"), failed(ahead=None)])
def test_nothing_is_promised_of_what_was_not_seen(oom: dict[str, Any] | None) -> None:
    assert is_enough(saving(weights=4), run(), oom) is None


def test_a_later_step_has_seen_a_whole_one() -> None:
    """Whatever phase of it fails: the state is there, and what each phase holds beside it was seen."""
    oom = failed("forward", ahead=None)
    seen = replace(run(), whole_step=True)
    assert is_enough(saving(optimizer_state=6.1), seen, oom) is True
    assert is_enough(saving(optimizer_state=5.9), seen, oom) is False


def test_a_step_is_whole_that_ran_before_the_one_that_failed() -> None:
    def phases(*of: tuple[int, str]) -> list[dict[str, Any]]:
        span = sample()[0]["phases"][0]
        return [{**span, "step": step, "phase": phase, "peak_bytes": GIB, "categories": {}} for step, phase in of]

    def whole(*of: tuple[int, str]) -> bool:
        oom = whole_oom({"step": 2, "phase": "forward"})
        return run_of({**sample()[0], "phases": phases(*of), "oom": oom}).whole_step

    first = ((1, "generate"), (1, "forward"), (1, "backward"), (1, "optimizer_step"))
    assert whole(*first, (2, "forward"))
    assert not whole(*first[:3], (2, "forward"))  # its optimizer step was lost
    assert not whole(*first[1:], (2, "generate"), (2, "forward"))  # a generation like it was not seen before
    assert not whole(*((2, phase) for _, phase in first))


def test_a_step_whose_state_is_there_still_makes_its_scratch() -> None:
    """4 GiB of gradients' worth is made by foreach alone; what failed is a part of it."""
    oom = failed(ahead=None, categories={"optimizer_state": 8 * GIB}, requested_bytes=GIB)
    foreach, fused = (
        replace(run(), settings=Settings(model="org/model", optim=optim))
        for optim in ("adamw_torch", "adamw_torch_fused")
    )
    assert is_enough(saving(gradients=4, weights=3.1), fused, oom) is True  # 16 + 1 GiB needed
    assert is_enough(saving(gradients=4, weights=3.1), foreach, oom) is False
    assert is_enough(saving(gradients=4, weights=2.1, temporaries=4), foreach, oom) is True


def test_of_two_changes_the_larger_saving_of_a_category_counts() -> None:
    once, other = saving(optimizer_state=4), saving(optimizer_state=4, gradients=2.1)
    assert enough_together(once, once, run(), failed()) is False
    assert enough_together(once, other, run(), failed()) is True


def test_a_limit_and_a_simulation() -> None:
    limited = failed(limit_bytes=11 * GIB, device_free_bytes=90 * GIB)
    assert is_enough(saving(optimizer_state=6.1), run(), limited) is False  # nothing is left under the limit
    for needed, enough in ((10 * GIB, True), (11 * GIB, False)):
        changed = simulated_row(peak_bytes=8 * GIB, device_peak_bytes=needed, verdict={"non_torch_bytes": 0})
        assert simulated_is_enough(changed, as_oom(failed())) is enough


def test_growing_segments_that_are_not_enough_do_not_come_first() -> None:
    """The request alone would have fitted in one contiguous block; the simulated step does not."""
    device = {"id": "expandable", "peak": "device", "saves_bytes": GIB, "toll": 0, "exact": True, "enough": False}
    enough = {"id": "lora", "peak": "allocated", "saves_bytes": 4 * GIB, "toll": 4, "exact": False, "enough": True}
    oom = failed(ahead=None, fits_defragmented=True)
    assert ranked([device, enough], oom)[0] is enough
    assert ranked([{**device, "enough": True}, enough], oom)[0]["id"] == "expandable"


def test_the_first_row_says_what_else_to_do() -> None:
    rows = [
        {"id": "a", "action": "Keep moments in 8 bits", "enough": False, "enough_with": ["b"]},
        {"id": "b", "action": "Train an adapter", "enough": False},
    ]
    assert with_words(rows, failed()) == ["Not enough alone: also train an adapter.", None]
    (alone,) = with_words([{**rows[0], "enough": True}], failed())
    assert alone == "That alone is sufficient: later allocations of the run are counted, 10% margin."
    unasked = [{**rows[0]}, rows[1]]
    del unasked[0]["enough_with"]  # a simulation's row: nothing was tried together
    assert with_words(unasked, failed())[0] == "Not enough alone."
    for unknown in ({**rows[0], "enough": None}, {"id": "a", "action": "Keep moments in 8 bits"}):
        (words,) = with_words([unknown], failed())
        assert words is not None
        assert "not known" in words
        assert words.endswith("`memprof advise` simulates the whole step.")
    assert with_words(rows, None) == [None, None]


def test_nobody_is_sent_to_a_simulation_that_cannot_be_made() -> None:
    data = sample()[0]
    data["source"]["config"] = None
    words = _simulating(as_report(data))
    assert words == "Nothing is known of this run's configuration, so it cannot be simulated."
