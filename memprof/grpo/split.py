"""Rows into pieces: what goes through the model in one forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memprof.grpo.trim import Row

__all__ = ["DEFAULT_PIECE_TOKENS", "parts_of", "pieces_of"]

#: Rows shorter than this share a piece where nothing else is said: below it a GPU is not kept busy, and the
#: activations of so few tokens are small beside any model's weights.
DEFAULT_PIECE_TOKENS = 2048


def parts_of(total: int, size: int) -> Iterable[slice]:
    """Parts of at most ``size`` of ``total`` tokens, one after the other: only the last may be shorter."""
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def pieces_of(rows: Sequence[Row], max_tokens: int | None = None) -> list[list[Row]]:
    """Pieces of at most ``max_tokens`` tokens each, padding counted; a longer row is a piece of its own.

    Rows are sorted by length, longest first: rows of a piece are of like length, and the first piece is the largest,
    so that a run that does not fit fails at once and the allocator's blocks fit every piece after it.
    """
    limit = DEFAULT_PIECE_TOKENS if max_tokens is None else max_tokens
    pieces: list[list[Row]] = []
    width = 0
    for row in sorted(rows, key=lambda row: (-row.length, row.index)):
        if pieces and (len(pieces[-1]) + 1) * width <= limit:
            pieces[-1].append(row)
        else:
            pieces.append([row])
            width = row.length
    return pieces
