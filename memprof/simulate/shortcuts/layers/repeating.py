"""Execute a few of a model's layers wherever nothing is differentiated, and repeat their events for those alike.

Generation, and the log-probabilities of the old and the reference policy, call the same layer tens of times in a row.
What a layer asks of the allocator follows from its modules' structure and the facts of what it is given. Of layers that
have both in common two are executed, and where they did the same, the others are repeated from the log: takings, frees,
claims, kernels and work, under the other layer's names. Only the inside of ``forward`` is repeated: hooks run. All that
is not understood is executed, and so is every layer that is trained.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from memprof.compat import torch as torch_names
from memprof.compat import transformers as transformers_names
from memprof.simulate.recorder.recorder import FakeRecorder
from memprof.simulate.shortcuts.layers.circumstances import known_by
from memprof.simulate.shortcuts.layers.pattern import Before, Pattern, Place
from memprof.simulate.shortcuts.layers.structure import cache_index
from memprof.simulate.shortcuts.layers.values import NotAlike, Values
from memprof.simulate.shortcuts.results import Making, making

__all__ = ["layers_repeated"]

_FEWEST = 3  # layers, of which two are executed
_graph_task: Any = torch_names.GRAPH_TASK.get()


@contextlib.contextmanager
def layers_repeated(models: list[Any], recorder: FakeRecorder) -> Iterator[None]:
    """Repeat the layers of these models that are alike, while open."""
    make = making()
    wrapped: list[nn.Module] = []
    if make is not None:
        for layers in _layers_of(models):
            row = _Row(recorder, make, layers)
            for number, layer in enumerate(layers):
                layer.forward = types.MethodType(row.forward_of(number), layer)  # which a copy of the layer binds anew
                wrapped.append(layer)
    try:
        yield
    finally:
        for layer in wrapped:
            vars(layer).pop("forward", None)


def _layers_of(models: list[Any]) -> Iterator[list[nn.Module]]:
    kind = transformers_names.DECODER_LAYER.find()
    seen: set[int] = set()
    for model in models:
        for module in model.modules() if isinstance(model, nn.Module) else ():
            layers = list(module) if isinstance(module, nn.ModuleList) else []
            free = all(kind and isinstance(layer, kind) and "forward" not in vars(layer) for layer in layers)
            if len(layers) >= _FEWEST and free and id(module) not in seen:
                seen.add(id(module))
                yield layers


class _Row:
    """Hold the layers of one model, which are called one after another; what is known of them lasts for one pass."""

    def __init__(self, recorder: FakeRecorder, make: Making, layers: list[nn.Module]) -> None:
        self._recorder, self._make = recorder, make
        self._last = len(layers)
        self._patterns: dict[Any, Pattern | None] = {}  # by what is given; None where it cannot be repeated
        self._sure: set[Any] = set()  # of these two were alike

    def forward_of(self, number: int) -> Callable[..., Any]:
        """Return what takes the place of a layer's forward."""

        def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
            call = self._call(number, layer, args, kwargs)
            if call is None:
                return type(layer).forward(layer, *args, **kwargs)
            return self._called(call, layer, args, kwargs)

        return forward

    def _call(self, number: int, layer: nn.Module, args: Any, kwargs: Any) -> _Call | None:
        """Return what is known of a call; None where that is not enough."""
        if torch.is_grad_enabled() or not self._is_free():
            return None
        if number <= self._last:
            self._patterns.clear()
            self._sure.clear()
        self._last = number
        try:
            return _Call(self._recorder, layer, args, kwargs)
        except NotAlike:
            return None

    def _is_free(self) -> bool:
        """Tell whether a call could be logged or repeated now."""
        return not (self._recorder.logs_call or self._recorder.paused) and _graph_task() == -1

    def _called(self, call: _Call, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        known = self._patterns.get(call.key)
        if known is not None and call.key in self._sure:
            return call.repeat(known)
        before = call.before()
        if known is None and call.key in self._patterns:
            return type(layer).forward(layer, *args, **kwargs)
        with self._recorder.logging_call() as log:
            out = type(layer).forward(layer, *args, **kwargs)
        try:
            found = Pattern(self._recorder, self._make, call.place, log, before, call.left(out))
        except NotAlike:
            self._patterns[call.key] = None
            return out
        if known is not None and known.key == found.key:
            self._sure.add(call.key)
        self._patterns[call.key] = found
        return out


class _Call:
    """Know one call of a layer by all that decides what it does.

    Raises:
        NotAlike: something it is given is not known to say all about itself.
    """

    def __init__(self, recorder: FakeRecorder, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._recorder = recorder
        self._cache = self._state = None
        number = -1
        kind, _ = transformers_names.CACHE_UPDATE.place()
        caches = [value for value in (*args, *kwargs.values()) if isinstance(value, kind)]
        if caches:
            number, self._cache = cache_index(layer), caches[0]
            layers = transformers_names.CACHE_LAYERS.of(self._cache)
            if len(caches) > 1 or layers is None or number >= len(layers):
                raise NotAlike("which part of the cache it uses is not known")
            self._state = layers[number]
        plain_args = [None if value is self._cache else value for value in args]
        plain_kwargs = {name: None if value is self._cache else value for name, value in kwargs.items()}
        values = Values()
        given = (*map(values.add, (plain_args, plain_kwargs)), *self._cached(values))
        self._values = values
        names, self.key = known_by(recorder, layer, given, values)
        self.place = Place(names, number)

    def _cached(self, values: Values) -> tuple[Any, ...]:
        """Describe the cache, and the layer's part of it."""
        if self._cache is None:
            return ()
        layers = transformers_names.CACHE_LAYERS.name
        rest = {name: value for name, value in vars(self._cache).items() if name != layers}
        return (type(self._cache), values.add(rest), type(self._state), values.add(vars(self._state)))

    def before(self) -> Before:
        """Note the tensors that are there, and let go of them: the call may replace some."""
        before = Before(self._values, self._recorder)
        self._values = Values()
        return before

    def left(self, out: Any) -> list[Any]:
        """List what the call leaves."""
        return [out] if self._state is None else [out, vars(self._state)]

    def repeat(self, pattern: Pattern) -> Any:
        """Do what the pattern says; return what the call returns."""
        left = pattern.repeat(self.place, self._values.tensors)
        if self._state is not None:
            vars(self._state).update(left[1])
        return left[0]
