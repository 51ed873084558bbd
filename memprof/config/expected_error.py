"""Say how far predictions were off where they could be compared: the one place that every screen quotes.

``python -m benchmarks.simulator table`` writes ``comparisons.json``: every comparison, each in the class of runs that
it speaks for, and how many of those whose settings are known exactly have each part of a run. No torch here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from memprof.config.catalogue import find_config
from memprof.config.gpus import Gpu
from memprof.config.model_shape import ModelShape
from memprof.config.trainer_fields import unsimulated_of
from memprof.errors import InputError

#: Classes of comparisons that are not named after a trainer.
CAPTURED, TRACED, PUBLISHED = "programs on GPUs", "TRL runs on a CPU", "GPU runs known by a text"
# Of so many comparisons the next lies between the lowest and the highest with 90 % (exchangeable: (n - 1) / (n + 1)).
_ENOUGH = 20
# No range is stated narrower: figures on screens have few digits.
_LEAST = 0.001
# No field that is left out makes a need smaller than this share of the simulated one.
_LEAST_NEED = 0.1
# They add the same tensors over the tokens.
_TOKEN_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo")


@lru_cache(maxsize=1)
def _packaged() -> dict[str, Any]:
    text = Path(__file__).with_name("comparisons.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def comparisons() -> tuple[dict[str, Any], ...]:
    """Return every comparison: ``name``, ``class``, ``where`` (gpu, emulated, cpu, published), ``what`` (peak,
    allocated, reserved, device, generation), and the measured and simulated bytes."""
    return tuple(_packaged()["comparisons"])


def stated_range(errors: Sequence[float]) -> tuple[float, float]:
    """Return the range that is stated of a class with these errors: nine of ten further ones are to lie inside.

    Twenty errors are enough to take the lowest and the highest; with fewer, each end is moved outwards by as large a
    share of their distance as is lacking to twenty.
    """
    low, high = min(errors), max(errors)
    wider = (high - low) * max(0, _ENOUGH - len(errors)) / _ENOUGH
    return min(low - wider, -_LEAST), max(high + wider, _LEAST)


def class_of(config: Mapping[str, Any]) -> str:
    """Name the class of runs on the real allocator that a run with these settings belongs to: trainer, and what is
    trained."""
    trainer = str(config.get("trainer") or "grpo")
    if trainer == "grpo" and config.get("recipe") == "lean":
        return "lean trainer on an emulated card"
    kind = str(config.get("peft_type") or "LORA")
    lora = "full" if config.get("lora_r") is None else "QLoRA" if config.get("load_in_4bit") else "LoRA"
    tuned = lora if kind == "LORA" else kind
    return f"{'TRL' if trainer == 'grpo' else trainer.upper()}, {tuned}, on an emulated card"


def parts_of(config: Mapping[str, Any], card: Gpu | None = None) -> list[str]:
    """List the parts of a run with these settings that a comparison can cover or lack, in words."""
    several, sharding = (config.get("gpus") or 1) > 1, str(config.get("sharding", "ddp"))
    lean, trainer = config.get("recipe") == "lean", config.get("trainer", "grpo")
    generation, cache = config.get("generation"), config.get("cache_implementation", "dynamic")
    parts = {
        f"trainer {trainer}": trainer in ("rloo", "sft", "dpo"),
        f"recipe {config.get('recipe')}": config.get("recipe") not in (None, "trl"),
        f"loss {config.get('loss_type')}": config.get("loss_type") not in (None, *_TOKEN_LOSSES),
        "LoRA": config.get("lora_r") is not None,
        f"{config.get('peft_type')} adapters": config.get("peft_type") not in (None, "LORA"),
        "DoRA": bool(config.get("use_dora")),
        "modules trained beside an adapter": bool(config.get("modules_to_save")),
        **dict.fromkeys(config.get("adapter_options") or (), True),
        **dict.fromkeys(config.get("trainer_options") or (), True),
        "4-bit layers": bool(config.get("load_in_4bit")),
        f"optimizer {config.get('optim')}": config.get("optim") not in (None, "none"),
        "vLLM's pool": generation == "vllm",
        "token-by-token generation": generation == "hf",
        f"{cache} cache": cache != "dynamic" and generation == "hf",
        f"{config.get('cache_dtype')} keys and values": config.get("cache_dtype") in ("fp8", "int4", "int2"),
        f"sharding {sharding}": several and sharding != "ddp",
        "gradient buckets": several and sharding == "ddp",
        f"{'lean ' if lean else ''}checkpointing {config.get('gradient_checkpointing')}": isinstance(
            config.get("gradient_checkpointing"), str
        ),
        "a reward model": bool(config.get("reward_model")),
        "AMD's cards": card is not None and card.name.startswith("MI"),
        "padding": config.get("padding") == "worst",
        **dict.fromkeys(_of_model(str(config.get("model") or "")), True),
    }
    return [name for name, present in parts.items() if present]


@lru_cache(maxsize=64)
def _of_model(name: str) -> tuple[str, ...]:
    try:
        return model_parts(find_config(name)) if name else ()
    except (InputError, OSError):  # of a report read elsewhere
        return ()


def model_parts(config: Mapping[str, Any]) -> tuple[str, ...]:
    """List what sets a model with this config apart from a plain decoder, in words."""
    shape = ModelShape.of(config)
    found = {
        "a mixture of experts": shape.experts > 0,
        "latent attention": shape.latent > 0,
        **{f"{kind.replace('_', ' ')} layers": True for kind in shape.layer_kinds if kind != "full_attention"},
    }
    return tuple(part for part, present in sorted(found.items()) if present)


def not_compared(config: Mapping[str, Any], card: Gpu | None = None) -> list[str]:
    """List the parts of a run with these settings that no comparison of exactly known settings has."""
    return [part for part in parts_of(config, card) if part not in _packaged()["compared"]]


def class_compared(config: Mapping[str, Any]) -> bool:
    """Tell whether the class of a run with these settings was compared with what runs for real."""
    return _classes_of([config])[0] != CAPTURED


def expected_error(*configs: Mapping[str, Any], card: Gpu | None = None) -> dict[str, Any]:
    """Return what is known of the error of predictions with these settings, as it stands in the report.

    ``allocated`` and ``reserved`` state a signed range (simulated / measured - 1) for the case that what was given is
    what runs: nine of ten comparisons lie inside whose settings are known exactly, of programs on GPUs and of the run's
    own ``class``. ``basis`` lists both; ``not_compared`` names what no comparison covers; ``assumed`` lists settings
    that nobody gave, with the values taken, those that memory usually follows most first.
    """
    lacking = {field.name: field for config in configs for field in unsimulated_of(config)}
    low, high = (1 + sum(getattr(field, side) for field in lacking.values()) for side in ("low", "high"))
    told = list(dict.fromkeys(part for config in configs for part in not_compared(config, card)))
    names = _classes_of(configs)
    found = {
        "class": names[0],
        "allocated": _widened(_range(names, "reserved"), low, high),
        "reserved": _widened(_range(names, "allocated", "peak", "generation"), low, high),
        "not_simulated": [*lacking],
        "not_compared": told,
        "assumed": _assumed(configs),
        "basis": [{"class": name, **_range([name])} for name in names],
    }
    return {**found, "sentence": _sentence(found)}


def _classes_of(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name the classes whose comparisons speak for runs with these settings; a run of no class is a program."""
    if any(config.get("device") == "cpu" for config in configs):
        return [TRACED]
    known = {row["class"] for row in comparisons()}
    wanted = dict.fromkeys(class_of(config) for config in configs if config.get("recipe"))
    return [*(name for name in wanted if name in known), CAPTURED]


def _assumed(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """List what every one of these runs leaves open, where they take the same value."""
    first, *others = configs
    return [
        {"setting": name, "value": first[name]}
        for name in first.get("assumed") or ()
        if all(name in (more.get("assumed") or ()) and more.get(name) == first[name] for more in others)
    ]


def _range(names: Sequence[str], *without: str) -> dict[str, Any]:
    """State the range of some classes, all that was measured of them but these kinds."""
    errors = [
        row["simulated_bytes"] / row["measured_bytes"] - 1
        for row in comparisons()
        if row["class"] in names and row["what"] not in without
    ]
    if not errors:  # a CPU reserves nothing
        return {"low": 0.0, "high": 0.0, "comparisons": 0}
    low, high = stated_range(errors)
    return {"low": round(low, 4), "high": round(high, 4), "comparisons": len(errors)}


def _widened(found: dict[str, Any], low: float, high: float) -> dict[str, Any]:
    """Widen a range of errors for a need that is really ``low`` to ``high`` times what was simulated."""
    if not found["comparisons"] or low == high == 1:
        return found
    least = (1 + found["low"]) / max(high, 1) - 1
    most = (1 + found["high"]) / min(max(low, _LEAST_NEED), 1) - 1
    return {**found, "low": round(least, 4), "high": round(most, 4)}


def _sentence(found: Mapping[str, Any]) -> str:
    held, reserved = found["allocated"], found["reserved"]
    words = f"If these settings are what runs: allocated {_spread(held)}"
    if reserved["comparisons"]:
        words += f", reserved {_spread(reserved)}"
    each = ", ".join(f"{of['comparisons']} of {of['class']}" for of in found["basis"])
    words += f" ({each})."
    if found["not_simulated"]:
        words += f" Not simulated: {', '.join(found['not_simulated'])}, which the range allows for."
    if found["not_compared"]:
        words += f" Never compared: {', '.join(found['not_compared'])}."
    if found["assumed"]:
        taken = ", ".join(f"{of['setting']} {_word(of['value'])}" for of in found["assumed"])
        words += f" Assumed, because nobody gave it: {taken}."
    return words


def _word(value: Any) -> str:
    return "none" if value is None else "on" if value is True else "off" if value is False else str(value)


def _spread(seen: Mapping[str, Any]) -> str:
    """Write a range in percent: signed, true minuses, two digits that count."""
    low, high = (f"{100 * seen[side]:+.{0 if abs(seen[side]) >= 0.1 else 1}f}" for side in ("low", "high"))
    return f"{low} to {high} %".replace("-", "−")
