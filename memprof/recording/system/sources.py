"""Collect the text of the program's own files that appear in a recording's stacks."""

from __future__ import annotations

import linecache
import os
from collections.abc import Iterator
from itertools import islice
from typing import Any

from memprof.files import is_newer, read_source
from memprof.foreign import SnapshotFile
from memprof.frame_paths import frame_path
from memprof.text import clean_text

#: The most bytes of one file, and of all files together.
LARGEST_FILE, LARGEST_SUM = 256 << 10, 2 << 20
# A recording of a million events has a million lists of frames; these are enough to see the program's files.
_MOST_STACKS = 20_000


def program_sources(raw: SnapshotFile, started: float) -> list[dict[str, Any]]:
    """Return the sources of the program's files, as the snapshot's ``"memprof"`` key has them.

    Args:
        raw: the snapshot, in torch's format.
        started: when the recording began, in seconds since 1970: files changed later may not be what ran.
    """
    found: list[dict[str, Any]] = []
    left = LARGEST_SUM
    for path in sorted(filter(_is_programs, _files_in(raw))):
        text = _text_of(path)
        if text is None:
            continue
        first = _first_lines(text, min(LARGEST_FILE, left))
        left -= len(first.encode())
        if first:
            found.append({"path": path, "text": first, "cut": first != text, "edited": is_newer(path, started)})
    return found


def _files_in(raw: SnapshotFile) -> set[str]:
    """Return the files that stacks name; of many stacks, evenly spread ones are read."""
    segments, traces = raw.get("segments") or [], raw.get("device_traces") or []
    blocks = [block for segment in segments for block in segment.get("blocks") or []]
    files: set[str] = set()
    seen: set[int] = set()
    for entries in (segments, blocks, *traces):
        for entry in islice(entries, 0, None, max(1, len(entries) // _MOST_STACKS)):
            frames = entry.get("frames")
            if not isinstance(frames, list) or id(frames) in seen:
                continue
            seen.add(id(frames))
            for frame in frames:
                if id(frame) not in seen:
                    seen.add(id(frame))
                    files.add(str(frame.get("filename", "")))
    return files


def _is_programs(path: str) -> bool:
    """Tell whether a file is Python, and neither installed nor of the interpreter's library."""
    library = os.path.dirname(os.__file__) + os.sep
    known = path.endswith((".py", ".ipynb")) or path in linecache.cache
    return known and not path.startswith("<") and not path.startswith(library) and not frame_path(path).rooted


def _text_of(path: str) -> str | None:
    """Return a file's text, a notebook's cell among them; None if it cannot be read."""
    text = read_source(path, LARGEST_FILE + 1)
    return clean_text("".join(_cached(path)) if text is None else text) or None


def _cached(path: str) -> Iterator[str]:
    entry = linecache.cache.get(path)
    lines = entry[2] if entry is not None and len(entry) == 4 else []
    yield from (line for line in lines if isinstance(line, str))


def _first_lines(text: str, most: int) -> str:
    """Return as many whole lines from the beginning as fit."""
    data = text.encode()
    if len(data) <= most:
        return text
    return data[: data.rfind(b"\n", 0, most) + 1].decode()

