"""The settings of a run that was recorded, so that it can be simulated as it was and with something changed.

No torch here: what is read is a report's ``source`` (schema ``memprof.report/1``).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from memprof.config.catalogue import find_config
from memprof.config.from_trainer import lean_values
from memprof.config.settings import CHOICES, OPTIMIZERS, Settings
from memprof.errors import InputError, UsageError

__all__ = ["Likeness", "model_values", "place_model", "ran_on", "settings_like"]


@dataclass(frozen=True)
class Likeness:
    """Settings of a recorded run, the values of its model's config, and in sentences what had to be assumed."""

    settings: Settings
    model: dict[str, Any]
    assumed: tuple[str, ...]


def settings_like(source: Mapping[str, Any]) -> Likeness:
    """What would have to be simulated to execute a recorded run again.

    ``settings.model`` is the model's name: before simulating, put :func:`place_model`'s answer there.

    Args:
        source: a report's ``source``.

    Raises:
        InputError: the recording does not say enough; the sentence names what is missing.
    """
    config = source.get("config") or {}
    if not isinstance(config, Mapping) or not config:
        raise InputError("nothing is known of this run's configuration, so it cannot be simulated")
    simulated = source.get("kind") == "simulated"
    model = _named(config.get("model")) if simulated else None
    model = model or model_values(source)
    try:
        if simulated:
            return Likeness(_as_simulated(config), model, ())
        return _as_recorded(source, config, model)
    except (UsageError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"this run cannot be simulated: {str(error).rstrip('.')}") from None


def ran_on(source: Mapping[str, Any], settings: Settings) -> str | None:
    """The size of the card that ran, where a simulation has to know it.

    An engine takes a share of the card, and the lean trainer generates as many sequences together as are free on it.
    """
    total = source.get("device_total_bytes")
    lean = settings.recipe == "lean" and settings.generation == "hf" and settings.generation_batch is None
    wanted = settings.device == "cuda" and (settings.generation == "vllm" or lean)
    return str(total) if wanted and total else None


def _named(model: Any) -> dict[str, Any] | None:
    """A config that is found by its name, or None."""
    try:
        return find_config(str(model))
    except (InputError, OSError, ValueError):  # a stranger's name may be no path at all
        return None


def _as_simulated(config: Mapping[str, Any]) -> Settings:
    known = {f.name for f in fields(Settings)}
    values = {name: value for name, value in config.items() if name in known}
    values["lora_target_modules"] = tuple(values.get("lora_target_modules") or ("all-linear",))
    if values.get("gpus", 1) == 1:  # other names were accepted once, and changed nothing
        values["sharding"] = "ddp"
    return Settings(**values)


# Settings that a GRPOConfig and a simulation have under one name.
_SAME = (
    "num_generations", "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation",
    "num_iterations", "beta", "max_grad_norm", "loss_type", "vllm_gpu_memory_utilization", "vllm_enable_sleep_mode",
    "cache_implementation",
)  # fmt: skip


def _as_recorded(source: Mapping[str, Any], config: Mapping[str, Any], model: Mapping[str, Any]) -> Likeness:
    if "num_generations" not in config:
        what = config.get("trainer") or "hand-written loop"
        raise UsageError(f"a {what} is not GRPO, and what is simulated is TRL's GRPO step")
    setup = source.get("setup") or {}
    known = {f.name for f in fields(Settings)}
    values: dict[str, Any] = {n: config[n] for n in _SAME if n in known and config.get(n) is not None}
    assumed: list[str] = []
    if values.get("cache_implementation") not in CHOICES.get("cache_implementation", ()):
        values.pop("cache_implementation", None)
    if config.get("reward_bytes"):
        assumed.append("reward models are left out")
    values["model"] = str(config.get("model_name") or "model")
    values["device"] = "cuda" if source.get("kind") == "cuda" else "cpu"
    values["dtype"] = _dtype(config, setup)
    values["mixed_precision"] = "bf16" if config.get("mixed_precision") == "bf16" or config.get("bf16") else "no"
    values["gradient_checkpointing"] = _checkpointing(config, setup)
    values["optim"] = _optimizer(config, assumed)
    values["attn"] = _attention(config)
    values["generation"] = _generation(config)
    values |= _adapter(config, setup)
    values |= _lengths(config, setup, assumed)
    values |= _ranks(source, config, assumed)
    if _is_lean(config):
        values |= lean_values(config, assumed)
        if "recipe" not in config:
            assumed.append("the recording does not hold the lean trainer's own settings; its defaults are assumed")
    if source.get("alloc_conf"):
        values["alloc_conf"] = str(source["alloc_conf"])
    if config.get("fp16"):
        assumed.append("fp16 autocast is simulated as none")
    return Likeness(Settings(**values), dict(model), tuple(assumed))


def _is_lean(config: Mapping[str, Any]) -> bool:
    """Recordings of before the recipe was among the facts have the trainer's name."""
    return bool(config.get("recipe", config.get("trainer")) in ("lean", "LeanGRPOTrainer"))


def _dtype(config: Mapping[str, Any], setup: Mapping[str, Any]) -> str:
    """The dtype most floating-point parameters have; an adapter's few in float32 do not decide."""
    by_count: dict[str, int] = {n: c for n, c in (setup.get("dtypes") or {}).items() if n in CHOICES["dtype"]}
    if by_count:
        return max(by_count, key=lambda name: by_count[name])
    name = str(config.get("dtype") or "float32")
    return name if name in CHOICES["dtype"] else "bfloat16"


def _checkpointing(config: Mapping[str, Any], setup: Mapping[str, Any]) -> Any:
    on = config.get("gradient_checkpointing", True)
    if on and (setup.get("checkpointing") or {}).get("offload") and "offloaded" in CHOICES["gradient_checkpointing"]:
        return "offloaded"
    return on


def _optimizer(config: Mapping[str, Any], assumed: list[str]) -> str:
    name = str(config.get("optim") or "adamw_torch_fused")
    if name in OPTIMIZERS:
        return name
    near = "paged_adamw_8bit" if name.startswith("paged_") else "adamw_8bit" if "8bit" in name else "adamw_torch"
    assumed.append(f"the optimizer {name} is simulated as {near}")
    return near


def _attention(config: Mapping[str, Any]) -> str:
    name = str(config.get("attn_implementation") or "sdpa")
    return "math" if name == "eager" else "flash" if name.startswith("flash") else "auto"


def _generation(config: Mapping[str, Any]) -> str:
    if not config.get("use_vllm"):
        return "hf"
    return "vllm" if config.get("vllm_mode", "server") == "colocate" else "none"


def _adapter(config: Mapping[str, Any], setup: Mapping[str, Any]) -> dict[str, Any]:
    adapter = setup.get("adapter") or {}
    rank = adapter.get("r") or config.get("lora_r")
    if not rank:
        return {"load_in_4bit": False}
    targets = adapter.get("target_modules") or config.get("lora_target_modules") or ["all-linear"]
    names = (targets,) if isinstance(targets, str) else tuple(str(t) for t in targets)
    return {"lora_r": int(rank), "lora_target_modules": names, "load_in_4bit": bool(setup.get("load_in_4bit"))}


def _lengths(config: Mapping[str, Any], setup: Mapping[str, Any], assumed: list[str]) -> dict[str, Any]:
    """The largest micro-batch seen; without one, the limits of the configuration."""
    batches = [row for row in setup.get("batches") or [] if len(row) == 4]
    if batches:
        _, _, prompt, completion = max(batches, key=lambda row: row[1] * (row[2] + row[3]))
        seen = {(p, c) for _, p, c in setup.get("lengths") or []}
        padded = len(seen) > 1
        return {"prompt_length": prompt, "completion_length": completion, "padding": "worst" if padded else "none"}
    prompt = config.get("max_prompt_length")
    if prompt is None:
        assumed.append("the recording does not say how long prompts are; 512 tokens are assumed")
    assumed.append("completions are taken to have their full length")
    return {"prompt_length": prompt or 512, "completion_length": config.get("max_completion_length") or 256}


def _ranks(source: Mapping[str, Any], config: Mapping[str, Any], assumed: list[str]) -> dict[str, Any]:
    ranks = int(source.get("world_size") or 1)
    kind = str(config.get("distributed_type") or "").upper()
    if ranks == 1:
        return {"gpus": 1}
    if "FSDP" in kind:
        return {"gpus": ranks, "sharding": "fsdp2"}
    if "DEEPSPEED" in kind:
        stage = config.get("zero_stage")
        if stage is None:
            assumed.append("the recording does not say which ZeRO stage ran; stage 2 is assumed")
        return {"gpus": ranks, "sharding": f"zero{stage or 2}"}
    return {"gpus": ranks, "sharding": "ddp"}


# -- the model ---------------------------------------------------------------------------------------------------------

# The facts' names, where a recording keeps sizes and no whole config, and a config's.
_SIZES = {
    "hidden_size": "hidden_size", "intermediate_size": "intermediate_size", "layers": "num_hidden_layers",
    "attention_heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "head_dim": "head_dim",
    "vocab_size": "vocab_size", "tie_word_embeddings": "tie_word_embeddings",
}  # fmt: skip


def model_values(source: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the model's config: recorded, of the catalogue by its name, or put together from recorded sizes.

    Raises:
        InputError: nothing of it is known.
    """
    recorded = (source.get("setup") or {}).get("model_config")
    if isinstance(recorded, Mapping) and recorded.get("model_type"):
        return {name: value for name, value in recorded.items() if name != "use_cache"}
    config = source.get("config") or {}
    if (named := _named(config.get("model_name") or config.get("model") or "")) is not None:
        return named
    values = {ours: config[theirs] for theirs, ours in _SIZES.items() if config.get(theirs) is not None}
    if not config.get("model_type") or not {"hidden_size", "num_hidden_layers", "vocab_size"} <= values.keys():
        raise InputError("the recording does not hold its model's config, so the run cannot be simulated")
    return {"model_type": str(config["model_type"]), **values}


def place_model(likeness: Likeness, folder: Path) -> Settings:
    """The settings with ``model`` naming a folder below ``folder`` that holds the recorded config.

    The folder's name depends on what is in the config only, so that results of simulations can be kept by it. A model
    of the catalogue whose config is the recorded one keeps its name.

    Raises:
        InputError: the folder cannot be written.
    """
    settings, values = likeness.settings, likeness.model
    if _named(settings.model) == values:
        return settings
    text = json.dumps(values, sort_keys=True, indent=1)
    name = re.sub(r"[^\w.-]+", "-", os.path.basename(settings.model.rstrip("/\\"))).strip(".-") or "model"
    place = folder / hashlib.sha256(text.encode()).hexdigest()[:12] / name
    try:
        place.mkdir(parents=True, exist_ok=True)
        if not (place / "config.json").is_file():
            handle, unfinished = tempfile.mkstemp(dir=place, suffix=".part")
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                out.write(text)
            os.replace(unfinished, place / "config.json")
    except OSError as error:
        raise InputError(f"{place}: cannot be written ({error.strerror or error}).") from None
    return settings.with_(model=str(place))
