"""Collect facts about a run for the snapshot's ``config``: flat names, plain values; and what simulating it takes."""

from __future__ import annotations

import json
import os
from typing import Any

from memprof.compat.transformers import ATTENTION_KIND, IN_4BIT, MODEL_NAME
from memprof.compat.trl import REFERENCE
from memprof.config.from_trainer import adapter_facts, supervised_kind, trainer_kind
from memprof.config.model_shape import SIZE_NAMES
from memprof.recording.storages import storage_key, storages_of

_ARGS = (
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
    "num_generations", "steps_per_generation", "num_iterations", "generation_batch_size", "max_prompt_length",
    "max_completion_length", "beta", "epsilon", "loss_type", "scale_rewards", "importance_sampling_level", "optim",
    "bf16", "fp16", "tf32", "learning_rate", "max_grad_norm", "max_steps", "num_train_epochs", "seed", "use_vllm",
    "vllm_mode", "vllm_gpu_memory_utilization", "vllm_enable_sleep_mode", "use_liger_kernel", "torch_compile",
    "cache_implementation", "pad_to_multiple_of", "cast_lm_head_to_fp32", "sync_ref_model", "auto_find_batch_size",
    "torch_empty_cache_steps", "average_tokens_across_devices", "dataloader_pin_memory", "ds3_gather_for_generation",
    "normalize_advantages", "max_length", "packing", "padding_free", "activation_offloading",
    "precompute_ref_log_probs",
)  # fmt: skip
_PAIRS = 256  # of a dataset, whose lengths are looked at
_MODEL = {
    "model_type": "model_type", **SIZE_NAMES, "attn_implementation": ATTENTION_KIND.name, "experts": "num_experts",
}  # fmt: skip


def collect_facts(trainer: Any, redact: bool = False) -> dict[str, Any]:
    """Collect what a reader needs to check the figures: the trainer's settings, the models' extents and bytes."""
    facts: dict[str, Any] = {"trainer": type(trainer).__name__}
    kind = "rloo" if trainer_kind(trainer) == "rloo" else supervised_kind(trainer)
    if kind is not None:  # whose subclass may have any name
        facts["trainer_kind"] = kind
    args = trainer.args
    for name in _ARGS:
        value = getattr(args, name, None)
        if value is not None:
            facts[name] = _scalar(value)
    # transformers 5 renamed it, and warns when the old name is read.
    renamed = getattr(args, "activation_checkpointing", None)
    facts["gradient_checkpointing"] = bool(args.gradient_checkpointing if renamed is None else renamed)
    facts.update(_lean_facts(trainer))
    model = trainer.model
    facts.update(_model_facts(model, redact))
    for label, attribute in (("reference", "ref_model"), ("value", "value_model")):
        if (other := getattr(trainer, attribute, None)) is not None:
            facts[f"{label}_bytes"] = _unique_bytes(other)
    rewards = [f for f in getattr(trainer, "reward_funcs", None) or [] if hasattr(f, "parameters")]
    if rewards:
        facts["reward_bytes"] = sum(_unique_bytes(r) for r in rewards)
    accelerator = getattr(trainer, "accelerator", None)
    if accelerator is not None:
        facts["distributed_type"] = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
        facts["mixed_precision"] = accelerator.mixed_precision
        facts["world_size"] = accelerator.num_processes
    return facts


def collect_setup(trainer: Any) -> dict[str, Any]:
    """Collect what else a simulation of this run needs, without names of files: the model's whole config, its adapter,
    its dtypes."""
    model = trainer.model
    setup: dict[str, Any] = {"model_config": plain_config(getattr(model, "config", None)), "dtypes": _dtypes(model)}
    reference = REFERENCE.of(trainer)
    if reference is not None:
        setup["reference_dtypes"] = _dtypes(reference)
    if (adapter := _adapter(model)) is not None:
        setup["adapter"] = adapter
    kwargs = getattr(trainer.args, "activation_checkpointing_kwargs", None)
    kwargs = kwargs or trainer.args.to_dict().get("gradient_checkpointing_kwargs")
    if isinstance(kwargs, dict) and kwargs:
        setup["checkpointing"] = {str(k): _scalar(v) for k, v in kwargs.items()}
    setup["load_in_4bit"] = bool(IN_4BIT.of(model, False))
    if setup["load_in_4bit"]:
        setup["four_bit"] = _four_bit(getattr(model, "config", None))
    if supervised_kind(trainer) == "dpo" and (share := _completion_share(trainer)) is not None:
        setup["completion_share"] = share
    return setup


def plain_config(config: Any) -> dict[str, Any] | None:
    """Return a model's config as its ``config.json`` would say it, without the path it was loaded from."""
    if config is None or not hasattr(config, "to_json_string"):
        return None
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    # What was really loaded is in ``dtypes``; trainers switch the cache off in the config, and generate with it.
    dropped = ("dtype", "torch_dtype", "quantization_config", "use_cache")
    return {k: v for k, v in values.items() if not k.startswith("_") and k not in dropped}


def _dtypes(model: Any) -> dict[str, int]:
    """Count elements of parameters by dtype."""
    found: dict[str, int] = {}
    for parameter in model.parameters():
        name = str(parameter.dtype).removeprefix("torch.")
        found[name] = found.get(name, 0) + parameter.numel()
    return found


def _completion_share(trainer: Any) -> float | None:
    """Return which share of the rows' tokens is completions, by the first pairs of a DPO dataset; None if unknown.

    Read from the data: the masks lie on the device, which is not to be waited for.
    """
    try:
        rows = trainer.train_dataset[:_PAIRS]
        prompts, *completions = (sum(map(len, rows[name])) for name in ("prompt_ids", "chosen_ids", "rejected_ids"))
    except Exception as error:  # data of any shape
        del error
        return None
    whole = 2 * prompts + sum(completions)
    return sum(completions) / whole if whole else None


def _four_bit(config: Any) -> dict[str, object]:
    """Return the dtype of 4-bit products and whether scales are quantised; {} where not known."""
    asked = getattr(config, "quantization_config", None)
    values: Any = asked if isinstance(asked, dict) else vars(asked) if asked is not None else {}
    kinds = {"bnb_4bit_compute_dtype": str, "bnb_4bit_use_double_quant": bool}
    return {name: kind(values[name]) for name, kind in kinds.items() if values.get(name) is not None}


def _adapter(model: Any) -> dict[str, object] | None:
    """Return what the first adapter's configuration says, and the modules it really is on, whatever chose them."""
    settings = next(iter((getattr(model, "peft_config", None) or {}).values()), None)
    if settings is None:
        return None
    marks = ("lora_A", "ia3_l")
    on = {name.rpartition(".")[2] for name, module in model.named_modules() if any(hasattr(module, m) for m in marks)}
    return {**adapter_facts(settings), "target_modules": sorted(on)}


def _lean_facts(trainer: Any) -> dict[str, object]:
    """Return the lean trainer's own arguments that are not at their defaults, or that its budget chose."""
    if not any(kind.__module__ == "memprof.grpo.trainer" for kind in type(trainer).__mro__):
        return {}
    args = trainer.args
    defaults = {name: field.default for name, field in type(args).__dataclass_fields__.items()}
    own = args.lean_settings() if hasattr(args, "lean_settings") else {}  # TRL's plain config: all at their defaults
    facts = {name: _scalar(v) for name, v in own.items() if v is not None and v != defaults.get(name)}
    try:
        kind = trainer.applied_checkpointing
    except AttributeError:  # while the trainer is being built
        kind = "auto"
    if kind != "auto":  # then transformers' own was switched off
        facts["gradient_checkpointing"] = kind != "none"
    return {"recipe": "lean", **facts}


def _model_facts(model: Any, redact: bool) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    config = getattr(model, "config", None)
    text_of = getattr(config, "get_text_config", None)
    text = config if text_of is None else text_of()
    name = MODEL_NAME.of(config) or type(model).__name__
    # A hub id is public; a path on this machine is not.
    facts["model_name"] = os.path.basename(os.path.normpath(name)) if redact or os.path.isabs(name) else name
    for label, attribute in _MODEL.items():
        value = getattr(text, attribute, None)
        if value is not None:
            facts[label] = _scalar(value)
    if "head_dim" not in facts and {"hidden_size", "attention_heads"} <= facts.keys():
        facts["head_dim"] = facts["hidden_size"] // facts["attention_heads"]
    if "kv_heads" not in facts and "attention_heads" in facts:
        facts["kv_heads"] = facts["attention_heads"]
    parameters = list(model.parameters())
    trainable = [p for p in parameters if p.requires_grad]
    facts["parameters"] = sum(p.numel() for p in parameters)
    facts["trainable_parameters"] = sum(p.numel() for p in trainable)
    facts["model_bytes"] = _unique_bytes(model)
    facts["trainable_bytes"] = sum(p.numel() * p.element_size() for p in trainable)
    if parameters:
        facts["dtype"] = str(parameters[0].dtype).removeprefix("torch.")
    for adapter, settings in list((getattr(model, "peft_config", None) or {}).items())[:1]:
        facts["adapter"] = str(adapter)
        facts["peft_type"] = str(getattr(settings.peft_type, "value", settings.peft_type))
        facts["lora_r"] = getattr(settings, "r", None)
        targets = getattr(settings, "target_modules", None)
        facts["lora_target_modules"] = targets if isinstance(targets, str) else sorted(targets or [])
    return facts


def _unique_bytes(model: Any) -> int:
    """Sum the bytes of a model's parameters and buffers, each storage once."""
    seen = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        for storage in storages_of(tensor):
            seen[storage_key(storage)] = storage.nbytes()
    return sum(seen.values())


def _scalar(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str)):
        return value if type(value) in (bool, int, float, str) else getattr(value, "value", str(value))
    if isinstance(value, (list, tuple)):
        return [_scalar(v) for v in value]
    return str(value)
