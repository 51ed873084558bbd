"""Answer what a script asks of ``torch.cuda`` before it trains, on a machine without a GPU."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from memprof.compat import patching
from memprof.compat import torch as torch_names
from memprof.compat.patching import replacing
from memprof.config.gpus import Gpu
from memprof.simulate.fake_cuda.sdpa_kernels import DEFAULT_CAPABILITY

_NAME = "simulated GPU"
_TOTAL_BYTES = 80 * 2**30  # where --gpu names none
# Functions that change nothing a simulation sees.
_WITHOUT_EFFECT = (
    "empty_cache", "ipc_collect", "init", "manual_seed", "manual_seed_all", "reset_accumulated_memory_stats",
    "reset_max_memory_allocated", "reset_max_memory_cached", "reset_peak_memory_stats", "seed", "seed_all",
    "set_device", "set_per_process_memory_fraction", "synchronize",
)  # fmt: skip
_NO_BYTES = (
    "max_memory_allocated", "max_memory_cached", "max_memory_reserved", "memory_allocated", "memory_cached",
    "memory_reserved", "utilization",
)  # fmt: skip


@contextlib.contextmanager
def cuda_answers(gpu: Gpu | None, script: Path) -> Iterator[None]:
    """Answer questions about the GPU as ``gpu`` would, while open; no memory is in use there.

    Whether there is a GPU is answered with yes to the script and to modules next to it only: libraries choose their
    device by it, and the fake tensors are on another.
    """
    total = gpu.total_bytes if gpu is not None else _TOTAL_BYTES
    capability = gpu.capability if gpu is not None and gpu.capability != (0, 0) else DEFAULT_CAPABILITY
    name = f"NVIDIA {gpu.name}" if gpu is not None and gpu.maker == "nvidia" else gpu.name if gpu is not None else _NAME
    properties = SimpleNamespace(
        name=name,
        total_memory=total,
        major=capability[0],
        minor=capability[1],
        multi_processor_count=gpu.multiprocessors if gpu is not None else 108,
        warp_size=32,
        is_integrated=0,
    )
    always: dict[str, Any] = {
        "current_device": 0,
        "get_device_capability": capability,
        "get_device_name": name,
        "get_device_properties": properties,
        "mem_get_info": (total, total),
        "memory_stats": {},
        "memory_summary": "",
        "memory_snapshot": [],
        **dict.fromkeys(_WITHOUT_EFFECT),
        **dict.fromkeys(_NO_BYTES, 0),
    }
    to_script = {
        "is_available": True,
        "device_count": 1,
        "is_bf16_supported": capability >= (8, 0),
        "is_initialized": True,
    }
    folder = str(script.resolve().parent)
    changes = [(torch.cuda, of, _answer(value)) for of, value in always.items() if hasattr(torch.cuda, of)]
    changes += [(torch.cuda, of, _to_script(getattr(torch.cuda, of), folder, value)) for of, value in to_script.items()]
    with replacing(*changes), patching((torch_names.HISTORY, _answer(None))):
        yield


def _answer(value: Any) -> Callable[..., Any]:
    def answer(*_: Any, **__: Any) -> Any:
        return value

    return answer


def _to_script(original: Callable[..., Any], folder: str, value: Any) -> Callable[..., Any]:
    """Make a function that answers ``value`` to code below ``folder``, and to all other code as ``original`` does."""

    def answer(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_code.co_filename
        ours = "site-packages" not in caller and str(Path(caller).resolve()).startswith(folder)
        return value if ours else original(*args, **kwargs)

    return answer
