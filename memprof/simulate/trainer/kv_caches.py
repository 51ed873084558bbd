"""Fill a cache of keys and values to full length, of the kind asked for, as decoding would have left it.

Executed: transformers' dynamic, static and quantised caches. Modelled: what ``optimum-quanto`` makes of a tensor, where
4 or 2 bits are asked for (its sources: values packed into bytes, a scale and a shift in the tensor's dtype for each
group of 64); transformers' own fp8 cache needs no such package and is executed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from memprof.compat import patching
from memprof.compat import transformers as transformers_names

_GROUP = 64
_QUANTISED = transformers_names.QUANTIZED_KEYS.name


class LayerShape(NamedTuple):
    """Hold the shapes of one layer's keys and values, ``[batch, heads, tokens, width]``; tokens are not known yet.

    ``keys`` and ``values`` are empty where a layer keeps none. ``state`` is the layer itself where it keeps a state of
    fixed size, which is as large after the prompt as at the end.
    """

    keys: tuple[int, ...]
    values: tuple[int, ...]
    dtype: torch.dtype | None
    state: Any = None


def shapes_of(cache: Any) -> list[LayerShape]:
    """Read the shapes a prompt's forward left in a cache; what grows is taken from layers that keep a state too."""
    found = []
    for layer in cache.layers:
        state = layer if hasattr(layer, transformers_names.CACHE_STATE.name) else None
        if getattr(layer, transformers_names.LAYER_KEYS.name, None) is None and not hasattr(layer, _QUANTISED):
            found.append(LayerShape((), (), None, state))
            continue
        quantised = transformers_names.QUANTIZED_KEYS.of(layer)
        if quantised is None:
            found.append(LayerShape(tuple(layer.keys.shape), tuple(layer.values.shape), layer.keys.dtype, state))
            if state is not None:
                layer.keys = layer.values = None
        else:
            keys, values = (_shape(part) for part in (quantised, transformers_names.QUANTIZED_VALUES.of(layer)))
            found.append(LayerShape(keys, values, layer.dtype))
    return found


def _shape(quantised: Any) -> tuple[int, ...]:
    return tuple(quantised.shape if isinstance(quantised, _Packed) else quantised[0].shape)


def filled_cache(model: Any, shapes: list[LayerShape], held: int, generation: Any, plain: int | None = None) -> Any:
    """Make a cache that holds ``held`` tokens in every layer, as the model's own layers would have left it.

    ``plain``: how many tokens a quantised cache holds unquantised; None: as many as it can.
    """
    config = model.config.get_text_config(decoder=True)
    if generation.cache_implementation == "quantized":
        cache = _quantised_cache(config, generation)
        for index, shape in enumerate(shapes):
            _fill_quantised(cache, index, shape, held, plain)
        return cache
    from transformers import DynamicCache

    cache = DynamicCache(config=config)
    for index, shape in enumerate(shapes):
        if shape.state is not None:
            cache.layers[index] = shape.state
        if not shape.keys:
            continue
        window = transformers_names.CACHE_WINDOW.of(cache.layers[index]) if index < len(cache.layers) else None
        tokens = min(held, window - 1) if window else held
        if shape.state is None:
            _update(cache, index, shape, tokens)
        else:
            shape.state.keys, shape.state.values = _empty(shape, tokens)
        if hasattr(cache.layers[index], transformers_names.CACHE_LENGTH.name):
            setattr(cache.layers[index], transformers_names.CACHE_LENGTH.name, held)
    return cache


def quantised_every(model: Any, generation: Any) -> int | None:
    """Return after how many tokens a quantised cache quantises all of itself; None where there is no such cache."""
    if generation.cache_implementation != "quantized":
        return None
    layers = _quantised_cache(model.config.get_text_config(decoder=True), generation).layers
    every: int | None = transformers_names.CACHE_RESIDUAL.of(layers[0])
    return every


def _quantised_cache(config: Any, generation: Any) -> Any:
    """Make an empty quantised cache, as ``generate`` does."""
    from transformers import QuantizedCache

    arguments = dict(generation.cache_config or {})
    return QuantizedCache(backend=arguments.pop("backend", "quanto"), config=config, **arguments)


def _fill_quantised(cache: Any, index: int, shape: LayerShape, held: int, plain: int | None) -> None:
    """Quantise all but the last few tokens: as many as can be held unquantised before the last token quantises all."""
    layer = cache.layers[index]
    if plain is None:
        plain = min(max(0, transformers_names.CACHE_RESIDUAL.of(layer, 0) - 2), held - 1)
    _update(cache, index, shape, held - plain)
    if plain:
        layer.keys, layer.values = _empty(shape, plain)
    setattr(layer, transformers_names.CACHE_LENGTH.name, held)


def _update(cache: Any, index: int, shape: LayerShape, tokens: int) -> None:
    keys, values = _empty(shape, tokens)
    cache.update(keys, values, index)


def _empty(shape: LayerShape, tokens: int) -> tuple[Any, Any]:
    keys, values = (torch.empty(*s[:-2], tokens, s[-1], dtype=shape.dtype) for s in (shape.keys, shape.values))
    return keys, values


class _Packed(NamedTuple):
    """Hold a tensor in a few bits, as quanto keeps it."""

    data: torch.Tensor
    scale: torch.Tensor
    shift: torch.Tensor
    shape: tuple[int, ...]


def _pack(tensor: torch.Tensor, bits: int) -> _Packed:
    groups = tensor.reshape(-1, _GROUP) if tensor.numel() % _GROUP == 0 else tensor.reshape(-1, tensor.shape[-1])
    low, high = torch.amin(groups, dim=1, keepdim=True), torch.amax(groups, dim=1, keepdim=True)
    scale, shift = (high - low) / (2**bits - 1), -low
    values = torch.clamp(torch.round((groups + shift) / scale), 0, 2**bits - 1).to(torch.uint8)
    per_byte = 8 // bits
    rows = values.reshape(per_byte, -1)
    packed = rows[0]
    for place in range(1, per_byte):
        packed = packed | (rows[place] << (bits * place))
    return _Packed(packed, scale, shift, tuple(tensor.shape))


def _unpack(packed: _Packed, bits: int) -> torch.Tensor:
    mask = 2**bits - 1
    parts = [(packed.data >> (bits * place)) & mask for place in range(8 // bits)]
    values = torch.cat(parts).reshape(packed.scale.shape[0], -1)
    return (packed.scale * values - packed.shift).reshape(packed.shape)


@contextlib.contextmanager
def modelled_quanto() -> Iterator[None]:
    """Let transformers' quantised cache do without ``optimum-quanto``, while open."""

    def quantize(self: Any, tensor: Any, axis: int) -> _Packed:
        return _pack(tensor, self.nbits)

    def dequantize(self: Any, q_tensor: Any) -> Any:
        return _unpack(q_tensor, self.nbits)

    methods = {transformers_names.QUANTIZE.name: quantize, transformers_names.DEQUANTIZE.name: dequantize}
    base, _ = transformers_names.QUANTIZE.place()
    with patching((transformers_names.QUANTO_LAYER, type("ModelledLayer", (base,), methods))):
        yield
