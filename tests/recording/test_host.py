"""What is said of the host's memory."""

from __future__ import annotations

import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from memprof.recording.guard import FailureGuard
from memprof.recording.system import host
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


def _proc_that_raises(error: OSError, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []

    def fail(_: str) -> bytes:
        raise error

    monkeypatch.setattr(host, "_proc", fail)
    monkeypatch.setattr(host, "_reading", FailureGuard(lost="the parts", say=said.append))
    for _ in range(3):
        assert "host_anon" not in host.host_parts()
    return said


def test_a_system_that_tells_nothing_is_no_mistake_and_one_that_cannot_be_read_is_said_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _proc_that_raises(FileNotFoundError(2, "no /proc here"), monkeypatch) == []
    (said,) = _proc_that_raises(OSError(24, "Too many open files"), monkeypatch)
    assert "Too many open files" in said
    assert "Lost: the parts." in said
    assert host.rss_bytes() >= 0  # psutil's, where it is installed


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_children_are_counted() -> None:
    assert host.host_parts()["host_anon"] > 0
    alone = host.host_parts()["host_children"]
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        deadline = time.monotonic() + 60
        while host.host_parts()["host_children"] <= alone and time.monotonic() < deadline:
            time.sleep(0.01)
        assert host.host_parts()["host_children"] > alone
        assert child.stdin is not None
        child.stdin.close()
