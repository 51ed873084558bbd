"""The messages of torch's device allocators, all versions and all backends.

The wordings, oldest first (sizes have two decimals, so each is off by up to half a hundredth of its unit):

* 1.x to 2.0: ``CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 10.76 GiB total capacity; 9.71 GiB already
  allocated; 5.62 MiB free; 1.00 GiB allowed; 9.78 GiB reserved in total by PyTorch)``; up to 1.3 ``cached`` for
  ``reserved in total by PyTorch``. NPU and other backends outside torch still use it.
* 2.1: ``GPU 0 has a total capacty of`` (sic, ``capacity`` from 2.2) ``14.75 GiB of which 5.06 MiB is free. Process
  123 has 2.00 GiB memory in use. Including non-PyTorch memory, this process has ... Of the allocated memory ... is
  allocated by PyTorch, and ... is reserved by PyTorch but unallocated.``
* 2.4: ``is allocated by PyTorch, with 1.00 GiB allocated in private pools (e.g., CUDA Graphs), and ...``. Those pools
  are in the first figure.
* HIP and XPU say the same about themselves, XPU without the processes.
* MPS: ``MPS backend out of memory (MPS allocated: ..., other allocations: ..., max allowed: ...). Tried to allocate``.
* ``backend:cudaMallocAsync``: ``Allocation on device 0 would exceed allowed memory. (out of memory)``, then a line each
  for ``Currently allocated``, ``Requested``, ``Device limit``, ``Free (according to CUDA)`` and ``PyTorch limit``.
* ``Tried to allocate more than 1EB memory.``: a size that is negative or has overflowed.

People shorten them by hand, so a message is read as its fields, wherever they stand, not as one sentence.
"""

from __future__ import annotations

import re

from memprof.oom.form import Form, form
from memprof.oom.reading.sizes import SIZE

__all__ = ["FIELDS", "FORMS", "INDEX", "PROCESS"]

_S = rf"({SIZE})"

FORMS: tuple[Form, ...] = (
    form(
        "torch.out_of_memory",
        "device",
        "torch",
        r"(?P<backend>cuda|hip|xpu|npu|mlu|musa|hpu|gcu|maca|ppu|dcu|mps backend|mps) out of memory",
    ),
    form(
        "torch.block_over_4gb",
        "device",
        "torch (Intel)",
        r"current platform can not allocate memory block with size larger than 4 ?gb",
        backend="XPU",
    ),
    # backend:cudaMallocAsync, which ComfyUI and others switch on
    form(
        "torch.malloc_async",
        "device",
        "torch",
        r"allocation on device (?:\d{1,3} )?(?:would exceed allowed memory|\(out of memory\))",
        backend="CUDA",
    ),
    # The first line is cut off or shortened away: the fields alone.
    form("torch.fields_only", "device", "torch", r"tried to allocate {size:requested}"),
    form("torch.class_only", "device", "torch", r"outofmemoryerror|torch_outofmemory", weak=True),
)

# name: pattern over squeezed text (lower case, no white space)
FIELDS: dict[str, re.Pattern[str]] = {
    "requested": re.compile(
        rf"(?:tried|trying|failed|unable|attempt(?:ed|ing)?)toallocate{_S}|(?<!memory)requested:{_S}"
    ),
    "total": re.compile(
        rf"totalcapa[a-z]{{2,6}}(?:of|:){_S}|{_S}total(?:capacity)?(?=[;,)])|hasa?total(?:of)?{_S}|devicelimit:{_S}"
    ),
    "free": re.compile(
        rf"ofwhich{_S}(?:is)?free|{_S}(?:is)?free(?![a-km-np-z(])|onlyhas{_S}free|free\(accordingtocuda\):{_S}"
    ),
    "allowed": re.compile(rf"{_S}allowed;?(?!:)|maxallowed:{_S}|pytorchlimit\([^)]{{1,60}}\):{_S}"),
    "in_use": re.compile(rf"thisprocesshas{_S}memoryinuse"),
    "allocated": re.compile(
        rf"{_S}(?:is)?allocatedbypytorch|{_S}alreadyallocated|mpsallocated:{_S}|currentlyallocated:{_S}"
    ),
    "private_pools": re.compile(rf"with{_S}allocatedinprivatepools"),
    "unallocated": re.compile(rf"{_S}(?:is)?reserved(?:bypytorch)?butunallocated"),
    "reserved": re.compile(rf"{_S}(?:reservedintotalbypytorch|cached|reserved(?=[;,)]))"),
    "other": re.compile(rf"otherallocations:{_S}"),
}
PROCESS = re.compile(rf"process(\d{{1,10}})has{_S}memoryinuse")
INDEX = re.compile(r"(?:gpu|npu|xpu|mlu|musa|device|cuda:?)(\d{1,3})(?:hasa?total|;)")
