"""Name the sizes beside a message that no part of the answer uses, each with its label."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from memprof.oom.failure import Failure
from memprof.oom.reading.sizes import bytes_of
from memprof.report.oom import UnreadFigure
from memprof.units import GIB

_SIZE = re.compile(
    r"(?<![\w.,/:=-])\d[\d,]{0,24}(?:\.\d{1,9})? ?(?:bytes|[kKMGT]i?B|[MGT]i?)(?![\w/])"
    r"|(?<=\(B\): )\d{7,15}(?!\d)"  # rocm-smi: VRAM Total Memory (B): 17163091968
)
_BEFORE, _AFTER = 8, 12  # lines
_MOST = 8
_FIELDS = (
    "requested", "total", "free", "allowed", "in_use", "allocated", "private_pools", "unallocated", "reserved", "other",
)  # fmt: skip
# The words of a clause that end where a size begins; those that follow it.
_LABEL = re.compile(r"((?<![\w.])(?![^\n]*\d{4})[^\W\d_][\w %/-]{2,40}?)(?: ?\(B\))?[\s:=~<>(\"'|]{0,24}$")
_FOLLOWING = re.compile(r"\s{0,4}((?:of )?[^\W\d_][\w -]{2,30})")


def unread_figures(failure: Failure, facts: Mapping[str, object]) -> tuple[UnreadFigure, ...]:
    """Return the sizes in the message's lines and next to it that were not read, each once: the nearest."""
    read = list(_read(failure, facts))
    found: dict[str, UnreadFigure] = {}
    for line, text in zip(failure.around_lines, failure.around.split("\n"), strict=False):
        if -_BEFORE <= line - failure.line <= _AFTER:
            for match in _SIZE.finditer(text):
                size = bytes_of(match[0].lower())
                if size and not any(abs(size - known) <= 0.006 * size for known in read):
                    figure = UnreadFigure(text=match[0], line=line, label=_label(text, match), bytes=size)
                    found.setdefault(match[0], figure)
    nearest = sorted(found.values(), key=lambda figure: abs(figure.line - failure.line))[:_MOST]
    return tuple(sorted(nearest, key=lambda figure: figure.line))


def _label(text: str, size: re.Match[str]) -> str:
    """Return the words that say what a size is: those before it in its clause, else those after it."""
    words = _LABEL.search(text[: size.start()]) or _FOLLOWING.match(text, size.end())
    return " ".join(words[1].split()) if words else ""


def _read(failure: Failure, facts: Mapping[str, object]) -> Iterator[float]:
    """Yield every number that was read, in bytes: an engine's number without a unit is GiB, MLX's GB is 10^9 bytes."""
    yield from (size for _, size in failure.processes)
    for value in (*(getattr(failure, name) for name in _FIELDS), *facts.values()):
        if isinstance(value, int | float):
            yield from (value, value * GIB, value * GIB / 1e9)
