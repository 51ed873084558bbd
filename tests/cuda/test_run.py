"""``memprof run``: scripts that know nothing of memprof, watched from outside on CUDA's own allocator."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cuda.balance import Balance
from tests.cuda.emulated import command_line, device

pytestmark = pytest.mark.slow

Row = Callable[[str, Balance], None]
# The script reads its own peak, which memprof then may not reset.
RUN = [sys.executable, "-m", "memprof", "run", "--no-reset-peaks"]


def watched(command: list[str], out: Path) -> tuple[dict[str, int], dict[str, object]]:
    """Run a script under ``memprof run``; what it printed by name, and the one report."""
    done = command_line([*RUN, "--out", str(out), "-m", *command], env=device())
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (line.split() for line in done.stdout.splitlines())
    said = {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdigit()}
    (report,) = out.glob("step-*.json")
    assert (out / "report.html").is_file()
    return said, json.loads(report.read_text(encoding="utf-8"))


def balanced(name: str, said: dict[str, int], report: dict[str, object], row: Row) -> Balance:
    balance = Balance.of(report, {"allocated_bytes": said["PEAK"]})
    row(name, balance)
    balance.check()
    return balance


def test_a_plain_loop(tmp_path: Path, row: Row) -> None:
    said, report = watched(["tests.cuda.programs.plain_script"], tmp_path)
    balance = balanced("memprof run, plain loop", said, report, row)
    assert {"forward", "backward", "optimizer_step"} <= set(balance.phases)


@pytest.mark.trl
def test_a_script_with_a_trainer(tmp_path: Path, row: Row) -> None:
    said, report = watched(["tests.cuda.programs.script", str(tmp_path)], tmp_path / "memprof")
    balance = balanced("memprof run, TRL's trainer", said, report, row)
    assert {"generate", "reward", "forward", "backward", "optimizer_step"} <= set(balance.phases)
    assert report["source"]["config"]["trainer"] == "GRPOTrainer"
