"""Rewards that run code in child processes: a recorded training is as one that is not.

``benchmarks/recording/sandboxes.py`` repeats this on a busy machine, in processes that are started for it.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from benchmarks.recording.sandboxes import KINDS
from tests import forked

pytestmark = pytest.mark.trl

# How a program without an end ends.
TERMINATED, KILLED = -signal.SIGTERM, -signal.SIGKILL
ENDS: dict[str, Any] = {
    "process": TERMINATED,
    "limits": [[-1.0], [0, 0, 0, KILLED]],
    "pool": "late",
    "executor-fork": [TERMINATED],
    "executor-forkserver": [TERMINATED],
    "executor-spawn": [TERMINATED],
    "program": "late",
    "session": TERMINATED,
    "coroutines": TERMINATED,
    "forks": [0, 0, TERMINATED],
    "alarm": "late",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_reward_with_a_sandbox(kind: str, tmp_path: Path) -> None:
    words = ["-m", "benchmarks.recording.sandboxes", kind, str(tmp_path), "alone", "watched"]
    done = forked.python(words, tmp_path, {**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    alone, watched = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert watched == alone
    assert watched["ends"] == [ENDS[kind]] * 2
    assert "memprof failed" not in done.stderr
