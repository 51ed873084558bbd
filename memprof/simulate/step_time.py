"""Estimate how long a simulated step takes on a card: every kernel at the roofline of the card's published peaks."""

from __future__ import annotations

from collections.abc import Mapping

from memprof.config.gpus import Gpu
from memprof.config.speeds import Speed, speed_of
from memprof.report.simulation import EstimatedTime
from memprof.simulate.recorder.flops import Tally

# Shares of the published peaks that kernels reach in practice, and what one operator costs the process that launches it
# (torch in eager mode, called from Python). They are assumptions, and the report says so.
_COMPUTE, _MEMORY, _HOST_LINK = 0.65, 0.80, 0.80
# 21 µs and 2.6 ms follow from Qwen2.5's published rates on an A100 (``python -m benchmarks.simulator time``).
_LAUNCH_SECONDS = 21e-6
_ENGINE_STEP_SECONDS = 2.6e-3


def estimated_time(
    work: Mapping[str, Tally], gpu: Gpu | None, *, bfloat16: bool = True
) -> EstimatedTime | None:
    """Estimate the seconds of one optimizer step on one rank: ``estimated_time`` of the report.

    A kernel takes as long as its FLOPs or its bytes, whichever is more, at a share of the card's peaks. A phase takes
    as long as its kernels, or as the host needs to launch them, whichever is more; then what crosses to the host and
    back is added, as if nothing overlapped. None where the card has no name that is known.

    ``work``: of each phase of the step; ``bfloat16``: whether half precision is that.
    """
    speed = speed_of(gpu.name, bfloat16=bfloat16) if gpu is not None else None
    if speed is None or gpu is None or not work:
        return None
    phases = {phase: round(_seconds(tally, speed), 6) for phase, tally in work.items()}
    return EstimatedTime(
        step_s=round(sum(phases.values()), 6), phases=phases, basis="roofline", assumptions=_assumptions(gpu, speed)
    )


def _seconds(tally: Tally, speed: Speed) -> float:
    device = launches = 0.0
    for key, times in tally.kernels.items():
        device += times * _kernel(key, speed)
        launches += times
    engine = sum(times * (_ENGINE_STEP_SECONDS + _kernel(key, speed)) for key, times in tally.fused.items())
    return max(device, launches * _LAUNCH_SECONDS) + engine + tally.host_bytes / speed.host / _HOST_LINK


def _kernel(key: tuple[int, int, int], speed: Speed) -> float:
    half, single, moved = key
    return max((half / speed.half + single / speed.single) / _COMPUTE, moved / speed.bandwidth / _MEMORY)


def _assumptions(gpu: Gpu, speed: Speed) -> tuple[str, ...]:
    return (
        f"{gpu.name}: {speed.half / 1e12:g} TFLOP/s in half precision, {speed.single / 1e12:g} in single, "
        f"{speed.bandwidth / 1e9:g} GB/s of memory, {speed.host / 1e9:g} GB/s to the host",
        f"kernels reach {_COMPUTE:.0%} of the FLOP/s and {_MEMORY:.0%} of the bytes",
        f"an operator costs the host {_LAUNCH_SECONDS * 1e6:g} µs; a step of a vLLM engine "
        f"{_ENGINE_STEP_SECONDS * 1e3:g} ms",
        "nothing overlaps with transfers to the host",
        "not counted: reward functions, the data loader, communication between ranks, logging",
    )
