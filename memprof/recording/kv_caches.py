"""Claim the keys and values of generation by watching transformers' cache classes while something is recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memprof.compat import transformers as names
from memprof.compat.patching import Patches
from memprof.compat.torch import IS_COMPILING
from memprof.foreign import Args, Kwargs
from memprof.recording.guard import NULL_GUARD, FailureGuard
from memprof.recording.owners import OwnershipRegistry
from memprof.vocabulary import Category

_PARTS = (
    (names.LAYER_KEYS, "keys"),
    (names.LAYER_VALUES, "values"),
    (names.QUANTIZED_KEYS, "keys"),
    (names.QUANTIZED_VALUES, "values"),
)


class CacheWatch:
    """Wrap ``Cache.update`` (and overriding subclasses) between ``start`` and ``stop``.

    A growing cache concatenates: every update leaves a new storage, which is claimed at once. A cache filled in a
    forward with gradients holds activations of that forward: those are left alone. ``on_token`` is called before each
    forward's first layer with the number of new tokens, and tells whether they are recorded.
    """

    def __init__(
        self, owners: OwnershipRegistry, on_token: Callable[[int], bool] | None = None, guard: FailureGuard = NULL_GUARD
    ) -> None:
        self._owners = owners
        self._guard = guard
        self._on_token = on_token
        self._patches = Patches()
        self._recorded = True
        self._is_watching = False

    def start(self) -> None:
        """Wrap the classes of an already imported transformers; without it there is nothing to watch."""
        self._is_watching = True
        if not names.CACHE_UPDATE.is_loaded or not names.CACHE_UPDATE.find():
            return
        base, name = names.CACHE_UPDATE.place()
        for kind in _with_subclasses(base):
            original = vars(kind).get(name)
            if callable(original):
                around = self._guard.around(original, self._before, self._after, IS_COMPILING.get())
                self._patches.put(kind, name, around)

    def stop(self) -> None:
        self._is_watching = False
        self._patches.restore()

    def _before(self, args: Args, kwargs: Kwargs) -> tuple[Any, int | None]:
        """Return the cache, and the index of the layer that is updated."""
        cache, args = args[0], args[1:]
        if not self._is_watching:  # another recording, which goes on, has wrapped this one's function
            return cache, None
        index = kwargs.get("layer_idx", args[2] if len(args) > 2 else None)
        index = index if isinstance(index, int) else None
        if self._on_token is not None and index == 0:
            keys = args[0] if args else kwargs.get("key_states")
            self._recorded = self._on_token(int(keys.shape[-2]) if keys is not None else 1)
        return cache, index

    def _after(self, updated: tuple[Any, int | None], _result: Any, error: BaseException | None) -> None:
        import torch

        cache, index = updated
        if not self._recorded or index is None or error is not None or torch.is_grad_enabled():
            return
        layers = names.CACHE_LAYERS.of(cache)
        if layers is not None and index < len(layers):
            for part, detail in _PARTS:
                self._claim(part.of(layers[index]), detail, index)
        else:  # transformers before cache layers: two lists on the cache
            for attribute, detail in (("key_cache", "keys"), ("value_cache", "values")):
                held = getattr(cache, attribute, None)
                if held is not None and index < len(held):
                    self._claim(held[index], detail, index)

    def _claim(self, tensor: Any, detail: str, index: int) -> None:
        import torch

        if isinstance(tensor, tuple):  # quantised: values and their scales
            for part in tensor:
                self._claim(part, detail, index)
        elif isinstance(tensor, torch.Tensor):
            self._owners.claim(tensor, Category.KV_CACHE, detail, f"layers.{index}.{detail}")


def _with_subclasses(base: type) -> list[Any]:
    found: list[Any] = [base]
    kinds: list[type] = base.__subclasses__()
    for kind in kinds:
        found += _with_subclasses(kind)
    return list(dict.fromkeys(found))
