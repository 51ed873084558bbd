"""Which recordings are written of each run, and streams made of one run repeated."""

from __future__ import annotations

from benchmarks.truth.emit import Stream, Variant

__all__ = ["variants_of"]


def variants_of(name: str, stream: Stream, derived: bool) -> list[tuple[Variant, Stream]]:
    return [(Variant(), stream)]
