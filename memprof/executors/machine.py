"""Count what this machine has for work: cores and free memory."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_UNKNOWN = 1 << 30


def cores() -> int:
    """Count the cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        return os.cpu_count() or 1


def free_memory() -> int:
    """Return the bytes that can be taken without swapping, in a container at most what is left of its limit."""
    with suppress(OSError, ValueError, IndexError):
        meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
        free = int(meminfo.split("MemAvailable:")[1].split()[0]) * 1024
        with suppress(OSError, ValueError):  # no limit: the word "max"
            group = Path("/sys/fs/cgroup")
            limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
            free = min(free, limit - used)
        return free
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return _UNKNOWN
