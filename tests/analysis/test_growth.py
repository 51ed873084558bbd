"""Telling a leak from longer completions, on runs that are one or the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memprof import Analysis, analyze
from memprof.analysis.growth import growth
from tests.synthetic import SnapshotBuilder

MIB = 2**20


def steps_of(tmp_path: Path, lengths: list[int], leak: int) -> Analysis:
    """One step per length: that many MiB come and go, ``leak`` bytes stay."""
    run = SnapshotBuilder()
    run.alloc(64 * MIB, "load_model")
    steps: list[list[Any]] = []
    phases: list[dict[str, Any]] = []
    for step, length in enumerate(lengths):
        start = run.time_us + 1
        passing = run.alloc(length * MIB, "forward")
        if leak:
            run.alloc(leak, "append_to_history")
        run.free(passing)
        steps.append([step, start, run.time_us, length * 1000])
        phases.append({"phase": "forward", "start_us": start, "end_us": run.time_us, "step": step})
    extra = {"schema": "memprof.snapshot/1", "kind": "cuda", "phases": phases, "steps": steps}
    return analyze(run.save(tmp_path / "run.pickle", extra))


def test_a_leak_is_named_by_its_stack(tmp_path: Path) -> None:
    analysis = steps_of(tmp_path, [8, 8, 8, 8, 8], leak=MIB)
    found = growth(analysis.timeline, analysis.attribution, {}, analysis.stacks.of, {})
    assert found.end_bytes_per_step == pytest.approx(MIB)
    assert [left.bytes for left in found.left_behind] == [4 * MIB]
    assert analysis.report.growth is not None
    (left,) = analysis.report.growth.left_behind
    assert left.steps == 4
    assert "append_to_history" in left.stack[0]


def test_longer_completions_are_no_leak(tmp_path: Path) -> None:
    report = steps_of(tmp_path, [4, 16, 8, 32, 2], leak=0).to_dict()["growth"]
    assert report["left_behind"] == []
    assert report["end_bytes_per_step"] == pytest.approx(0, abs=1)
    assert report["explained_by_tokens"] == pytest.approx(1)
    assert report["peak_bytes_per_token"] == pytest.approx(MIB / 1000)


def test_too_few_steps_say_nothing(tmp_path: Path) -> None:
    report = steps_of(tmp_path, [4, 8], leak=0).to_dict()["growth"]
    assert report["end_bytes_per_step"] is None
    assert report["explained_by_tokens"] is None
