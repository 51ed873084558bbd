"""Read settings from YAML and JSON files, also those written for other tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from memprof.config.settings.parts import kinds_of
from memprof.config.settings.run import Settings
from memprof.config.trainer_fields import class_fields, class_with, executed_of, flat_fields, left_out_of
from memprof.config.trl_arguments import said_by_trl
from memprof.errors import InputError
from memprof.files import refuse_special

# Names this alike are one, misspelt; per_device_eval_batch_size, TRL's own, is 0.87 like ours.
_MISSPELT = 0.93
#: Names that other tools' config files use for the same setting.
ALIASES = {
    "model_name_or_path": "model",
    "max_prompt_length": "prompt_length",
    "max_completion_length": "completion_length",
    "lora_rank": "lora_r",
    "r": "lora_r",
    "target_modules": "lora_target_modules",
    "torch_dtype": "dtype",
    "activation_checkpointing": "gradient_checkpointing",
    "use_bnb_nested_quant": "bnb_4bit_use_double_quant",
    "lora_modules_to_save": "modules_to_save",
    "lora_target_parameters": "target_parameters",
    "num_processes": "gpus",  # accelerate's, which TRL's command line takes too
}
# Names that only the configuration of a launcher has.
_DEEPSPEEDS = {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"}
_ACCELERATES = {"compute_environment", "distributed_type"}
# Settings that are lists of names.
_LISTS = ("lora_target_modules", "modules_to_save")


def read_settings(path: str | Path, trainer: str | None = None) -> dict[str, Any]:
    """Read settings from a YAML or JSON file of the fields that TRL's, transformers' and PEFT's configurations have.

    Fields that change memory and are not simulated are listed in ``left_out``; those that no configuration has in
    ``unknown``; ``generation_batch_size`` stays by this name, because it counts what other settings decide.

    Args:
        path: the file.
        trainer: which trainer's fields are meant, where the file does not say.

    Raises:
        InputError: the file cannot be read or holds no mapping, it configures a launcher and not a trainer, or a name
            in it is nearly that of a setting.
    """
    file = Path(path)
    try:
        refuse_special(file)
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot be read ({error}).") from None
    given = _parse(file, text)
    _refuse_launchers(file, given)
    plain = {_plain_name(key): value for key, value in given.items()}
    trainer, kind = str(plain.get("trainer") or trainer), str(plain.get("peft_type") or "LORA")
    known = {f.name for f in fields(Settings)}
    values: dict[str, Any] = {}
    unknown: list[str] = []
    for key, value in plain.items():
        name = ALIASES.get(key, key)
        if name not in known and class_with(key, trainer, kind) is None and class_with(name, trainer, kind) is None:
            if near := get_close_matches(name, {*known, *_field_names()}, 1, _MISSPELT):
                raise InputError(f"{file}: {name} is no setting; {near[0]} is.")
            unknown.append(key)
        if name not in (*known, "generation_batch_size") or value is None:
            continue
        if name in _LISTS:
            value = tuple(value.split(",")) if isinstance(value, str) else value
            if not isinstance(value, (list, tuple)) or not all(isinstance(part, str) for part in value):
                raise InputError(f"{file}: {name} is {value!r:.40}; write a list of names.")
            value = tuple(value)
        if name in ("dtype", "bnb_4bit_compute_dtype"):
            value = str(value).removeprefix("torch.")
        values[name] = _number(name, value)
    told = {ALIASES[key] if key == "lora_target_parameters" else key: value for key, value in plain.items()}
    unknown += [name for name, _ in flat_fields(plain) if "." in name and class_with(name) is None]
    adapter, theirs = executed_of(told, trainer, kind)
    found = {
        "left_out": left_out_of(plain, trainer, kind), "unknown": tuple(unknown),
        "adapter_options": adapter, "trainer_options": theirs,
    }  # fmt: skip
    values |= {name: value for name, value in found.items() if value}
    return _with_kind(said_by_trl(values, given), given)


def _refuse_launchers(file: Path, given: Mapping[str, Any]) -> None:
    """Refuse (InputError) the configuration of DeepSpeed or accelerate, and name the options that say the same."""
    if _DEEPSPEEDS & set(given):
        zero = given.get("zero_optimization")
        stage = zero.get("stage") if isinstance(zero, Mapping) else None
        whose, gpus, sharding = "DeepSpeed", "N", f"zero{stage}" if stage in (1, 2, 3) else "zero2"
    elif _ACCELERATES & set(given):
        kind = {"FSDP": "fsdp2", "DEEPSPEED": "zero2"}.get(str(given.get("distributed_type")).upper(), "ddp")
        whose, gpus, sharding = "accelerate", str(given.get("num_processes") or "N"), kind
    else:
        return
    raise InputError(
        f"{file}: this configures {whose}, not a trainer. Give --gpus {gpus} --sharding {sharding} instead; offloading "
        "to the host is not simulated."
    )


def _plain_name(key: object) -> str:
    return str(key).replace("-", "_")


@cache
def _field_names() -> frozenset[str]:
    """List the fields of every configuration class."""
    kinds = class_fields().values()
    return frozenset(name for of in kinds for name in (*of.simulated, *of.no_memory, *of.executed, *of.not_simulated))


def _number(name: str, value: Any) -> Any:
    """Read a number as TRL does where YAML takes it for a word (``1e-3``), or where JSON writes a whole one ``5e8``."""
    kind = "int" if name == "generation_batch_size" else kinds_of(Settings).get(name, ("",))[0]
    if kind not in ("int", "float") or isinstance(value, bool):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        return value
    return number if kind == "float" else int(number) if number.is_integer() else value


def _with_kind(values: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Read the kind of checkpointing as transformers' and TRL's own arguments name it."""
    if values.get("gradient_checkpointing", True) is not True:
        return values
    for name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
        more = given.get(name)
        for key, kind in (("offload", "offloaded"), ("selective", "selective")):
            if isinstance(more, dict) and more.get(key):
                values["gradient_checkpointing"] = kind
    return values


def _parse(file: Path, text: str) -> dict[str, Any]:
    import json

    try:
        if file.suffix == ".json":
            data = json.loads(text)
        else:
            import yaml  # type: ignore[import-untyped]

            data = yaml.safe_load(text)
    except ImportError:
        raise InputError(f"{file}: reading YAML needs PyYAML; install it or write the file as JSON.") from None
    except ValueError as error:
        raise InputError(f"{file}: not valid {file.suffix or 'YAML'} ({str(error)[:80]}).") from None
    except Exception as error:  # yaml's own errors share no importable base without yaml
        raise InputError(f"{file}: not valid YAML ({str(error)[:80]}).") from None
    if not isinstance(data, dict):
        raise InputError(f"{file}: expected names and values, like a GRPOConfig written as YAML.")
    return data
