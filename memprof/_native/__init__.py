"""Run in C the one loop that Python is too slow for: a snapshot's pickle to columns (``scan.c``).

The extension is optional: where it was not built, or ``MEMPROF_NATIVE=0`` is set, the Python reader gives the same
answers. It is also what reads every file that the scanner gives up on.
"""

from __future__ import annotations

import os
from typing import Any

__all__ = ["scanner"]

_VERSION = 1  # of what scan.c returns; an older build is left alone


def scanner() -> Any | None:
    """Return a new scanner; None where the extension is switched off or was not built.

    ``feed(data)`` takes the bytes of a pickle piece by piece and tells whether to go on. ``finish()`` returns the data
    in it, each trace as the ``(begin, end)`` of its rows, and the columns of all rows; None where it gave up.
    """
    if os.environ.get("MEMPROF_NATIVE") == "0":
        return None
    try:
        from memprof._native import scan  # type: ignore[attr-defined]
    except ImportError:
        return None
    return scan.Scanner() if scan.VERSION == _VERSION else None
