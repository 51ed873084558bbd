"""Run in C the two loops that Python is too slow for: a snapshot's pickle to columns (``scan.c``), and the allocator's
model (``replay.c``).

The extensions are optional: where one was not built, or ``MEMPROF_NATIVE=0`` is set, Python gives the same answers. It
also reads every file that the scanner gives up on, and models every setting that ``replay.c`` does not know.
"""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType
from typing import Any

_VERSION = 3  # of what the extensions return; an older build is left alone


def scanner() -> Any | None:
    """Return a new scanner; None where the extension is switched off or was not built.

    ``feed(data)`` takes the bytes of a pickle piece by piece and tells whether to go on. ``finish()`` returns the data
    in it, each trace as the ``(begin, end)`` of its rows, and the columns of all rows; None where it gave up.
    """
    module = _built("scan")
    return module.Scanner() if module is not None else None


def replayer() -> ModuleType | None:
    """Return the module whose ``Heap`` is the allocator's model; None where it is switched off or was not built."""
    return _built("replay")


def _built(name: str) -> ModuleType | None:
    if os.environ.get("MEMPROF_NATIVE") == "0":
        return None
    try:
        module = import_module(f"{__name__}.{name}")
    except ImportError:
        return None
    return module if module.VERSION == _VERSION else None
