"""What the lean trainer was told (``LeanGRPOConfig``, or the facts of a recording), as settings of a simulation.

No torch here: a recording's values are looked at too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memprof.config.settings import CHOICES, OPTIMIZERS, Settings

__all__ = [
    "ARGUMENTS",
    "CHANGEABLE",
    "LEAN_ARGUMENTS",
    "lean_values",
    "not_kept",
    "prompt_tokens",
    "script_settings",
    "settled",
    "tame",
]

# Of one name in a LeanGRPOConfig and in settings.
_SAME = ("max_tokens_per_piece", "tiled_mlp", "prefix_sharing", "generation_batch")
# What :func:`lean_values` reads.
LEAN_ARGUMENTS = (*_SAME, "checkpointing", "gradient_checkpointing", "cache_implementation", "generation_cache")
# Where these are not at their default, a simulation of the settings alone is of another run.
_ONLY_THE_TRAINERS = (
    "micro_splitting",
    "exact_two_pass",
    "skip_zero_advantages",
    "fused_loss",
    "loss_chunk_tokens",
    "packing",
    "reference",
    "stochastic_rounding",
)
_CACHES = ("dynamic", "static", "quantized")


def lean_values(config: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Settings of :class:`~memprof.config.settings.Settings`, by name; what is another in them is said in ``notes``.

    Args:
        config: :data:`LEAN_ARGUMENTS` by name; what is missing has the lean trainer's default.
        notes: sentences are added to it.
    """
    values = {name: config[name] for name in _SAME if config.get(name) is not None}
    kind = config.get("checkpointing") or "auto"
    if kind == "auto":
        kind = bool(config.get("gradient_checkpointing", True))
    elif kind == "mlp":
        notes.append("checkpointing='mlp' is none in the settings, which holds more")
        kind = False
    name = config.get("cache_implementation") or config.get("generation_cache") or "dynamic"
    if name not in _CACHES:
        notes.append(f"the cache {name!r} is one that stays on the device in the settings, which holds more")
        name = "dynamic"
    return {"recipe": "lean", "gradient_checkpointing": kind, "cache_implementation": name, **values}


def not_kept(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """``name=value`` of the lean trainer's settings that are not at their default and that settings do not hold."""
    set_so = ((name, config.get(name, defaults.get(name))) for name in _ONLY_THE_TRAINERS)
    return [f"{name}={value!r}" for name, value in set_so if value != defaults.get(name)]


# Settings that a script's own arguments hold under this name, or under the one given.
ARGUMENTS = {
    "num_generations": "num_generations",
    "per_device_train_batch_size": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "steps_per_generation": "steps_per_generation",
    "completion_length": "max_completion_length",
    "beta": "beta",
    "optim": "optim",
}
CHANGEABLE = (*ARGUMENTS, "prompt_length", "attn", "padding", "generation", "alloc_conf")
_PROMPT_LENGTH = 512
_MAX_ROWS = 1000  # of a dataset, looked at for the longest prompt
_WARM_UP, _MEASURED = 1, 1


def script_settings(
    arguments: Any, model: Any, adapter: Any, changes: Mapping[str, Any], notes: list[str], *, lean: bool = False
) -> Settings:
    """Settings that describe the run a ``GRPOConfig``, a model and an adapter make.

    ``lean``: the trainer is the lean one, and ``arguments`` a ``LeanGRPOConfig``. ``changes``: what is set otherwise,
    and ``device``.

    Raises:
        UsageError: they contradict each other.
    """
    config = getattr(model, "config", None)
    name = model if isinstance(model, str) else getattr(config, "_name_or_path", "") or "the script's model"
    values: dict[str, Any] = {
        "model": str(name),
        "dtype": _dtype(arguments, model),
        "mixed_precision": "bf16" if arguments.bf16 else "no",
        "lora_r": _rank(model, adapter),
        "load_in_4bit": bool(getattr(model, "is_loaded_in_4bit", False)),
        "num_iterations": arguments.num_iterations,
        "prompt_length": changes.get("prompt_length", _PROMPT_LENGTH),
        "gradient_checkpointing": bool(arguments.gradient_checkpointing),
        "max_grad_norm": arguments.max_grad_norm,
        "loss_type": arguments.loss_type,
        "generation": changes.get("generation") or _generation(arguments),
        "vllm_gpu_memory_utilization": arguments.vllm_gpu_memory_utilization,
        "vllm_enable_sleep_mode": arguments.vllm_enable_sleep_mode,
        "attn": changes.get("attn", "auto"),
        "padding": changes.get("padding", "none"),
        "alloc_conf": changes.get("alloc_conf", ""),
        "device": changes.get("device", "cuda"),
    }
    if (targets := _targets(model, adapter)) is not None:
        values["lora_target_modules"] = targets
    if lean:
        asked = {name: getattr(arguments, name, None) for name in LEAN_ARGUMENTS}
        values.update(lean_values(asked, notes))
    values.update({ours: getattr(arguments, theirs) for ours, theirs in ARGUMENTS.items()})
    values["optim"] = _optimizer(str(getattr(arguments.optim, "value", arguments.optim)), notes)
    arguments.optim = values["optim"] if values["optim"] not in ("none",) else arguments.optim
    return Settings(**values)


def _dtype(arguments: Any, model: Any) -> str:
    import torch

    if isinstance(model, str):
        kind = (arguments.model_init_kwargs or {}).get("dtype", "float32")
        kind = "bfloat16" if kind in ("auto", None) else str(kind)
    else:
        kinds = [p.dtype for p in model.parameters() if p.dtype.is_floating_point] or [torch.float32]
        kind = str(max(set(kinds), key=kinds.count))
    kind = kind.removeprefix("torch.")
    return kind if kind in ("float32", "bfloat16", "float16") else "bfloat16"


def _rank(model: Any, adapter: Any) -> int | None:
    """LoRA's rank, from the config given to the trainer or from the adapter the model has already."""
    held = next(iter((getattr(model, "peft_config", None) or {}).values()), None)
    rank = getattr(adapter if adapter is not None else held, "r", None)
    return rank if isinstance(rank, int) and rank > 0 else None


def _targets(model: Any, adapter: Any) -> tuple[str, ...] | None:
    """The modules an adapter names one by one; None where it names them otherwise."""
    held = next(iter((getattr(model, "peft_config", None) or {}).values()), None)
    named = getattr(adapter if adapter is not None else held, "target_modules", None)
    if not named or isinstance(named, str):
        return None
    return tuple(sorted({str(name).rpartition(".")[2] for name in named}))


def settled(settings: Settings, trainer: Any) -> Settings:
    """The settings with what the built trainer has: its weights' dtype, by their number, and whether in 4 bits."""
    from memprof.recording.run_facts import collect_setup

    setup = collect_setup(trainer)
    kinds = {name: count for name, count in setup["dtypes"].items() if name in CHOICES["dtype"]}
    changes: dict[str, Any] = {"load_in_4bit": setup["load_in_4bit"] and settings.lora_r is not None}
    if kinds:
        changes["dtype"] = max(kinds, key=lambda name: kinds[name])
    return settings.with_(**changes)


def _generation(arguments: Any) -> str:
    if not getattr(arguments, "_memprof_vllm", False):
        return "hf"
    return "vllm" if arguments.vllm_mode == "colocate" else "none"


def _optimizer(name: str, notes: list[str]) -> str:
    if name in OPTIMIZERS:
        return name
    near = "paged_adamw_8bit" if name.startswith("paged_") else "adamw_8bit" if "8bit" in name else "adamw_torch"
    notes.append(f"the optimizer {name} is simulated as {near}")
    return near


def tame(arguments: Any, folder: str, *, grpo: bool) -> None:
    """Two steps (or generation cycles), no logging, no saving, no evaluation, nothing written but into ``folder``."""
    from transformers.trainer_utils import IntervalStrategy, SaveStrategy

    cycle = 1
    if grpo:
        steps = arguments.steps_per_generation // arguments.gradient_accumulation_steps
        cycle = max(1, steps) * arguments.num_iterations
        arguments._memprof_vllm, arguments.use_vllm = arguments.use_vllm, False
        arguments.log_completions = False
    arguments.output_dir = arguments.logging_dir = folder
    arguments.max_steps = (_WARM_UP + _MEASURED) * cycle
    arguments.logging_strategy = arguments.eval_strategy = IntervalStrategy.NO
    arguments.save_strategy = SaveStrategy.NO
    for name in ("load_best_model_at_end", "push_to_hub", "do_eval", "save_only_model", "logging_first_step"):
        setattr(arguments, name, False)
    arguments.report_to = []
    arguments.disable_tqdm = True
    arguments.dataloader_pin_memory = False
    arguments.dataloader_num_workers = 0


def prompt_tokens(data: Any, tokenizer: Any) -> int | None:
    """Tokens of the longest prompt among the first rows; None where there are no rows to look at."""
    try:
        rows = [row for _, row in zip(range(_MAX_ROWS), data, strict=False)]
        prompts = [row["prompt"] for row in rows]
        lengths = [len(_tokens(prompt, tokenizer)) for prompt in prompts]
    except Exception as error:  # data of any shape: what cannot be counted is not known
        del error
        return None
    return max(lengths, default=None)


def _tokens(prompt: Any, tokenizer: Any) -> Any:
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=True)[
        "input_ids"
    ]
