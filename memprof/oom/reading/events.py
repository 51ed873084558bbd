"""Join matches into failures: the signs of one event, and an engine's message with its cause."""

from __future__ import annotations

from memprof.oom.known_messages import FORMS
from memprof.oom.reading.matches import Hit
from memprof.oom.reading.normalize import Stream

_NEAR = 40  # lines between two signs of one event
_CHAIN = 400  # lines a chained traceback, or TensorFlow's dump of its allocator, may be long
_CLOSE = 8  # lines between an engine's message and what caused it, where nothing says that it did
_LOOK_BACK = 60  # events
_ORDER = {form.id: i for i, form in enumerate(FORMS)}
_LONGEST = 3000  # characters of a message that is told in several parts


def events_of(stream: Stream, hits: list[Hit]) -> list[Hit]:
    """Return one hit for each event: near signs of one thing joined, what caused an engine's message folded into it."""
    events: list[Hit] = []
    for hit in hits:
        if hit.form.kind != "device" and (near := _sign_of(stream, hit, events[-_LOOK_BACK:])) is not None:
            _fold(near, hit)
            continue
        for before in reversed(events[-_LOOK_BACK:] if hit.form.absorbs else []):
            if before.form.kind in hit.form.absorbs and _caused(stream, before, hit):
                _fold(hit, before, words=False)
                events.remove(before)
                break
        events.append(hit)
    return _without_consequences(events)


def _caused(stream: Stream, before: Hit, hit: Hit) -> bool:
    """Say whether ``hit`` was raised because of ``before``: Python says so between them, or they stand close."""
    between = hit.line - before.last_line
    return between <= _CLOSE or (between <= _CHAIN and _chained(stream.squeezed[before.stop : hit.start]))


def _chained(text: str) -> bool:
    """Say whether Python's words between two tracebacks name the first as the cause of the second."""
    return "directcauseofthefollowing" in text or "duringhandlingoftheabove" in text


def _sign_of(stream: Stream, hit: Hit, events: list[Hit]) -> Hit | None:
    """Return the last of ``events`` that ``hit`` is another sign of."""
    for event in reversed(events):
        near = _CHAIN if hit.form.event == "tensorflow" else _NEAR
        if event.form.event != hit.form.event or hit.line - event.last_line > near:
            continue
        mine, theirs = hit.values.get("pid"), event.values.get("pid")
        if hit.form.event == "launcher" and hit.values.get("rank") not in (None, event.values.get("rank")):
            continue
        if hit.form.event == "driver" and _raised_apart(stream, event, hit):
            continue
        if mine is None or theirs is None or mine == theirs:
            return event
    return None


def _raised_apart(stream: Stream, before: Hit, hit: Hit) -> bool:
    """Say whether two bare messages end two tracebacks that neither caused the other, or are of two ranks.

    A driver's words carry no figures or process to tell two failures by.
    """
    ranks = {stream.lines[h.line].rank for h in (before, hit)} - {None}
    if len(ranks) > 1:
        return True
    between = stream.squeezed[before.stop : hit.start].partition("traceback(mostrecentcalllast")
    return bool(between[1]) and not _chained(between[0])


def _fold(into: Hit, other: Hit, *, words: bool = True) -> None:
    """Add to ``into`` what only ``other`` says; the more telling form of two leads."""
    if words and _ORDER[other.form.id] < _ORDER[into.form.id]:
        into.form, into.backend = other.form, other.backend or into.backend
    into.values = {**other.values, **into.values}
    into.processes = into.processes or other.processes
    if words and into.stop < other.stop < into.start + _LONGEST:
        into.stop, into.last_line = other.stop, other.last_line


def _without_consequences(events: list[Hit]) -> list[Hit]:
    """Return the events without a driver's bare *out of memory* that repeats a fuller one beside it."""

    def repeats(i: int, hit: Hit) -> bool:
        beside = [e for e in events[max(0, i - 3) : i + 4] if e is not hit and abs(e.line - hit.line) <= 3]
        return any(e.form.kind in ("engine", "library") or e.values.get("requested") for e in beside)

    return [hit for i, hit in enumerate(events) if hit.form.event != "driver" or hit.values or not repeats(i, hit)]
