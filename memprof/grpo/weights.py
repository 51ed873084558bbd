"""Choose in which dtype a model given as a string is loaded."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from memprof.errors import UsageError
from memprof.foreign import Kwargs
from memprof.grpo.once_log import OnceLog


def choose_weights(lean: Any, options: Kwargs, log: OnceLog) -> None:
    """Put ``lean.weights`` into what the trainer is built with, for a model given as a string.

    ``auto``: bf16 under an adapter, because the base is never updated, where ``bf16`` is on; otherwise TRL's default,
    fp32 master weights, because updates of 1e-6 of a weight vanish in bf16's 8 bits. A dtype or quantisation given
    stands.

    Raises:
        UsageError: ``nf4`` without an adapter or without bitsandbytes.
    """
    given = dict(lean.model_init_kwargs or {})
    wanted = lean.weights
    if wanted == "as_given" or not isinstance(options["model"], str):
        if wanted not in ("auto", "as_given"):
            log.warn(f"weights={wanted!r} is for models given as a string; this one is loaded.")
        return
    quantised = options.get("quantization_config") is not None or "quantization_config" in given
    if wanted == "auto":
        if "dtype" in given or quantised or options.get("peft_config") is None or not lean.bf16:
            return
        wanted = "bf16"
        log.warn("unlike TRL, the weights under the adapter are loaded in bf16 (weights='as_given' loads them in fp32)")
    if wanted == "nf4":
        options["quantization_config"] = _nf4(options)
    lean.model_init_kwargs = {**given, "dtype": "float32" if wanted == "fp32" else "bfloat16"}


def _nf4(options: Kwargs) -> Any:
    if options.get("peft_config") is None:
        raise UsageError("weights='nf4' needs an adapter (peft_config): quantised weights cannot be trained.")
    if find_spec("bitsandbytes") is None:
        raise UsageError("weights='nf4' needs bitsandbytes: pip install bitsandbytes.")
    import torch
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
