"""Save and restore to the bit what a step changes: weights, optimizer, random numbers, a trainer's own state.

Tensors are kept in the host's memory, never on the device. On a CPU that is device and host in one they are kept as
numpy arrays, which a tensor trace does not count.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, MutableMapping, MutableSequence, MutableSet
from typing import Any, NamedTuple

import numpy as np
import torch

# Containers that are larger, or nested deeper, are data and not state.
_LARGEST = 100_000
_DEPTH = 4
_SMALL_TENSOR = 2**20
_ABSENT = object()


class StateBackup:
    """Copy everything when made; :meth:`restore` puts it back, and may be called once.

    Of ``model`` trainable parameters, buffers, gradients and modes are kept, of ``optimizer`` (no wrapper) the state,
    of ``objects`` attributes that are plain values, containers of them and small tensors, all but those to ``skip``, of
    ``stateful`` ones, such as a gradient scaler, the ``state_dict``.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        objects: Iterable[Any] = (),
        stateful: Iterable[Any] = (),
        skip: Iterable[str] = (),
    ) -> None:
        self._modes = [(m, m.training) for m in model.modules()]
        self._parameters = list(model.parameters())
        self._gradients = [p.grad for p in self._parameters]
        changing = [p for p in self._parameters if p.requires_grad] + list(model.buffers())
        self._tensors = [(t, _to_host(t)) for t in changing]
        self._optimizer = optimizer
        self._state = {p: _take(slots) for p, slots in optimizer.state.items()}
        self._groups = _take(optimizer.param_groups)
        left_out = frozenset(skip)
        self._attributes = [
            (o, {k: _take(v) for k, v in vars(o).items() if k not in left_out}, left_out) for o in objects
        ]
        self._stateful = [(o, o.state_dict()) for o in stateful]
        self._random = _RandomState()

    def restore(self) -> None:
        """Put everything back as it was; on CUDA the allocator's cache is given back too."""
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        with torch.no_grad():
            for tensor, host in self._tensors:
                _from_host(tensor, host)
        state = self._optimizer.state
        for key in list(state):
            if key not in self._state:
                del state[key]
        for key, taken in self._state.items():
            state[key] = _put(taken)
        _put(self._groups)
        for module, training in self._modes:
            module.training = training
        for owner, values, left_out in self._attributes:
            _restore_attributes(owner, values, left_out)
        for owner, saved in self._stateful:
            owner.load_state_dict(saved)
        self._random.restore()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def make_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Step once with gradients of zero: later steps have the state from their beginning."""
    if optimizer.state:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


class _RandomState:
    """Keep the random generators a training run draws from."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._torch = torch.get_rng_state().numpy().copy()
        started = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._cuda = torch.cuda.get_rng_state_all() if started else None

    def restore(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(torch.from_numpy(self._torch))
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)


class _Taken(NamedTuple):
    """Hold a container and its content, or a tensor and its bytes."""

    thing: Any
    content: Any


def _take(value: Any, depth: int = 0) -> Any:
    if isinstance(value, torch.Tensor):
        return _Taken(value, _to_host(value)) if _worth_keeping(value, depth) else value
    if depth >= _DEPTH or not isinstance(value, (dict, list, set, deque)) or len(value) > _LARGEST:
        return value
    if isinstance(value, dict):
        return _Taken(value, {k: _take(v, depth + 1) for k, v in value.items()})
    return _Taken(value, [_take(v, depth + 1) for v in value])


def _worth_keeping(tensor: torch.Tensor, depth: int) -> bool:
    """Tell whether a tensor found in some object may be state: optimizer slots are (depth 1), whole models are not."""
    if tensor.is_meta or tensor.layout is not torch.strided or isinstance(tensor, torch.nn.Parameter):
        return False
    return depth == 1 or tensor.numel() * tensor.element_size() <= _SMALL_TENSOR


def _put(taken: Any) -> Any:
    """Return the same object with its old content."""
    if not isinstance(taken, _Taken):
        return taken
    thing, content = taken
    if isinstance(thing, torch.Tensor):
        with torch.no_grad():
            _from_host(thing, content)
    elif isinstance(thing, MutableMapping):
        values = {k: _put(v) for k, v in content.items()}
        thing.clear()
        thing.update(values)
    elif isinstance(thing, MutableSet):
        thing.clear()
        thing.update(_put(v) for v in content)  # type: ignore[attr-defined]
    elif isinstance(thing, (MutableSequence, deque)):
        values_in_order = [_put(v) for v in content]
        thing.clear()
        thing.extend(values_in_order)
    return thing


def _restore_attributes(owner: Any, values: dict[str, Any], left_out: frozenset[str]) -> None:
    now = vars(owner)
    for name in [n for n in now if n not in values and n not in left_out]:
        del now[name]
    for name, taken in values.items():
        value = _put(taken)
        if now.get(name, _ABSENT) is not value:
            now[name] = value


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor."""
    to_local = getattr(tensor, "to_local", None)
    part: torch.Tensor = to_local() if to_local is not None else tensor
    return part.detach()


def _to_host(tensor: torch.Tensor) -> Any:
    part = _local(tensor)
    if part.device.type == "cpu":
        return part.reshape(-1).view(torch.uint8).numpy().copy()
    return part.to("cpu", copy=True)


def _from_host(tensor: torch.Tensor, host: Any) -> None:
    part = _local(tensor)
    if isinstance(host, np.ndarray):
        host = torch.from_numpy(host).view(part.dtype).reshape(part.shape)
    part.copy_(host)
