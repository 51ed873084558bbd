"""Answer an operation on fake tensors from the result it had before, without dispatching it again.

Each layer runs the operations of the layer before it. torch's fake mode caches results too, but reaching its cache,
through the dispatcher and back into Python, costs several times what making the result does; and it caches neither
lists of tensors nor the view after each linear layer. Here an operation is recognised by the same facts of its
arguments before it is dispatched. The first result is torch's own. A result that cannot be made exactly so again is
never made here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from memprof.compat import torch as torch_names
from memprof.compat.check import fault_of
from memprof.foreign import Args, Kwargs

_FakeTensor: Any = torch_names.FAKE_TENSOR.get()
_is_symbolic = attrgetter(torch_names.FAKE_SYMBOLIC.name)
_key_of: Callable[[Any], int] = attrgetter(torch_names.STORAGE_KEY.name)
_Operator: Any = type(torch.ops.aten.add.Tensor)
_META, _STRIDED = torch.device("meta"), torch.strided
_NEEDED = (
    torch_names.FAKE_SYMBOLIC, torch_names.NO_DISPATCH, torch_names.MAKE_SUBCLASS, torch_names.NO_DATA_POINTER,
    torch_names.KEYS_OF,
)  # fmt: skip
# Their result hangs on values, or they change what their argument is.
_LEFT_ALONE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
# Types of arguments that are their own facts.
_SIMPLE = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}

_Maker = Callable[[list[Any]], Any]


def known_results() -> KnownResults | None:
    """Return an empty memory of results; None where torch's release lacks what it needs, which costs time."""
    return None if any(fault_of(target) for target in _NEEDED) else KnownResults()


class KnownResults:
    """Remember the results of operations by the facts of their arguments, for as long as one fake mode lasts."""

    def __init__(self) -> None:
        self._makers: dict[tuple[Any, ...], tuple[_Maker | None, int]] = {}
        self._cacheable: dict[int, bool] = {}
        self._make = _Making()

    def run(self, func: Any, args: Args, kwargs: Kwargs) -> tuple[Any, int | None]:
        """Return what ``func`` returns for these arguments, executed only where it is not known.

        Returned beside it: a number that all calls with arguments like these have, None where they are not told apart.
        """
        number = id(func)  # operators live as long as torch does, and hashing one costs a call
        cacheable = self._cacheable.get(number)
        if cacheable is None:
            cacheable = self._cacheable[number] = _is_cacheable(func)
        tensors: list[Any] = []
        key = _key(number, args, kwargs, tensors) if cacheable else None
        if key is None:
            return func(*args, **kwargs), None
        known = self._makers.get(key)
        if known is None:
            out = func(*args, **kwargs)
            unchanged = _key(number, args, kwargs, []) == key
            alike = len(self._makers)
            self._makers[key] = (self._make.maker_of(out, tensors) if unchanged else None, alike)
            return out, alike
        maker, alike = known
        return (func(*args, **kwargs) if maker is None else maker(tensors)), alike


def _is_cacheable(func: Any) -> bool:
    """Tell whether the facts of its arguments say all of an operator's result."""
    plain = isinstance(func, _Operator) and func.namespace in ("aten", "prims")
    return plain and not _LEFT_ALONE.intersection(func.tags) and "lift" not in str(func)


def _key(number: int, args: Args, kwargs: Kwargs, tensors: list[Any]) -> tuple[Any, ...] | None:
    """Return what an operation is known by, and fill ``tensors``; None where one of them is not dense."""
    facts: list[Any] = [number, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
    if not _add_facts(args, facts, tensors):
        return None
    if kwargs:
        facts += kwargs
        if not _add_facts(kwargs.values(), facts, tensors):
            return None
    return tuple(facts)


def _add_facts(values: Iterable[Any], facts: list[Any], tensors: list[Any]) -> bool:
    for value in values:
        kind = type(value)
        if kind is _FakeTensor:
            if value.constant is not None or value.layout is not _STRIDED or _is_symbolic(value):
                return False
            facts.append(_facts_of(value))
            tensors.append(value)
        elif kind in _SIMPLE:
            facts += (kind, value)
        elif kind is list or kind is tuple or kind is torch.Size:
            facts += (list, len(value))
            if not _add_facts(value, facts, tensors):
                return False
        elif kind is torch.Generator:
            facts.append(kind)  # which one it is decides values only
        else:
            return False
    return True


def _facts_of(tensor: Any) -> tuple[Any, ...]:
    """List all that torch's ``TensorMetadata`` says of a dense tensor; shape and strides give its memory format."""
    return (
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.fake_device,
        tensor.storage_offset(),
        tensor.untyped_storage().nbytes(),
        tensor.requires_grad,
        tensor.is_quantized,
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.is_inference(),
    )


class _Shape(NamedTuple):
    """Hold what is asked of torch to make a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


class _Arguments:
    """Know an operation's tensors by themselves and by their storages: their first places, and all of a storage's."""

    def __init__(self, tensors: list[Any]) -> None:
        self.tensors = tensors
        self.places: dict[int, int] = {}
        self.of_storage: dict[int, list[int]] = {}
        for place, tensor in enumerate(tensors):
            self.places.setdefault(id(tensor), place)
            self.of_storage.setdefault(_storage(tensor), []).append(place)

    def new_storage(self, part: Any) -> int | None:
        """Return the storage of a result's part; None where it is an argument's, or the part has none."""
        storage = _storage(part) if isinstance(part, torch.Tensor) else None
        return None if storage in self.of_storage else storage


class _Making:
    """Make results again."""

    def __init__(self) -> None:
        self._no_dispatch: Any = torch_names.NO_DISPATCH.get()
        self._subclass: Any = torch_names.MAKE_SUBCLASS.get()
        self._no_pointer: Any = torch_names.NO_DATA_POINTER.get()
        self._keys: Any = torch_names.KEYS_OF.get()

    def maker_of(self, out: Any, tensors: list[Any]) -> _Maker | None:
        """Return what makes a result like ``out`` again, of tensors like these; None where that is not certain."""
        kind, arguments = type(out), _Arguments(tensors)
        if kind is not list and kind is not tuple:
            return self._one(out, arguments)
        makers = [self._one(part, arguments) for part in out]
        new = [storage for part in out if (storage := arguments.new_storage(part)) is not None]
        if None in makers or len(set(new)) < len(new):
            return None  # two of them share what is new
        return lambda given: kind([maker(given) for maker in makers])  # type: ignore[misc]

    def _one(self, out: Any, arguments: _Arguments) -> _Maker | None:
        if out is None or type(out) in (int, float, bool):
            return lambda given: out
        place = arguments.places.get(id(out))
        if place is not None:
            return lambda given: given[place]
        if type(out) is not _FakeTensor or not _is_simple_result(out):
            return None
        of = arguments.of_storage.get(_storage(out), [])
        return self._tensor(out, arguments.tensors, of[0] if of else None) if len(of) < 2 else None

    def _tensor(self, out: Any, tensors: list[Any], of: int | None) -> _Maker | None:
        """Return what makes a tensor, of its own or in the storage of the argument ``of``, once that was tried."""
        shape = _Shape(tuple(out.shape), out.stride(), out.storage_offset(), out.dtype, out.fake_device)
        if (of is None and shape.offset) or (of is not None and _end(out) > out.untyped_storage().nbytes()):
            return None
        meta = self._meta(shape, None if of is None else tensors[of].untyped_storage())
        first = _FakeTensor(out.fake_mode, meta, shape.device)
        if _facts_of(first) != _facts_of(out) or self._keys(first) != self._keys(out):
            return None
        attributes, device = dict(vars(first)), shape.device
        build, subclass, no_pointer = self._meta, self._subclass, self._no_pointer

        def make(given: list[Any]) -> Any:
            made = build(shape, None if of is None else given[of].untyped_storage())
            made = subclass(_FakeTensor, made, False, dispatch_device=True, device_for_backend_keys=device)
            no_pointer(made)
            made.__dict__.update(attributes)
            return made

        return make

    def _meta(self, shape: _Shape, storage: Any) -> Any:
        extents, strides, offset, dtype, _ = shape
        with self._no_dispatch():
            made = torch.empty_strided(extents, strides, dtype=dtype, device=_META)
            return made if storage is None else made.set_(storage, offset, extents, strides)


def _is_simple_result(out: Any) -> bool:
    odd = out.requires_grad or out.is_conj() or out.is_neg() or out.is_inference() or out.constant is not None
    return out.layout is _STRIDED and not _is_symbolic(out) and not odd


def _storage(tensor: Any) -> int:
    return _key_of(tensor.untyped_storage())


def _end(tensor: Any) -> int:
    """Return where a tensor's last element ends in its storage, in bytes."""
    if not tensor.numel():
        return 0
    last = sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int((tensor.storage_offset() + last + 1) * tensor.element_size())
