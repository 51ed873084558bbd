"""One message in every wording torch has had, with the figures that are in it (GiB, unless a unit stands there)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from memprof.oom.knowledge_files import MESSAGE_FILES, table

G, M = 2**30, 2**20


def gib(value: float) -> int:
    return round(value * G)


def mib(value: float) -> int:
    return round(value * M)


class Wording(NamedTuple):
    text: str
    says: dict[str, Any]


_ADVICE_20 = (
    " If reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation.  See "
    "documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF"
)
_ADVICE_24 = (
    " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to "
    "avoid fragmentation.  See documentation for Memory Management  "
    "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)

WORDINGS = {
    "1.3": Wording(
        "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 1; 10.76 GiB total capacity; 9.71 GiB "
        "already allocated; 5.62 MiB free; 83.50 MiB cached)",
        {"backend": "CUDA", "device": 1, "requested": mib(20), "total": gib(10.76), "allocated": gib(9.71),
         "free": mib(5.62), "unallocated": mib(83.5)},
    ),
    "2.0": Wording(
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.25 GiB (GPU 0; 23.69 GiB total capacity; "
        "20.10 GiB already allocated; 410.25 MiB free; 22.05 GiB reserved in total by PyTorch)" + _ADVICE_20,
        {"backend": "CUDA", "device": 0, "requested": gib(1.25), "total": gib(23.69), "allocated": gib(20.1),
         "free": mib(410.25), "reserved": gib(22.05), "unallocated": gib(22.05) - gib(20.1)},
    ),
    "2.0 with a limit": Wording(
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB (GPU 0; 79.15 GiB total "
        "capacity; 7.70 GiB already allocated; 70.98 GiB free; 8.00 GiB allowed; 7.81 GiB reserved in total "
        "by PyTorch)",
        {"allowed": gib(8), "requested": mib(512), "free": gib(70.98), "reserved": gib(7.81)},
    ),
    "2.1": Wording(
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 496.00 MiB. GPU 0 has a total capacty of "
        "14.75 GiB of which 235.06 MiB is free. Process 20398 has 14.52 GiB memory in use. Of the allocated memory "
        "14.06 GiB is allocated by PyTorch, and 330.42 MiB is reserved by PyTorch but unallocated. If reserved but "
        "unallocated memory is large try setting max_split_size_mb to avoid fragmentation.",
        {"total": gib(14.75), "free": mib(235.06), "processes": ((20398, gib(14.52)),), "allocated": gib(14.06),
         "unallocated": mib(330.42), "in_use": None},
    ),
    "2.2, another process": Wording(
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.24 GiB. GPU 2 has a total capacity of "
        "139.80 GiB of which 623.38 MiB is free. Including non-PyTorch memory, this process has 123.29 GiB memory in "
        "use. Process 2951793 has 15.88 GiB memory in use. Of the allocated memory 121.00 GiB is allocated by PyTorch, "
        "and 1.10 GiB is reserved by PyTorch but unallocated." + _ADVICE_24,
        {"device": 2, "in_use": gib(123.29), "processes": ((2951793, gib(15.88)),), "allocated": gib(121)},
    ),
    "2.4, private pools": Wording(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.11 "
        "GiB of which 1.02 GiB is free. 76.00 GiB allowed; Including non-PyTorch memory, this process has 78.06 GiB "
        "memory in use. Of the allocated memory 75.50 GiB is allocated by PyTorch, with 3.25 GiB allocated in private "
        "pools (e.g., CUDA Graphs), and 1.31 GiB is reserved by PyTorch but unallocated." + _ADVICE_24,
        {"device": 3, "allowed": gib(76), "private_pools": gib(3.25), "allocated": gib(75.5), "in_use": gib(78.06),
         "unallocated": gib(1.31)},
    ),
    "2.6": Wording(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 34.00 MiB. GPU 0 has a total capacity of 4.00 "
        "GiB of which 0 bytes is free. Including non-PyTorch memory, this process has 17179869184.00 GiB memory in "
        "use. Of the allocated memory 3.35 GiB is allocated by PyTorch, and 125.23 MiB is reserved by PyTorch but "
        "unallocated.",
        {"free": 0, "total": gib(4), "allocated": gib(3.35)},
    ),
    "HIP": Wording(
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 76.00 MiB. GPU 1 has a total capacity of 287.98 "
        "GiB of which 0 bytes is free. Of the allocated memory 200.12 GiB is allocated by PyTorch, and 87.00 MiB is "
        "reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_HIP_ALLOC_CONF=expandable_segments:True to avoid fragmentation.",
        {"backend": "HIP", "device": 1, "total": gib(287.98), "allocated": gib(200.12), "unallocated": mib(87)},
    ),
    "XPU": Wording(
        "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 59.61 GiB. GPU 0 has a total capacity of 28.55 "
        "GiB of which 12.01 GiB is free. Of the allocated memory 15.90 GiB is allocated by PyTorch, and 40.00 MiB is "
        "reserved by PyTorch but unallocated. Please use `empty_cache` to release all unoccupied cached memory.",
        {"backend": "XPU", "requested": gib(59.61), "total": gib(28.55), "free": gib(12.01)},
    ),
    "MPS": Wording(
        "RuntimeError: MPS backend out of memory (MPS allocated: 7.64 GiB, other allocations: 68.91 GiB, max allowed: "
        "88.13 GiB). Tried to allocate 33.92 GiB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable "
        "upper limit for memory allocations (may cause system failure).",
        {"backend": "MPS", "allocated": gib(7.64), "other": gib(68.91), "allowed": gib(88.13),
         "requested": gib(33.92)},
    ),
    "NPU": Wording(
        "RuntimeError: NPU out of memory. Tried to allocate 96.00 MiB (NPU 5; 60.97 GiB total capacity; 58.96 GiB "
        "already allocated; 58.96 GiB current active; 12.31 MiB free; 59.96 GiB reserved in total by PyTorch)",
        {"backend": "NPU", "device": 5, "requested": mib(96), "free": mib(12.31), "reserved": gib(59.96)},
    ),
    "CPU": Wording(
        "RuntimeError: [enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you "
        "tried to allocate 4503599627370496 bytes. Error code 12 (Cannot allocate memory)",
        {"kind": "cpu", "requested": 2**52},
    ),
    "driver": Wording(
        "torch.AcceleratorError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        {"kind": "driver", "backend": "CUDA", "requested": None},
    ),
    "library": Wording(
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        {"kind": "library", "backend": "CUBLAS_STATUS_ALLOC_FAILED"},
    ),
    "numpy": Wording(
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 8.00 EiB for an array with shape "
        "(1152921504606846976,) and data type float64",
        {"kind": "host", "requested": 2**63},
    ),
    "Python": Wording("MemoryError", {"kind": "host", "requested": None}),
    "kernel": Wording(
        "[12345.6] Out of memory: Killed process 4711 (python) total-vm:912345kB, anon-rss:65011712kB, file-rss:0kB",
        {"kind": "killed"},
    ),
    "vLLM": Wording(
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.",
        {"kind": "engine"},
    ),
}  # fmt: skip


# The examples of the knowledge files: a text for each message, as its program prints it, and what is read from it.


class Example(NamedTuple):
    text: str
    facts: Mapping[str, Any]


EXAMPLES = {
    entry["id"]: Example(entry["example"], entry.get("expect", {}))
    for name in MESSAGE_FILES
    for entry in table(name)["message"]
}
NOT_MEMORY_EXAMPLES: dict[str, str] = {entry["id"]: entry["example"] for entry in table("elsewhere")["message"]}
