"""Putting a dispatch mode on torch's stack and taking it off again, wherever it then stands."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["remove_mode"]


def remove_mode(mode: TorchDispatchMode) -> str | None:
    """Take ``mode`` off the stack; modes a user put on top of it are lifted and put back in their order.

    A mode's own ``__exit__`` pops whatever is on top, so it may only be called when that is the mode itself.

    Returns:
        What was out of order, for a warning, or None.
    """
    from torch.utils import _python_dispatch as dispatch

    stack = dispatch._get_current_dispatch_mode_stack()
    if not any(m is mode for m in stack):
        return "memprof's dispatch mode had already been taken off the stack by somebody else's exit"
    lifted = []
    while (top := dispatch._pop_mode()) is not mode:
        lifted.append(top)
    dispatch._push_mode(mode)
    mode.__exit__(None, None, None)
    for other in reversed(lifted):
        dispatch._push_mode(other)
    if lifted:
        names = ", ".join(type(m).__name__ for m in lifted)
        return f"{names} was entered during memprof's recording and outlives it; it was kept in place"
    return None
