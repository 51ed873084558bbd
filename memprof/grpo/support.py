"""What the lean trainer does not do: refused by name at construction, or left to TRL's own step, also by name."""

from __future__ import annotations

from typing import Any

from memprof.errors import UsageError

__all__ = ["check_supported", "whole_batch_reason"]

# Optimizers that step inside the backward: several backwards would be several steps.
_STEP_IN_BACKWARD = ("lomo", "adalomo")


def check_supported(args: Any) -> None:
    """Refuse what cannot work.

    Raises:
        UsageError: named combination.
    """
    optimizer = str(getattr(args.optim, "value", args.optim))
    if optimizer in _STEP_IN_BACKWARD or optimizer.endswith("_layerwise"):
        raise UsageError(
            f"optim={optimizer!r} updates the weights inside the backward, and LeanGRPOTrainer runs several: "
            "choose another optimizer."
        )
    if args.exact_two_pass == "never" and args.top_entropy_quantile < 1.0:
        raise UsageError(
            "top_entropy_quantile compares the tokens of all sequences, which takes a pass over all of them first: "
            "set exact_two_pass='auto' or top_entropy_quantile=1."
        )


def whole_batch_reason(trainer: Any) -> str | None:
    """Why every step of this run goes through TRL's own path, or None."""
    if not trainer.args.micro_splitting:
        return "micro_splitting is off"
    if trainer.aux_loss_enabled:
        return "the router's auxiliary loss needs the tokens of all sequences in one graph"
    if _prompt_learning(trainer.model):
        return "PEFT's prompt learning adds tokens of its own before the prompt"
    if str(getattr(trainer.accelerator.distributed_type, "value", "")).upper() == "DEEPSPEED" and _zero_stage(trainer) == 3:
        return "DeepSpeed ZeRO-3 gathers the head's weight inside TRL's forward only"
    return None


def _prompt_learning(model: Any) -> bool:
    configs = getattr(model, "peft_config", None)
    return bool(configs) and any(getattr(config, "is_prompt_learning", False) for config in configs.values())


def _zero_stage(trainer: Any) -> int:
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    return int(getattr(plugin, "zero_stage", 0) or 0)
