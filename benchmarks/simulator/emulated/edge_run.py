"""Find the smallest limit of device memory under which TRL trains as settings say, on the device that is here.

    echo '{"settings": {...}, "probes": [bytes], "step": bytes}' | python -m benchmarks.simulator.emulated.edge_run

A child process. Torch's allocator is told a limit (``set_per_process_memory_fraction``), which it meets as it meets the
end of a card: it gives cached segments back, and then raises. The first run has room for all; then the edge is
bisected, between what was allocated and what was reserved, and each of ``probes`` is tried. The answer is the last line
of standard output.
"""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

from memprof.config.settings import Settings

__all__ = ["main"]

_MIB = 2**20


def main() -> None:
    question = json.loads(sys.stdin.read())
    settings = Settings.from_dict(question["settings"])
    free = _trained(settings, None)
    tried: dict[int, bool] = {}
    low, high = free["allocated_bytes"] // _MIB * _MIB, free["reserved_bytes"]
    while high - low > question["step"]:
        middle = (low + high) // 2 // (2 * _MIB) * 2 * _MIB
        if middle <= low:
            break
        tried[middle] = _trained(settings, middle)["error"] is None
        low, high = (low, middle) if tried[middle] else (middle, high)
    for limit in question["probes"]:
        if limit < free["reserved_bytes"]:
            tried[limit] = _trained(settings, limit)["error"] is None
    print(json.dumps({**free, "edge_bytes": high, "tried": sorted(tried.items())}))


def _trained(settings: Settings, limit: int | None) -> dict[str, Any]:
    """Train in an empty allocator, with ``limit`` bytes for it."""
    import torch

    from benchmarks.simulator.emulated.device_run import train_here
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    left = torch.cuda.memory_reserved()
    if left > 4 * _MIB:
        raise RuntimeError(f"{left} bytes are left of the run before.")
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if limit is None else (limit + 0.5) / total)
    return train_here(settings)


if __name__ == "__main__":
    main()
