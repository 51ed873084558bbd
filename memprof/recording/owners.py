"""Record who owns which memory: a live tensor *is* a parameter, a gradient, a moment, a cache or an input.

A claim says what the storage at an address was at one time. It holds for the allocation's whole life, before and
after, so it is enough to look once while the tensor lives: gradients are read after backward, optimizer state
after the step. Claims go by storage: views and tied weights count once, and the first claim stands.
"""

from __future__ import annotations

import re
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from memprof.recording import sharded_owners
from memprof.recording.guard import NULL_GUARD, FailureGuard, read_foreign
from memprof.recording.sharded_owners import SHARDED, UNSHARDED, is_sharded, zero_tensors
from memprof.recording.storages import gradient_of, storage_key, storages_of
from memprof.recording.system.inference_engine import engine_parts, runner_of
from memprof.units import format_bytes
from memprof.vocabulary import Category

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["OwnershipRegistry", "storages_of"]

# Roles a model can have, and what its parameters are then.
_ROLE_CATEGORY = {
    "policy": Category.WEIGHTS,
    "reference": Category.REFERENCE_MODEL,
    "reward": Category.REWARD_MODEL,
    "value": Category.VALUE_MODEL,
    "engine": Category.INFERENCE_ENGINE,
}
# Names PEFT gives to what it adds; `original_module` is the frozen weight that `modules_to_save` copied.
_ADAPTER = re.compile(
    r"(^|\.)(lora_\w+|ia3_\w+|hada_\w+|oft_\w+|boft_\w+|vera_\w+|adaption_\w+|prompt_encoder|prompt_embeddings"
    r"|modules_to_save|trainable_tokens_\w+|ln_tuning_layers|vblora_\w+|randlora_\w+|fourierft_\w+)(\.|$)"
)
# TRL keeps the starting point of a re-trained adapter as a second, frozen adapter of this name.
_REFERENCE_ADAPTER = re.compile(r"\.(ref)\.")
_KEEP = 500_000
_DEPTH = 4
_T = TypeVar("_T")
# Shards may be padded; their storages are no larger than this times the shards unless they hold something else too.
_WHOLE = 1.25


class OwnershipRegistry:
    """Collect owner rows ``[address, time_us, category, detail, name]``.

    ``watches`` tells whether storages on a device of this type are recorded; ``guard`` stands between the autograd
    engine and claims of gradients.
    """

    def __init__(
        self, now_us: Callable[[], int], watches: Callable[[str], bool], guard: FailureGuard = NULL_GUARD
    ) -> None:
        self._now = now_us
        self._guard = guard
        self._watches = watches
        self._rows: deque[tuple[int, int, str, str | None, str | None]] = deque(maxlen=_KEEP)
        self._claimed: dict[int, weakref.ref[Any]] = {}
        self._models: list[tuple[weakref.ref[Any], str]] = []
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._wrappers: list[weakref.ref[Any]] = []
        self._zero: weakref.WeakSet[Any] = weakref.WeakSet()
        self._engines: weakref.WeakSet[Any] = weakref.WeakSet()
        self._runners: list[weakref.ref[Any]] = []
        self._hooks: dict[int, Any] = {}
        self._unread: dict[str, str] = {}  # what raised when it was read, with the exception's text

    # -- what to watch -----------------------------------------------------------------------------------------

    def add_model(self, model: nn.Module, role: str) -> None:
        """Add a model whose parameters and buffers are claimed as ``role``."""
        if not any(ref() is model for ref, _ in self._models):
            self._models.append((weakref.ref(model), role))

    def add_wrapper(self, module: Any) -> None:
        """Add what an engine wrapped the policy in (DistributedDataParallel, FSDP): it may hold buffers of its own."""
        is_wrapper = read_foreign(lambda: hasattr(module, "modules"), False)
        if is_wrapper and not any(ref() is module for ref in self._wrappers):
            self._wrappers.append(weakref.ref(module))

    def add_inference_engine(self, engine: Any) -> None:
        """Add a vLLM that runs in this process: its model, its KV cache and its buffers are claimed. Others are not."""
        runner = read_foreign(lambda: runner_of(engine), None)
        if runner is not None and not any(ref() is runner for ref in self._runners):
            self._runners.append(weakref.ref(runner))

    def _read(self, what: str, read: Callable[[], Iterable[_T]]) -> list[_T]:
        """Return what is found in the program's objects; if their code raises, what was found before, and a remark."""
        found: list[_T] = []
        read_foreign(lambda: found.extend(read()), None, lambda error: self._unread.setdefault(what, error))
        return found

    def add_optimizer(self, optimizer: Any) -> None:
        """Add an optimizer whose state is claimed; wrappers (accelerate's) are unwrapped."""
        self._read("an optimizer", lambda: self._add_optimizer(optimizer) or ())

    def _add_optimizer(self, optimizer: Any) -> None:
        inner = unwrap_optimizer(optimizer)
        if inner is not None:
            self._optimizers.add(inner)
        for _ in range(_DEPTH):
            if next(zero_tensors(optimizer), None) is not None:
                self._zero.add(optimizer)
            optimizer = getattr(optimizer, "optimizer", None)

    @property
    def models(self) -> list[tuple[Any, str]]:
        """Return the models that still exist, with their roles."""
        return [(m, role) for ref, role in self._models if (m := ref()) is not None]

    # -- looking -----------------------------------------------------------------------------------------------

    def claim_models(self) -> None:
        """Claim parameters and buffers of every model."""
        for model, role in self.models:
            for name, tensor, category, detail in self._read(f"the {role} model", partial(_parts, model, role)):
                self.claim(tensor, category, detail, name)
        for runner in self._alive(self._runners):
            for name, tensor, category in self._read("the inference engine", partial(engine_parts, runner)):
                self.claim(tensor, category, None, name)

    def claim_shards(self, again: bool = False) -> None:
        """Claim what FSDP and ZeRO hold beside parameters, gradients and state; whole gradients as they are made.

        ``again``: look only where an earlier look found an engine; without one this costs nothing.
        """
        modules = [*(m for m, role in self.models if role == "policy"), *self._alive(self._wrappers)]
        for module in [m for m in modules if m in self._engines] if again else modules:
            what = f"a sharded model ({type(module).__name__})"
            for tensor, category, detail, name in self._read(what, partial(sharded_owners.engine_tensors, module)):
                self._forget(tensor)  # freed and filled again by resizing one storage: each time another allocation
                self.claim(tensor, category, detail, name)
            for parameter, name in self._read(what, partial(sharded_owners.unsharded_parameters, module)):
                self._watch_whole_gradient(parameter, name)
            if read_foreign(partial(sharded_owners.has_engine, module), False):
                self._engines.add(module)
        for optimizer in list(self._zero):
            for tensor, category, detail, name in self._read("an optimizer", partial(zero_tensors, optimizer)):
                self.claim(tensor, category, detail, name)

    def _forget(self, tensor: Any) -> None:
        for storage in storages_of(tensor):
            self._claimed.pop(storage_key(storage), None)

    def _watch_whole_gradient(self, parameter: Any, name: str) -> None:
        if id(parameter) not in self._hooks:
            self._hooks[id(parameter)] = parameter.register_post_accumulate_grad_hook(
                self._guard.hook(lambda p: self._claim_whole(gradient_of(p), name))
            )

    def _claim_whole(self, gradient: Any, name: str) -> None:
        if gradient is not None:
            self.claim(gradient, Category.GRADIENTS, UNSHARDED, name)

    def bucket_bytes(self) -> list[int]:
        """Return the sizes of the gradient buckets of the models' DDP wrappers, or of models that are wrappers."""
        wrappers = [*self._alive(self._wrappers), *(m for m, _ in self.models)]
        found = [self._read("a DDP wrapper", partial(sharded_owners.bucket_bytes, wrapper)) for wrapper in wrappers]
        return [nbytes for sizes in found for nbytes in sizes]

    def elsewhere(self) -> dict[str, int]:
        """Return bytes of parameters, gradients and optimizer state that lie on another device than the watched one."""
        found: dict[str, int] = {}
        seen: set[int] = set()
        for tensor, category in self._read("a model or an optimizer", self._held):
            for storage in storages_of(tensor):
                where = storage.device.type
                known = storage_key(storage) in seen or self._watches(where) or where == "meta"
                if not known and storage.nbytes():
                    seen.add(storage_key(storage))
                    found[category.value] = found.get(category.value, 0) + int(storage.nbytes())
        return found

    def _held(self) -> Iterator[tuple[Any, Category]]:
        for model, role in self.models:
            adapted = _is_adapted(model)
            for name, tensor in _named_tensors(model):
                yield tensor, _category(name, tensor, role, adapted)
                if (grad := gradient_of(tensor)) is not None:
                    yield grad, Category.GRADIENTS
        for optimizer in list(self._optimizers):
            for _, tensor in _state_of(optimizer):
                yield tensor, Category.OPTIMIZER_STATE

    def remarks(self) -> list[str]:
        """Return notes on unusual storages of the models."""
        said = [
            f"{what} could not be read completely ({error}): some of its memory is not named"
            for what, error in self._unread.items()
        ]
        for model, role in self.models:
            own, held = read_foreign(partial(sharded_owners.shards_and_storages, model), (0, 0))
            if held > own * _WHOLE:
                said.append(
                    f"the {role} model's shards of {format_bytes(own)} are views of whole parameters, which stay in "
                    f"memory: {format_bytes(held)} are in use"
                )
        return said

    def unhook(self) -> None:
        for handle in self._hooks.values():
            handle.remove()
        self._hooks = {}

    @staticmethod
    def _alive(refs: list[weakref.ref[Any]]) -> list[Any]:
        return [thing for ref in refs if (thing := ref()) is not None]

    def claim_gradients(self) -> None:
        """Claim what is in ``.grad`` now."""
        for model, role in self.models:
            if role != "policy" and role != "value":
                continue
            for name, gradient in self._read(f"the {role} model", partial(_gradients, model)):
                self.claim(gradient, Category.GRADIENTS, None, name)

    def claim_optimizers(self) -> None:
        for optimizer in list(self._optimizers):
            self.claim_optimizer(optimizer)

    def claim_optimizer(self, optimizer: Any) -> None:
        """Claim the state of one optimizer: moments, master weights, block-wise 8-bit state, step counters."""
        for name, tensor in self._read("an optimizer", partial(_state_of, optimizer)):
            self.claim(tensor, Category.OPTIMIZER_STATE, None, name)

    def claim_inputs(self, batch: Any, name: str = "batch") -> None:
        """Claim tensors of a batch or rollout buffer."""
        for path, tensor in self._read("a batch", partial(_nested, batch, name)):
            if not read_foreign(lambda tensor=tensor: bool(tensor.requires_grad), False):  # type: ignore[misc]
                self.claim(tensor, Category.INPUTS, None, path)

    def claim(self, tensor: torch.Tensor, category: Category, detail: str | None, name: str | None) -> None:
        """Note that ``tensor``'s memory is ``category``, unless its storage has an owner already."""
        for storage in storages_of(tensor):
            if self.owns(storage):
                continue
            if not self._watches(storage.device.type) or not storage.nbytes() or not (address := storage.data_ptr()):
                continue
            self._claimed[storage_key(storage)] = weakref.ref(storage)
            self._rows.append((address, self._now(), category.value, detail, name))

    def owns(self, storage: Any) -> bool:
        """Tell whether this storage has been claimed."""
        known = self._claimed.get(storage_key(storage))
        return known is not None and known() is storage

    def rows(self, since_us: int = 0) -> list[list[Any]]:
        """Return owner rows not older than ``since_us``, oldest first."""
        return [list(row) for row in self._rows if row[1] >= since_us]

    def renew(self) -> None:
        """Forget the claims, so that the next look claims again what is alive (rows stay)."""
        self._claimed.clear()


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the ``torch.optim.Optimizer`` inside accelerate's and similar wrappers (None if there is none)."""
    from torch.optim import Optimizer

    for _ in range(_DEPTH):
        # AcceleratedOptimizer is an Optimizer too, but its own ``state`` is the inner one's.
        inner = getattr(optimizer, "optimizer", None)
        if inner is None:
            break
        optimizer = inner
    return optimizer if isinstance(optimizer, Optimizer) or hasattr(optimizer, "state") else None


def _named_tensors(model: nn.Module) -> Iterable[tuple[str, Any]]:
    yield from model.named_parameters(remove_duplicate=True)
    yield from model.named_buffers(remove_duplicate=True)


def _parts(model: nn.Module, role: str) -> Iterator[tuple[str, Any, Category, str | None]]:
    """Yield name, tensor, category and detail of a model's parameters and buffers, with how they are quantised."""
    adapted = _is_adapted(model)
    for name, tensor in _named_tensors(model):
        category = _category(name, tensor, role, adapted)
        yield name, tensor, category, SHARDED if is_sharded(tensor) else None
        for part in _quantisation_state(tensor):
            yield f"{name} (quantisation state)", part, category, None


def _is_adapted(model: Any) -> bool:
    return read_foreign(lambda: getattr(model, "peft_config", None) is not None, False)


def _gradients(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, parameter in model.named_parameters(remove_duplicate=True):
        if parameter.requires_grad and (gradient := gradient_of(parameter)) is not None:
            yield name, gradient


def _state_of(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of an optimizer's state, with their names in it; a parameter's own is none of it."""
    state = getattr(optimizer, "state", None)
    if isinstance(state, Mapping):
        for key, slots in state.items():
            yield from ((name, tensor) for name, tensor in _nested(slots, "") if tensor is not key)


def _category(name: str, tensor: Any, role: str, adapted: bool) -> Category:
    if role == "policy" and adapted and "original_module" not in name:
        if _ADAPTER.search(name):
            frozen_copy = _REFERENCE_ADAPTER.search(name) and not tensor.requires_grad
            return Category.REFERENCE_MODEL if frozen_copy else Category.ADAPTERS
        if tensor.requires_grad:
            return Category.ADAPTERS
    return _ROLE_CATEGORY[role]


def _quantisation_state(tensor: Any) -> Iterator[Any]:
    """Yield scales and code books that bitsandbytes keeps beside a packed weight, as attributes of it."""
    for attribute in ("quant_state", "SCB", "CB"):
        held = getattr(tensor, "__dict__", {}).get(attribute)
        if held is not None:
            values = held if isinstance(held, (Mapping, list, tuple)) or _is_tensor(held) else vars(held)
            for _, part in _nested(values, attribute):
                yield part


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _nested(value: Any, path: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield tensors in dicts, lists and small objects, with where they were found."""
    if _is_tensor(value):
        yield path, value
    elif depth >= _DEPTH:
        return
    elif isinstance(value, Mapping):
        for key, item in value.items():
            label = key if isinstance(key, str) else "" if _is_tensor(key) else str(key)
            yield from _nested(item, f"{path}.{label}" if path and label else path or label, depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _nested(item, path, depth + 1)
    elif type(value).__name__ == "QuantState":
        yield from _nested(vars(value), path, depth + 1)
