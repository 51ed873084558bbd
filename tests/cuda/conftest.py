"""Run this folder's tests on the emulated device: entered before any of them imports torch.

``make test-cuda`` runs them in ``.venv-cuda``. Elsewhere they are skipped, with the reason: a CPU build of torch, or an
emulator that is not built.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from memprof.emulate.launch import enter
from memprof.errors import MemprofError
from tests.cuda.table import pytest_terminal_summary, row

__all__ = ["pytest_terminal_summary", "row"]

#: The card of this process: an 80 GiB H100. Tests that need another start a process of their own.
CARD = "H100"
_HERE = Path(__file__).parent


def _enter() -> str | None:
    """Put this process on the device; return why that is not possible."""
    if "torch" in sys.modules:
        return None if sys.modules["torch"].cuda.is_available() else "torch was imported before, and sees no device"
    try:
        enter(CARD)
    except MemprofError as error:
        return str(error)
    return None


_WHY_NOT = _enter()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip where there is no device; every test of this folder uses it."""
    for item in items:
        if _WHY_NOT is not None and _HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=_WHY_NOT))
