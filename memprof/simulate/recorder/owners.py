"""Owners of storages that only the recorder has addresses for."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch

from memprof.recording.owners import OwnerBook, storages_of
from memprof.vocabulary import Category

__all__ = ["FakeOwnerBook"]

_SHARDED = {Category.WEIGHTS, Category.ADAPTERS, Category.REFERENCE_MODEL}


class AddressBook(Protocol):
    """What the owners need of the recorder."""

    def now_us(self) -> int: ...
    def watches(self, device_type: str) -> bool: ...
    def address_of(self, storage: Any) -> int: ...


class FakeOwnerBook(OwnerBook):
    """Owners of fake storages, whose addresses only the recorder knows."""

    def __init__(self, recorder: AddressBook) -> None:
        super().__init__(recorder.now_us, recorder.watches)
        self._recorder = recorder
        self._category_of: dict[int, Category] = {}

    def claim(self, tensor: torch.Tensor, category: Category, detail: str | None, name: str | None) -> None:
        shard = hasattr(tensor, "_local_tensor") and category in _SHARDED
        if shard:
            self._category_of[id(tensor)] = category
            detail = detail or "sharded"
        for storage in storages_of(tensor):
            known = self._claimed.get(storage._cdata)
            if known is not None and known() is storage:
                continue
            if address := self._recorder.address_of(storage):
                self._claimed[storage._cdata] = weakref.ref(storage)
                self.claim_address(address, category, detail, name)

    @property
    def claims(self) -> int:
        """How many there were so far."""
        return len(self._rows)

    def category_of(self, parameter: torch.Tensor) -> Category:
        """What a sharded parameter is; a weight if nobody said."""
        return self._category_of.get(id(parameter), Category.WEIGHTS)

    def claim_address(self, address: int, category: Category, detail: str | None, name: str | None) -> None:
        """Note what the block alive at ``address`` is."""
        self._rows.append((address, self._now(), category.value, detail, name))
