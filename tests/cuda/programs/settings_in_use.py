"""Allocate and free at random under allocator settings, on the device and on memprof's model of its allocator."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch

from memprof.allocator.model import AllocatorOutOfMemory, CachingAllocator
from memprof.allocator.settings import settings_of
from tests.cuda.programs.answer import answer

MIB = 2**20
SIZES = (600, 400_000, MIB, 3 * MIB, 8 * MIB, 11 * MIB, 37 * MIB, 60 * MIB + 5, 130 * MIB, 300 * MIB, 700 * MIB)


def main(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return of each case how many steps agreed, and what both allocators counted at the last.

    A case is a ``text`` of settings (None: those of the environment), the share of the device that a call gives the
    process (``fraction``, which torch writes nowhere), a ``seed`` and the number of ``steps``.
    """
    return [counted(case) for case in cases]


def counted(case: dict[str, Any]) -> dict[str, Any]:
    device = torch.cuda.get_device_properties(0)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["num_alloc_retries"]
    if (text := case["text"]) is not None:
        # These two stay as they are until they are set again.
        kept = "large_segment_size_mb:20,expandable_segments:False"
        torch._C._accelerator_setAllocatorSettings(kept)
        torch._C._accelerator_setAllocatorSettings(text)
    if (fraction := case["fraction"]) is not None:
        torch.cuda.set_per_process_memory_fraction(fraction)
    settings = settings_of(torch.cuda.memory._snapshot()["allocator_settings"])
    if fraction is not None:
        settings = replace(settings, memory_fraction=fraction)
    streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    heap = CachingAllocator(settings.on_device(device.total_memory), torch.cuda.mem_get_info()[0])
    dice, failed = random.Random(case["seed"]), 0
    live: list[tuple[torch.Tensor, int]] = []
    for step in range(case["steps"]):
        if live and dice.random() < 0.48:
            tensor, address = live.pop(dice.randrange(len(live)))
            heap.free(address)
            del tensor
        elif dice.random() < 0.005:
            torch.cuda.empty_cache()
            heap.empty_cache()
        else:
            size, stream = dice.choice(SIZES) + dice.randrange(100_000), dice.randrange(3)
            made, place = on_device(size, streams[stream]), modelled(heap, size, stream)
            if (made is None) != (place is None):
                return {"step": step, "failed": [made is None, place is None]}
            failed += made is None
            if made is not None and place is not None:
                live.append((made, place))
            del made
        counts = [torch.cuda.memory_reserved(), torch.cuda.memory_allocated()]
        if counts != [heap.reserved, heap.allocated]:
            return {"step": step, "torch": counts, "memprof": [heap.reserved, heap.allocated]}
    flushes = [torch.cuda.memory_stats()["num_alloc_retries"] - before, heap.flushes]
    highest = [torch.cuda.max_memory_reserved(), heap.max_reserved]
    return {"step": case["steps"], "failed": failed, "flushes": flushes, "highest": highest}


def on_device(size: int, stream: torch.cuda.Stream) -> torch.Tensor | None:
    try:
        with torch.cuda.stream(stream):
            return torch.empty(size, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        return None


def modelled(heap: CachingAllocator, size: int, stream: int) -> int | None:
    try:
        return heap.malloc(size, stream)[0]
    except AllocatorOutOfMemory:
        return None


if __name__ == "__main__":
    answer(main)
