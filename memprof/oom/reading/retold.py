"""A driver's bare words told anew by the frames that asked for the memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memprof.oom.failure import Failure, Frame
from memprof.oom.known_messages import FORMS

_DEPTH = 4
_ASKED = tuple(form for form in FORMS if form.asked_by is not None)


def retold(failure: Failure) -> Failure:
    """Return a failure in the form that its innermost frames tell, where its message is the driver's bare words."""
    if failure.form.event != "driver" or failure.requested is not None:
        return failure
    for place in reversed(_places(failure.frames)):
        for form in _ASKED:
            if form.asked_by is not None and form.asked_by.search(place):
                return replace(failure, form=form, kind=form.kind)
    return failure


def fits_frames(failure: Failure) -> bool:
    """Say whether the frames are those its form asks for, where it asks for any."""
    pattern = failure.form.frames
    return pattern is None or any(pattern.search(place) for place in _places(failure.frames))


def _places(frames: Sequence[Frame]) -> list[str]:
    return [f"{frame.path.replace(chr(92), '/')}:{frame.function} {frame.code}" for frame in frames[-_DEPTH:]]
