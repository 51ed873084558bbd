"""What the lean trainer does not do: refused by name at construction, or left to TRL's own step, also by name."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

from memprof.config.optimizers import optimizer
from memprof.errors import UsageError
from memprof.units import parse_size

__all__ = ["check_supported", "reference_place", "whole_batch_reason"]


def check_supported(args: Any, known_loss: bool = True) -> None:
    """Refuse what cannot work. ``known_loss``: the trainer's loss is TRL's own.

    Raises:
        UsageError: named combination.
    """
    name = str(getattr(args.optim, "value", args.optim))
    if optimizer(name).steps_in_backward:  # several backwards would be several steps
        raise UsageError(
            f"optim={name!r} updates the weights inside the backward, and LeanGRPOTrainer runs several: "
            "choose another optimizer."
        )
    if args.generation_cache == "quantized" and not any(map(_installed, ("optimum.quanto", "hqq"))):
        raise UsageError("generation_cache='quantized' needs optimum-quanto or hqq: pip install optimum-quanto.")
    if args.memory_budget is not None and str(args.memory_budget).strip().lower() != "auto":
        parse_size(str(args.memory_budget))
    if args.exact_two_pass == "never" and args.top_entropy_quantile < 1.0:
        raise UsageError(
            "top_entropy_quantile compares the tokens of all sequences, which takes a pass over all of them first: "
            "set exact_two_pass='auto' or top_entropy_quantile=1."
        )
    if args.exact_two_pass == "never" and not known_loss:
        raise UsageError(
            "An overridden _compute_loss or _get_per_token_logps_and_entropies takes a pass over all sequences first: "
            "set exact_two_pass='auto'."
        )


def whole_batch_reason(trainer: Any) -> str | None:
    """Why every step of this run goes through TRL's own path, or None."""
    if not trainer.args.micro_splitting:
        return "micro_splitting is off"
    if trainer.args.torch_compile:
        return "torch_compile compiles a forward without pieces"
    if trainer.aux_loss_enabled:
        return "the router's auxiliary loss needs the tokens of all sequences in one graph"
    if _prompt_learning(trainer.model):
        return "PEFT's prompt learning adds tokens of its own before the prompt"
    if trainer.is_deepspeed_enabled and _zero_stage(trainer) == 3:
        return "DeepSpeed ZeRO-3 gathers the head's weight inside TRL's forward only"
    return None


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its parent package is not there
        return False


def reference_place(args: Any, adapter: bool) -> tuple[str, str]:
    """Where the reference policy is to be, ``none``, ``adapter``, ``host`` or ``device``, and why not on the host.

    Args:
        adapter: whether the policy is, or will be, a PEFT model.

    Raises:
        UsageError: what ``args.reference`` asks for is impossible.
    """
    wanted = args.reference
    if args.beta == 0.0:
        return "none", ""
    if adapter:
        if wanted in ("host", "device"):
            raise UsageError(
                f"reference={wanted!r} is for full fine-tuning: under an adapter the reference is the same weights "
                "with the adapter off. Use reference='auto'."
            )
        return "adapter", ""
    if wanted == "adapter":
        raise UsageError("reference='adapter' needs an adapter (peft_config). Use reference='auto'.")
    why = _why_on_device(args)
    if wanted == "host" and why:
        raise UsageError(f"reference='host' does not work here: {why}. Use reference='auto'.")
    return ("device", why) if wanted == "device" or why else ("host", "")


def _why_on_device(args: Any) -> str:
    if args.sync_ref_model:
        return "sync_ref_model updates the reference on the device"
    if args.cast_lm_head_to_fp32:
        return "cast_lm_head_to_fp32 changes the reference's head"
    if not args.micro_splitting:
        return "micro_splitting is off"
    if "distributed_config" in (args.model_init_kwargs or {}):
        return "the reference is sharded as the policy is"
    if args.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("1", "true"):
        return "FSDP shards the reference over the ranks"
    if args.deepspeed or os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() in ("1", "true"):
        return "DeepSpeed holds the reference"
    return ""


def _prompt_learning(model: Any) -> bool:
    configs = getattr(model, "peft_config", None) or {}
    return any(getattr(config, "is_prompt_learning", False) for config in configs.values())


def _zero_stage(trainer: Any) -> int:
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    return int(getattr(plugin, "zero_stage", 0) or 0)
