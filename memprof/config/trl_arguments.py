"""Read a config of TRL's: what it names otherwise than :class:`Settings`, and TRL's defaults."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from memprof.config.trainer_fields import unsimulated_of
from memprof.errors import UsageError
from memprof.report.run import KnownSettings

# How TRL's releases compute log-probabilities of GRPO and RLOO, from each release on (read in their packages): in
# chunks, from ``logits / temperature`` (a copy), from ``logits.div_()`` (in place), or as the first one with GRPO did.
_LOSSES = (
    ((1, 17), None),  # none of these was read yet
    ((1, 14), "trl"), ((1, 10), "trl-full-logits"), ((1, 0), "trl-in-place-logits"), ((0, 16), "trl-full-logits"),
    ((0, 15), None), ((0, 14), "trl-0.14"),
)  # fmt: skip
# TRL's RLOO trainer had another step before.
_FIRST_RLOO = (0, 22)


def recipe_of_release(version: str, trainer: str = "grpo") -> str:
    """Return the recipe of TRL's loss in a release, such as ``1.12`` or ``0.19.1``.

    Raises:
        UsageError: it is no release, or one whose loss is not simulated.
    """
    found = re.fullmatch(r"v?(\d+)\.(\d+)(?:\.\w+)*", version.strip())
    if found is None:
        raise UsageError(f"--trl-version {version!r}: give a release of TRL, such as 1.12.")
    release = int(found[1]), int(found[2])
    recipe = next((recipe for first, recipe in _LOSSES if release >= first), None)
    if recipe is None or (trainer == "rloo" and release < _FIRST_RLOO):
        raise UsageError(f"--trl-version {version}: the {trainer.upper()} loss of this release is not simulated.")
    return recipe


# Defaults of TRL's ``ModelConfig``, which it uses where ``use_peft`` is on and nothing else is said.
_TRLS_ADAPTER = {"lora_r": 16, "lora_dropout": 0.05}
# The configurations that TRL's command line brings for accelerate, and the sharding that each asks for.
_LAUNCHED = {"single_gpu": "ddp", "multi_gpu": "ddp", **{name: name for name in ("zero1", "zero2", "zero3", "fsdp2")}}
# Settings of an adapter whose names do not begin with lora_.
_ADAPTERS = ("use_dora", "modules_to_save", "peft_type", "num_virtual_tokens", "adapter_options")
#: Settings that memory follows most, in the order in which a person should give them.
_FOLLOWED = (
    "prompt_length", "completion_length", "per_device_train_batch_size", "dtype", "lora_r", "gradient_checkpointing",
    "optim", "generation", "vllm_enable_sleep_mode", "num_generations", "beta", "attn",
)  # fmt: skip
# What trainers of given rows do not have, or have without memory following it.
_GENERATING = {"generation", "vllm_enable_sleep_mode", "num_generations", "beta"}
_SUPERVISED = ("sft", "dpo")
_GRPO: dict[str, str | int | float | bool | None] = {
    "completion_length": 512, "per_device_train_batch_size": 8, "dtype": "float32", "lora_r": None,
    "gradient_checkpointing": True, "optim": "adamw_torch_fused", "generation": "hf", "num_generations": 8,
    "vllm_enable_sleep_mode": False, "beta": 0.0, "attn": "auto",
}  # fmt: skip
# Settings with another default in the lean trainer.
_LEANS_OWN = ("gradient_checkpointing", "vllm_enable_sleep_mode")
_ROWS = {name: value for name, value in _GRPO.items() if name not in {*_GENERATING, "completion_length"}}
#: The defaults of each of TRL's trainers, by our names; ``max_length`` is where rows are cut.
OF_TRL = {
    "grpo": _GRPO,
    "rloo": {**_GRPO, "num_generations": 2, "beta": 0.05},
    "sft": {**_ROWS, "max_length": 1024},
    "dpo": {**_ROWS, "max_length": 1024},
}


def attention_of(implementation: Any) -> str:
    """Return the ``attn`` of transformers' attention implementation."""
    name = str(implementation or "sdpa")
    return "math" if name == "eager" else "flash" if name.startswith("flash") else "auto"


def generation_of(use_vllm: Any, mode: Any) -> str:
    """Return what generates in the training process."""
    if not use_vllm:
        return "hf"
    return "vllm" if mode == "colocate" else "none"


def said_by_trl(values: Mapping[str, object], given: Mapping[str, object]) -> dict[str, object]:
    """Add to ``values``, settings by name, what ``given`` says in TRL's words: whether there is an adapter, what
    generates, the model's dtype, how attention is computed and in which precision.

    What is there by its own name wins, except where it is an adapter that TRL would not make.

    Raises:
        UsageError: the file asks for both halves at once.
    """
    more: dict[str, object] = {}
    if "use_vllm" in given:
        more["generation"] = generation_of(given["use_vllm"], given.get("vllm_mode") or "colocate")
    more |= _cache_of(given.get("generation_kwargs"))
    if (launched := given.get("accelerate_config")) is not None:
        if launched not in _LAUNCHED:
            raise UsageError(f"accelerate_config {launched} is not read: give --gpus N --sharding instead.")
        more["sharding"] = _LAUNCHED[str(launched)]
    inside = given.get("model_init_kwargs")
    told = [place.get("attn_implementation") for place in (given, inside) if isinstance(place, Mapping)]
    if any(told):
        more["attn"] = attention_of(next(name for name in told if name))
    if given.get("fp16") and given.get("bf16"):
        raise UsageError("fp16: true and bf16: true can't be used together in transformers.")
    if given.get("fp16"):
        more["mixed_precision"] = "fp16"
    elif given.get("bf16") is not None:
        more["mixed_precision"] = "bf16" if given["bf16"] else "no"
    if isinstance(inside, Mapping) and (dtype := inside.get("dtype") or inside.get("torch_dtype")):
        values = {**values, "dtype": str(dtype).removeprefix("torch.")}  # TRL lets it win
    if given.get("use_peft") and values.get("peft_type", "LORA") == "LORA":
        more |= _TRLS_ADAPTER
    kept = {**more, **values}
    if given.get("use_peft") is False:
        kept = {name: value for name, value in kept.items() if not name.startswith("lora_") and name not in _ADAPTERS}
    return kept


def _cache_of(generation: object) -> dict[str, object]:
    """Return the settings of a quantized cache from ``generation_kwargs``."""
    config = generation.get("cache_config") if isinstance(generation, Mapping) else None
    if not isinstance(config, Mapping):
        return {}
    name = "fp8" if config.get("backend") == "fp8" else f"int{config.get('nbits', 4)}"
    return {"cache_dtype": name}


# ---- what nobody gave ------------------------------------------------------------------------------------------------


def assumed_of(given: Mapping[str, object]) -> tuple[str, ...]:
    """List the settings that memory follows most and that ``given`` leaves open, of those that its trainer has."""
    open_names = given.get("assumed")
    known = set(given) - set(open_names if isinstance(open_names, (list, tuple)) else ())
    if given.get("max_length"):
        known |= {"prompt_length", "completion_length"}
    if given.get("trainer") in _SUPERVISED:
        known |= _GENERATING
    if given.get("generation") != "vllm":
        known.add("vllm_enable_sleep_mode")
    return tuple(name for name in _FOLLOWED if name not in known)


def assumed_words(config: KnownSettings) -> list[str]:
    """List in words what was assumed in ``config``: first what is not simulated, then what the data or memprof chose,
    last TRL's own defaults."""
    left_out = [f"a run without {field.name}, which is not simulated" for field in unsimulated_of(config)]
    trainer = config.trainer_kind
    theirs = OF_TRL.get(trainer, {})
    taken = [name for name in config.assumed if name in config.names]
    ours, default = [], []
    if trainer in _SUPERVISED and {"prompt_length", "completion_length"} <= set(taken):
        rows = (config.prompt_length or 0) + (config.completion_length or 0)
        ours.append(f"rows of {rows} tokens (the data decide; TRL cuts at {theirs['max_length']})")
        taken = [name for name in taken if name not in ("prompt_length", "completion_length")]
    for name in taken:
        words = _words(name, config)
        if not words:
            continue
        if name not in theirs:
            ours.append(f"{words} (the data decide)")
        elif name in _LEANS_OWN and config.recipe == "lean":
            ours.append(f"{words} (the lean trainer's default)")
        elif config.value(name) != theirs[name]:
            ours.append(f"{words} (TRL's default is {theirs[name]})")
        else:
            default.append(words)
    if default:
        ours.append(f"{', '.join(default)} (TRL's default{'s' if len(default) > 1 else ''})")
    return [*left_out, *ours]


def _words(name: str, config: KnownSettings) -> str:
    """Write one setting as a person would say it; nothing where another setting decides it."""
    value = config.value(name)
    if name == "dtype":  # DeepSpeed's are bfloat16; of 4-bit weights few have it
        if config.load_in_4bit or str(config.sharding).startswith("zero"):
            return ""
        return f"{value} weights"
    if name == "lora_r":
        return "no LoRA" if value is None else f"LoRA of rank {value}"
    if name == "gradient_checkpointing":
        return "no checkpointing" if value in (False, "none") else "gradient checkpointing"
    if name == "vllm_enable_sleep_mode":
        return "vLLM asleep while the model trains" if value else "vLLM awake while the model trains"
    unit = {"sft": "rows", "dpo": "pairs"}.get(config.trainer_kind, "completions")
    return {
        "prompt_length": f"prompts of {value} tokens",
        "completion_length": f"completions of {value} tokens",
        "per_device_train_batch_size": f"{value} {unit} in a micro-batch",
        "generation": "generation by transformers" if value == "hf" else f"generation: {value}",
        "num_generations": f"{value} completions a prompt",
        "beta": f"beta {value:g}" if isinstance(value, float) else f"beta {value}",
        "attn": "PyTorch's own choice of attention" if value == "auto" else f"{value} attention",
    }.get(name, f"{name} {value}")
