"""Write settings as ``GRPOConfig``, ``RLOOConfig``, their lean subclasses and ``LoraConfig`` take them, or as text.

The way back is :mod:`memprof.config.from_trainer`. No torch here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from memprof.config.optimizers import optimizer
from memprof.config.trainer_fields import ADAPTER_CLASSES

if TYPE_CHECKING:
    from memprof.config.settings import ModelSettings, Settings
    from memprof.foreign import Kwargs

#: What ``GRPOConfig`` calls a setting whose value it takes as it is.
GRPO_NAMES = {
    name: {"completion_length": "max_completion_length"}.get(name, name)
    for name in (
        "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "num_iterations",
        "num_generations", "completion_length", "optim", "beta", "loss_type", "max_grad_norm",
        "vllm_gpu_memory_utilization", "vllm_enable_sleep_mode",
    )
}  # fmt: skip
#: Settings that ``LeanGRPOConfig`` has under the same name.
LEAN_NAMES = ("max_tokens_per_piece", "tiled_mlp", "prefix_sharing", "generation_batch", "park_weights")
#: 4-bit weights as transformers is asked for them.
NF4 = 'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="bfloat16")'

# TRL's own defaults (1.16): not worth a line to paste.
_DEFAULTS = {"num_iterations": 1, "loss_type": "dapo", "max_grad_norm": 1.0}
_ATTENTION = {"auto": "sdpa", "flash": "flash_attention_2", "efficient": "sdpa", "math": "eager"}
_BITS = {"auto": 4, "int4": 4, "int2": 2}  # transformers' default is 4


def grpo_arguments(settings: Settings) -> Kwargs:
    """Return the keyword arguments of the ``GRPOConfig`` or ``RLOOConfig`` that makes this run.

    Not in them: what launches several processes, the adapter (:func:`adapter_arguments`), the lean trainer's own
    (:func:`lean_arguments`), and kinds of checkpointing other than transformers' plain one, which has no argument.
    """
    s = settings
    arguments: Kwargs = {
        "per_device_train_batch_size": s.per_device_train_batch_size,
        "gradient_accumulation_steps": s.gradient_accumulation_steps,
        "steps_per_generation": s.generation_steps,
        "num_generations": s.num_generations,
        "max_completion_length": s.completion_length,
        "gradient_checkpointing": bool(s.gradient_checkpointing),
        "optim": optimizer(s.optim).argument or s.optim,
        "bf16": s.mixed_precision == "bf16",
        **({"fp16": True} if s.mixed_precision == "fp16" else {}),
        "beta": s.beta,
        "num_iterations": s.num_iterations,
        "loss_type": s.loss_type,
        "max_grad_norm": s.max_grad_norm,
        "model_init_kwargs": {"dtype": s.dtype},
        **cache_arguments(s.cache_implementation, s.cache_dtype),
        **s.trainer_options.to_dict(),
    }
    if s.optim == "none":  # of memprof's: the run up to the end of its backward
        del arguments["optim"]
    if s.trainer == "rloo":  # it has one loss
        del arguments["loss_type"]
    if s.attn in ("flash", "math"):
        arguments["model_init_kwargs"]["attn_implementation"] = _ATTENTION[s.attn]
    if s.generation != "hf":
        arguments |= _engine(s)
    return arguments


def cache_arguments(implementation: str, dtype: str) -> Kwargs:
    """Return the arguments of ``GRPOConfig`` that choose how generation keeps its keys and values."""
    if implementation == "dynamic":
        return {}
    arguments: Kwargs = {"cache_implementation": implementation}
    if implementation == "quantized":
        config = {"backend": "fp8"} if dtype == "fp8" else {"backend": "quanto", "nbits": _BITS[dtype]}
        arguments["generation_kwargs"] = {"cache_config": config}
    return arguments


def _engine(s: Settings) -> Kwargs:
    if s.generation == "none":  # nothing generates in this process: a server elsewhere does
        return {"use_vllm": True, "vllm_mode": "server"}
    return {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": s.vllm_gpu_memory_utilization,
        "vllm_enable_sleep_mode": s.engine_sleeps,
    }


def lean_arguments(settings: Settings) -> Kwargs:
    """Return the further arguments of ``LeanGRPOConfig``: none for other recipes, none at their defaults."""
    if not settings.lean:
        return {}
    chosen = {name: getattr(settings, name) for name in LEAN_NAMES}
    return {
        "checkpointing": settings.checkpointing,
        **{n: v for n, v in chosen.items() if v is not None and v is not False},
    }


def adapter_arguments(settings: ModelSettings) -> tuple[str, Kwargs] | None:
    """Return the name of the adapter's configuration class in PEFT (``LoraConfig``) and its keyword arguments; None
    where the whole model is trained."""
    if not settings.has_adapter:
        return None
    told: Kwargs = {}
    targets = settings.lora_target_modules
    if settings.lora_r is not None:
        told = _lora(settings.lora_r, targets)
        if settings.lora_dropout:
            told["lora_dropout"] = settings.lora_dropout
        if settings.use_dora:
            told["use_dora"] = True
    elif settings.peft_type == "PROMPT_TUNING":
        told["num_virtual_tokens"] = settings.num_virtual_tokens
    elif targets != ("all-linear",):  # else PEFT chooses by the model's type
        told["target_modules"] = list(targets)
    if settings.modules_to_save:
        told["modules_to_save"] = list(settings.modules_to_save)
    return ADAPTER_CLASSES[settings.peft_type], {**told, **settings.adapter_options.to_dict()}


def four_bit_arguments(settings: Settings) -> Kwargs:
    """Return the keyword arguments of the ``BitsAndBytesConfig`` for 4-bit weights.

    Unless it is said, products are in the dtype of autocast, or of the weights: transformers' default is float32, which
    unpacks twice as large and copies each layer's input.
    """
    compute = settings.bnb_4bit_compute_dtype
    if compute == "auto":
        compute = {"bf16": "bfloat16", "fp16": "float16"}.get(settings.mixed_precision, settings.weights_dtype)
    asked = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": compute}
    return {**asked, "bnb_4bit_use_double_quant": True} if settings.bnb_4bit_use_double_quant else asked


def _lora(rank: int, targets: Iterable[str]) -> Kwargs:
    names = list(targets)
    return {"r": rank, "lora_alpha": 2 * rank, "target_modules": "all-linear" if names == ["all-linear"] else names}


# -- text to paste -----------------------------------------------------------------------------------------------------


def as_python(settings: Settings) -> str:
    """Write the program that trains with these settings, but for its data and rewards.

    It has imports, the trainer's arguments, the adapter, and 4-bit weights in ``model_init_kwargs``, where TRL reads
    them.
    """
    kind = f"{'Lean' if settings.lean else ''}{settings.trainer.upper()}"
    trainer, config = f"{kind}Trainer", f"{kind}Config"
    adapter = adapter_arguments(settings)
    lines = [f"from peft import {adapter[0]}"] if adapter is not None else []
    lines += ["from transformers import BitsAndBytesConfig"] if settings.load_in_4bit else []
    lines += [f"from {'memprof.grpo' if settings.lean else 'trl'} import {config}, {trainer}", ""]
    lines += [f"# {words}" for words in _without_argument(settings)]
    arguments = {"output_dir": "output", **_worth_a_line(settings), **lean_arguments(settings)}
    lines.append(f"args = {config}(")
    lines += [f"    {name}={_of_model(value, settings)}," for name, value in arguments.items()]
    lines.append(")")
    if adapter is not None:
        inside = ", ".join(f"{name}={value!r}" for name, value in adapter[1].items())
        lines.append(f"peft_config = {adapter[0]}({inside})")
    if not settings.lean and settings.checkpointing in ("selective", "offloaded"):
        lines.append(f"# {settings.checkpointing} checkpointing: wrap the model first (docs/simulation-reference.md)")
    given = [f"model={settings.model!r}", "reward_funcs=reward_funcs", "args=args", "train_dataset=train_dataset"]
    given += ["peft_config=peft_config"] if adapter is not None else []
    return "\n".join([*lines, f"trainer = {trainer}(", *(f"    {text}," for text in given), ")", "trainer.train()"])


def _of_model(value: object, settings: Settings) -> str:
    """Write a value of an argument; the model's own with its 4-bit weights."""
    if not settings.load_in_4bit or not isinstance(value, Mapping) or "dtype" not in value:
        return repr(value)
    inside = ", ".join(f"{name}={of!r}" for name, of in four_bit_arguments(settings).items())
    return f"{repr(dict(value))[:-1]}, 'quantization_config': BitsAndBytesConfig({inside})}}"


def as_yaml(settings: Settings) -> str:
    """Write the same for TRL's command line, and for ``--config``.

    TRL reads the model's dtype and attention by names of their own, which also decide what 4-bit products are computed
    in; its dropout is 0.05 where none is said. What its command line has no word for is a comment.
    """
    told = dict(_worth_a_line(settings))
    told |= told.pop("model_init_kwargs")
    if settings.lora_r is not None:
        told |= {"use_peft": True, "lora_r": settings.lora_r, "lora_alpha": 2 * settings.lora_r}
        told |= {"lora_dropout": settings.lora_dropout, "lora_target_modules": list(settings.lora_target_modules)}
    if settings.peft_type != "LORA":  # TRL's command line makes LoRA only
        _, theirs = adapter_arguments(settings) or ("", {})
        told |= {"use_peft": True, "peft_type": settings.peft_type, **theirs}
    else:
        told |= settings.adapter_options.to_dict()
    if settings.use_dora:
        told["use_dora"] = True
    if settings.modules_to_save and settings.peft_type == "LORA":
        told["lora_modules_to_save"] = list(settings.modules_to_save)
    if settings.load_in_4bit:
        told["load_in_4bit"] = True
    if settings.bnb_4bit_use_double_quant:
        told["use_bnb_nested_quant"] = True
    lines = [f"# {words}" for words in _without_argument(settings)]
    if settings.peft_type != "LORA" or settings.adapter_options:
        lines.append("# TRL's command line has no arguments for this adapter: build its PEFT configuration with these")
    if settings.lean:
        told |= {"recipe": "lean", **lean_arguments(settings)}
        told["gradient_checkpointing"] = told.pop("checkpointing")
        trainer = f"Lean{settings.trainer.upper()}Trainer"
        lines.append(f"# TRL's command line has no lean trainer: build {trainer} with these")
    if settings.load_in_4bit and (compute := four_bit_arguments(settings)["bnb_4bit_compute_dtype"]) != settings.dtype:
        lines.append(f"# simulated with 4-bit matmuls in {compute}; TRL's command line computes them in dtype")
    return "\n".join([*lines, *(f"{name}: {json.dumps(value)}" for name, value in told.items())]) + "\n"


def _without_argument(settings: Settings) -> list[str]:
    """List settings outside the trainer's arguments: of the environment, and of what launches the processes."""
    told = [f"in the environment: PYTORCH_CUDA_ALLOC_CONF={settings.alloc_conf}"] if settings.alloc_conf else []
    if settings.gpus > 1:
        told.append(f"launched on {settings.gpus} GPUs with {settings.sharding}")
    return told


def _worth_a_line(settings: Settings) -> Kwargs:
    arguments = grpo_arguments(settings)
    return {name: value for name, value in arguments.items() if name not in _DEFAULTS or value != _DEFAULTS[name]}


def adapter_text(rank: int, targets: Iterable[str] = ("all-linear",)) -> str:
    """Write the ``peft_config`` of an adapter."""
    return f"peft_config=LoraConfig({_keywords(_lora(rank, targets))})"


def written(changes: Mapping[str, Any]) -> str:
    """Write changed settings, by their names in :class:`~memprof.config.settings.Settings`, as keyword arguments of
    ``GRPOConfig`` (or ``LeanGRPOConfig``) and of the trainer; those without one there (lengths of prompts, padding, the
    allocator's settings) are left out."""
    plain = {GRPO_NAMES.get(name, name): changes[name] for name in changes if name in GRPO_NAMES or name in LEAN_NAMES}
    parts = [_keywords(plain)] if plain else []
    if "gradient_checkpointing" in changes:
        parts.append(f"gradient_checkpointing={bool(changes['gradient_checkpointing'])}")
    model: Kwargs = {"dtype": changes["dtype"]} if "dtype" in changes else {}
    if "attn" in changes:
        model["attn_implementation"] = _ATTENTION[changes["attn"]]
    if model:
        parts.append(_keywords({"model_init_kwargs": model}))
    if "cache_implementation" in changes:
        parts.append(_keywords(cache_arguments(changes["cache_implementation"], changes.get("cache_dtype", "auto"))))
    if changes.get("generation") == "none":
        parts.append(_keywords({"use_vllm": True, "vllm_mode": "server"}))
    if changes.get("lora_r"):
        parts.append(adapter_text(changes["lora_r"], changes.get("lora_target_modules", ("all-linear",))))
    return ", ".join(parts)


def _keywords(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_literal(value)}" for name, value in values.items())


def _literal(value: Any) -> str:
    """Write a value as Python, with double quotes."""
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(k)}: {_literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return repr(value)
