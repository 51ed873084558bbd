"""Stacks as a report has them: without memprof, and without what started it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import memprof
from memprof.analysis.analysis import analyze
from memprof.snapshot import snapshot_from_raw
from tests.synthetic import SnapshotBuilder, frame

MIB = 2**20
HERE = Path(os.path.abspath(memprof.__file__)).parent.as_posix()
SITE = "/home/ada/.venv/lib/python3.11/site-packages"
SCRIPT = frame("<module>", "/home/ada/train.py", 31)
LOSS = frame("_compute_loss", f"{SITE}/trl/trainer/grpo_trainer.py", 1790)
CLICK = [frame("invoke", f"{SITE}/click/core.py", 1485), frame("__call__", f"{SITE}/click/core.py", 1161)]
RUN = [frame("run", f"{HERE}/instrument/script.py", 69), frame("main", f"{HERE}/cli/group.py", 90)]
COMMAND = frame("<module>", "/home/ada/.venv/bin/memprof", 8)
PYTHON_M = [frame("_run_code", "<frozen runpy>", 88), frame("_run_module_as_main", "<frozen runpy>", 198)]
WRAPPER = frame("wrapper", f"{HERE}/compat/patching.py", 60)
LEAN = frame("_tiles", f"{HERE}/grpo/loss/chunked_loss.py", 221)


def stack_of(frames: Sequence[dict[str, Any]]) -> list[str]:
    """The stack that the report has of the one block allocated with these frames."""
    builder = SnapshotBuilder()
    builder.alloc(3 * MIB)
    for event in builder.events:
        event["frames"] = list(frames)
    report = analyze(snapshot_from_raw(builder.raw())).to_dict()
    assert report["device_peak"]["grown_by"][0]["stack"] == report["peak"]["allocations"][0]["stack"]
    assert report["peak"]["active_bytes"] == sum(report["peak"]["categories"].values()) == 3 * MIB
    found: list[str] = report["peak"]["allocations"][0]["stack"]
    return found


def lines(*frames: dict[str, Any]) -> list[str]:
    return [f"{f['filename']}:{f['line']} {f['name']}" for f in frames]


@pytest.mark.parametrize("start", [[*RUN, *CLICK, COMMAND], [*RUN, *CLICK, RUN[1], *PYTHON_M]], ids=["memprof", "-m"])
def test_what_started_memprof_is_left_out(start: list[dict[str, Any]]) -> None:
    assert stack_of([LOSS, WRAPPER, SCRIPT, *start]) == lines(LOSS, SCRIPT)


def test_a_program_of_click_keeps_its_frames_where_memprof_did_not_start_it() -> None:
    assert stack_of([LOSS, SCRIPT, *CLICK, *PYTHON_M]) == lines(LOSS, SCRIPT, *CLICK, *PYTHON_M)
    assert stack_of([LOSS, SCRIPT, *CLICK, *RUN, *CLICK, COMMAND]) == lines(LOSS, SCRIPT)


def test_the_lean_trainers_frames_stay() -> None:
    assert stack_of([LEAN, LOSS, SCRIPT, *RUN, COMMAND]) == lines(LEAN, LOSS, SCRIPT)


def test_a_stack_of_nothing_else_stays_whole() -> None:
    assert stack_of([*RUN, COMMAND]) == lines(*RUN, COMMAND)


def test_a_stack_of_what_started_memprof_alone_names_no_place() -> None:
    """A simulation records no frames of its own: what is left of a weight's stack is click, and that made nothing."""
    assert stack_of([*CLICK, frame("<module>", f"{HERE}/__main__.py", 6), *PYTHON_M]) == []
