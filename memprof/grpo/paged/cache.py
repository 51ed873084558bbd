"""Hold the keys and values of many sequences in one pool of token slots, and show a forward those it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class SlotPool:
    """Number the token slots of a pool and hand them out. ``size`` itself names one more, always zero, that padding
    reads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = list(range(size - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Return ``count`` free slots, which are the caller's until they are given back; MemoryError where there are
        fewer."""
        if count > len(self._free):
            raise MemoryError(f"{count} slots asked for, {len(self._free)} are free")
        cut = len(self._free) - count
        taken = self._free[cut:][::-1]
        del self._free[cut:]
        return taken

    def give_back(self, slots: list[int]) -> None:
        self._free.extend(reversed(slots))


@dataclass(frozen=True)
class TokenPlaces:
    """Say where the tokens of one forward stand.

    ``write``: slots of the new tokens, ``[rows * new]``, row by row. ``read``: slots of all tokens each row attends to,
    the new ones last, ``[rows, length]``, padded on the left with the slot that is always zero. ``new``: new tokens of
    each row.
    """

    write: torch.Tensor
    read: torch.Tensor
    new: int


class PooledCache(Cache):  # type: ignore[misc, unused-ignore]
    """A cache of transformers whose layers are one pool of ``size`` slots. ``rows`` is set before each forward.

    ``gathered``: the most tokens that are gathered of a layer. ``alike``: layers whose pools are as large as the first
    one's, and are taken with it. Taken one by one, each in the first forward that comes to its layer, they would lie in
    what that forward has freed, and the allocator could give none of those segments back.
    """

    def __init__(self, size: int, gathered: int, alike: int = 0) -> None:
        self.size, self.gathered, self._alike = size, gathered, alike
        self.rows: TokenPlaces | None = None
        super().__init__(layers=[])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's new keys and values; return those of all tokens, ``[rows, heads, length, width]``."""
        first = not self.layers
        while len(self.layers) <= max(layer_idx, self._alike - 1):
            self.layers.append(_PooledLayer(self))
        for layer in self.layers if first else ():
            layer.lazy_initialization(key_states, value_states)
        found: tuple[torch.Tensor, torch.Tensor] = self.layers[layer_idx].update(key_states, value_states)
        return found

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many tokens stand before the new ones."""
        return 0 if self.rows is None else self.rows.read.shape[1] - self.rows.new

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return how many tokens a forward attends to, and where they begin."""
        return self.get_seq_length() + query_length, 0


class _PooledLayer(CacheLayerMixin):  # type: ignore[misc, unused-ignore]
    """One layer's part of the pool: keys and values ``[slots + 1, heads, width]``, allocated with the first tokens."""

    is_sliding = False

    def __init__(self, cache: PooledCache) -> None:
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys, self.values = (self._pool(states) for states in (key_states, value_states))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._holds(key_states, value_states):
            self.lazy_initialization(key_states, value_states)
        assert self._cache.rows is not None
        return self._passed(self.keys, key_states), self._passed(self.values, value_states)

    def get_seq_length(self) -> int:
        return self._cache.get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.get_mask_sizes(query_length)

    def get_max_length(self) -> int:
        return -1

    def _holds(self, key_states: torch.Tensor, value_states: torch.Tensor) -> bool:
        """Tell whether the pools taken are for these: a layer may be on another device than the first."""
        return self.is_initialized and all(
            (pool.device, pool.shape[1], pool.shape[2]) == (states.device, states.shape[1], states.shape[3])
            for pool, states in ((self.keys, key_states), (self.values, value_states))
        )

    def _pool(self, states: torch.Tensor) -> torch.Tensor:
        _, heads, _, width = states.shape
        pool = states.new_empty(self._cache.size + 1, heads, width)
        pool[-1].zero_()
        return pool

    def _passed(self, pool: Any, states: torch.Tensor) -> torch.Tensor:
        """Write ``states [rows, heads, new, width]`` and gather what the rows read, into a block of always the same
        size: the allocator can use it again as sequences grow."""
        rows = self._cache.rows
        assert rows is not None
        pool.index_copy_(0, rows.write, states.transpose(1, 2).flatten(0, 1))
        count, length = rows.read.shape
        block = states.new_empty(self._cache.gathered, *pool.shape[1:])
        gathered = torch.index_select(pool, 0, rows.read.flatten(), out=block[: count * length])
        return gathered.view(count, length, *pool.shape[1:]).transpose(1, 2)
