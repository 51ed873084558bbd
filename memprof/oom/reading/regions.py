"""Find where in a log to look: the lines around every word that may concern memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from memprof.oom.known_messages import TRIGGERS

_SMALL = 150_000  # characters that are read closely whatever they hold: a broken line can hide every trigger
_BEFORE, _AFTER = 40_000, 8_000
# A log that speaks of memory everywhere: its head and tail are read, and a note says so.
_MOST = 800_000


def regions(text: str, notes: list[str]) -> Iterator[tuple[int, str]]:
    """Yield (number of its first line, whole lines) around every place that may concern memory."""
    if len(text) <= _SMALL:
        yield 1, text
        return
    spans: list[tuple[int, int]] = []
    for at in _places(text.lower()):
        lo, hi = _line_start(text, max(0, at - _BEFORE)), _line_end(text, min(len(text), at + _AFTER))
        if spans and lo <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(hi, spans[-1][1]))
        else:
            spans.append((lo, hi))
    kept = _within(spans, notes, text)
    line, at = 1, 0
    for lo, hi in kept:
        line += text.count("\n", at, lo)
        at = lo
        yield line, text[lo:hi]


def _line_start(text: str, at: int) -> int:
    """Return where the line of a place begins, or a place before it in a line too long to read whole."""
    return max(text.rfind("\n", max(0, at - _AFTER), at) + 1, at - _AFTER, 0)


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at, at + _AFTER)
    return end if end >= 0 else min(len(text), at + _AFTER)


def _places(lowered: str) -> list[int]:
    """Return where a trigger stands, in order, not more than one in a quarter of what is read after it."""
    places = []
    for word in TRIGGERS:
        at = lowered.find(word)
        while at >= 0:
            places.append(at)
            at = lowered.find(word, at + _AFTER // 4)
    return sorted(places)


def _within(spans: list[tuple[int, int]], notes: list[str], text: str) -> list[tuple[int, int]]:
    """Return ``spans``, or only their first and last parts where they are too much to read closely."""
    if sum(hi - lo for lo, hi in spans) <= _MOST:
        return spans
    head, tail = _first(spans, _MOST // 2), _first([(-hi, -lo) for lo, hi in reversed(spans)], _MOST // 2)
    kept = head + [(-hi, -lo) for lo, hi in reversed(tail)]
    kept = [(_line_start(text, lo), hi) for lo, hi in kept]
    skipped = sum(hi - lo for lo, hi in spans) - sum(hi - lo for lo, hi in kept)
    notes.append(
        f"This log speaks of memory almost everywhere; its first and last {_MOST / 2e6:.1f} MB were read closely "
        f"and {max(0, skipped) / 1e6:.1f} MB between them were not: cut out the part you mean to be sure."
    )
    return kept


def _first(spans: Iterable[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    kept = []
    for lo, hi in spans:
        if most <= 0:
            break
        kept.append((lo, min(hi, lo + most)))
        most -= kept[-1][1] - lo
    return kept
