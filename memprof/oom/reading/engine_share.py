"""Read what an inference engine's log lines say it took of the card: weights, cache, graphs, activations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from memprof.oom.knowledge_files import table
from memprof.units import GIB, format_bytes

#: The parts that are told apart, and their words.
PARTS = {
    "weights": "weights",
    "kv_cache": "KV cache",
    "graphs": "CUDA graphs",
    "activations": "activations at the profiled peak",
    "outside": "non-PyTorch memory",
}
_GIB = re.compile(r"\{gib:(\w{1,40})\}")
_MOST = 2_000  # lines of one kind that are read


class _Line(NamedTuple):
    engine: str
    find: str
    pattern: re.Pattern[str]


@dataclass
class EngineShare:
    """What an engine's own lines say it took of one rank's GPU: bytes by part, the largest of each kept."""

    engine: str
    line: int
    parts: dict[str, int] = field(default_factory=dict)

    def row(self) -> dict[str, str | int]:
        """Return it as a row of ``memprof.oom/1``."""
        sizes = {f"{part}_bytes": size for part, size in self.parts.items()}
        return {"engine": self.engine, "line": self.line, **sizes}


def engine_shares(log: str) -> list[EngineShare]:
    """Return for each engine of a log what its lines say of one rank, in bytes by part, the largest of each kept.

    Both engines divide by 1024 and print GB or GiB. A later start in the same log replaces nothing that was larger.
    """
    found: dict[str, EngineShare] = {}
    for row in _lines():
        for number, match in _matches(log, row):
            share = found.setdefault(row.engine, EngineShare(row.engine, number))
            share.line = min(share.line, number)
            parts: dict[str, int] = {}
            for name, text in match.groupdict().items():
                key = name.removesuffix("_too")
                parts[key] = parts.get(key, 0) + round(float(text) * GIB)
            for key, size in parts.items():
                share.parts[key] = max(size, share.parts.get(key, 0))
    return list(found.values())


def share_note(share: EngineShare) -> str:
    """Return one sentence: what the engine took, by part and in all."""
    parts = [(words, share.parts[key]) for key, words in PARTS.items() if key in share.parts]
    listed = ", ".join(f"{words} {format_bytes(size)}" for words, size in parts)
    total = f": {format_bytes(sum(size for _, size in parts))} together" if len(parts) > 1 else ""
    return f"{share.engine}'s own lines (from line {share.line}) say what it took on a GPU{total} ({listed})."


@cache
def _lines() -> tuple[_Line, ...]:
    number = r"(?P<\1>\\d{1,6}(?:\\.\\d{1,6})?) ?Gi?B"
    return tuple(
        _Line(entry["engine"], entry["find"], re.compile(_GIB.sub(number, entry["words"])))
        for entry in table("engines")["share"]
    )


def _matches(log: str, row: _Line) -> Iterator[tuple[int, re.Match[str]]]:
    """Yield the number of each line that says it, and what it says."""
    at, number, counted = log.find(row.find), 1, 0
    for _ in range(_MOST):
        if at < 0:
            return
        begin = log.rfind("\n", max(0, at - 500), at) + 1
        end = log.find("\n", at, at + 1_000)
        match = row.pattern.search(log, begin, end if end >= 0 else at + 1_000)
        if match is not None:
            number += log.count("\n", counted, at)
            counted = at
            yield number, match
        at = log.find(row.find, at + len(row.find))
