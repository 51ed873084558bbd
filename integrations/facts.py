"""Facts about a run, flat names and plain values, for the snapshot's ``config``."""

from __future__ import annotations

import os
from typing import Any

from memprof.record.owners import storages_of

__all__ = ["collect_facts"]

_ARGS = (
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
    "num_generations", "steps_per_generation", "num_iterations", "generation_batch_size", "max_prompt_length",
    "max_completion_length", "beta", "epsilon", "loss_type", "scale_rewards", "importance_sampling_level", "optim",
    "bf16", "fp16", "tf32", "learning_rate", "max_grad_norm", "max_steps", "num_train_epochs", "seed", "use_vllm",
    "vllm_mode", "vllm_gpu_memory_utilization", "vllm_enable_sleep_mode", "use_liger_kernel", "torch_compile",
    "cache_implementation", "pad_to_multiple_of", "cast_lm_head_to_fp32", "sync_ref_model", "auto_find_batch_size",
    "torch_empty_cache_steps", "average_tokens_across_devices", "dataloader_pin_memory", "ds3_gather_for_generation",
)  # fmt: skip
_MODEL = {
    "model_type": "model_type", "hidden_size": "hidden_size", "intermediate_size": "intermediate_size",
    "layers": "num_hidden_layers", "attention_heads": "num_attention_heads", "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim", "vocab_size": "vocab_size", "tie_word_embeddings": "tie_word_embeddings",
    "attn_implementation": "_attn_implementation", "experts": "num_experts",
}  # fmt: skip


def collect_facts(trainer: Any, redact: bool = False) -> dict[str, Any]:
    """What a reader needs to check the figures: the trainer's settings, the models' sizes and shapes in bytes."""
    facts: dict[str, Any] = {"trainer": type(trainer).__name__}
    args = trainer.args
    for name in _ARGS:
        value = getattr(args, name, None)
        if value is not None:
            facts[name] = _scalar(value)
    # transformers 5 renamed it, and warns when the old name is read.
    renamed = getattr(args, "activation_checkpointing", None)
    facts["gradient_checkpointing"] = bool(args.gradient_checkpointing if renamed is None else renamed)
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


def _model_facts(model: Any, redact: bool) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    config = getattr(model, "config", None)
    text_of = getattr(config, "get_text_config", None)
    text = config if text_of is None else text_of()
    name = getattr(config, "_name_or_path", "") or type(model).__name__
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
    """Bytes of a model's parameters and buffers, each storage once."""
    seen = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        for storage in storages_of(tensor):
            seen[storage._cdata] = storage.nbytes()
    return sum(seen.values())


def _scalar(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str)):
        return value if type(value) in (bool, int, float, str) else getattr(value, "value", str(value))
    if isinstance(value, (list, tuple)):
        return [_scalar(v) for v in value]
    return str(value)
