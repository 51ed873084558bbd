"""Find the smallest limit of device memory under which TRL trains as settings say, on the device that is here.

    echo '{"settings": {...}, "loaded": false, "probes": [bytes], "step": bytes, "capability": [9, 0]}' |
        python -m benchmarks.simulator.emulated.edge_run

A child process. Torch's allocator is told a limit (``set_per_process_memory_fraction``), which it meets as it meets the
end of a GPU: it gives cached segments back, and then raises. The first run has room for all; then each of ``probes``
is tried, and the edge is bisected, between what was allocated and what was reserved or lived before. Every run is a
process of its own, forked before the device is touched, since a run that ends in an error leaves memory behind. The
answer is the last line of standard output.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from memprof.config.settings import Settings

_MIB = 2**20


def main() -> None:
    question = json.loads(sys.stdin.read())
    import_without_device(tuple(question["capability"]))
    free = _trained(question, None)
    tried: dict[int, bool] = {}
    low, high = free["allocated_bytes"] // _MIB * _MIB, free["reserved_bytes"]
    for limit in question["probes"]:
        if limit < free["reserved_bytes"]:
            tried[limit] = _trained(question, limit)["error"] is None
            low, high = (low, min(high, limit)) if tried[limit] else (max(low, limit), high)
    while high - low > question["step"]:
        middle = (low + high) // 2 // (2 * _MIB) * 2 * _MIB
        if middle <= low:
            break
        tried[middle] = _trained(question, middle)["error"] is None
        low, high = (low, middle) if tried[middle] else (middle, high)
    print(json.dumps({**free, "edge_bytes": high, "tried": sorted(tried.items())}))


def import_without_device(capability: tuple[int, int]) -> None:
    """Load what every run needs, and leave the device alone: a process that has touched it cannot be forked.

    ``capability``: the GPU's. Libraries ask for it while they are imported (bitsandbytes, when PEFT loads it).
    """
    import torch

    cuda: Any = torch.cuda
    answers = {
        "is_available": lambda: True, "device_count": lambda: 1,
        "get_device_capability": lambda device=None: capability,
    }  # fmt: skip
    asked = {name: getattr(cuda, name) for name in answers}
    try:
        vars(cuda).update(answers)
        import datasets  # noqa: F401
        import trl.trainer.dpo_trainer
        import trl.trainer.grpo_trainer  # noqa: F401
    finally:
        vars(cuda).update(asked)
    if torch.cuda.is_initialized():
        raise RuntimeError("A library has touched the device while it was imported; runs cannot be forked.")


def _trained(question: dict[str, Any], limit: int | None) -> dict[str, Any]:
    """Train in a process of its own, with ``limit`` bytes for its allocator."""
    (found,) = in_processes([lambda: _train(question, limit)])
    print(f"{limit or 0:,} {found['error'] or 'lives'}", file=sys.stderr, flush=True)
    return found


def in_processes(works: Sequence[Callable[[], dict[str, Any]]]) -> list[dict[str, Any]]:
    """Run each of ``works`` in a process of its own, side by side, and return what they answered.

    Raises:
        RuntimeError: a process ended without an answer.
    """
    pipes = []
    for work in works:
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            os.close(reading)
            _answer(work, writing)
        os.close(writing)
        pipes.append((child, reading))
    texts = []
    for child, reading in pipes:
        with os.fdopen(reading) as answer:
            texts.append(answer.read())
        os.waitpid(child, 0)
    if not all(texts):
        raise RuntimeError("A run ended without an answer.")
    return [json.loads(text) for text in texts]


def _answer(work: Callable[[], dict[str, Any]], writing: int) -> None:
    """Write what ``work`` returns, and end the process."""
    try:
        found = work()
        with os.fdopen(writing, "w") as file:
            file.write(json.dumps(found))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _train(question: dict[str, Any], limit: int | None) -> dict[str, Any]:
    import torch

    from benchmarks.simulator.emulated.device_run import train_here

    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if limit is None else (limit + 0.5) / total)
    return train_here(Settings.from_dict(question["settings"]), question.get("loaded", False))


if __name__ == "__main__":
    main()
