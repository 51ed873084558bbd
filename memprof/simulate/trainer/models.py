"""Build the model to simulate without a single weight, its config from the catalogue, a folder or a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from memprof.compat import transformers as transformers_names
from memprof.config.catalogue import find_config
from memprof.errors import InputError
from memprof.simulate.trainer.nf4 import Nf4, quantize_nf4
from memprof.simulate.world.fakes import materialize

__all__ = [
    "build_model",
    "load_config",
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
    nf4: Nf4 | None = None,
    scores: bool = False,
    before: Callable[[Any], Iterable[Any]] | None = None,
) -> Any:
    """Build a causal language model of fake tensors; call it inside the fake world, where its tensors are counted.

    Args:
        config: transformers' config.
        dtype: of the parameters.
        attention: transformers' name for the attention code.
        nf4: keep linear layers in 4 bits, in this way.
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
            if nf4 is not None:
                quantize_nf4(model, nf4)
        materialize(model, first=before(model) if before is not None else ())
        model.tie_weights()
    except (ValueError, RuntimeError, NotImplementedError) as error:
        name = transformers_names.MODEL_NAME.of(config, config.model_type)
        raise InputError(f"{name}: cannot be built without weights ({str(error).splitlines()[0][:100]}).") from None
    return model
