"""The options of a simulated run, named as ``GRPOConfig``, ``LoraConfig`` and ``TrainingArguments`` name them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from memprof.config.settings import Settings

__all__ = ["budget_option", "check_sharding", "run_options", "settings_of"]

F = TypeVar("F", bound=Callable[..., Any])

_COUNT = click.IntRange(min=1)
_KIND = "gradient_checkpointing"


def _keep(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    kept: str | None = context.params.get(_KIND)
    return value if value is not None else kept


def _switch_off(context: click.Context, option: click.Parameter, value: bool) -> None:
    if value:
        context.params[_KIND] = "none"


_OPTIONS = (
    click.option("--model", help="Hub id of the packaged catalogue, folder, or config.json."),
    click.option(
        "--config", "config_file", type=click.Path(path_type=Path), metavar="FILE",
        help="YAML or JSON with any of these settings by their own names; options given here win.",
    ),
    click.option("--dtype", help="Of the parameters: float32 (what TRL loads by name), bfloat16, float16."),
    click.option("--lora-r", type=_COUNT, metavar="R", help="Train an adapter of this rank instead of the model."),
    click.option("--lora-target-modules", metavar="NAMES", help="Comma-separated; default: all-linear."),
    click.option("--load-in-4bit", is_flag=True, default=None, help="Base weights as bitsandbytes NF4 (QLoRA)."),
    click.option("--num-generations", type=int, metavar="G", help="Completions of one prompt."),
    click.option("--per-device-train-batch-size", type=int, metavar="N", help="Completions in a micro-batch."),
    click.option("--gradient-accumulation-steps", type=int, metavar="N"),
    click.option("--steps-per-generation", type=int, metavar="N"),
    click.option("--num-iterations", type=_COUNT, metavar="N", help="Optimizer passes over one generation."),
    click.option("--prompt-length", type=int, metavar="TOKENS"),
    click.option("--completion-length", type=int, metavar="TOKENS"),
    click.option(
        "--gradient-checkpointing", is_flag=False, flag_value="auto", metavar="[KIND]", callback=_keep,
        help="auto (also with no KIND: full, of lean by the sequences' length), full, selective (attention's outputs "
        "are kept), offloaded (to the host) or none.",
    ),
    click.option(
        "--no-gradient-checkpointing", is_flag=True, expose_value=False, callback=_switch_off, help="As KIND none.",
    ),
    click.option("--beta", type=float, help="KL coefficient; other than 0 needs a reference model."),
    click.option("--optim", help="A name of transformers' optimizers, or none for no optimizer step."),
    click.option("--attn", help="auto, flash, efficient or math."),
    click.option("--padding", help="none, or worst: masks hold padding, which rules flash attention out."),
    click.option("--generation", help="hf, none or vllm."),
    click.option("--cache-implementation", help="Of hf's generation: dynamic, static or quantized."),
    click.option("--cache-dtype", help="Of a quantized cache: fp8, int4 or int2."),
    click.option("--reward-model", metavar="MODEL", help="A model that scores completions, given as --model is."),
    click.option("--recipe", help="trl, trl-full-logits, trl-0.14, liger or lean."),
    click.option("--max-tokens-per-piece", type=_COUNT, metavar="N", help="Of lean: through the model together."),
    click.option("--tiled-mlp", type=_COUNT, metavar="TOKENS", help="Of lean: through an MLP together."),
    click.option("--prefix-sharing", is_flag=True, default=None, help="Of lean: a group's prompt is computed once."),
    click.option("--generation-batch", type=_COUNT, metavar="N", help="Of lean: sequences generated together."),
    click.option("--vllm-gpu-memory-utilization", type=float, metavar="SHARE", help="Of the card, for vllm."),
    click.option("--vllm-enable-sleep-mode/--no-vllm-enable-sleep-mode", default=None),
    click.option("--gpus", type=int, metavar="N"),
    click.option("--gpus-per-node", type=_COUNT, metavar="N", help="Whose processes share a host's memory; default 8."),
    click.option("--host-memory", metavar="SIZE", help="Of a node: a run that needs more of it does not fit."),
    click.option("--reduce-bucket-size", type=_COUNT, metavar="N", help="Of ZeRO, in elements; default 500000000."),
    click.option("--sharding", help="ddp, fsdp2, zero1, zero2, zero3 or tp, with --gpus above 1."),
    click.option("--alloc-conf", metavar="STRING", help="As PYTORCH_CUDA_ALLOC_CONF."),
)  # fmt: skip


budget_option = click.option(
    "--memory-budget",
    metavar="SIZE|auto",
    help="With --recipe lean: choose the fastest settings that fit this size, or (auto) the card that --gpu names.",
)


def run_options(function: F) -> F:
    """Add the options to a command; they arrive as keyword arguments, None where not given."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def settings_of(config_file: Path | None, given: dict[str, Any], *, device: str = "cuda") -> Settings:
    """Settings from a file and from options.

    Raises:
        InputError: the file cannot be used.
        UsageError: no model, or settings that contradict each other.
    """
    from memprof.config.settings import Settings, read_settings
    from memprof.errors import UsageError

    values = read_settings(config_file) if config_file is not None else {}
    values.update({name: value for name, value in given.items() if value is not None})
    targets = values.get("lora_target_modules")
    if isinstance(targets, str):
        values["lora_target_modules"] = tuple(t.strip() for t in targets.split(",") if t.strip())
    if not values.get("model"):
        raise UsageError("which model? Give --model, a hub id such as Qwen/Qwen2.5-1.5B-Instruct or a config.json.")
    values["device"] = device
    try:
        settings = Settings(**values)
    except TypeError as error:
        raise UsageError(f"a setting has a value of the wrong kind ({error}).") from None
    check_sharding(settings, given)
    return settings


def check_sharding(settings: Settings, given: Mapping[str, Any]) -> None:
    """Refuse ``--sharding ddp`` where there is one GPU; among settings it is the default and says nothing.

    Raises:
        UsageError: it was asked for, and there is nothing to divide.
    """
    from memprof.errors import UsageError

    if given.get("sharding") is not None and settings.gpus == 1:
        raise UsageError(f"--sharding {settings.sharding} is of several GPUs: add --gpus 2, or more.")
