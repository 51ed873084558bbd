"""Read a simulated run's settings from options named as in ``GRPOConfig``, ``LoraConfig``, ``TrainingArguments``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from memprof.cli.unused_options import refuse_unused
from memprof.config.trainer_fields import class_fields
from memprof.errors import UsageError
from memprof.files import read_toml

if TYPE_CHECKING:
    from memprof.config.settings import Settings

F = TypeVar("F", bound=Callable[..., Any])

_KIND = "gradient_checkpointing"


def _keep(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    kept: str | None = context.params.get(_KIND)
    return value if value is not None else kept


def _switch_off(context: click.Context, option: click.Parameter, value: bool) -> None:
    if value:
        context.params[_KIND] = "none"


_TYPES: dict[str, dict[str, Any]] = {
    "int": {"type": int},
    "float": {"type": float},
    "count": {"type": click.IntRange(min=1)},
    "path": {"type": click.Path(path_type=Path)},
    "flag": {"is_flag": True, "default": None},
    "switch": {"default": None},
}
_CALLBACKS: dict[str, dict[str, Any]] = {_KIND: {"callback": _keep}, f"no_{_KIND}": {"callback": _switch_off}}


def _of_configurations() -> dict[str, str]:
    """Say what to do about fields of TRL's, transformers' and PEFT's configurations that are no options."""
    told = {"--lr": "the learning rate changes no memory; drop it"}
    for kind in class_fields().values():
        for name in (*kind.no_memory, *kind.earlier):
            told.setdefault(f"--{name.replace('_', '-')}", "it changes no memory; drop it")
        for name in kind.executed:
            told.setdefault(f"--{name.replace('_', '-')}", f"write {name} into a file, and give it with --config")
        for name, field in kind.not_simulated.items():
            told.setdefault(f"--{name.replace('_', '-')}", f"it is not simulated; it {field.why}")
    return told


#: Rows by name, by the title of their group; the head of the file says what stands in them.
_TABLE = read_toml(Path(__file__).with_suffix(".toml"))
#: Other names of options, and names that are none, with what to give instead.
OTHER_NAMES: dict[str, str] = _TABLE.pop("Other names")
INSTEAD: dict[str, str] = {**_of_configurations(), **_TABLE.pop("Instead")}


def _option(name: str, row: Mapping[str, Any]) -> Callable[[F], F]:
    given = {key: value for key, value in row.items() if key not in ("names", "type")}
    names = row.get("names", [f"--{name.replace('_', '-')}"])
    return click.option(*names, **_TYPES.get(row.get("type", ""), {}), **_CALLBACKS.get(name, {}), **given)


_OPTIONS = [_option(name, row) for rows in _TABLE.values() for name, row in rows.items() if name != "also"]
#: How ``--help`` groups these options, and those that simulate and plan add.
GROUPS = {title: " ".join([*(rows.keys() - {"also"}), rows.get("also", "")]) for title, rows in _TABLE.items()}
budget_option = click.option(
    "--memory-budget",
    metavar="SIZE|auto",
    help="With --recipe lean: choose the fastest settings that fit this size, or (auto) the GPU given by --gpu.",
)


def run_options(function: F) -> F:
    """Add the options to a command, which gets them as keyword arguments, None where not given."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def given_settings(config_file: Path | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Collect the settings that a file and options give; options win."""
    from memprof.config.settings import read_settings

    values = read_settings(config_file, given.get("trainer")) if config_file is not None else {}
    values |= {name: value for name, value in given.items() if value is not None and name != "allow_unsimulated"}
    for name in ("lora_target_modules", "modules_to_save"):
        if isinstance(text := values.get(name), str):
            values[name] = names_of(text)
    return _with_steps(values)


def _with_steps(values: dict[str, Any]) -> dict[str, Any]:
    """Replace ``generation_batch_size`` of a file by the ``steps_per_generation`` it comes to, as TRL does."""
    whole = values.pop("generation_batch_size", None)
    if whole is None:
        return values
    if values.get("steps_per_generation") is not None:
        raise UsageError("generation_batch_size and steps_per_generation can't be used together in TRL.")
    batch = values.get("per_device_train_batch_size", 8) * (values.get("gpus") or 1)
    if not isinstance(whole, int) or not isinstance(batch, int) or whole < batch or whole % batch:
        raise UsageError(
            f"generation_batch_size {whole!r} is not a multiple of the batch of all GPUs, {batch}, which TRL requires."
        )
    return {**values, "steps_per_generation": whole // batch}


def refuse_unsimulated(settings: Settings, allowed: object) -> None:
    """Refuse (UsageError) fields that change memory and that settings leave out, unless this is allowed."""
    from memprof.config.trainer_fields import unsimulated_of

    fields = [field for field in unsimulated_of(settings.known) if not field.noted]
    if fields and not allowed:
        told = " ".join(field.sentence() for field in fields)
        it = "it" if len(fields) == 1 else "them"
        raise UsageError(f"{told} Drop {it}, or add --allow-unsimulated to leave {it} out and widen the stated range.")


def with_gpu_count(
    gpu: str | None, config_file: Path | None, given: dict[str, Any]
) -> tuple[str | None, dict[str, Any]]:
    """Split ``8xH100`` into the GPU and ``--gpus 8``; return the GPU and ``given`` with the number. UsageError where
    ``--gpus`` gives another number, or the text is no GPU."""
    from memprof.config.gpus import find_gpu, split_count

    if gpu is None:
        return None, given
    count, single = split_count(gpu)
    find_gpu(single)
    if count == 1:
        return single, given
    asked = given_settings(config_file, given).get("gpus")
    if asked not in (None, count):
        raise UsageError(f"--gpu {gpu} means {count} GPUs, and --gpus is {asked}: give one of them.")
    return single, {**given, "gpus": count}


def settings_of(
    config_file: Path | None, given: Mapping[str, Any], *, device: str = "cuda", open_names: Collection[str] = ()
) -> Settings:
    """Make settings of a file and of options. ``open_names``: settings that the command varies itself. UsageError for
    no model, settings that contradict each other, or an option that changes nothing."""
    from memprof.config.settings import TRAINERS_OWN, Settings
    from memprof.config.trl_arguments import assumed_of

    values = given_settings(config_file, given)
    values = {**TRAINERS_OWN.get(str(values.get("trainer")), {}), **values, "assumed": assumed_of(values)}
    if not values.get("model"):
        raise UsageError("which model? Give --model, a hub id such as Qwen/Qwen2.5-1.5B-Instruct or a config.json.")
    values["device"] = device
    try:
        settings = Settings(**values)
    except TypeError as error:
        raise UsageError(f"a setting has a value of the wrong kind ({error}).") from None
    refuse_unused(settings, given, open_names)
    refuse_unsimulated(settings, given.get("allow_unsimulated"))
    return settings


def names_of(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def value_of(text: str) -> bool | int | float | str:
    """Read the value of a setting written as ``NAME=VALUE``."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
