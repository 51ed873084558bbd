"""Read from an inference engine's log lines how much GPU memory it uses: weights, cache, graphs, activations."""

from __future__ import annotations

import re
from functools import cache
from itertools import islice

import msgspec

from memprof.oom.knowledge_files import typed
from memprof.report.oom import EngineMemory
from memprof.units import GIB, format_bytes

_PARTS = typed("engines", "share_part", dict[str, str])
_MOST = 2_000  # lines of one kind that are read


class _Line(msgspec.Struct):
    """A line of ``engines.toml``."""

    engine: str
    words: str


@cache
def line_patterns() -> tuple[tuple[str, re.Pattern[str]], ...]:
    """Return the engine and the pattern of each line that is read (``engines.toml``)."""
    size = r"(?P<\1>\\d{1,6}(?:\\.\\d{1,6})?) ?Gi?B"
    rows = typed("engines", "share", tuple[_Line, ...])
    return tuple((row.engine, re.compile(re.sub(r"\{gib:(\w{1,40})\}", size, row.words))) for row in rows)


def engine_shares(log: str) -> tuple[EngineMemory, ...]:
    """Return what the lines of each engine in a log say about one rank, the largest of each part.

    Both engines divide by 1024 and print GB or GiB. A later start in the same log replaces nothing that was larger.
    """
    sizes: dict[str, dict[str, int]] = {}
    starts: dict[str, int] = {}
    for engine, pattern in line_patterns():
        for match in islice(pattern.finditer(log), _MOST):
            starts[engine] = min(match.start(), starts.get(engine, match.start()))
            parts: dict[str, int] = {}
            for name, text in match.groupdict().items():
                key = f"{name.removesuffix('_too')}_bytes"
                parts[key] = parts.get(key, 0) + round(float(text) * GIB)
            known = sizes.setdefault(engine, {})
            known.update({key: max(size, known.get(key, 0)) for key, size in parts.items()})
    return tuple(EngineMemory(engine=e, line=log.count("\n", 0, starts[e]) + 1, **sizes[e]) for e in sizes)


def share_note(share: EngineMemory) -> str:
    """Return one sentence: what the engine took, by part and in all."""
    parts = [(words, size) for key, words in _PARTS.items() if (size := getattr(share, key)) is not None]
    listed = ", ".join(f"{words} {format_bytes(size)}" for words, size in parts)
    total = f": {format_bytes(sum(size for _, size in parts))} together" if len(parts) > 1 else ""
    return f"{share.engine}'s own lines (from line {share.line}) say what it took on a GPU{total} ({listed})."
