"""Keep the analysis of a large snapshot for the next command."""

from __future__ import annotations

import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memprof.files import cache_is_off

if TYPE_CHECKING:
    from memprof.analysis.cache.entries import Entry

_LEAST = 4 * 2**20  # bytes of a snapshot; a smaller one is read about as fast as its entry


def entry_of(path: Any, device: int | None) -> Entry | None:
    """Return the entry that keeps the parts of a snapshot's device; None where nothing is kept.

    Nothing is kept of a small or remote file, nor where the cache is switched off.
    """
    if cache_is_off() or not isinstance(path, Path) or "://" in str(path):
        return None
    with suppress(OSError, RuntimeError):
        before = path.stat()
        if stat.S_ISREG(before.st_mode) and before.st_size >= _LEAST:
            from memprof.analysis.cache.entries import entry_at

            return entry_at(path, device, before)
    return None
