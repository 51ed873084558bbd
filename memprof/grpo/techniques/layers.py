"""Find the parts of a causal LM that the memory techniques work on, by what they are and not by the model's name."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from memprof.compat.transformers import DECODER_LAYER
from memprof.errors import UsageError

#: Takes back what a function did to a model.
Undo = Callable[[], None]

_WRAPPERS, _BEFORE = "_memprof_wrappers", "_memprof_forward"
_MLP_NAMES = ("mlp", "feed_forward", "ffn")


def text_config(model: Any) -> Any:
    """Return the configuration of the language model in ``model``, whatever wraps it."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "get_text_config"):
            return config.get_text_config()
    raise UsageError(f"{type(model).__name__} has no transformers configuration: memprof.grpo works on those models.")


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Find the decoder layers in order: the language model's longest list of transformers' layers with an attention.

    Beside it a vision tower may have as many, or more (SmolVLM 2.2B). UsageError: there is none.
    """
    kind, found = DECODER_LAYER.get(), list[nn.Module]()
    language: Any = next((module for module in model.modules() if hasattr(module, "get_decoder")), None)
    for module in (model if language is None else language.get_decoder()).modules():
        longer = isinstance(module, nn.ModuleList) and len(module) > len(found)
        if longer and all(isinstance(layer, kind) and attention_of(layer) is not None for layer in module.children()):
            found = list(module.children())
    if not found:
        raise UsageError(
            f"{type(model).__name__} has no list of transformers decoder layers with attention: leave checkpointing at "
            "auto, which is transformers' own, and drop tiled_mlp."
        )
    return found


def attention_of(layer: nn.Module) -> nn.Module | None:
    """Return the layer's (self-)attention, None where it has none."""
    for name, child in layer.named_children():
        if ("attn" in name or "attention" in name) and "norm" not in name:
            return child
    return None


def hands_arguments_down(model: nn.Module) -> bool:
    """Tell whether the decoder layers hand keyword arguments on to their attention, by the code of their ``forward``
    (Nemotron's drop them). True where there is no code to read, or no such layers."""
    try:
        kinds: set[Any] = {type(layer) for layer in decoder_layers(model)}
    except UsageError:
        return True
    return all(_passes_keywords_on(kind) for kind in kinds)


@functools.cache
def _passes_keywords_on(kind: Any) -> bool:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(kind.forward))))
    except (OSError, TypeError, SyntaxError):
        return True
    function = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    name = function.args.kwarg.arg if function.args.kwarg is not None else None
    handed = (
        isinstance(given.value, ast.Name) and given.value.id == name
        for call in ast.walk(function)
        if isinstance(call, ast.Call)
        for given in call.keywords
        if given.arg is None
    )
    return name is not None and any(handed)


def mlp_of(layer: nn.Module) -> nn.Module:
    """Return the layer's feed-forward network; UsageError where it has none by a known name."""
    for name in _MLP_NAMES:
        child = getattr(layer, name, None)
        if isinstance(child, nn.Module):
            return child
    raise UsageError(f"{type(layer).__name__} has no {', '.join(_MLP_NAMES)}: its feed-forward network was not found.")


def is_mixture_of_experts(network: nn.Module) -> bool:
    """Tell whether a layer's feed-forward network sends each token to some of several networks."""
    return any(hasattr(network, name) for name in ("experts", "router", "gate"))


def replace_forward(module: nn.Module, wrapper: Callable[..., Any], *, innermost: bool = False) -> Undo:
    """Make ``module`` run ``wrapper(module, inner, *args, **kwargs)``, ``inner`` being its forward until now.

    ``innermost``: inside the wrappers it already has. The module's ``forward`` is replaced and not its call, so that
    hooks (FSDP's, PEFT's) stay outside. A deep copy of the model gets a forward of its own.
    """
    own = module.__dict__
    if _WRAPPERS not in own:
        own[_WRAPPERS], own[_BEFORE] = [], own.get("forward")
        module.forward = types.MethodType(_wrapped_forward, module)
    wrappers = own[_WRAPPERS]
    wrappers.insert(0 if innermost else len(wrappers), wrapper)

    def undo() -> None:
        wrappers[:] = [other for other in wrappers if other is not wrapper]
        if not wrappers and own.pop(_WRAPPERS, None) is not None:
            before = own.pop(_BEFORE)
            if before is None:
                own.pop("forward", None)
            else:
                module.forward = before

    return undo


def _wrapped_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    before = self.__dict__[_BEFORE]
    run = type(self).forward.__get__(self) if before is None else before
    for wrapper in self.__dict__[_WRAPPERS]:
        run = functools.partial(wrapper, self, run)
    return run(*args, **kwargs)
