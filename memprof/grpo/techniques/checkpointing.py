"""Choose what each decoder layer keeps from forward to backward, and what it computes again.

==============  ==========================================================  =====================================
kind            kept for each layer                                         computed again
==============  ==========================================================  =====================================
``none``        everything                                                  nothing
``mlp``         all of attention; the inputs of MLP and norms               the MLP and the norms
``selective``   the layer's input, attention's output and logsumexp         all but attention itself
``full``        the layer's input                                           the layer
``offloaded``   the layer's input, in host memory (the last one's stays)    the layer
==============  ==========================================================  =====================================

All are torch's non-reentrant checkpoint around the layer's (or its parts') ``forward``: gradients are those without
checkpointing, dropout draws the same numbers again, autocast is as it was, and adapters whose inputs need no gradient
train. Layers are wrapped by themselves and not through ``gradient_checkpointing_enable``, which TRL switches off and on
around generation.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from memprof.compat import optional_packages
from memprof.compat import torch as torch_names
from memprof.compat.targets import Target
from memprof.compat.transformers import ATTENTION_KIND
from memprof.errors import UsageError
from memprof.grpo.techniques.layers import Undo, attention_of, decoder_layers, replace_forward, text_config
from memprof.grpo.techniques.offload import Offloader

CHECKPOINTING_KINDS = ("none", "mlp", "selective", "full", "offloaded")

# The kernels behind scaled_dot_product_attention, and flash-attn's own.
_ATTENTION_OPERATORS = (
    torch_names.FLASH, torch_names.FLASH_ON_CPU, torch_names.EFFICIENT, torch_names.CUDNN, torch_names.FUSED,
    torch_names.FLASH_FORWARD, torch_names.EFFICIENT_FORWARD, optional_packages.FLASH_ATTN,
    optional_packages.FLASH_ATTN_PACKED,
)  # fmt: skip


class Checkpointing:
    """Checkpointing applied to a model; :meth:`remove` takes it off again. ``offloader``: with ``offloaded``."""

    def __init__(self, kind: str, undo: list[Undo], offloader: Offloader | None = None) -> None:
        self.kind, self.offloader = kind, offloader
        self._undo = undo

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()


def apply_checkpointing(model: nn.Module, kind: str, *, device: torch.device | None = None) -> Checkpointing:
    """Wrap the decoder layers of ``model`` (any wrapper around a transformers causal LM) as ``kind`` says.

    transformers' own checkpointing is switched off. Works while training with gradients on; otherwise (generation, a
    reference policy) the layers run as they are. ``device``: for ``offloaded``; None: the model's.

    Raises:
        UsageError: an unknown kind, no decoder layers, ``selective`` with an attention it cannot recognise.
    """
    if kind not in CHECKPOINTING_KINDS:
        raise UsageError(f"checkpointing is one of {', '.join(CHECKPOINTING_KINDS)}: got {kind!r}.")
    layers = decoder_layers(model)
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False  # type: ignore[assignment]
    if kind == "none":
        return Checkpointing(kind, [])
    if kind == "mlp":
        parts = [child for layer in layers for child in _all_but_attention(layer)]
        return Checkpointing(kind, [replace_forward(part, partial(_recomputed)) for part in parts])
    if kind == "selective":
        context = _keep_attention(model)
        wrapper = partial(_recomputed, _context=context)
        return Checkpointing(kind, [replace_forward(layer, wrapper) for layer in layers])
    if kind == "full":
        return Checkpointing(kind, [replace_forward(layer, partial(_recomputed)) for layer in layers])
    offloader = Offloader(device or next(model.parameters()).device)
    undo = [
        replace_forward(layer, partial(_offloaded, _offloader=offloader, _index=index))
        for index, layer in enumerate(layers[:-1])
    ]
    # The last layer's input is needed first in backward: sending it away and back would only be waited for.
    undo.append(replace_forward(layers[-1], _recomputed))
    return Checkpointing(kind, undo, offloader)


def _recomputed(module: nn.Module, inner: Any, *args: Any, _context: Any = None, **kwargs: Any) -> Any:
    if not (module.training and torch.is_grad_enabled()):
        return inner(*args, **kwargs)
    if _context is None:
        return checkpoint(inner, *args, use_reentrant=False, **kwargs)
    return checkpoint(partial(_cast_anew, inner), *args, use_reentrant=False, context_fn=_context, **kwargs)


def _cast_anew(inner: Any, *args: Any, **kwargs: Any) -> Any:
    """Run ``inner`` without autocast's cache of weights.

    Where an earlier forward has filled the cache (a prompt's, before its completions'), a layer would cast less now
    than when it is recomputed, and torch pairs the operators of the two one by one.
    """
    kept = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        return inner(*args, **kwargs)
    finally:
        torch.set_autocast_cache_enabled(kept)


def _offloaded(module: nn.Module, inner: Any, *args: Any, _offloader: Offloader, _index: int, **kwargs: Any) -> Any:
    if not (module.training and torch.is_grad_enabled()):
        return inner(*args, **kwargs)
    # checkpoint saves its positional inputs before it sets its own hooks: those and nothing else are sent away.
    with _offloader.saving(_index):
        return checkpoint(inner, *args, use_reentrant=False, **kwargs)


def _all_but_attention(layer: nn.Module) -> list[nn.Module]:
    attention = attention_of(layer)
    return [child for child in layer.children() if child is not attention and not isinstance(child, nn.Dropout)]


def _keep_attention(model: nn.Module) -> Any:
    implementation = ATTENTION_KIND.of(text_config(model))
    if implementation not in ("sdpa", "flash_attention_2"):
        raise UsageError(
            "checkpointing='selective' saves the output of torch's fused attention or flash-attn: load the model with "
            f"attn_implementation='sdpa' (it has {implementation!r}), or use 'full'."
        )
    return partial(create_selective_checkpoint_contexts, _Policy())


def _registered_name(operator: Target) -> str:
    """Return the name under which torch knows an operator of ``torch.ops``: ``"aten::mm"``."""
    namespace, name, _ = operator.path.rsplit(".", 2)
    return f"{namespace.rpartition('.')[2]}::{name}"


_KEPT = frozenset(_registered_name(operator) for operator in _ATTENTION_OPERATORS)


class _Policy:
    """Keep what attention kernels return, all overloads of each.

    An operator is known by its name when it runs. flash-attn's are registered when it is imported, which may be in the
    first forward.
    """

    def __init__(self) -> None:
        self._known: dict[Any, CheckpointPolicy] = {}

    def __call__(self, ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        policy = self._known.get(operator)
        if policy is None:
            kept = str(operator.name()).partition(".")[0] in _KEPT
            policy = CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
            self._known[operator] = policy
        return policy

