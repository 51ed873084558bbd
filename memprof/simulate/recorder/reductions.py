"""Reckon what CUDA's reductions (sums, means, norms) ask for beside their result.

A reduction with few results and many inputs to each is divided among thread blocks, which meet in a buffer in global
memory. Its size follows from the shape and from the card's number of processors. This is ``setReduceConfig`` of torch's
``ATen/native/cuda/Reduce.cuh``, and the order of dimensions of ``TensorIterator``, in the same order and names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_MAX_THREADS = 512
_WARP = 32
_FEWEST, _MOST = 16, 256  # values a thread sums


class Processors(NamedTuple):
    """Hold a card's number of streaming multiprocessors, and the threads that one of them can hold."""

    number: int
    threads: int


class _Dim(NamedTuple):
    size: int
    stride: int  # of the input, in elements
    reduced: bool


def reduction_buffers(
    sizes: Sequence[int],
    strides: Sequence[int],
    reduced: Sequence[int],
    accumulator: int,
    processors: Processors,
    *,
    vector: int = 4,
) -> list[int]:
    """List the buffer and the semaphores, in bytes, of a reduction over ``reduced`` dimensions; nothing without them.

    Args:
        sizes: of the input.
        strides: of the input, in elements.
        reduced: dimensions that are summed over; all of them where empty.
        accumulator: bytes of what is summed in.
        processors: the card's.
        vector: inputs that one load brings along a reduced dimension.
    """
    count = len(sizes)
    over = {d % count for d in reduced} if reduced else set(range(count))
    dims = _coalesced([_Dim(n, s, i in over) for i, (n, s) in enumerate(zip(sizes, strides, strict=True)) if n != 1])
    inputs = outputs = 1
    for dim in dims:
        inputs, outputs = (inputs * dim.size, outputs) if dim.reduced else (inputs, outputs * dim.size)
    if inputs * outputs == 0:
        return []
    return _divided(dims, inputs, outputs, accumulator, processors, vector)


def _coalesced(dims: list[_Dim]) -> list[_Dim]:
    """Order dimensions as ``TensorIterator`` does, the reduced ones first, fastest first; join what lies in a row."""
    joined: list[_Dim] = []
    for dim in sorted(dims, key=lambda d: (not d.reduced, d.stride)):
        last = joined[-1] if joined else None
        if last is not None and last.reduced == dim.reduced and last.size * last.stride == dim.stride:
            joined[-1] = _Dim(last.size * dim.size, last.stride, last.reduced)
        else:
            joined.append(dim)
    return joined


def _divided(
    dims: list[_Dim], inputs: int, outputs: int, accumulator: int, processors: Processors, vector: int
) -> list[int]:
    n_reduced = sum(dim.reduced for dim in dims)
    along_input = n_reduced == len(dims) or (n_reduced > 0 and dims[0].stride < dims[n_reduced].stride)
    wide, high, fastest = inputs, outputs, dims[0].stride if dims else 1
    if dims and not along_input:
        wide, high, fastest = outputs, inputs, dims[n_reduced].stride
    per_load = 1
    if fastest == 1 and along_input and wide >= 128 and n_reduced == 1:
        wide //= vector
    elif fastest == 1 and not along_input:
        per_load = _output_vector(dims, n_reduced)
        wide //= per_load
    most = _MAX_THREADS // per_load
    width2, height2 = (_power_below(n) if n < most else most for n in (wide, high))
    width = min(width2, _WARP)
    height = min(height2, most // width)
    width = min(width2, most // height)
    step_input, step_output = (width, 1) if along_input else (1, width)
    across_warps = _up(inputs, step_input) >= min(height * 16, _MOST)
    if not across_warps:
        return []
    step_input *= height
    target = processors.number * (processors.threads // (width * height))
    grid = _up(outputs // per_load, step_output)
    values = _up(inputs, step_input)
    if values < _MOST or grid > target:
        return []
    blocks = max(min(_up(target, grid), _up(values, _FEWEST)), _up(values, _MOST))
    if blocks <= 1:
        return []
    size = accumulator * outputs * blocks
    return [size if along_input else size * width * per_load, 4 * grid]


def _output_vector(dims: list[_Dim], n_reduced: int) -> int:
    """Count the neighbouring results that one thread computes: 4, 2 or 1, whatever all strides allow."""
    vector = 4
    for number in (dims[n_reduced].size, *(d.stride for i, d in enumerate(dims) if i != n_reduced)):
        while number % vector:
            vector //= 2
    return vector


def _up(value: int, part: int) -> int:
    return -(-value // part)


def _power_below(value: int) -> int:
    return 1 << max(value.bit_length() - 1, 0)
