"""Train TRL's or the lean trainer, case after case in one process, and tell the allocator's figures for each."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from tests.cuda.programs import tiny
from tests.cuda.programs.answer import answer
from tests.cuda.programs.ledger import Ledger


def main(asked: dict[str, Any]) -> dict[str, Any]:
    """Run ``cases`` in ``folder``.

    A case may name ``watch`` (false: no callback), the callback's ``options``, and a ``limit`` in bytes.
    """
    ledger, folder = Ledger(), Path(asked["folder"])
    told = {}
    for case in asked["cases"]:
        told[case["name"]] = one(folder, case, ledger)
        told[case["name"]]["left"] = _left()
    return told


def _left() -> int:
    """Return the bytes that stay allocated once threads that were still at work have let go."""
    until = time.monotonic() + 20
    while True:
        tiny.fresh()
        left = torch.cuda.memory_allocated()
        if left < 2**16 or time.monotonic() > until:
            return left
        time.sleep(0.5)


def one(folder: Path, case: dict[str, Any], ledger: Ledger) -> dict[str, Any]:
    tiny.fresh()
    if limit := case.get("limit"):
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    callbacks: list[Any] = []
    if case.get("watch", True):
        from memprof import MemProfCallback

        callbacks = [MemProfCallback(folder / case["name"] / "_memprof", **case.get("options", {}))]
    ledger.restart()
    built = tiny.trainer(folder, case, callbacks)
    before = tiny.outcome(built)["parameters"]
    error = None
    try:
        built.train()
    except torch.OutOfMemoryError as caught:
        error = str(caught)
    told = {"counters": ledger.read(), "error": error, "facts": tiny.facts(built, case), **tiny.outcome(built)}
    told["moved"] = told["parameters"] != before
    if limit:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return told


if __name__ == "__main__":
    answer(main)
