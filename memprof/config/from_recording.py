"""Read the settings of a recorded run, so that it can be simulated as it was and with something changed.

No torch here: what is read is a report's ``source`` (schema ``memprof.report/1``).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from memprof.config.catalogue import find_config
from memprof.config.from_trainer import adapter_values, dtype_of, four_bit, lean_values, optimizer_of, sharding_of
from memprof.config.gpus import find_gpu, known_gpus
from memprof.config.model_shape import SIZE_NAMES
from memprof.config.settings import CHOICES, Settings
from memprof.config.to_trl_config import GRPO_NAMES
from memprof.config.trainer_fields import executed_of, left_out_of
from memprof.config.trl_arguments import assumed_words, attention_of, generation_of, recipe_of_release
from memprof.errors import InputError, UsageError
from memprof.files import write_whole
from memprof.foreign import ConfigValues


@dataclass(frozen=True)
class Likeness:
    """Settings of a recorded run, the values of its model's config, and in words what else had to be assumed."""

    settings: Settings
    model: dict[str, Any]
    assumed: tuple[str, ...]

    def words(self, settings: Settings | None = None) -> list[str]:
        """List in words all that was assumed; ``settings``: those that are simulated, where some were changed."""
        return [*self.assumed, *assumed_words((settings or self.settings).known)]


def settings_like(source: ConfigValues) -> Likeness:
    """Say what has to be simulated to execute the run of a report's ``source`` again.

    ``settings.model`` is the model's name: before simulating, put :func:`place_model`'s answer there.

    Raises:
        InputError: the recording does not say enough; the sentence names what is missing. Where what it says could not
            be read, another error is its cause.
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
        cause = None if isinstance(error, UsageError) else error
        raise InputError(f"this run cannot be simulated: {str(error).rstrip('.')}") from cause


def ran_on(source: ConfigValues, settings: Settings) -> str | None:
    """Return the card of the run: its name where known, which gives its speed; else its size, where that matters.

    An engine takes a share of the card, and the lean trainer generates as many sequences together as fit.
    """
    total = source.get("device_total_bytes")
    if settings.device == "cuda" and (named := _card(str(source.get("device_name") or ""), total)) is not None:
        return named
    lean = settings.lean and settings.generation == "hf" and settings.generation_batch is None
    wanted = settings.device == "cuda" and (settings.generation == "vllm" or lean)
    return f"{total}B" if wanted and total else None


def _card(name: str, total: int | None) -> str | None:
    """Find the card with this driver's name and, to 2%, this memory; None where there is none."""
    try:
        card = find_gpu(name)
    except UsageError:
        return None
    named = any(card.name == known.name for known in known_gpus())
    return card.name if named and total and abs(card.total_bytes - total) <= total / 50 else None


def _named(model: Any) -> dict[str, Any] | None:
    """Find a config by its name; None where there is none."""
    try:
        return find_config(str(model))
    except (InputError, OSError, ValueError):  # a stranger's name may be no path at all
        return None


def _as_simulated(config: ConfigValues) -> Settings:
    known = {f.name for f in fields(Settings)}
    values = {name: value for name, value in config.items() if name in known}
    if values.get("trainer") not in CHOICES["trainer"]:  # a script's: the name of its class
        values["trainer"] = _kind(config)
    values["lora_target_modules"] = tuple(values.get("lora_target_modules") or ("all-linear",))
    if values.get("gpus", 1) == 1:  # other names were accepted once, and changed nothing
        values["sharding"] = "ddp"
    return Settings(**values)


# Settings that a recording holds under the same name and in the same form.
_SAME_SUPERVISED = ("per_device_train_batch_size", "gradient_accumulation_steps", "beta", "max_grad_norm")
_SAME = (*(ours for ours, theirs in GRPO_NAMES.items() if ours == theirs and ours != "optim"), "cache_implementation")


def _as_recorded(source: ConfigValues, config: ConfigValues, model: ConfigValues) -> Likeness:
    trainer = _kind(config)
    supervised = trainer in ("sft", "dpo")
    if not supervised and "num_generations" not in config:
        what = config.get("trainer") or "hand-written loop"
        raise UsageError(f"a {what} is none of GRPO, RLOO, SFT and DPO, whose steps are simulated")
    setup = source.get("setup") or {}
    same = _SAME_SUPERVISED if supervised else _SAME
    values: dict[str, Any] = {n: config[n] for n in same if config.get(n) is not None}
    assumed: list[str] = []
    if values.get("cache_implementation") not in CHOICES["cache_implementation"]:
        values.pop("cache_implementation", None)
    if config.get("reward_bytes"):
        assumed.append("reward models are left out")
    values["model"] = str(config.get("model_name") or "model")
    values["trainer"] = trainer
    values["device"] = "cuda" if source.get("kind") == "cuda" else "cpu"
    values["dtype"] = _dtype(config, setup)
    asked = config.get("mixed_precision")
    values["mixed_precision"] = "bf16" if config.get("bf16") else "fp16" if config.get("fp16") else asked or "no"
    on, kind = config.get("gradient_checkpointing", True), setup.get("checkpointing") or {}
    values["gradient_checkpointing"] = "offloaded" if on and kind.get("offload") else on
    values["optim"], note = optimizer_of(str(config.get("optim") or "adamw_torch_fused"))
    assumed += note
    values["attn"] = attention_of(config.get("attn_implementation"))
    values["left_out"] = left_out_of(config, trainer)
    _, values["trainer_options"] = executed_of(config, trainer)
    adapter = _adapter(config, setup, trainer)
    values |= {**adapter, "left_out": (*values["left_out"], *adapter.get("left_out", ()))}
    values |= _ranks(source, config, assumed)
    if supervised:
        values |= _rows(config, setup, trainer, assumed)
    else:
        values["generation"] = generation_of(config.get("use_vllm"), config.get("vllm_mode"))
        values |= _lengths(config, setup, assumed)
    values |= _loss_of(source, trainer, assumed)
    # Old recordings have the lean trainer's name and no recipe.
    if config.get("recipe", config.get("trainer")) in ("lean", "LeanGRPOTrainer", "LeanRLOOTrainer"):
        values |= lean_values(config, assumed)
        if "recipe" not in config:
            assumed.append("the recording lacks the lean trainer's settings; defaults are assumed")
    if source.get("alloc_conf"):
        values["alloc_conf"] = str(source["alloc_conf"])
    return Likeness(Settings(**values), dict(model), tuple(assumed))


def _loss_of(source: ConfigValues, trainer: str, assumed: list[str]) -> dict[str, Any]:
    """Return the recipe of the TRL that the run was recorded with; the installed TRL's where it is not known."""
    versions = source.get("versions")
    version = versions.get("trl") if isinstance(versions, Mapping) else None
    if not version or trainer not in ("grpo", "rloo"):
        return {}
    try:
        return {"recipe": recipe_of_release(str(version), trainer)}
    except UsageError:
        assumed.append(f"the loss is the installed TRL's; the one of TRL {version} is not simulated")
        return {}


def _kind(config: ConfigValues) -> str:
    """Tell trainers apart, subclasses included; old recordings have the trainer's name alone."""
    name = str(config.get("trainer"))
    told = config.get("trainer_kind") or {"SFTTrainer": "sft", "DPOTrainer": "dpo"}.get(name)
    told = told or ("rloo" if "RLOO" in name else "grpo")
    return told if told in CHOICES["trainer"] else "grpo"


def _dtype(config: ConfigValues, setup: ConfigValues) -> str:
    if (known := dtype_of(setup)) is not None:
        return known
    name = str(config.get("dtype") or "float32")
    return name if name in CHOICES["dtype"] else "bfloat16"


def _adapter(config: ConfigValues, setup: ConfigValues, trainer: str) -> dict[str, Any]:
    """Return the settings of the adapter, and what of it is not simulated; UsageError for a kind that is not."""
    adapter = dict(setup.get("adapter") or {})
    kind = str(adapter.get("peft_type") or config.get("peft_type") or "LORA").upper()
    rank = adapter.get("r") or config.get("lora_r")
    if not adapter and not rank:
        return {"load_in_4bit": False}
    adapter = {"peft_type": kind, **adapter, "r": rank}
    if not adapter.get("target_modules"):
        adapter["target_modules"] = config.get("lora_target_modules")
    values = adapter_values(adapter, trainer)
    if not setup.get("load_in_4bit"):
        return {**values, "load_in_4bit": False}
    return {**values, "load_in_4bit": True, **four_bit(setup)}


def _lengths(config: ConfigValues, setup: ConfigValues, assumed: list[str]) -> dict[str, Any]:
    """Return the lengths of the largest micro-batch seen; without one, the limits of the configuration."""
    batches = [row for row in setup.get("batches") or [] if len(row) == 4]
    if batches:
        _, _, prompt, completion = max(batches, key=lambda row: row[1] * (row[2] + row[3]))
        seen = {(p, c) for _, p, c in setup.get("lengths") or []}
        padded = len(seen) > 1
        return {"prompt_length": prompt, "completion_length": completion, "padding": "worst" if padded else "none"}
    prompt = config.get("max_prompt_length")
    limits = {"prompt_length": prompt, "completion_length": config.get("max_completion_length")}
    known = {name: tokens for name, tokens in limits.items() if tokens}
    assumed.append("completions are taken to have their full length")
    return {**known, "assumed": tuple(name for name in limits if name not in known)}


def _rows(config: ConfigValues, setup: ConfigValues, kind: str, assumed: list[str]) -> dict[str, Any]:
    """Return rows and their length, of the largest micro-batch seen; without one, the configuration's limit."""
    batches = [row for row in setup.get("batches") or [] if len(row) == 4]
    values: dict[str, Any] = {"generation": "none"}
    if batches:
        _, rows, prompt, completion = max(batches, key=lambda row: row[1] * (row[2] + row[3]))
        length = prompt + completion
        values["per_device_train_batch_size"] = max(1, rows // 2) if kind == "dpo" else rows
        values["padding"] = "worst" if rows > 1 and len({row[2] + row[3] for row in batches}) > 1 else "none"
    elif config.get("max_length"):
        length = int(config["max_length"])
        assumed.append(f"the recording has no lengths of rows; all are assumed to have max_length, {length:,}")
    else:
        raise UsageError("the recording contains neither the lengths of rows nor their maximum")
    if kind == "dpo":
        share = setup.get("completion_share")
        if share is None:
            assumed.append("the recording has no lengths of completions; half of each row is assumed to be one")
        values["prompt_length"] = min(max(1, round(length * (1 - (share or 0.5)))), length - 1)
        if config.get("precompute_ref_log_probs"):
            assumed.append("the reference is simulated in every step; this run computed its log-probabilities before")
    return {**values, "max_length": length}


def _ranks(source: ConfigValues, config: ConfigValues, assumed: list[str]) -> dict[str, Any]:
    ranks, kind = int(source.get("world_size") or 1), str(config.get("distributed_type"))
    stage = config.get("zero_stage")
    if ranks > 1 and "DEEPSPEED" in kind.upper() and stage is None:
        assumed.append("the recording does not contain the ZeRO stage; stage 2 is assumed")
    return sharding_of(ranks, kind, stage or 2)


# -- the model ---------------------------------------------------------------------------------------------------------


def model_values(source: ConfigValues) -> dict[str, Any]:
    """Return the values of the model's config: recorded, of the catalogue by its name, or put together from sizes.
    InputError where nothing of it is known."""
    recorded = (source.get("setup") or {}).get("model_config")
    if isinstance(recorded, Mapping) and recorded.get("model_type"):
        return {name: value for name, value in recorded.items() if name != "use_cache"}
    config = source.get("config") or {}
    if (named := _named(config.get("model_name") or config.get("model") or "")) is not None:
        return named
    values = {theirs: config[fact] for fact, theirs in SIZE_NAMES.items() if config.get(fact) is not None}
    if not config.get("model_type") or not {"hidden_size", "num_hidden_layers", "vocab_size"} <= values.keys():
        raise InputError("the recording lacks its model's config, so the run cannot be simulated")
    return {"model_type": str(config["model_type"]), **values}


def place_model(likeness: Likeness, folder: Path) -> Settings:
    """Write the recorded config into a folder below ``folder``, and return the settings with ``model`` naming it.

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
            write_whole(place / "config.json", text)
    except OSError as error:
        raise InputError(f"{place}: cannot be written ({error.strerror or error}).") from None
    return settings.with_(model=str(place))
