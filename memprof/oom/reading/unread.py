"""Name the sizes beside a message that no part of the answer uses."""

from __future__ import annotations

import re
from collections.abc import Iterator

from memprof.oom.failure import Failure
from memprof.oom.reading.sizes import bytes_of
from memprof.report.oom import UnreadFigure
from memprof.units import GIB

_SIZE = re.compile(r"(?<![\w.,/:=-])\d[\d,]{0,24}(?:\.\d{1,9})? ?(?:bytes|[kKMGT]i?B|[MGT]i?)(?![\w/])")
_BEFORE, _AFTER = 2, 6  # lines
_MOST = 8
_FIELDS = (
    "requested", "total", "free", "allowed", "in_use", "allocated", "private_pools", "unallocated", "reserved", "other",
)  # fmt: skip


def unread_figures(failure: Failure) -> tuple[UnreadFigure, ...]:
    """Return the first sizes in the message's lines and those next to it that were not read, each once."""
    read = list(_read(failure))
    found: dict[str, UnreadFigure] = {}
    for line, text in zip(failure.around_lines, failure.around.split("\n"), strict=False):
        if -_BEFORE <= line - failure.line <= _AFTER:
            for match in _SIZE.finditer(text):
                size = bytes_of(match[0].lower())
                if size and not any(abs(size - known) <= 0.006 * size for known in read):
                    found.setdefault(match[0], UnreadFigure(text=match[0], line=line))
    return tuple(found.values())[:_MOST]


def _read(failure: Failure) -> Iterator[float]:
    """Yield every number that was read, in bytes: what an engine prints without a unit is GiB."""
    yield from (size for _, size in failure.processes)
    for value in (*(getattr(failure, name) for name in _FIELDS), *failure.facts.values()):
        if isinstance(value, int | float):
            yield from (value, value * GIB)
