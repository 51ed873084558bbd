"""The ten lines a run out of memory ends with."""

from __future__ import annotations

from typing import Any

import pytest
from memprof.reports.terminal.out_of_memory import MOST_LINES, oom_lines

from memprof.report import Report
from tests.report.plain import as_report
from tests.reports.sample import sample

GIB = 2**30


def report(**changes: Any) -> Report:
    oom = {
        "requested_bytes": 3 * GIB, "device_free_bytes": GIB, "phase": "backward", "step": 57, "time_us": 1,
        "stack": ["/x/site-packages/torch/nn/functional.py:9 linear", "/home/me/train.py:12 main"],
        "allocated_bytes": 20 * GIB, "cached_bytes": 0, "inactive_split_bytes": 0, "fits_defragmented": False,
        "categories": {"activations": 9 * GIB, "weights": 6 * GIB, "gradients": 3 * GIB, "inputs": 2 * GIB},
    }  # fmt: skip
    base = sample()[0]
    words = {"verdict": f"Out by 2.00 GiB in {oom['phase']}", "cause": "9.00 GiB of activations."}
    rank = {"rank": changes.pop("rank", 0), "world_size": changes.pop("world_size", 1)}
    plain = {
        **base,
        "source": {**base["source"], **rank, "device_total_bytes": 24 * GIB},
        "peak": {**base["peak"], "allocated_bytes": 21 * GIB, "categories": {"weights": 21 * GIB}},
        "headline": {**words, "places": [], "action": "", "assumed": []},
        "advice": changes.pop("advice", []),
        "oom": {**oom, **changes},
    }
    return as_report(plain)


def test_what_is_asked_where_and_who_holds_it() -> None:
    lines = oom_lines(report(), "out/report.html")
    assert lines[:5] == [
        "memprof: Out by 2.00 GiB in backward. 9.00 GiB of activations.",
        "  requested  3.00 GiB with 1.00 GiB free of 24.00 GiB",
        "  by         /x/site-packages/torch/nn/functional.py:9 linear",
        "  by         /home/me/train.py:12 main",
        "  allocated  20.00 GiB: Activations 9.00 GiB, Weights 6.00 GiB, Gradients 3.00 GiB, other 2.00 GiB",
    ]
    assert lines[-1] == "  page       out/report.html"
    assert len(lines) <= MOST_LINES


def test_what_is_enough_alone_is_said() -> None:
    def row(action: str, saves: int, enough: bool | None) -> dict[str, Any]:
        told = {"costs": "", "exact": True, "basis": "simulated", "enough": enough}
        return {"action": action, "saves_bytes": saves, **told}

    advice = [row("just enough", 2 * GIB, True), row("more than enough", 9 * GIB, None), row("little", GIB, False)]
    lines = oom_lines(report(advice=advice), "p")
    assert lines[5] == "  change     just enough (saves 2.00 GiB, simulated; enough alone)"
    assert "more than enough (saves 9.00 GiB, simulated)" in lines[6]
    assert "little (saves 1.00 GiB, simulated; not enough alone)" in lines[7]
    assert len(oom_lines(report(advice=advice * 5), "p")) == MOST_LINES


@pytest.mark.parametrize(("fits", "says"), [(True, "expandable_segments:True"), (False, "too little even")])
def test_idle_memory_is_judged(fits: bool, says: str) -> None:
    lines = oom_lines(report(inactive_split_bytes=2 * GIB, fits_defragmented=fits))
    assert any("2.00 GiB reserved by PyTorch but unused" in line and says in line for line in lines)


def test_with_little_known_and_on_many_ranks() -> None:
    unknown = {"stack": [], "categories": None, "device_free_bytes": None, "step": None, "phase": None}
    bare = report(**unknown, requested_bytes=0, rank=3, world_size=8)
    lines = oom_lines(bare)
    assert lines[:3] == [
        "memprof [rank 3]: Out by 2.00 GiB in backward. 9.00 GiB of activations.",
        "  requested  an unknown size",
        "  allocated  21.00 GiB at the peak: Weights 21.00 GiB",
    ]


MIB = 2**20
AHEAD = {
    "still": {"optimizer_state": 850 * MIB}, "moment": "optimizer_step", "needed_bytes": 5 * GIB,
    "available_bytes": 5 * GIB - 800 * MIB, "short_bytes": 800 * MIB,
}  # fmt: skip


def test_a_step_with_more_ahead_is_no_matter_of_fragments() -> None:
    lines = oom_lines(report(inactive_split_bytes=GIB, fits_defragmented=True, ahead=AHEAD))
    assert (
        "  idle       1.00 GiB reserved by PyTorch but unused; if contiguous it would fit this request, not the step"
        in lines
    )
    assert (  # 0.83 + 4.17 are 5.00
        "  the step   had still to allocate 850.00 MiB of optimizer state in addition to 4.17 GiB: 5.00 GiB in total, "
        "800.00 MiB more than there was" in lines
    )
    assert not any("expandable" in line for line in lines)


def test_what_lies_idle_is_advised_only_where_that_was_wrong() -> None:
    def row(action: str, saves: int, toll: int, peak: str = "allocated") -> dict[str, Any]:
        return {
            "action": action,
            "saves_bytes": saves,
            "costs": "",
            "exact": True,
            "basis": "estimated",
            "toll": toll,
            "peak": peak,
        }

    advice = [
        row("QLoRA", 9 * GIB, 4), row("enough for the request", 50 * MIB, 1), row("a smaller batch", 2 * GIB, 1),
        row("grow segments", GIB, 0, "device"),
    ]  # fmt: skip
    asked = {
        "requested_bytes": 47 * MIB,
        "device_free_bytes": 10 * MIB,
        "inactive_split_bytes": GIB,
        "fits_defragmented": True,
    }
    lines = [line for line in oom_lines(report(advice=advice, ahead=AHEAD, **asked)) if "saves" in line]
    assert [line[13:18] for line in lines] == ["QLoRA", "enoug", "a sma"]
    without = [line for line in oom_lines(report(advice=advice, **asked)) if "saves" in line]
    assert any("grow segments" in line for line in without)


def test_the_piece_the_allocator_asks_for_is_named() -> None:
    asked = {"requested_bytes": 8_713_000, "device_free_bytes": 10 * MIB, "segment_bytes": 20 * MIB}
    assert oom_lines(report(**asked))[1] == (
        "  requested  8.31 MiB, which is allocated as a segment of 20.00 MiB, with 10.00 MiB free of 24.00 GiB"
    )


def test_no_frame_of_memprof_is_named() -> None:
    stack = [
        "/x/site-packages/memprof/recording/trace/dispatch_mode.py:80 wrapper",
        "/x/site-packages/torch/nn/functional.py:9 linear",
        "/x/site-packages/memprof/compat/patching.py:40 wrapper",
        "/home/me/train.py:12 main",
    ]
    lines = [line for line in oom_lines(report(stack=stack)) if line.startswith("  by")]
    assert lines == [
        "  by         /x/site-packages/torch/nn/functional.py:9 linear",
        "  by         /home/me/train.py:12 main",
    ]
    assert not any(line.startswith("  by") for line in oom_lines(report(stack=stack[:1])))
