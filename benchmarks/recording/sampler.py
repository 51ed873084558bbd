"""Measure what watching a device between the phases costs: the sampler's CPU time, and what it keeps of an hour.

There is no GPU on every machine: where there is none, NVML and the allocator's counters are answered by a stand-in
(``device: "stand-in"`` in the result), so the figure is memprof's own share and the driver's calls are not in it.

    python -m benchmarks.recording sampler --json benchmarks/results/cpu/sampler.json
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from benchmarks.measure import write_result
from memprof.recording.system.nvml import DeviceMeter
from memprof.recording.system.outside_torch import Outside
from memprof.recording.system.sampler import MOST_HERTZ, Sampler


class _StandIn:
    """A library that answers at once, a process that grows and shrinks."""

    def __init__(self) -> None:
        self.count = 0

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:
        return name

    def nvmlDeviceIsMigDeviceHandle(self, _handle: str) -> int:
        return 0

    def nvmlDeviceGetMemoryInfo(self, _handle: str) -> Any:
        self.count += 1
        return SimpleNamespace(total=80 << 30, used=(20 + self.count // 30 % 3) << 30)

    def nvmlDeviceGetComputeRunningProcesses(self, _handle: str) -> list[Any]:
        return [SimpleNamespace(pid=os.getpid(), usedGpuMemory=(18 + self.count // 30 % 3) << 30)]


@click.command(help=__doc__)
@click.option("--seconds", default=20.0, show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path))
def main(seconds: float, path: Path | None) -> None:
    write_result(measure(seconds), path)


def measure(seconds: float) -> dict[str, Any]:
    """Run a sampler for so long; return its figures."""
    import torch

    real = torch.cuda.is_available()
    outside = Outside(torch.cuda.current_device()) if real else Outside(0, DeviceMeter("0", library=_StandIn()))
    reserved = (lambda: int(torch.cuda.memory_reserved())) if real else (lambda: 16 << 30)
    kept: list[Any] = []
    sampler = Sampler(lambda: outside.row(time.time_ns() // 1000, reserved()), kept.append)
    sampler.start()
    time.sleep(seconds)
    sampler.stop()
    return {
        "device": "cuda" if real else "stand-in",
        "hertz_allowed": MOST_HERTZ,
        "hertz": round(sampler.looks / seconds, 2),
        "cpu_us_per_look": round(1e6 * sampler.seconds / max(sampler.looks, 1), 1),
        "share_of_one_core": round(sampler.seconds / seconds, 6),
        "rows_kept_per_hour": round(len(kept) * 3600 / seconds),
    }
