"""Build the model to simulate without a single weight, its config from the catalogue, a folder or a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from memprof.compat import transformers as transformers_names
from memprof.config.catalogue import find_config
from memprof.errors import InputError
from memprof.simulate.fake_cuda.fakes import materialize
from memprof.simulate.fake_cuda.nf4 import Nf4, quantize_nf4


def load_config(model: str) -> Any:
    """Make a transformers config for a hub id, a folder or a ``config.json``.

    Raises:
        InputError: there is none, or transformers does not know the architecture.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    values = dict(find_config(model))
    kind = values.pop("model_type", None)
    try:
        config = AutoConfig.for_model(kind, **values)
    except (ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        what = " ".join(str(error).split())[:160]
        raise InputError(f"{model}: transformers cannot use this config ({what}).") from None
    setattr(config, transformers_names.MODEL_NAME.name, model)
    return config


def build_model(
    config: Any,
    dtype: str,
    *,
    attention: str | None = None,
    nf4: Nf4 | None = None,
    scores: bool = False,
    before: Callable[[Any], Iterable[Any]] | None = None,
) -> Any:
    """Build a causal language model of fake tensors; call it inside the fake world, where its tensors are counted.

    Args:
        config: transformers' config.
        dtype: of the parameters.
        attention: transformers' name for the attention code; None lets transformers choose: ``sdpa`` where a model has
            it, else ``eager``.
        nf4: keep linear layers in 4 bits, in this way.
        scores: a model that gives each sequence one number instead (a reward model).
        before: is called with the model on ``meta``, and returns the tensors that get their memory first, in order.

    Raises:
        InputError: the architecture is not one of these, or its code needs real values.
    """
    make = maker_of(config, scores)
    try:
        with torch.device("meta"):
            model = make(config, dtype=getattr(torch, dtype), attn_implementation=attention)
            if nf4 is not None:
                quantize_nf4(model, nf4)
        materialize(model, first=before(model) if before is not None else ())
        model.tie_weights()
    except (ValueError, RuntimeError, NotImplementedError, TypeError, AttributeError, KeyError, ImportError) as error:
        name = transformers_names.MODEL_NAME.of(config, config.model_type)
        what = (str(error).strip() or type(error).__name__).splitlines()[0]
        if scores and what.startswith("Unrecognized configuration class"):
            what = f"transformers has no {config.model_type} that scores sequences: choose another --reward-model."
            raise InputError(f"{name}: {what}") from None
        raise InputError(f"{name}: cannot be built without weights ({what[:100].rstrip('. ')}).") from None
    return model


def maker_of(config: Any, scores: bool = False) -> Callable[..., Any]:
    """Return what makes the model that TRL would load: the class a config names, else the one its type has.

    A config of images and text makes the whole model, whose vision part text leaves idle.
    """
    import transformers

    if scores:
        return _from_config(transformers.AutoModelForSequenceClassification)
    named = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
    if named is not None and hasattr(named, "generate"):
        return _from_config(named)
    text_only = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    return _from_config(transformers.AutoModelForCausalLM if text_only else transformers.AutoModelForImageTextToText)


def _from_config(kind: Any) -> Callable[..., Any]:
    auto, model = transformers_names.AUTO_FROM_CONFIG, transformers_names.MODEL_FROM_CONFIG
    make: Callable[..., Any] = auto.of(kind) or model.of(kind)
    return make

