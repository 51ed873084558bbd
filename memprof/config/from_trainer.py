"""Read the settings of a run from its trainer, or from what a script hands to one.

The way back is :mod:`memprof.config.to_trl_config`; recordings are read by :mod:`memprof.config.from_recording`. No
torch here: what is read is looked at by name.
"""

from __future__ import annotations

import heapq
import json
import re
from collections import Counter
from dataclasses import MISSING, fields
from typing import Any

from memprof.config.optimizers import OPTIMIZERS, nearest
from memprof.config.settings import CHOICES, Settings
from memprof.config.to_trl_config import GRPO_NAMES, LEAN_NAMES
from memprof.config.trainer_fields import ADAPTER_CLASSES, class_fields, executed_of, left_out_of
from memprof.config.trl_arguments import attention_of, generation_of
from memprof.errors import UsageError
from memprof.foreign import ConfigValues

#: Settings whose value a script's arguments hold, and may be given instead of theirs; by their names there.
ARGUMENTS = {
    name: GRPO_NAMES[name]
    for name in (
        "num_generations", "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation",
        "completion_length", "beta", "optim",
    )
}  # fmt: skip
#: All settings that may be given instead of a script's own.
CHANGEABLE = (*ARGUMENTS, "prompt_length", "attn", "padding", "generation", "alloc_conf")
#: What :func:`lean_values` reads.
LEAN_ARGUMENTS = (*LEAN_NAMES, "checkpointing", "gradient_checkpointing", "cache_implementation")

_SUPERVISED = {"SFTTrainer": "sft", "DPOTrainer": "dpo"}
_PROMPT_LENGTH = 512  # tokens, where it is not known
_MAX_ROWS = 1000  # of a dataset, looked at for the longest prompt
_LONGEST = 64  # prompts with the most characters, whose tokens are counted
# Where these are not at their default, a simulation of the settings alone is of another run.
_ONLY_THE_TRAINERS = (
    "micro_splitting", "exact_two_pass", "loss_chunk_tokens", "packing", "reference", "stochastic_rounding",
    "gradient_sums",
)  # fmt: skip
# In the names of an adapter's parameters: PEFT's prefixes, and copies of modules that are trained beside it.
_ADAPTERS = re.compile(r"(^|\.)(lora_|vera_|ia3_|prompt_encoder\.|modules_to_save\.)")
_CACHES = ("dynamic", "static", "quantized")


def from_trainer(trainer: Any, model: Any, notes: list[str], *, name: str, attention: Any) -> Settings:
    """Describe the run that a built lean trainer will make, on all its ranks.

    Completions have their full length, prompts the length of the dataset's longest. ``model`` has no wrappers of an
    adapter or of a sharded run; ``name`` is where it was loaded from; ``attention`` is transformers' name of its
    attention code. Sentences on what was assumed are added to ``notes``.

    Raises:
        UsageError: the settings contradict each other, or cannot be simulated.
    """
    adapted = _adapter(trainer.model)
    changes = {
        "prompt_length": _longest_prompt(trainer, notes),
        "attn": attention_of(attention),
        "device": "cuda" if trainer.accelerator.device.type == "cuda" else "cpu",
    }
    name = name or model.config.model_type
    kind = trainer_kind(trainer)
    settings = from_arguments(trainer.args, model, adapted, changes, notes, lean=True, name=name, kind=kind)
    accelerator = trainer.accelerator
    stage = getattr(getattr(accelerator.state, "deepspeed_plugin", None), "zero_stage", None)
    kind = str(getattr(accelerator.distributed_type, "value", ""))
    return settings.with_(
        lora_target_modules=_targets(adapted), **sharding_of(int(accelerator.num_processes), kind, stage or 2)
    )


def trainer_kind(trainer: Any) -> str:
    """Return ``rloo`` for TRL's ``RLOOTrainer`` and its subclasses, whatever their names, else ``grpo``."""
    return "rloo" if any(kind.__name__ == "RLOOTrainer" for kind in type(trainer).__mro__) else "grpo"


def supervised_kind(trainer: Any) -> str | None:
    """Return ``sft`` or ``dpo`` for TRL's ``SFTTrainer`` and ``DPOTrainer`` and subclasses that users make of them;
    None for TRL's own subclasses, which have a teacher or generate."""
    for kind in type(trainer).__mro__:
        if kind.__name__ in _SUPERVISED:
            return _SUPERVISED[kind.__name__]
        if kind.__module__.partition(".")[0] == "trl":
            return None
    return None


def from_arguments(
    arguments: Any,
    model: Any,
    adapter: Any,
    changes: ConfigValues,
    notes: list[str],
    *,
    lean: bool = False,
    name: str = "",
    kind: str = "grpo",
) -> Settings:
    """Describe the run that ``arguments``, a ``GRPOConfig``, ``RLOOConfig`` or (``lean``) a lean one, a model or the
    name of one, and an adapter make: a ``LoraConfig``, or None for the one that the model has, if any.

    ``changes`` are settings to override, and ``device``; ``name`` is where a model was loaded from. Sentences on what
    is not simulated as it is are added to ``notes``.

    Raises:
        UsageError: the settings contradict each other.
    """
    adapter = _adapter(model) if adapter is None else adapter
    # What is not in changes is the arguments' own, or the default of Settings.
    values: dict[str, Any] = {
        ours: getattr(arguments, theirs)
        for ours, theirs in GRPO_NAMES.items()
        if kind == "grpo" or ours != "loss_type"  # RLOO has one loss
    }
    values |= {
        "trainer": kind,
        "model": model if isinstance(model, str) else name or "the script's model",
        "dtype": _dtype(arguments, model),
        "mixed_precision": "bf16" if arguments.bf16 else "fp16" if arguments.fp16 else "no",
        "load_in_4bit": bool(getattr(model, "is_loaded_in_4bit", False)),
        "gradient_checkpointing": bool(arguments.gradient_checkpointing),
        "generation": changes.get("generation") or generation_of(arguments.use_vllm, arguments.vllm_mode),
        "prompt_length": changes.get("prompt_length", _PROMPT_LENGTH),
        "device": changes.get("device", "cuda"),
        **{name: changes[name] for name in ("attn", "padding", "alloc_conf") if name in changes},
    }
    if adapter is not None:
        values |= _of_adapter(adapter, kind, notes)
    theirs = executed_of({name: getattr(arguments, name, None) for name in _executed(kind)}, kind)[1]
    values["trainer_options"] = theirs
    if lean:
        values |= lean_values({name: getattr(arguments, name, None) for name in LEAN_ARGUMENTS}, notes)
        values["park_weights"] = bool(getattr(arguments, "park_weights", False)) and values["generation"] == "vllm"
    values["optim"], note = optimizer_of(str(getattr(arguments.optim, "value", arguments.optim)))
    notes += note
    return Settings(**values)


def _executed(kind: str) -> list[str]:
    """List the fields of a trainer's configuration that a simulation hands to it."""
    return [*class_fields()["RLOOConfig" if kind == "rloo" else "GRPOConfig"].executed]


def _of_adapter(adapter: Any, trainer: str, notes: list[str]) -> dict[str, Any]:
    """Return the settings of an adapter's configuration; a kind that is not simulated is described as LoRA."""
    facts = adapter_facts(adapter)
    if facts["peft_type"] not in ADAPTER_CLASSES:
        notes.append(f"adapters of the kind {facts['peft_type']} are not simulated by settings alone: LoRA is assumed")
        facts = {**facts, "peft_type": "LORA", "options": {}}
    named = facts["target_modules"]
    values = adapter_values({**facts, "target_modules": None if isinstance(named, str) else named}, trainer)
    notes += [f"{name} of the adapter is not simulated by settings alone" for name in values.pop("left_out")]
    return values


def as_built(settings: Settings, setup: ConfigValues) -> Settings:
    """Return the settings, read before the trainer was built, with what the built model has: the dtype of most of its
    weights, and whether in 4 bits, by ``setup`` as a recording keeps it."""
    changes: dict[str, Any] = {"load_in_4bit": setup["load_in_4bit"] and settings.has_adapter}
    if changes["load_in_4bit"]:
        changes |= four_bit(setup)
    if settings.lora_r is not None:
        changes["lora_dropout"] = dropout_of(setup.get("adapter") or {})
    if (dtype := dtype_of(setup)) is not None:
        changes["dtype"] = dtype
    return settings.with_(**changes)


# -- one subject each, for trainers and recordings ---------------------------------------------------------------------


def optimizer_of(name: str) -> tuple[str, list[str]]:
    """Return the optimizer that is simulated for ``name``, and a sentence where it is another one."""
    near = nearest(name)
    return near, [] if name in OPTIMIZERS else [f"the optimizer {name} is simulated as {near}"]


def four_bit(setup: ConfigValues) -> dict[str, Any]:
    """Return the settings of 4-bit weights that a recording's setup tells; {} where it is an old one."""
    found = setup.get("four_bit") or {}
    kind = str(found.get("bnb_4bit_compute_dtype", "auto")).removeprefix("torch.")
    told = {"bnb_4bit_use_double_quant": bool(found.get("bnb_4bit_use_double_quant"))}
    return {**told, "bnb_4bit_compute_dtype": kind} if kind in CHOICES["bnb_4bit_compute_dtype"] else told


def dtype_of(setup: ConfigValues) -> str | None:
    """Return the dtype of most parameters, of those that a simulation knows; an adapter's few do not decide."""
    counts = {name: count for name, count in (setup.get("dtypes") or {}).items() if name in CHOICES["dtype"]}
    return max(counts, key=lambda name: counts[name], default=None)


def adapter_facts(config: Any) -> dict[str, Any]:
    """Return what a PEFT configuration says that memory follows: under ``options`` the fields with no word of ours."""
    rank = getattr(config, "r", None)
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    table = class_fields().get(ADAPTER_CLASSES.get(kind, ""))
    names = set() if table is None else {*table.executed, *table.not_simulated} - {"task_type"}
    options = {}
    for of in fields(config):
        value = getattr(config, of.name)
        default = of.default_factory() if of.default_factory is not MISSING else of.default
        if of.name in names and value != default:
            options[of.name] = sorted(value) if isinstance(value, (set, frozenset)) else value
    targets = getattr(config, "target_modules", None)
    return {
        "peft_type": kind,
        "r": rank if isinstance(rank, int) and rank > 0 else None,
        "lora_alpha": getattr(config, "lora_alpha", None),
        "lora_dropout": getattr(config, "lora_dropout", None),
        "target_modules": targets if isinstance(targets, str) else sorted(targets or []),
        "modules_to_save": sorted(getattr(config, "modules_to_save", None) or []),
        "use_dora": bool(getattr(config, "use_dora", False)),
        "num_virtual_tokens": getattr(config, "num_virtual_tokens", None),
        "options": json.loads(json.dumps(options, default=str)),
    }


def adapter_values(facts: ConfigValues, trainer: str | None = None) -> dict[str, Any]:
    """Return the settings of an adapter from :func:`adapter_facts`, as a recording keeps them.

    Raises:
        UsageError: adapters of this kind are not simulated.
    """
    kind, rank = str(facts.get("peft_type") or "LORA"), facts.get("r")
    if kind not in ADAPTER_CLASSES:
        raise UsageError(f"adapters of the kind {kind} are not simulated; {', '.join(ADAPTER_CLASSES)} are")
    options = facts.get("options") or {}
    named = facts.get("target_modules") or "all-linear"
    targets = (named,) if isinstance(named, str) else sorted({str(name).rpartition(".")[2] for name in named})
    values: dict[str, Any] = {
        "peft_type": kind,
        "lora_target_modules": tuple(targets) if kind != "PROMPT_TUNING" else ("all-linear",),
        "modules_to_save": tuple(facts.get("modules_to_save") or ()) if kind != "PROMPT_TUNING" else (),
        "adapter_options": executed_of(options, trainer, kind)[0],
        "left_out": left_out_of(options, trainer, kind),
    }
    if kind == "LORA":
        values["lora_r"] = int(rank) if rank else None
        values["lora_dropout"], values["use_dora"] = dropout_of(facts), bool(facts.get("use_dora"))
    if kind == "PROMPT_TUNING":
        values["num_virtual_tokens"] = int(facts.get("num_virtual_tokens") or 0) or None
    return values


def dropout_of(adapter: ConfigValues) -> float:
    """Return the share of an adapter's inputs that is dropped."""
    share = adapter.get("lora_dropout")
    return float(share) if isinstance(share, (int, float)) and 0 <= share < 1 else 0.0


def sharding_of(ranks: int, kind: str, stage: Any) -> dict[str, Any]:
    """Return ``gpus`` and ``sharding`` of so many ``ranks``; ``kind`` is accelerate's ``distributed_type``, ``stage``
    ZeRO's."""
    if ranks == 1:
        return {"gpus": 1}
    kind = kind.upper()
    sharding = "fsdp2" if "FSDP" in kind else f"zero{stage}" if "DEEPSPEED" in kind else "ddp"
    return {"gpus": ranks, "sharding": sharding}


def lean_values(config: ConfigValues, notes: list[str]) -> dict[str, Any]:
    """Return settings by name from the lean trainer's arguments, :data:`LEAN_ARGUMENTS`; what is missing has its
    default. Sentences are added to ``notes`` where a setting stands for another one."""
    values = {name: config[name] for name in LEAN_NAMES if config.get(name) is not None}
    kind = config.get("checkpointing") or "auto"
    if kind == "auto":
        kind = bool(config.get("gradient_checkpointing", True))
    elif kind == "mlp":
        notes.append("checkpointing='mlp' is simulated as none, which uses more memory")
        kind = False
    name = config.get("cache_implementation") or "dynamic"
    if name not in _CACHES:
        notes.append(f"the cache {name!r} is simulated as a cache on the device, which uses more memory")
        name = "dynamic"
    return {"recipe": "lean", "gradient_checkpointing": kind, "cache_implementation": name, **values}


def not_kept(config: ConfigValues, defaults: ConfigValues) -> list[str]:
    """List ``name=value`` of the lean trainer's arguments that are not at their defaults and that settings lack."""
    set_so = ((name, config.get(name, defaults.get(name))) for name in _ONLY_THE_TRAINERS)
    return [f"{name}={value!r}" for name, value in set_so if value != defaults.get(name)]


def prompt_tokens(data: Any, tokenizer: Any) -> int | None:
    """Count the tokens of the longest prompt among the first rows; None where there are no rows to look at."""
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


def _longest_prompt(trainer: Any, notes: list[str]) -> int:
    try:
        prompts = heapq.nlargest(_LONGEST, trainer.train_dataset["prompt"], key=lambda prompt: len(str(prompt)))
    except (TypeError, KeyError, AttributeError):  # a stream: its first rows are looked at
        prompts = None
    data = trainer.train_dataset if prompts is None else [{"prompt": prompt} for prompt in prompts]
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    longest = prompt_tokens(data, tokenizer)
    if not longest:
        notes.append(f"how long prompts are is not known: {_PROMPT_LENGTH} tokens are assumed")
        return _PROMPT_LENGTH
    notes.append(f"prompts of {longest} tokens, the longest of the dataset; completions of full length")
    return longest


def _dtype(arguments: Any, model: Any) -> str:
    """Return the dtype that most of a model's weights are in, or that a model given by name is loaded in."""
    if isinstance(model, str):
        kind = (arguments.model_init_kwargs or {}).get("dtype", "float32")
        kind = "bfloat16" if kind in ("auto", None) else str(kind)
    else:
        kinds = _elements_by_dtype(model)
        kind = kinds.most_common(1)[0][0] if kinds else "float32"
    kind = kind.removeprefix("torch.")
    return kind if kind in CHOICES["dtype"] else "bfloat16"


def _elements_by_dtype(model: Any) -> Counter[str]:
    """Count the elements of a model's own floating-point weights by dtype, without an adapter's, often in another."""
    kinds: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        if parameter.dtype.is_floating_point and not _ADAPTERS.search(name):
            # What ZeRO-3 has taken away is said beside it.
            kinds[str(parameter.dtype)] += int(getattr(parameter, "ds_numel", parameter.numel()))
    return kinds


def _adapter(model: Any) -> Any:
    """Return the first adapter's config, None where a model has none."""
    return next(iter((getattr(model, "peft_config", None) or {}).values()), None)


def _targets(adapter: Any) -> tuple[str, ...]:
    """Return the names of the modules an adapter is on; PEFT spells "all-linear" out."""
    targets = getattr(adapter, "target_modules", None) or "all-linear"
    if isinstance(targets, str):
        return (targets,)
    return tuple(sorted({str(target).rpartition(".")[2] for target in targets}))
