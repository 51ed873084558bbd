"""Note the owners of fake storages, whose addresses only the recorder knows."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

from memprof.compat import torch as torch_names
from memprof.compat import torch_sharding as sharding_names
from memprof.recording.owners import OwnershipRegistry, storages_of
from memprof.simulate.recorder.decode_log import Rehearsal
from memprof.vocabulary import Category

_key_of: Callable[[Any], int] = attrgetter(torch_names.STORAGE_KEY.name)
_SHARDED = {Category.WEIGHTS, Category.ADAPTERS, Category.REFERENCE_MODEL}


class FakeOwnerBook(OwnershipRegistry):
    """Keep the owners of fake storages; ``address_of`` returns 0 for one that has no address."""

    def __init__(
        self, now_us: Callable[[], int], address_of: Callable[[Any], int], rehearsal: Callable[[], Rehearsal | None]
    ) -> None:
        super().__init__(now_us, lambda device_type: True)
        self._address_of, self._rehearsal = address_of, rehearsal
        self._category_of: dict[int, Category] = {}

    def claim(self, tensor: torch.Tensor, category: Category, detail: str | None, name: str | None) -> None:
        shard = sharding_names.LOCAL_TENSOR.of(tensor) is not None and category in _SHARDED
        if shard:
            self._category_of[id(tensor)] = category
            detail = detail or "sharded"
        for storage in storages_of(tensor):
            known = self._claimed.get(_key_of(storage))
            if known is not None and known() is storage:
                continue
            if address := self._address_of(storage):
                self._claimed[_key_of(storage)] = weakref.ref(storage)
                self.claim_address(address, category, detail, name)

    def forget_models(self) -> None:
        """Forget the models added so far: a trainer wraps its own."""
        self._models.clear()

    @property
    def claims(self) -> int:
        return len(self._rows)

    def category_of(self, parameter: torch.Tensor) -> Category:
        """Return what a sharded parameter was claimed as; a weight if nobody said."""
        return self._category_of.get(id(parameter), Category.WEIGHTS)

    def moved(self, before: int, after: int) -> None:
        """Move a claim from the address ``before`` to ``after``."""
        known = next((row for row in reversed(self._rows) if row[0] == before), None)
        if known is not None:
            self.claim_address(after, Category(known[2]), known[3], known[4])

    def claim_address(self, address: int, category: Category, detail: str | None, name: str | None) -> None:
        """Claim the block alive at ``address``."""
        if (rehearsal := self._rehearsal()) is not None:
            rehearsal.claim(address, category, detail, name)
        else:
            self._rows.append((address, self._now(), category.value, detail, name))
