"""Tracebacks as people paste them: Python's own, IPython's, rich's, shortened by hand, printed backwards."""

from __future__ import annotations

import re
from collections.abc import Sequence

from memprof.oom.failure import TracebackFrame
from memprof.oom.knowledge_files import typed
from memprof.oom.reading.normalize import LogLine

_HEAD = "Traceback (most recent call last"
_MOST_LINES = 500
_MOST_FRAMES = 250
_NARROWEST = 40
# So many lines above a message a line of code can be what asked.
_NEAR = 3
_CODE = re.compile(r"\s{1,40}[\w.]{1,60} = [\w.]{1,60}[ (\[.]|[\s`]{0,40}(?:[\w.]{1,60} = |return )[\w.]{1,60}\(")
_PYTHON, *_OTHERS = (re.compile(pattern) for pattern in typed("log_lines", "frames", dict[str, str]).values())
_MARKS = re.compile(r"^[\s^~❱❯|>-]{0,2000}$")


def frames_around(lines: Sequence[LogLine], at: int, floor: int, ceiling: int) -> tuple[TracebackFrame, ...]:
    """Return the frames of the traceback that the message in line ``at`` belongs to, outermost first.

    Lines from ``floor`` (after the failure before) to ``ceiling`` can belong to it.
    """
    above = _block_above(lines, at, max(floor, at - _MOST_LINES))
    if frames := _read(above):
        return tuple(frames[-_MOST_FRAMES:])
    below = [line.text for line in lines[at + 1 : min(ceiling, at + _MOST_LINES)]]
    heads = [i for i, text in enumerate(below) if _HEAD in text]
    if len(heads) > 1:
        below = below[: heads[1]]
    frames = _read(below)
    if not frames:
        return _last_code(lines[max(floor, at - _NEAR) : at])
    if frames and not heads and _is_backwards(below):
        frames = _read(below[::-1])
    return tuple(frames[-_MOST_FRAMES:])


def _last_code(above: Sequence[LogLine]) -> tuple[TracebackFrame, ...]:
    """Return the line of code that stands right above a message whose traceback is cut off, as a frame of no file."""
    code = [line.text.strip() for line in above if _CODE.match(line.text)]
    return (TracebackFrame("", 0, "", code[-1].strip("`")[:200]),) if code else ()


def _block_above(lines: Sequence[LogLine], at: int, floor: int) -> list[str]:
    """Return the lines from the last traceback's head, or from ``floor``, to the message."""
    for i in range(at, floor - 1, -1):
        if _HEAD in lines[i].text:
            return [line.text for line in lines[i : at + 1]]
    return [line.text for line in lines[floor : at + 1]]


def _read(block: Sequence[str]) -> list[TracebackFrame]:
    """Return the frames of ``block`` in the first notation that it has any of."""
    plain, unwrapped = _matched(block), _matched(_unwrapped(block))
    if len(plain) != len(unwrapped):
        return max(plain, unwrapped, key=len)
    return [whole if whole.function.isidentifier() else cut for cut, whole in zip(plain, unwrapped, strict=True)]


def _matched(block: Sequence[str]) -> list[TracebackFrame]:
    text = "\n".join(line.strip() for line in block)
    for pattern in (_PYTHON, *_OTHERS):
        found = list(pattern.finditer(text))
        if found:
            ends = [*(match.start() for match in found[1:]), len(text)]
            return [_frame(match, text, end) for match, end in zip(found, ends, strict=True)]
    return []


def _unwrapped(block: Sequence[str]) -> list[str]:
    """Join lines that a terminal or a box has cut at its width: the next goes on at its very beginning."""
    width = max(map(len, block[:-1]), default=0)
    if width < _NARROWEST or sum(len(line) >= width - 1 for line in block[:-1]) < 2:
        return list(block)
    margin = " " if all(line.startswith(" ") for line in block[:-1] if line) else ""
    joined: list[str] = []
    goes_on = False
    for line in block:
        text = line.removeprefix(margin)
        if goes_on and not text[:1].isspace():
            joined[-1] += text
        else:
            joined.append(text)
        goes_on = width - 1 <= len(line) <= width
        if goes_on and len(line) == width - 1:
            joined[-1] += " "  # which ended the line, and was taken off
    return joined


def _frame(match: re.Match[str], text: str, stop: int) -> TracebackFrame:
    groups = match.groups()
    path = "".join((groups[0] or "").split()) if "\n" in (groups[0] or "") else str(groups[0]).strip()
    numbers = [g for g in groups[1:-1] if g]
    function = str(groups[-1] or "").strip().rstrip(":")
    after = text[match.end() : min(stop, match.end() + 400)].split("\n")[1:]
    code = next((line for line in after if line and not _MARKS.match(line)), "")
    return TracebackFrame(
        path.replace("\\", "/"), int(numbers[0]) if numbers else 0, function.rsplit(".", 1)[-1], code[:200]
    )


def _is_backwards(below: Sequence[str]) -> bool:
    """Say whether a log viewer shows the newest line first: the innermost frame's code then stands above the frame."""
    first = next((i for i, text in enumerate(below) if _PYTHON.search(text)), 0)
    return any(text.strip() and not _MARKS.match(text) for text in below[:first])
