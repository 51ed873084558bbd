"""Write the settings of a plan's row as a configuration ready to paste."""

from __future__ import annotations

from memprof.plan.planner import Row

__all__ = ["as_python", "as_yaml"]


def _arguments(row: Row) -> dict[str, object]:
    s = row.settings
    cache = {} if s.cache_implementation == "dynamic" else {"cache_implementation": s.cache_implementation}
    return {
        "per_device_train_batch_size": s.per_device_train_batch_size,
        "gradient_accumulation_steps": s.gradient_accumulation_steps,
        "steps_per_generation": s.generation_steps,
        "num_generations": s.num_generations,
        "max_completion_length": s.completion_length,
        "gradient_checkpointing": bool(s.gradient_checkpointing),
        "optim": s.optim,
        "bf16": s.mixed_precision == "bf16",
        "beta": s.beta,
        "model_init_kwargs": {"dtype": s.dtype},
        **cache,
    }


def _lean(row: Row) -> dict[str, object]:
    """Collect what only the lean trainer's config has."""
    s = row.settings
    if s.recipe != "lean":
        return {}
    names = ("max_tokens_per_piece", "tiled_mlp", "prefix_sharing", "generation_batch")
    chosen = {name: getattr(s, name) for name in names if getattr(s, name)}
    return {"checkpointing": s.checkpointing, **chosen}


def as_python(row: Row) -> str:
    """Write ``GRPOConfig(...)`` and, for an adapter, ``LoraConfig(...)``."""
    lines = ["args = LeanGRPOConfig(" if row.settings.recipe == "lean" else "args = GRPOConfig("]
    lines += [f"    {name}={value!r}," for name, value in {**_arguments(row), **_lean(row)}.items()]
    lines.append(")")
    if row.settings.lora_r is not None:
        targets: object = list(row.settings.lora_target_modules)
        if targets == ["all-linear"]:
            targets = "all-linear"
        rank = row.settings.lora_r
        lines.append(f"peft_config = LoraConfig(r={rank}, lora_alpha={2 * rank}, target_modules={targets!r})")
    if row.settings.recipe != "lean" and row.settings.checkpointing in ("selective", "offloaded"):
        lines.append(f"# {row.settings.checkpointing} checkpointing: wrap the model first (docs/simulating.md)")
    if row.settings.load_in_4bit:
        lines.append("quantization_config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4')")
    return "\n".join(lines)


def as_yaml(row: Row) -> str:
    """Write the same as YAML for TRL's command line."""
    import json

    lines = [f"{name}: {json.dumps(value)}" for name, value in _arguments(row).items()]
    if row.settings.lora_r is not None:
        lines += ["use_peft: true", f"lora_r: {row.settings.lora_r}"]
    if row.settings.load_in_4bit:
        lines.append("load_in_4bit: true")
    return "\n".join(lines) + "\n"
