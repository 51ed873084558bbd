"""Run out of memory for one reason after the other, recorded; tell torch's messages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import memprof
from tests.cuda.programs.answer import answer
from tests.cuda.programs.ledger import Ledger

MIB = 2**20


def main(asked: dict[str, Any]) -> dict[str, Any]:
    """Provoke each of ``causes``; ``folder`` gets ``<cause>.pickle``, written as the error passes through."""
    ledger = Ledger()
    return {name: one(name, Path(asked["folder"]), ledger) for name in asked["causes"]}


def one(name: str, folder: Path, ledger: Ledger) -> dict[str, Any]:
    torch.cuda.empty_cache()
    ledger.restart()
    error = None
    try:
        with memprof.record(folder / f"{name}.pickle"), memprof.phase("forward"):
            _CAUSES[name]()
    except torch.OutOfMemoryError as caught:
        error = str(caught)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return {"error": error, "counters": ledger.read()}


def full() -> None:
    """More and more live tensors."""
    held = []
    while True:
        held.append(megabytes(96))


def limit() -> None:
    """As ``full``, where the process may take a quarter of the card."""
    torch.cuda.set_per_process_memory_fraction(0.25)
    full()


def fragmentation() -> None:
    """Blocks of 3 MiB fill the card, one of each segment's stays, and 256 MiB in one piece are asked for."""
    torch.cuda.set_per_process_memory_fraction(1.0)
    free, _ = torch.cuda.mem_get_info()
    blocks = [megabytes(3) for _ in range(free // (20 * MIB) * 6)]
    kept = blocks[::6]
    del blocks
    whole = megabytes(256)
    del kept, whole


def larger() -> None:
    """One tensor that no such card can hold."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.empty(total + 64 * MIB, dtype=torch.uint8, device="cuda")


def megabytes(number: int) -> torch.Tensor:
    return torch.empty(number * MIB, dtype=torch.uint8, device="cuda")


_CAUSES: dict[str, Callable[[], None]] = {f.__name__: f for f in (full, limit, fragmentation, larger)}

if __name__ == "__main__":
    answer(main)
