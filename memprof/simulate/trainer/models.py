"""Build the model to simulate without a single weight, its config from the catalogue, a folder or a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from memprof.compat import transformers as transformers_names
from memprof.config.catalogue import find_config
from memprof.errors import InputError
from memprof.simulate.world.fakes import materialize

__all__ = [
    "build_model",
    "load_config",
    "quantize_nf4",
]


def load_config(model: str) -> Any:
    """Make a transformers config for a hub id, a folder or a ``config.json``.

    Raises:
        InputError: there is none, or transformers does not know the architecture.
    """
    from transformers import AutoConfig

    values = dict(find_config(model))
    kind = values.pop("model_type", None)
    try:
        config = AutoConfig.for_model(kind, **values)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{model}: transformers cannot use this config ({str(error).splitlines()[0][:100]})."
        ) from None
    setattr(config, transformers_names.MODEL_NAME.name, model)
    return config


def build_model(
    config: Any,
    dtype: str,
    *,
    attention: str = "sdpa",
    nf4: bool = False,
    scores: bool = False,
    before: Callable[[Any], Iterable[Any]] | None = None,
) -> Any:
    """Build a causal language model of fake tensors; call it inside the fake world, where its tensors are counted.

    Args:
        config: transformers' config.
        dtype: of the parameters.
        attention: transformers' name for the attention code.
        nf4: keep linear layers in 4 bits.
        scores: a model that gives each sequence one number instead (a reward model).
        before: is called with the model on ``meta``, and returns the tensors that get their memory first, in order.

    Raises:
        InputError: the architecture is not one of these, or its code needs real values.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind: Any = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    try:
        with torch.device("meta"):
            model = kind.from_config(config, dtype=getattr(torch, dtype), attn_implementation=attention)
            if nf4:
                quantize_nf4(model)
        materialize(model, first=before(model) if before is not None else ())
        model.tie_weights()
    except (ValueError, RuntimeError, NotImplementedError) as error:
        name = transformers_names.MODEL_NAME.of(config, config.model_type)
        raise InputError(f"{name}: cannot be built without weights ({str(error).splitlines()[0][:100]}).") from None
    return model


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
