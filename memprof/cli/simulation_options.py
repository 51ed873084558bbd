"""Read a simulated run's settings from options named as in ``GRPOConfig``, ``LoraConfig``, ``TrainingArguments``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from memprof.cli.unused_options import refuse_unused
from memprof.errors import UsageError

if TYPE_CHECKING:
    from memprof.config.settings import Settings

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
    click.option("--model", help="Name the model: a hub id of the packaged catalogue, a folder, or config.json."),
    click.option(
        "--config", "config_file", type=click.Path(path_type=Path), metavar="FILE",
        help="Read any of these settings, by their own names, from YAML or JSON; options given here win.",
    ),
    click.option("--trainer", help="Train with grpo, rloo, sft or dpo (TRL's trainers); default: grpo."),
    click.option("--max-length", type=int, metavar="TOKENS", help="With sft or dpo: make each row this long."),
    click.option("--dtype", help="Set the parameters' dtype: float32 (TRL's default by name), bfloat16, float16."),
    click.option("--lora-r", type=_COUNT, metavar="R", help="Train an adapter of this rank instead of the model."),
    click.option("--lora-target-modules", metavar="NAMES", help="Adapt these modules (a,b,c); default: all-linear."),
    click.option("--lora-dropout", type=float, metavar="SHARE", help="Drop this share of the adapters' inputs."),
    click.option("--load-in-4bit", is_flag=True, default=None, help="Load base weights as bitsandbytes NF4 (QLoRA)."),
    click.option(
        "--bnb-4bit-use-double-quant", is_flag=True, default=None, help="With 4 bits: quantise the scales too."
    ),
    click.option(
        "--bnb-4bit-compute-dtype", metavar="DTYPE",
        help="With 4 bits: compute products in float32, bfloat16 or float16; default: as autocast does.",
    ),
    click.option("--num-generations", type=int, metavar="G", help="Generate G completions of each prompt."),
    click.option("--per-device-train-batch-size", type=int, metavar="N", help="Put N completions in a micro-batch."),
    click.option(
        "--gradient-accumulation-steps", type=int, metavar="N", help="Accumulate N micro-batches in an optimizer step."
    ),
    click.option("--steps-per-generation", type=int, metavar="N", help="Train N micro-batches on one generation."),
    click.option("--num-iterations", type=_COUNT, metavar="N", help="Make N optimizer passes over one generation."),
    click.option("--prompt-length", type=int, metavar="TOKENS", help="Make each prompt this long."),
    click.option("--completion-length", type=int, metavar="TOKENS", help="Make the longest completion this long."),
    click.option("--images", type=_COUNT, metavar="N", help="Put N images into each prompt (Qwen2-VL, Gemma 3)."),
    click.option("--image-size", metavar="WxH", help="With --images: their size in pixels; default: 1024x1024."),
    click.option(
        "--gradient-checkpointing", is_flag=False, flag_value="auto", metavar="[KIND]", callback=_keep,
        help="Choose what is kept for backward: full (layer inputs), selective (attention's outputs too), offloaded "
        "(layer inputs, on the host), none, or auto (the same as no KIND: full; with lean, by the sequences' length).",
    ),
    click.option(
        "--no-gradient-checkpointing", is_flag=True, expose_value=False, callback=_switch_off,
        help="Checkpoint nothing, as KIND none.",
    ),
    click.option(
        "--beta", type=float,
        help="Set the KL coefficient; other than 0 needs a reference model. Default: 0; with rloo 0.05, as TRL's.",
    ),
    click.option("--optim", help="Use this optimizer of transformers, or none for no optimizer step."),
    click.option("--attn", help="Choose attention: auto, flash, efficient or math."),
    click.option("--padding", help="Choose none, or worst: masks hold padding, which rules out flash attention."),
    click.option("--generation", help="Generate with hf, vllm or none."),
    click.option("--cache-implementation", help="With hf: keep the cache dynamic, static or quantized."),
    click.option("--cache-dtype", help="With a quantized cache: store fp8, int4 or int2."),
    click.option("--reward-model", metavar="MODEL", help="Score completions with a model, named as in --model."),
    click.option("--recipe", help="Train as trl, trl-full-logits, trl-0.14, liger or lean does."),
    click.option(
        "--max-tokens-per-piece", type=_COUNT, metavar="N", help="With lean: put N tokens through the model at a time."
    ),
    click.option("--tiled-mlp", type=_COUNT, metavar="TOKENS", help="With lean: put this many in an MLP at a time."),
    click.option("--prefix-sharing", is_flag=True, default=None, help="With lean: compute a group's prompt once."),
    click.option("--generation-batch", type=_COUNT, metavar="N", help="With lean: generate N sequences at a time."),
    click.option(
        "--vllm-gpu-memory-utilization", type=float, metavar="SHARE", help="With vllm: give it this share of the card."
    ),
    click.option(
        "--vllm-enable-sleep-mode/--no-vllm-enable-sleep-mode", default=None,
        help="With vllm: let it sleep while the model trains.",
    ),
    click.option(
        "--park-weights", is_flag=True, default=None,
        help="With lean and a vllm that sleeps: keep weights and optimizer state on the host while it generates.",
    ),
    click.option("--gpus", type=int, metavar="N", help="Train on N GPUs; default 1."),
    click.option(
        "--gpus-per-node", type=_COUNT, metavar="N", help="Let N GPUs share a host's memory; default 8."
    ),
    click.option("--host-memory", metavar="SIZE", help="Give a node this much; a run that needs more does not fit."),
    click.option(
        "--reduce-bucket-size", type=_COUNT, metavar="N",
        help="With ZeRO: reduce N elements at a time; default 500000000.",
    ),
    click.option("--sharding", help="With several GPUs: use ddp, fsdp2, zero1, zero2, zero3 or tp."),
    click.option("--alloc-conf", metavar="STRING", help="Configure the allocator, as PYTORCH_CUDA_ALLOC_CONF."),
)  # fmt: skip


#: How ``--help`` groups these options, and those that simulate and plan add.
GROUPS = {
    "Model": "model dtype load_in_4bit bnb_4bit_use_double_quant bnb_4bit_compute_dtype lora_r lora_target_modules "
    "lora_dropout reward_model attn",
    "Training": "trainer config_file like assignments script per_device_train_batch_size gradient_accumulation_steps "
    "num_iterations max_length beta optim gradient_checkpointing no_gradient_checkpointing padding recipe "
    "max_tokens_per_piece tiled_mlp prefix_sharing memory_budget",
    "Generation": "num_generations steps_per_generation prompt_length images image_size completion_length "
    "completion_lengths generation "
    "cache_implementation cache_dtype generation_batch vllm_gpu_memory_utilization vllm_enable_sleep_mode park_weights",
    "Sharding": "gpus gpus_per_node sharding reduce_bucket_size",
    "Card and host": "gpu device alloc_conf host_memory",
}
budget_option = click.option(
    "--memory-budget",
    metavar="SIZE|auto",
    help="With --recipe lean: choose the fastest settings that fit this size, or (auto) the card that --gpu names.",
)


def run_options(function: F) -> F:
    """Add the options to a command, which gets them as keyword arguments, None where not given."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def given_settings(config_file: Path | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Collect the settings that a file and options give; options win.

    Raises:
        InputError: the file cannot be used.
    """
    from memprof.config.settings import read_settings

    values = read_settings(config_file) if config_file is not None else {}
    return {**values, **{name: value for name, value in given.items() if value is not None}}


def settings_of(
    config_file: Path | None, given: Mapping[str, Any], *, device: str = "cuda", open_names: Collection[str] = ()
) -> Settings:
    """Make settings of a file and of options. ``open_names``: settings that the command varies itself.

    Raises:
        InputError: the file cannot be used.
        UsageError: no model, settings that contradict each other, or an option that changes nothing.
    """
    from memprof.config.settings import TRAINERS_OWN, Settings
    from memprof.config.trl_arguments import assumed_of

    values = given_settings(config_file, given)
    values = {**TRAINERS_OWN.get(str(values.get("trainer")), {}), **values, "assumed": assumed_of(values)}
    if isinstance(targets := values.get("lora_target_modules"), str):
        values["lora_target_modules"] = names_of(targets)
    if not values.get("model"):
        raise UsageError("which model? Give --model, a hub id such as Qwen/Qwen2.5-1.5B-Instruct or a config.json.")
    values["device"] = device
    try:
        settings = Settings(**values)
    except TypeError as error:
        raise UsageError(f"a setting has a value of the wrong kind ({error}).") from None
    refuse_unused(settings, given, open_names)
    return settings


def names_of(text: str) -> tuple[str, ...]:
    """Split comma-separated names."""
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
