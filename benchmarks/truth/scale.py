"""Scale the tiny model that ran to the named big one: each extent of a storage's shape is mapped by meaning.

The tiny extents (hidden, ffn, vocabulary, head, tokens ...) are distinct numbers, so an extent says what it is.
One tiny token stands for ``tokens`` real ones; batches, layers and head counts are real.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Scale:
    """``features`` maps tiny extents to big ones; ``vocabulary`` are the tiny extents that are vocabulary-wide."""

    features: dict[int, int]
    vocabulary: set[int]
    hidden: set[int]
    tokens: int
    lengths: set[int]
    completion: int
    batches: set[int]
    heads: set[int]
    guessed: Counter[tuple[tuple[int, ...], int]] = field(default_factory=Counter)

    def extent(self, shape: tuple[int, ...], position: int) -> int:
        """Return one extent of the big tensor."""
        n, dims = shape[position], len(shape)
        if n in self.features:
            return self.features[n]
        if n in self.lengths:
            return n * self.tokens
        if dims >= 4 and n <= max(self.heads):
            return n  # heads, their groups, a batch: attention's tensors hold no completion extents
        if dims == 3 and position == 1 and n in self.heads and shape[2] in self.lengths:
            return n
        if n == 1 or (position == 0 and (n in self.batches or n in self.heads)):
            return n
        if n <= self.completion + 1:
            return n * self.tokens if position > 0 and n > 1 else n
        lengths = self.lengths | {self.completion, self.completion + 1}
        if any(n % b == 0 and n // b in lengths for b in self.batches):
            return n * self.tokens
        if n in self.batches or n in self.heads:
            return n
        self.guessed[shape, position] += 1
        return n * self.tokens if dims in (2, 3) else n

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.extent(shape, i) for i in range(len(shape)))

    def is_vocabulary(self, shape: tuple[int, ...]) -> bool:
        """Tell whether a shape is [.., vocabulary] or a tile of it, without the hidden size: logits."""
        return any(n in self.vocabulary for n in shape) and not any(n in self.hidden for n in shape)

    def has_hidden(self, shape: tuple[int, ...]) -> bool:
        return any(n in self.hidden for n in shape)

    def count(self, shape: tuple[int, ...]) -> int:
        total = 1
        for n in self.shape(shape):
            total *= n
        return total
