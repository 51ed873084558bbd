"""Counters files that are written from JSON's own types."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memprof.analysis.counters import MAX_BYTES, CountersFile
from memprof.report.codec import to_builtins
from memprof.report.counters import CountersStart, Line, read_line


def line_of(row: Mapping[str, Any]) -> Any:
    """Read a line as a counters file has it."""
    found = read_line(json.dumps(row).encode() + b"\n")
    assert found is not None, row
    return found


def counters_file(folder: Path, rank: int, about: Mapping[str, Any], max_bytes: int = MAX_BYTES) -> CountersFile:
    start = line_of({"schema": "memprof.counters/1", "rank": rank, "started": time.time(), **about})
    assert isinstance(start, CountersStart)
    return CountersFile(folder, start, max_bytes)


def append(file: CountersFile, row: Mapping[str, Any]) -> None:
    file.append(line_of(row))


def plain(line: Line | None) -> dict[str, Any]:
    assert line is not None
    return to_builtins(line)
