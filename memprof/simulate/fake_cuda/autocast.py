"""Apply CUDA's autocast rules, and what its kernels do that the CPU's do not, on the device that fake tensors have.

Fake tensors live on ``cpu`` (fake CUDA ones need a driver), and ``torch.autocast("cpu")`` casts other operations than
``torch.autocast("cuda")`` does. The lower-precision lists agree where language models go; what CUDA runs in float32
and the CPU does not is registered here, for as long as :func:`cuda_autocast` is open. Lists: torch's
``aten/src/ATen/autocast_mode.h``.

``softmax`` of fp16 that is told to answer in float32 is one kernel on CUDA; the CPU copies its input into float32
first, as both do with bfloat16 (``aten/src/ATen/native/SoftMax.cpp``).

``linear`` adds a bias to the product in place, but not where tensors are a subclass or a mode looks on, as here
(``aten/src/ATen/native/Linear.cpp``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memprof.compat import torch as torch_names

# Cast to float32, then computed there.
_FLOAT32 = [
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt"),
    *("sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm"),
    *("native_layer_norm", "group_norm", "rms_norm", "cosine_similarity", "dist", "pdist", "renorm", "logsumexp"),
]
# Told to compute and answer in float32: a reduction converts while it reads, without a copy.
_DTYPE = [
    *("prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm"),
    *("sum", "sum.dim_IntList"),
]
# Left alone by CUDA's autocast; the CPU's brings their arguments to one dtype first (``autocast_mode.cpp``).
_UNTOUCHED = ["cat", "stack", "index_copy"]
_WIDEST = ["addcdiv", "addcmul", "atan2", "cross", "dot", "scatter_add"]

# What reads fp16 and answers in float32 without a copy, and the kernel that does it.
_READS_HALF = {"softmax.int": "_softmax", "log_softmax.int": "_log_softmax"}

_LINEAR: Any = torch.ops.aten.linear.default
_AUTOCAST: Any = torch_names.AUTOCAST_KEY.get()
_OFF = torch_names.KEY_SET.get()(_AUTOCAST)
_without: Any = torch_names.EXCLUDE_KEYS.get()


def _eligible(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64


def _operation(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _cast_float32(op: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _without(_OFF):
            kwargs = {name: _float32(value) for name, value in kwargs.items()}
            cast = [_float32(value) for value in reversed(args)]  # as torch's builds do: the last argument first
            found = op(*reversed(cast), **kwargs)
            while cast:  # and what was cast last is freed first
                cast.pop()
            return found

    return kernel


def _float32(value: Any) -> Any:
    return value.float() if _eligible(value) else value


def _set_dtype(op: Any) -> Callable[..., Any]:
    names = [a.name for a in torch_names.OPERATOR_SCHEMA.of(op).arguments]
    place = names.index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = args[place] if place < len(args) else kwargs.get("dtype")
        with _without(_OFF):
            if given is None and _eligible(args[0]):
                kwargs = {**kwargs, "dtype": torch.float32}
                args = args[:place]
            return op(*args, **kwargs)

    return kernel


def _cast_widest(op: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _without(_OFF):
            if any(_eligible(a) and a.dtype is torch.float32 for a in args):
                args = tuple(a.float() if _eligible(a) else a for a in args)
            return op(*args, **kwargs)

    return kernel


def _untouched(op: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _without(_OFF):
            return op(*args, **kwargs)

    return kernel


def _half_to_float(op: Any) -> Callable[..., Any]:
    def kernel(values: Any, dim: int, dtype: Any = None) -> Any:
        fused = values.dtype is torch.float16 and dtype is torch.float32
        if dtype is not None and not fused:
            values = values.to(dtype)
        return op(values, dim, fused)

    return kernel


def _linear(values: Any, weight: Any, bias: Any = None) -> Any:
    if bias is None or values.dim() < 3 or values.is_contiguous():  # one product, or with the bias in it
        return _LINEAR.decompose(values, weight, bias)
    return torch.matmul(values, weight.t()).add_(bias)


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """While open, ``torch.autocast("cpu")`` casts what ``torch.autocast("cuda")`` would."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    lists = ((_FLOAT32, _cast_float32), (_DTYPE, _set_dtype), (_WIDEST, _cast_widest), (_UNTOUCHED, _untouched))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for names, make in lists:
            for name in names:
                library.impl(name, make(_operation(name)), "AutocastCPU")
        kernels = {name: _half_to_float(_operation(kernel)) for name, kernel in _READS_HALF.items()}
        for name, kernel in (*kernels.items(), ("linear", _linear)):
            for key in ("AutogradCPU", "CPU"):
                library.impl(name, kernel, key)
    try:
        yield
    finally:
        torch_names.LIBRARY_DESTROY.of(library)()
