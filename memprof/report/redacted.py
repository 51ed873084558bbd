"""Leave out of answers what tells who made them where (see :mod:`memprof.redact`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from memprof.redact import redact
from memprof.report.base import Model
from memprof.report.codec import from_builtins, plain_entries, to_builtins

_M = TypeVar("_M", bound=Model)


def redacted(answer: _M, beside: object = None) -> _M:
    """Return an answer without paths, names and tokens; ``beside`` is what else is known of the run: names in it are
    hidden too."""
    return from_builtins(redact(to_builtins(answer), beside), type(answer))


def redacted_parts(parts: Sequence[_M], beside: object = None) -> tuple[_M, ...]:
    """Return parts of an answer, as :func:`redacted` does; a name in one is hidden in all."""
    clean = redact(plain_entries(parts), beside)
    return tuple(from_builtins(plain, type(part)) for plain, part in zip(clean, parts, strict=True))
