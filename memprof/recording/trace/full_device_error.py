"""Make the error a full device ends with, in torch's own type and words."""

from __future__ import annotations

import torch

from memprof.units import format_bytes


def out_of_memory(device: str, index: int, capacity: int, held: int, requested: int) -> torch.OutOfMemoryError:
    """Return the error that torch's allocator would raise on a device of that size.

    Args:
        device: the device's type, such as ``cpu``.
        index: its number.
        capacity: bytes it is to have.
        held: bytes in use on it.
        requested: bytes that were asked for.

    Returns:
        The error, with ``requested_bytes`` on it (the text rounds).
    """
    size = format_bytes
    error = torch.cuda.OutOfMemoryError(  # torch before 2.5 has no shorter name
        f"{device.upper()} out of memory. Tried to allocate {size(requested)}. "
        f"GPU {index} has a total capacity of {size(capacity)} of which {size(max(0, capacity - held))} is free. "
        f"Including non-PyTorch memory, this process has {size(held)} memory in use. "
        f"Of the allocated memory {size(held)} is allocated by PyTorch, and 0 bytes is reserved by PyTorch but "
        "unallocated. The capacity is the one memprof was asked to enforce."
    )
    error.requested_bytes = requested  # type: ignore[attr-defined]
    return error
