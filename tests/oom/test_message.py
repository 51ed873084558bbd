"""The ten lines a run out of memory ends with."""

from __future__ import annotations

from typing import Any

import pytest

from memprof.oom.message import MOST_LINES, oom_lines

GIB = 2**30


def report(**changes: Any) -> dict[str, Any]:
    oom = {
        "requested_bytes": 3 * GIB, "device_free_bytes": GIB, "phase": "backward", "step": 57, "time_us": 1,
        "stack": ["/x/site-packages/torch/nn/functional.py:9 linear", "/home/me/train.py:12 main"],
        "allocated_bytes": 20 * GIB, "cached_bytes": 0, "inactive_split_bytes": 0, "fits_defragmented": False,
        "categories": {"activations": 9 * GIB, "weights": 6 * GIB, "gradients": 3 * GIB, "inputs": 2 * GIB},
    }  # fmt: skip
    return {
        "source": {"rank": 0, "world_size": 1, "device_total_bytes": 24 * GIB},
        "peak": {"allocated_bytes": 21 * GIB, "categories": {"weights": 21 * GIB}},
        "advice": changes.pop("advice", []),
        "oom": {**oom, **changes},
    }


def test_what_is_asked_where_and_who_holds_it() -> None:
    lines = oom_lines(report(), "out/report.html")
    assert lines[:5] == [
        "memprof: out of memory in backward, step 57.",
        "  asked for  3.00 GiB with 1.00 GiB free of 24.00 GiB",
        "  by         /x/site-packages/torch/nn/functional.py:9 linear",
        "  by         /home/me/train.py:12 main",
        "  held       20.00 GiB: Activations 9.00 GiB, Weights 6.00 GiB, Gradients 3.00 GiB, other 2.00 GiB",
    ]
    assert lines[-1] == "  page       out/report.html"
    assert len(lines) <= MOST_LINES


def test_the_smallest_change_that_is_enough_comes_first() -> None:
    def row(action: str, saves: int) -> dict[str, Any]:
        return {"action": action, "saves_bytes": saves, "costs": "", "exact": True, "basis": "simulated"}

    advice = [row("too little", GIB), row("more than enough", 9 * GIB), row("just enough", 2 * GIB)]
    lines = oom_lines(report(advice=advice), "p")
    assert lines[5] == "  change     just enough (saves 2.00 GiB, simulated; enough alone)"
    assert "more than enough (saves 9.00 GiB, simulated)" in lines[6]
    assert len(oom_lines(report(advice=advice * 5), "p")) == MOST_LINES


@pytest.mark.parametrize(("fits", "says"), [(True, "expandable_segments:True"), (False, "too little even")])
def test_idle_memory_is_judged(fits: bool, says: str) -> None:
    lines = oom_lines(report(inactive_split_bytes=2 * GIB, fits_defragmented=fits))
    assert any("2.00 GiB reserved by torch and unused" in line and says in line for line in lines)


def test_with_little_known_and_on_many_ranks() -> None:
    bare = report(stack=[], categories=None, device_free_bytes=None, step=None, phase=None, requested_bytes=0)
    bare["source"] |= {"rank": 3, "world_size": 8}
    lines = oom_lines(bare)
    assert lines[:3] == [
        "memprof [rank 3]: out of memory in an unknown phase.",
        "  asked for  an unknown size",
        "  held       21.00 GiB at the peak: Weights 21.00 GiB",
    ]
