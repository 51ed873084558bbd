"""Scripts as somebody would write them, and running them in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

LOOP = """
import os, sys, time
import torch
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(1, 5):
    at(step, "before") if "at" in globals() else None
    for micro in range(2):
        loss = model(torch.randn(32, 64)).square().mean() / 2
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item().hex(), flush=True)
"""


def loop_that(does: str) -> str:
    """The loop with ``does`` run before step 2 (indented code; ``step`` is the step)."""
    body = "\n".join(f"        {line}" for line in does.splitlines())
    return f"def at(step, _):\n    import os, signal, sys, time\n    if step == 2:\n{body}\n{LOOP}"


def environment(**extra: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MEMPROF", "RANK", "WORLD_SIZE", "MASTER_"))}
    return {**kept, "OMP_NUM_THREADS": "1", **extra}


def python(
    *args: str, cwd: Path, stdin: str = "", timeout: float = 300, **extra: str
) -> subprocess.CompletedProcess[str]:
    """``python ARGS`` to its end."""
    return subprocess.run(
        [sys.executable, *args], cwd=cwd, input=stdin, capture_output=True, text=True, timeout=timeout,
        env=environment(**extra),
    )  # fmt: skip


def signalled(
    args: Sequence[str], cwd: Path, send: Callable[[subprocess.Popen[str]], None], ready: str, timeout: float = 180
) -> tuple[int, str, str]:
    """``python ARGS`` until it has printed ``ready``; then ``send`` is called. Its exit status and what it printed."""
    process = subprocess.Popen(
        [sys.executable, *args], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    try:
        assert process.stdout is not None
        seen = ""
        for line in process.stdout:
            seen += line
            if ready in line:
                break
        send(process)
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return process.returncode, seen + out, err


def left_in(folder: Path) -> list[str]:
    """Names of the files memprof left, sorted."""
    return sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []


def wait_for(path: Path, seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < until, path
        time.sleep(0.02)
