"""Read what a config of TRL's says by other names than :class:`Settings` does, and what no simulation executes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memprof.errors import UsageError

__all__ = ["LEFT_OUT", "attention_of", "generation_of", "left_out_of", "said_by_trl"]

#: Settings that change a run's memory and that no simulation executes, with what each usually changes: names of
#: ``TrainingArguments`` and the configs of TRL's trainers.
LEFT_OUT = {
    "torch_compile": "torch.compile is not simulated: it fuses operations, which keep fewer results for backward, and "
    "with CUDA graphs it holds a memory pool of its own",
    "use_liger_kernel": "Liger's kernels are not simulated here: they keep fewer results for backward than the model's "
    "own layers do",
    "packing": "packing is not simulated: every row is taken to be full, as packed rows nearly are",
    "padding_free": "padding_free is not simulated: all rows of a batch are taken to be of one length",
    "activation_offloading": "activation_offloading is not simulated: activations stay on the device, which holds more",
    "load_in_8bit": "8-bit weights are not simulated: weights have the dtype given, which holds more",
    "neftune_noise_alpha": "NEFTune's noise is not simulated: one more tensor as large as the embedded batch",
}

# Defaults of TRL's ``ModelConfig``, which it uses where ``use_peft`` is on and nothing else is said.
_TRLS_ADAPTER = {"lora_r": 16, "lora_dropout": 0.05}


def attention_of(implementation: Any) -> str:
    """Return the ``attn`` of transformers' attention implementation."""
    name = str(implementation or "sdpa")
    return "math" if name == "eager" else "flash" if name.startswith("flash") else "auto"


def generation_of(use_vllm: Any, mode: Any) -> str:
    """Return what generates in the training process."""
    if not use_vllm:
        return "hf"
    return "vllm" if mode == "colocate" else "none"


def left_out_of(given: Mapping[str, Any]) -> tuple[str, ...]:
    """List the names among ``given`` that are switched on and are in :data:`LEFT_OUT`."""
    return tuple(name for name in LEFT_OUT if given.get(name))


def said_by_trl(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Add to ``values``, settings by name, what ``given`` says in TRL's words: whether there is an adapter, what
    generates, the model's dtype, how attention is computed and in which precision.

    What is there by its own name wins, except where it is an adapter that TRL would not make.

    Raises:
        UsageError: the file asks for both halves at once.
    """
    more: dict[str, Any] = {}
    if "use_vllm" in given:
        more["generation"] = generation_of(given["use_vllm"], given.get("vllm_mode") or "colocate")
    inside = given.get("model_init_kwargs")
    told = [place.get("attn_implementation") for place in (given, inside) if isinstance(place, Mapping)]
    if any(told):
        more["attn"] = attention_of(next(name for name in told if name))
    if given.get("fp16") and given.get("bf16"):
        raise UsageError("fp16: true and bf16: true exclude each other; transformers refuses both at once.")
    if given.get("fp16"):
        more["mixed_precision"] = "fp16"
    elif given.get("bf16") is not None:
        more["mixed_precision"] = "bf16" if given["bf16"] else "no"
    if isinstance(inside, Mapping) and (dtype := inside.get("dtype") or inside.get("torch_dtype")):
        values = {**values, "dtype": str(dtype).removeprefix("torch.")}  # TRL lets it win
    if given.get("use_peft"):
        more |= _TRLS_ADAPTER
    kept = {**more, **values}
    if given.get("use_peft") is False:
        kept = {name: value for name, value in kept.items() if not name.startswith("lora_")}
    return kept
