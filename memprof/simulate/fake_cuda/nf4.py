"""Model linear layers that bitsandbytes keeps in 4 bits: what they hold, and what a product asks for.

Read from bitsandbytes 0.50 (``functional.quantize_4bit``, ``backends/cuda/ops.py``, ``autograd/_functions.py``) and
PEFT (``tuners/lora/bnb.py``), and held against torch's own allocator by ``python -m benchmarks.simulator emulated``.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from memprof.foreign import ConfigValues

# Values that share a scale, and scales that share one where they are quantised themselves.
_BLOCK, _SCALES = 64, 256
# Tokens from which every product unpacks its weight; up to so many none does (``gemm_4bit``).
_MANY, _FEW = 1536, 4


@dataclass(frozen=True)
class Nf4:
    """Describe how a run asks transformers for 4-bit weights.

    Attributes:
        compute: what products are computed in, ``bnb_4bit_compute_dtype``.
        double: scales are quantised to 8 bits, ``bnb_4bit_use_double_quant``.
    """

    compute: torch.dtype
    double: bool = False

    @classmethod
    def of(cls, asked: ConfigValues) -> Nf4:
        """Read the attributes or arguments of a ``BitsAndBytesConfig``, with its defaults."""
        compute = asked.get("bnb_4bit_compute_dtype") or torch.float32
        if isinstance(compute, str):
            compute = getattr(torch, compute.removeprefix("torch."))
        return cls(compute, bool(asked.get("bnb_4bit_use_double_quant")))


class _Product(torch.autograd.Function):
    """Multiply by a weight that is unpacked for the product, and again for its backward."""

    @staticmethod
    def forward(ctx: Any, x: Any, layer: Linear4bit, bias: Any) -> Any:
        ctx.layer = layer
        return _multiplied(x, layer, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        return grad @ _unpacked(ctx.layer).to(grad.dtype), None, None


def _multiplied(x: Any, layer: Linear4bit, bias: Any) -> Any:
    """Follow ``gemm_4bit``: one kernel for few tokens, else the unpacked weight and torch's own product."""
    if x.numel() // x.shape[-1] <= _FEW:
        return x.new_empty((*x.shape[:-1], layer.out_features))
    if layer.nested:
        scales = torch.empty(layer.blocks, device=x.device)
        centred = scales + layer.offset  # noqa: F841  (both are there until the product is)
    weight = x.new_empty((layer.out_features, layer.in_features))
    return nn.functional.linear(x, weight, bias)


def _unpacked(layer: Linear4bit) -> Any:
    """Follow ``dequantize_4bit``, which the backward calls: in the dtype of the weight that was quantised."""
    device = layer.weight.device
    scales = torch.empty(layer.blocks, device=device) if layer.nested else None
    weight = torch.empty((layer.out_features, layer.in_features), dtype=layer.kept, device=device)
    del scales
    return weight


class Linear4bit(nn.Linear):
    """Stand for a frozen linear layer with a packed weight; ``nested`` where its scales are quantised too."""

    absmax: torch.Tensor
    code: torch.Tensor
    offset: torch.Tensor
    nested_absmax: torch.Tensor
    nested_code: torch.Tensor

    def __init__(self, original: nn.Linear, nf4: Nf4) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = original.in_features, original.out_features
        self.kept, self.compute, self.nested = original.weight.dtype, nf4.compute, nf4.double
        place, count = original.weight.device, original.weight.numel()
        self.blocks = -(-count // _BLOCK)
        packed = torch.empty((count + 1) // 2, 1, dtype=torch.uint8, device=place)
        self.weight = nn.Parameter(packed, requires_grad=False)
        scale = torch.uint8 if self.nested else torch.float32
        self.register_buffer("absmax", torch.empty(self.blocks, dtype=scale, device=place))
        self.register_buffer("code", torch.empty(16, device=place))
        if self.nested:
            self.register_buffer("offset", torch.empty((), device=place))
            self.register_buffer("nested_absmax", torch.empty(-(-self.blocks // _SCALES), device=place))
            self.register_buffer("nested_code", torch.empty(256, device=place))
        self.bias = original.bias
        if self.bias is not None:
            self.bias.requires_grad_(False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Linear4bit:
        """Copy each tensor, as bitsandbytes does where PEFT copies a layer for DoRA; a fake storage is not copied."""
        memo |= {id(one): nn.Parameter(one.detach().clone(), requires_grad=False) for one in self.parameters()}
        memo |= {id(one): one.clone() for one in self.buffers()}
        made = memo[id(self)] = type(self).__new__(type(self))
        vars(made).update(deepcopy(vars(self), memo))
        return made

    @property
    def W_q(self) -> Any:
        """Return the weight by the name that HQQ's layers have: PEFT asks these by :meth:`dequantize`."""
        return self.weight

    def dequantize(self) -> Any:
        """Return the unpacked weight, which DoRA adds its adapter to."""
        return _unpacked(self)

    def forward(self, x: Any) -> Any:
        asked = x.dtype
        x = x.to(self.compute)
        bias = None if self.bias is None else self.bias.to(self.compute)
        grad = torch.is_grad_enabled() and x.requires_grad
        out = _Product.apply(x, self, bias) if grad else _multiplied(x, self, bias)  # type: ignore[no-untyped-call]
        return out.to(asked)


def quantize_nf4(model: Any, nf4: Nf4) -> None:
    """Replace the linear layers of a model by 4-bit ones, all but its output head."""
    head = model.get_output_embeddings()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and child is not head:
                setattr(module, name, Linear4bit(child, nf4))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.is_loaded_in_4bit = True


def tell_of_adapters(model: nn.Module) -> None:
    """Let PEFT's layers around 4-bit ones add as its own class for them does, which needs bitsandbytes to be there."""
    for module in model.modules():
        if isinstance(getattr(module, "base_layer", None), Linear4bit):
            module.forward = MethodType(_adapted, module)


def _adapted(layer: Any, x: Any) -> Any:
    """Follow ``peft.tuners.lora.bnb.Linear4bit.forward``: what is added is cast first, so that no sum is in float32."""
    out = layer.base_layer(x)
    if layer.disable_adapters:
        return out
    out, casts = out.clone(), not torch.is_autocast_enabled()
    for name in layer.active_adapters:
        if name in layer.lora_A:
            first = layer.lora_A[name]
            x = x.to(first.weight.dtype) if casts else x
            if (variant := layer.lora_variant.get(name)) is not None:
                changed = variant.forward(layer, active_adapter=name, x=x, result=out)
                out = changed.to(out.dtype) if casts else changed
                continue
            more = layer.lora_B[name](first(layer.lora_dropout[name](x))) * layer.scaling[name]
            more = more.to(out.dtype) if casts else more
            out = out + more
    return out


def quantize(layer: Linear4bit, table: list[Any]) -> Iterator[Any]:
    """Yield a layer's tensors in the order of ``quantize_4bit``, and hold its temporaries meanwhile.

    Args:
        layer: on ``meta``; whoever iterates makes each tensor before it asks for the next.
        table: of 8-bit values; the first layer whose scales are quantised puts it there, and all share it.
    """
    weight = torch.empty((layer.out_features, layer.in_features), dtype=layer.kept)
    scales = torch.empty(layer.blocks) if layer.nested else None
    if scales is None:
        yield layer.absmax
    yield layer.weight
    yield layer.code
    _normalise()
    if scales is not None:
        scales.mean()
        yield layer.offset
        centred = torch.empty_like(scales)
        if not table:
            table.append(torch.empty(256))
        yield layer.nested_absmax
        yield layer.absmax
        yield layer.nested_code
        del centred
    del scales, weight


def _normalise() -> None:
    """Follow ``get_4bit_type``: the largest of the code's absolute values divides it."""
    absolute = torch.empty(16)
    largest = torch.empty(())
    del absolute, largest
