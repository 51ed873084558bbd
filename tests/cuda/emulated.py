"""Run a program of ``tests/cuda/programs`` on the emulated GPU, in a process of its own, and take its answer.

pytest itself never imports torch here: a process has one card, one allocator configuration and one set of peaks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from memprof.emulate.launch import environment

ROOT = Path(__file__).resolve().parents[2]
# What a process that asks for nothing else gets.
CARD, CONTEXT = "24GiB", "512MiB"
_HIDDEN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MEMPROF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"


def device(
    card: str = CARD, *, expandable: bool = False, devices: int = 1, event_delay_us: int = 0, **more: Any
) -> dict[str, str]:
    """Return the environment of a process with an emulated GPU; ``more`` is for the emulator."""
    base = {key: value for key, value in os.environ.items() if key not in _HIDDEN}
    base |= {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
    }
    base["PYTHONPATH"] = str(ROOT)
    if expandable:
        base["PYTORCH_CUDA_ALLOC_CONF"] = _EXPANDABLE
    return environment(card, devices=devices, event_delay_us=event_delay_us, context=CONTEXT, base=base, **more)


def run(program: str, asked: Any, *, env: dict[str, str] | None = None, timeout: float = 600) -> Any:
    """Run ``tests/cuda/programs/<program>.py`` and return what it answered."""
    command = [sys.executable, "-m", f"tests.cuda.programs.{program}", json.dumps(asked)]
    done = command_line(command, env=env, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    return answer_in(done.stdout)


def command_line(
    command: list[str], *, env: dict[str, str] | None = None, cwd: Path = ROOT, timeout: float = 600
) -> subprocess.CompletedProcess[str]:
    """Run a command on the emulated GPU, whatever its exit code."""
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env=env or device(), timeout=timeout, check=False
    )


def answer_in(output: str) -> Any:
    """Return the program's answer: its last line that begins with ``ANSWER``."""
    lines = [line for line in output.splitlines() if line.startswith("ANSWER ")]
    assert lines, output[-3000:]
    return json.loads(lines[-1].removeprefix("ANSWER "))
