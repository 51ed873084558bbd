"""``MemProfCallback``: profile the memory of any transformers or TRL trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memprof.integrations.callback.callback import MemProfCallback

__all__ = ["MemProfCallback"]


def __getattr__(name: str) -> Any:
    """Load the callback on first use: importing it brings transformers, which modules beside it do without."""
    if name != "MemProfCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from memprof.integrations.callback.callback import MemProfCallback

    return MemProfCallback
