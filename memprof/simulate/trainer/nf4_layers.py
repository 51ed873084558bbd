"""Model bitsandbytes' 4-bit linear layers: what their packed weights weigh, and the copy each product unpacks.

Layout: NF4 with blocks of 64 values, one fp32 maximum for each. bitsandbytes needs a GPU to run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["quantize_nf4"]

_BLOCK = 64


class _Product(torch.autograd.Function):
    """Multiply by a weight that is unpacked for the product, and again for its backward."""

    @staticmethod
    def forward(ctx: Any, x: Any, packed: Any, shape: tuple[int, int]) -> Any:
        ctx.save_for_backward(packed)
        ctx.shape, ctx.kind = shape, x.dtype
        weight = torch.empty(shape, dtype=x.dtype, device=x.device)
        return nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        weight = torch.empty(ctx.shape, dtype=grad.dtype, device=grad.device)
        return grad @ weight, None, None


class Linear4bit(nn.Linear):
    """Stand for a frozen linear layer with a packed weight."""

    def __init__(self, original: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = original.in_features, original.out_features
        count = original.weight.numel()
        place = original.weight.device
        self.weight = nn.Parameter(torch.empty(-(-count // 2), 1, dtype=torch.uint8, device=place), requires_grad=False)
        self.register_buffer("absmax", torch.empty(-(-count // _BLOCK), device=place))
        self.register_buffer("code", torch.empty(16, device=place))
        self.bias = original.bias
        if self.bias is not None:
            self.bias.requires_grad_(False)

    def forward(self, x: Any) -> Any:
        kind = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        out = _Product.apply(  # type: ignore[no-untyped-call]
            x.to(kind), self.weight, (self.out_features, self.in_features)
        )
        return out if self.bias is None else out + self.bias.to(out.dtype)


def quantize_nf4(model: Any) -> None:
    """Replace the linear layers of a model by 4-bit ones, all but its output head."""
    head = model.get_output_embeddings()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and child is not head:
                setattr(module, name, Linear4bit(child))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.is_loaded_in_4bit = True
