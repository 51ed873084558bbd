"""Find the smallest limit of device memory under which TRL trains as settings say, on the device that is here.

    echo '{"settings": {...}, "loaded": false, "probes": [bytes], "step": bytes}' |
        python -m benchmarks.simulator.emulated.edge_run

A child process. Torch's allocator is told a limit (``set_per_process_memory_fraction``), which it meets as it meets the
end of a card: it gives cached segments back, and then raises. The first run has room for all; then the edge is
bisected, between what was allocated and what was reserved, and each of ``probes`` is tried. Every run is a process of
its own, forked before the device is touched, since a run that ends in an error leaves memory behind. The answer is the
last line of standard output.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

from memprof.config.settings import Settings

__all__ = ["main"]

_MIB = 2**20


def main() -> None:
    question = json.loads(sys.stdin.read())
    _import()
    free = _trained(question, None)
    tried: dict[int, bool] = {}
    low, high = free["allocated_bytes"] // _MIB * _MIB, free["reserved_bytes"]
    while high - low > question["step"]:
        middle = (low + high) // 2 // (2 * _MIB) * 2 * _MIB
        if middle <= low:
            break
        tried[middle] = _trained(question, middle)["error"] is None
        low, high = (low, middle) if tried[middle] else (middle, high)
    for limit in question["probes"]:
        if limit < free["reserved_bytes"]:
            tried[limit] = _trained(question, limit)["error"] is None
    print(json.dumps({**free, "edge_bytes": high, "tried": sorted(tried.items())}))


def _import() -> None:
    """Load what every run needs and what leaves the device alone: a process that has touched it cannot be forked.

    PEFT is left to the runs, since bitsandbytes asks the device what it is.
    """
    import datasets  # noqa: F401
    import torch
    import transformers.models.auto.modeling_auto  # noqa: F401

    if torch.cuda.is_initialized():
        raise RuntimeError("A library has touched the device while it was imported; runs cannot be forked.")


def _trained(question: dict[str, Any], limit: int | None) -> dict[str, Any]:
    """Train in a process of its own, with ``limit`` bytes for its allocator.

    Raises:
        RuntimeError: the process ended without an answer.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _answer(question, limit, reading, writing)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    if not text:
        raise RuntimeError(f"The run with a limit of {limit} bytes ended without an answer.")
    found: dict[str, Any] = json.loads(text)
    print(f"{limit or 0:,} {found['error'] or 'lives'}", file=sys.stderr, flush=True)
    return found


def _answer(question: dict[str, Any], limit: int | None, reading: int, writing: int) -> None:
    """Train in this process, write what was counted, and end the process."""
    os.close(reading)
    try:
        import torch

        from benchmarks.simulator.emulated.device_run import train_here

        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if limit is None else (limit + 0.5) / total)
        found = train_here(Settings.from_dict(question["settings"]), question.get("loaded", False))
        with os.fdopen(writing, "w") as file:
            file.write(json.dumps(found))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
