"""Note what lies on a recording's device beside what torch's own allocator holds."""

from __future__ import annotations

import os
import sys
from typing import Any

from memprof.compat.torch_sharding import GROUPS
from memprof.recording.system.host import pinned_bytes, rss_bytes
from memprof.recording.system.nvml import DeviceMemory, DeviceMeter

# Modules that allocate on a device beside torch's caching allocator, where they are loaded.
_ALLOCATORS = {
    "vllm": "vLLM (its own pools, CUDA graphs, custom all-reduce)",
    "sglang": "SGLang (its own pools)",
    "torch_memory_saver": "torch_memory_saver (mapped pages of its own)",
    "cupy": "CuPy's pool",
    "jax": "JAX's preallocated pool",
    "tensorflow": "TensorFlow's pool",
    "deep_ep": "DeepEP's buffers",
    "nvshmem": "NVSHMEM's symmetric heap",
    "flashinfer": "FlashInfer's workspaces",
    "rmm": "RMM's pool",
}


class Outside:
    """Read one CUDA device, by torch's ``index``, through NVML; keep its first and its fullest state."""

    def __init__(self, index: int, meter: DeviceMeter | None = None) -> None:
        self._meter = meter if meter is not None else _meter_of(index)
        self._first: tuple[DeviceMemory, int | None] | None = None
        self._fullest: DeviceMemory | None = None

    def row(self, now_us: int, reserved: int | None) -> list[int | None]:
        """Return one sample: ``[time_us, rss, own, pinned, used, others, reserved]``."""
        reading = self._meter.read()
        if reading is not None:
            if self._first is None:
                self._first = (reading, reserved)
            if self._fullest is None or reading.used >= self._fullest.used:
                self._fullest = reading
        own, used, others = (reading.own, reading.used, reading.others) if reading else (None, None, None)
        return [now_us, rss_bytes(), own, pinned_bytes(), used, others, reserved]

    def to_plain(self) -> dict[str, Any]:
        """Return the ``outside`` part of a snapshot."""
        first, fullest = self._first, self._fullest
        return {
            "reason": self._meter.reason or None,
            "mig": self._meter.mig,
            "capacity_bytes": fullest.total if fullest else None,
            "used_bytes": fullest.used if fullest else None,
            "own_bytes": fullest.own if fullest else None,
            "others_bytes": fullest.others if fullest else None,
            "first_own_bytes": first[0].own if first else None,
            "first_reserved_bytes": first[1] if first else None,
            "processes": [[pid, n] for pid, n in fullest.processes] if fullest else [],
            "this_process": os.getpid(),
            "process_groups": _process_groups(),
            "allocators": [words for name, words in _ALLOCATORS.items() if name in sys.modules],
        }


def _meter_of(index: int) -> DeviceMeter:
    import torch

    if getattr(torch.version, "hip", None):
        return DeviceMeter("", silent="ROCm: no NVML to ask")
    try:
        uuid = str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))
    except Exception as error:
        return DeviceMeter("", silent=f"the device does not say which it is ({error})")
    return DeviceMeter(uuid, os.environ.get("CUDA_VISIBLE_DEVICES"))


def _process_groups() -> int:
    """Return how many NCCL communicators torch has groups for; each holds device buffers of its own."""
    distributed = sys.modules.get("torch.distributed")
    try:
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            return 0
        groups = (GROUPS.find() or {}).values()
        return sum("nccl" in str(backend) for backend, _ in groups)
    except Exception:
        return 0
