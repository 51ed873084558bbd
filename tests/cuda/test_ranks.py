"""Two ranks with a card each: DDP, FSDP2, and TRL's trainer with the callback."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memprof import analyze, load_snapshot
from tests.cuda.balance import Balance, analysed
from tests.cuda.emulated import command_line, device

pytestmark = [pytest.mark.slow, pytest.mark.trl]

Row = Callable[[str, Balance], None]
RANKS = (0, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ranks")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [sys.executable, *torchrun, "-m", "tests.cuda.programs.ranks", str(out)]
    done = command_line(command, env=device(devices=2))
    assert done.returncode == 0, done.stderr[-4000:]
    return out


def told(folder: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"told.rank-{rank}.json").read_text())
    return found


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_each_rank_balances(folder: Path, kind: str, rank: int, row: Row) -> None:
    one, path = told(folder, rank)[kind], folder / f"{kind}.rank-{rank}.pickle"
    report = analysed(path)
    balance = Balance.of(report, one["counters"])
    row(f"{kind}, rank {rank} of 2", balance)
    balance.check()
    assert report["source"]["device"] == rank
    last = [phase for phase in analyze(load_snapshot(path)).phases if phase.phase == "optimizer_step"][-1]
    held = last.categories_requested
    assert one["local"] == (one["whole"] // 2 if kind == "fsdp2" else one["whole"])
    assert held["weights"] == held["gradients"] == one["local"]
    assert 2 * one["local"] < held["optimizer_state"] < 2.01 * one["local"]


@pytest.mark.parametrize("rank", RANKS)
def test_the_callback_balances_on_each_rank(folder: Path, rank: int, row: Row) -> None:
    one = told(folder, rank)["trl"]
    assert one["world"] == 2
    report = json.loads((folder / "trl" / "_memprof" / f"step-000002.rank-{rank}.json").read_text())
    balance = Balance.of(report, one["counters"])
    row(f"callback under DDP, rank {rank} of 2", balance)
    balance.check()
    assert (report["source"]["rank"], report["source"]["world_size"]) == (rank, 2)
