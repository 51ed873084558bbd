"""In which dtype a model given as a string is loaded, and how bf16 weights take small updates."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

from memprof.errors import UsageError

__all__ = ["choose_weights", "rounded_optimizer", "trains_in_bf16"]

logger = logging.getLogger(__name__)


def choose_weights(lean: Any, options: dict[str, Any]) -> None:
    """Put ``lean.weights`` into what the trainer is built with, for a model given as a string.

    ``auto``: bf16 under an adapter, because the base is never updated, where ``bf16`` is on; otherwise TRL's default,
    fp32 master weights, because updates of 1e-6 of a weight vanish in bf16's 8 bits. A dtype or quantisation that is
    given stands.

    Raises:
        UsageError: ``nf4`` without an adapter or without bitsandbytes.
    """
    given = dict(lean.model_init_kwargs or {})
    wanted = lean.weights
    if wanted == "as_given" or not isinstance(options["model"], str):
        if wanted not in ("auto", "as_given"):
            logger.warning("LeanGRPOTrainer: weights=%r is for models given as a string; this one is loaded.", wanted)
        return
    quantised = options.get("quantization_config") is not None or "quantization_config" in given
    if wanted == "auto":
        if "dtype" in given or quantised or options.get("peft_config") is None or not lean.bf16:
            return
        wanted = "bf16"
    if wanted == "nf4":
        options["quantization_config"] = _nf4(options)
    lean.model_init_kwargs = {**given, "dtype": "float32" if wanted == "fp32" else "bfloat16"}


def _nf4(options: dict[str, Any]) -> Any:
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


def trains_in_bf16(model: Any) -> bool:
    """Whether most of what is trained is bf16: then an update below 1/512 of a weight is lost to rounding."""
    import torch

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    low = sum(parameter.numel() for parameter in trained if parameter.dtype == torch.bfloat16)
    return bool(2 * low > sum(parameter.numel() for parameter in trained))


def rounded_optimizer(trainer: Any, kind: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The optimizer transformers chose, or one with stochastic rounding where bf16 weights would lose its updates.

    torch's AdamW becomes :class:`~memprof.grpo.techniques.rounding.StochasticAdamW` (same state, so checkpoints fit
    both), torchao's 8-bit and 4-bit AdamW round when told to. For others a warning says what is lost.
    """
    import torch

    from memprof.grpo.techniques.rounding import StochasticAdamW

    if trainer.args.stochastic_rounding == "never" or not trains_in_bf16(trainer.model):
        return kind, keywords
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        trainer._say("bf16 weights are trained without stochastic rounding under FSDP and DeepSpeed", logging.WARNING)
        return kind, keywords
    if kind is torch.optim.AdamW:
        trainer._say("bf16 weights are trained: AdamW with stochastic rounding")
        kept = {name: value for name, value in keywords.items() if name in ("lr", "betas", "eps", "weight_decay")}
        return StochasticAdamW, kept
    if kind.__module__.partition(".")[0] == "torchao":
        trainer._say(f"bf16 weights are trained: torchao's {kind.__name__} with stochastic rounding")
        return kind, {**keywords, "bf16_stochastic_round": True}
    trainer._say(
        f"bf16 weights are trained by {kind.__name__}, which rounds to nearest: updates below 1/512 of a weight are "
        "lost. Load the model in float32, or use optim='adamw_torch' or 'adamw_torch_8bit'.",
        logging.WARNING,
    )
    return kind, keywords
