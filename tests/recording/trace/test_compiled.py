"""What torch.compile makes of a module is the same with and without a recording."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memprof import record

ROOT = Path(__file__).resolve().parents[3]


def graphs_of(path: Path | None) -> tuple[list[str], bytes]:
    """What a module compiled by its ``forward`` computes, and its gradient; recorded where there is a path."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4)))
    graphs: list[str] = []

    def keep(graph: Any, _inputs: Any) -> Any:
        graphs.append(" ".join(str(node.target) for node in graph.graph.nodes if node.op.startswith("call")))
        return graph.forward

    model.forward = torch.compile(model.forward, backend=keep)  # type: ignore[method-assign]

    def step() -> None:
        model(torch.ones(2, 4)).square().sum().backward()

    if path is None:
        step()
    else:
        with record(path, model=model):
            step()
    (gradient,) = (p.grad for name, p in model.named_parameters() if name.endswith("0.weight"))
    assert gradient is not None
    return graphs, gradient.numpy().tobytes()


def test_the_graphs_are_the_same(tmp_path: Path) -> None:
    alone, watched = graphs_of(None), graphs_of(tmp_path / "run.pickle")
    assert watched == alone
    assert len(alone[0]) == 1


@pytest.mark.heavy
@pytest.mark.parametrize("way", ["config", "forward"])
def test_a_compiled_training_is_equal_to_the_bit(way: str, tmp_path: Path) -> None:
    """With inductor, which orders sums by what it sees; a process and a cache each: three minutes of CPU time."""
    told = []
    for name in ("alone", "watched"):
        (folder := tmp_path / name).mkdir()
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "tests.recording.trace.compiled_run", way, str(folder), name],
            cwd=ROOT, env={**os.environ, **cache}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        told.append(json.loads(done.stdout.splitlines()[-1]))
    assert [run.pop("recorded") for run in told] == [0, 3]
    assert told[0] == told[1]
