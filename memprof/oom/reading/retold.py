"""A driver's bare words told anew by the frames that asked for the memory."""

from __future__ import annotations

import re
from dataclasses import replace

from memprof.oom.failure import Failure, Frame
from memprof.oom.forms import FORMS

__all__ = ["retold"]

_BY_ID = {form.id: form for form in FORMS}
_DEPTH = 4
# File and function of a frame that asked, and the form whose answer fits.
_ASKED: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("vllm.wake", re.compile(r"(?:^|/)cumem\.py:(?:create_and_map|wake_up)")),
    ("torch_memory_saver.resume", re.compile(r"/torch_memory_saver/[^:]*:_?resume")),
    ("pinned", re.compile(r":_?pin_memory(?:_loop)?$")),
)


def retold(failure: Failure) -> Failure:
    """Return a failure in the form that its innermost frames tell, where its message is the driver's bare words."""
    if failure.form.event != "driver" or failure.requested is not None:
        return failure
    for frame in reversed(failure.frames[-_DEPTH:]):
        if (form_id := _asked(frame)) is not None:
            form = _BY_ID[form_id]
            return replace(failure, form=form, kind=form.kind)
    return failure


def _asked(frame: Frame) -> str | None:
    place = f"{frame.path.replace(chr(92), '/')}:{frame.function}"
    found = next((form_id for form_id, pattern in _ASKED if pattern.search(place)), None)
    return "pinned" if found is None and ".pin_memory(" in frame.code else found
