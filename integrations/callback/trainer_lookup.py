"""Find the trainer a callback belongs to: transformers does not hand it over."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any


def find_trainer(callback: Any, state: Any = None) -> Any:
    """Find, in the calling frames, the trainer whose callback handler holds ``callback``; None if there is none.

    ``state``, the ``TrainerState`` it was called with, tells apart trainers that are nested.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",):
            owner = frame.f_locals.get("self")
            handler = getattr(owner, "callback_handler", None) if hasattr(type(owner), "training_step") else None
            ours = handler is not None and any(c is callback for c in handler.callbacks)
            if ours and (state is None or getattr(owner, "state", state) is state):
                return owner
        frame = frame.f_back
    return None
