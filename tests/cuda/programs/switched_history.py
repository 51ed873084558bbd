"""Switch torch's history in a program that is recorded on two devices, and tell what the recording says of each."""

from __future__ import annotations

from typing import Any

import torch
from torch.cuda.memory import _record_memory_history as imported_before

from memprof.recording.api import make_recorder
from memprof.recording.session import Session
from memprof.snapshot import snapshot_from_raw
from memprof.timeline.timeline import build_timeline
from tests.cuda.programs.answer import answer

_DEVICES = (0, 1)


def main(asked: list[tuple[str, int]]) -> dict[str, Any]:
    """Return by case the history of each device, whether torch's history is on afterwards, and the notes."""
    for device in _DEVICES:
        torch.zeros(1, device=f"cuda:{device}")
    return {f"{case} {kept}": recorded(case, kept) for case, kept in asked}


def recorded(case: str, kept: int) -> dict[str, Any]:
    switch = imported_before if case.startswith("imported") else torch.cuda.memory._record_memory_history
    if case.startswith("own"):
        switch("all", max_entries=100 if case == "own overflows" else 10_000)
    session = Session(make_recorder("cuda:0", stacks=None))
    session.start()
    alive = work(kept)
    if case.endswith("stops"):
        switch(None)
    elif case.endswith("clears"):
        switch("all", clear_history=True)
    elif case.endswith("shortens"):
        switch("all", max_entries=10)
    elif case.endswith("restarts"):
        switch(None)
        switch("all")
    elif case.endswith("skips"):
        switch("all", max_entries=10_000, skip_actions=["alloc", "free_requested", "free_completed"])
        alive += work(kept)
        switch("all", max_entries=10_000)
    elif case.endswith("records"):
        switch("all", max_entries=5000)
    alive += work(kept)
    session.stop()
    raw = session.to_raw()
    snapshot = snapshot_from_raw(raw)
    found = {
        "history": [build_timeline(snapshot, device).history.value for device in _DEVICES],
        "is on": torch._C._cuda_isHistoryEnabled(),
        "left": sum(len(trace) for trace in torch.cuda.memory._snapshot()["device_traces"]),
        "notes": raw["memprof"]["notes"],
    }
    switch(None)
    del alive
    return found


def work(kept: int) -> list[torch.Tensor]:
    """Make and free tensors, most of them on the second device; return those that stay."""
    torch.ones(1000, device="cuda:0")
    for _ in range(60):
        torch.ones(1000, device="cuda:1")
    return [torch.ones(1000, device="cuda:1") for _ in range(kept)]


if __name__ == "__main__":
    answer(main)
