"""Allocate and free at random under allocator settings, on the device and on memprof's model of its allocator."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch

from memprof.allocator.model import CachingAllocator, OutOfMemory
from memprof.allocator.settings import settings_of
from tests.cuda.programs.answer import answer

MIB = 2**20
SIZES = (600, 400_000, MIB, 3 * MIB, 8 * MIB, 11 * MIB, 37 * MIB, 60 * MIB + 5, 130 * MIB, 300 * MIB, 700 * MIB)


def main(asked: dict[str, Any]) -> dict[str, Any]:
    """Return how many steps agreed, and what both allocators counted at the last.

    The model's settings are what torch writes into a snapshot. ``fraction`` is set by a call, which torch writes nowhere.
    """
    device = torch.cuda.get_device_properties(0)
    if asked["fraction"] is not None:
        torch.cuda.set_per_process_memory_fraction(asked["fraction"])
    streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    settings = settings_of(torch.cuda.memory._snapshot()["allocator_settings"])
    if asked["fraction"] is not None:
        settings = replace(settings, memory_fraction=asked["fraction"])
    heap = CachingAllocator(settings.on_device(device.total_memory), torch.cuda.mem_get_info()[0])
    dice, live, failed = random.Random(asked["seed"]), [], 0
    for step in range(asked["steps"]):
        if live and dice.random() < 0.48:
            tensor, address = live.pop(dice.randrange(len(live)))
            heap.free(address)
            del tensor
        elif dice.random() < 0.005:
            torch.cuda.empty_cache()
            heap.empty_cache()
        else:
            size, stream = dice.choice(SIZES) + dice.randrange(100_000), dice.randrange(3)
            tensor = on_device(size, streams[stream])
            address = modelled(heap, size, stream)
            if (tensor is None) != (address is None):
                return {"step": step, "failed": [tensor is None, address is None]}
            failed += tensor is None
            if tensor is not None and address is not None:
                live.append((tensor, address))
        counted = [torch.cuda.memory_reserved(), torch.cuda.memory_allocated()]
        if counted != [heap.reserved, heap.allocated]:
            return {"step": step, "torch": counted, "memprof": [heap.reserved, heap.allocated]}
    flushes = [torch.cuda.memory_stats()["num_alloc_retries"], heap.flushes]
    highest = [torch.cuda.max_memory_reserved(), heap.max_reserved]
    return {"step": asked["steps"], "failed": failed, "flushes": flushes, "highest": highest}


def on_device(size: int, stream: torch.cuda.Stream) -> torch.Tensor | None:
    try:
        with torch.cuda.stream(stream):
            return torch.empty(size, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        return None


def modelled(heap: CachingAllocator, size: int, stream: int) -> int | None:
    try:
        return heap.malloc(size, stream)[0]
    except OutOfMemory:
        return None


if __name__ == "__main__":
    answer(main)
