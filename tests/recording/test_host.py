"""What is said of the host's memory."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from memprof.recording.system.host import pinned_bytes

# What torch says after blocks of 131,072 and 1 bytes were pinned and the second one was freed, which keeps it cached.
STATS = {
    "2.9.1": {
        "allocated_bytes.current": 131072, "allocation.current": 1, "reserved_bytes.current": 131073,
        "segment.current": 2,
    },
    "2.13.0": {
        "active_bytes.current": 131072, "active_requests.current": 1, "allocated_bytes.current": 131073,
        "allocations.current": 2,
    },
}  # fmt: skip


def torch_with(**cuda: Any) -> SimpleNamespace:
    return SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True, **cuda))


@pytest.mark.parametrize("version", STATS)
def test_pinned_memory_counts_what_is_cached_under_every_torch(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch_with(host_memory_stats=lambda: STATS[version]))
    assert pinned_bytes() == 131073


def test_a_torch_that_does_not_count_pinned_memory_is_not_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch_with())
    assert pinned_bytes() is None
