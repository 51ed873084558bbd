"""The tools and variables of a backend, where advice is written with CUDA's names."""

from __future__ import annotations

from collections.abc import Iterable

from memprof.oom.advice.device import Remedy

__all__ = ["for_backend"]

# CUDA's name, then the backend's: what lists processes, what picks a device, the module of torch.
_NAMES: dict[str, tuple[tuple[str, str], ...]] = {
    "HIP": (
        ("nvidia-smi", "rocm-smi --showpids"),
        ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
        ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
        ("a CUDA context", "a HIP context"),
    ),
    "XPU": (
        ("nvidia-smi", "xpu-smi ps"),
        ("CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
        ("torch.cuda.", "torch.xpu."),
    ),
    "NPU": (
        ("nvidia-smi", "npu-smi info"),
        ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"),
        ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF"),
        ("torch.cuda.", "torch.npu."),
    ),
    "MPS": (("nvidia-smi", "Activity Monitor (Memory, GPU)"), ("torch.cuda.", "torch.mps.")),
}


def for_backend(backend: str, rows: Iterable[Remedy]) -> list[Remedy]:
    """Return the rows with the backend's own names of tools, variables and modules."""
    names = _NAMES.get(backend, ())
    found = []
    for action, why in rows:
        for ours, theirs in names:
            action, why = action.replace(ours, theirs), why.replace(ours, theirs)
        found.append((action, why))
    return found
