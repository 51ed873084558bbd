"""Taking this machine's paths out of a snapshot before it is written."""

from __future__ import annotations

import os
import re
from typing import Any

__all__ = ["redact", "short_path"]

_PACKAGES = re.compile(r".*[/\\](?:site-packages|dist-packages)[/\\]")
_STDLIB = re.compile(r".*[/\\]lib[/\\]python3\.\d+[/\\]")


def short_path(path: str) -> str:
    """A file's path from its package on; of the user's own files only the name."""
    for prefix in (_PACKAGES, _STDLIB):
        match = prefix.match(path)
        if match:
            return path[match.end() :]
    return os.path.basename(path.replace("\\", "/"))


def redact(raw: dict[str, Any]) -> None:
    """Shorten the file names in every frame of a raw snapshot, in place."""
    seen: set[int] = set()

    def shorten(frames: Any) -> None:
        if not isinstance(frames, list) or id(frames) in seen:
            return
        seen.add(id(frames))
        for frame in frames:
            if id(frame) not in seen:
                seen.add(id(frame))
                frame["filename"] = short_path(frame.get("filename", ""))

    for segment in raw.get("segments", []):
        shorten(segment.get("frames"))
        for block in segment.get("blocks", []):
            shorten(block.get("frames"))
    for trace in raw.get("device_traces", []):
        for event in trace:
            shorten(event.get("frames"))
    oom = raw.get("memprof", {}).get("oom")
    if oom:
        oom["stack"] = [_short_line(line) for line in oom["stack"]]


def _short_line(line: str) -> str:
    path, colon, rest = line.partition(":")
    if len(path) == 1 and rest[:1] in "\\/":  # a drive letter
        more, colon, rest = rest.partition(":")
        path = f"{path}:{more}"
    return f"{short_path(path)}{colon}{rest}"
