"""Choose the trainer of a recipe, and how it computes the loss: with logits in full as older TRLs did, or Liger's."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from memprof.compat import trl as trl_names
from memprof.compat.patching import bind
from memprof.config.settings import Settings
from memprof.config.to_grpo import lean_arguments
from memprof.errors import UsageError
from memprof.simulate.trainer.full_logits import log_softmax_rows, logps_from_full_logits
from memprof.simulate.trainer.liger_loss import liger_loss

__all__ = ["apply_recipe", "apply_trl_0_14", "classes_of", "config_of"]


def classes_of(settings: Settings) -> tuple[Any, Any]:
    """Return the trainer's class and its config's. A recipe that is a trainer of its own is chosen here."""
    if settings.recipe == "lean":
        from memprof.grpo import LeanGRPOConfig, LeanGRPOTrainer

        return LeanGRPOTrainer, LeanGRPOConfig
    from trl import GRPOConfig, GRPOTrainer

    return GRPOTrainer, GRPOConfig


def config_of(settings: Settings) -> dict[str, Any]:
    """Make the arguments of the recipe's config beside those of every recipe."""
    if settings.recipe != "lean":
        return {}
    return {**lean_arguments(settings), "weights": "as_given", **_as_sharded(settings)}


def _as_sharded(settings: Settings) -> dict[str, Any]:
    """Make the choices that the lean trainer makes once accelerate or transformers shards a run, unseen on fakes.

    Its reference is then sharded on the devices, and under ZeRO-3 the step is TRL's own.
    """
    if settings.gpus == 1 or settings.sharding == "ddp":
        return {}
    chosen: dict[str, Any] = {"micro_splitting": settings.sharding != "zero3"}
    if settings.beta != 0.0 and settings.lora_r is None:
        chosen["reference"] = "device"
    return chosen


def apply_recipe(trainer: Any, settings: Settings) -> None:
    """Make a trainer compute its loss as ``settings.recipe`` says.

    Raises:
        UsageError: the recipe's package is not installed.
    """
    if settings.recipe == "trl-full-logits":
        bind(trainer, trl_names.LOGPS, logps_from_full_logits)
    elif settings.recipe == "trl-0.14":
        apply_trl_0_14(trainer)
    elif settings.recipe == "liger":
        if find_spec("liger_kernel") is None:
            raise UsageError("--recipe liger runs Liger's own loss: pip install liger-kernel.")
        bind(trainer, trl_names.LOSS, liger_loss)


def apply_trl_0_14(trainer: Any) -> None:
    """Make a trainer of the installed TRL compute its log-probabilities in that way and order."""
    bind(trainer, trl_names.LOGPS, _logps_and_entropies)


def _logps_and_entropies(
    self: Any,
    model: Any,
    input_ids: Any,
    attention_mask: Any,
    logits_to_keep: int,
    batch_size: int | None = None,
    compute_entropy: bool = False,
    compute_aux_loss: bool = False,
    **_: Any,
) -> tuple[Any, Any, Any]:
    if not torch.is_grad_enabled():  # the installed release asks for the reference here; 0.14 did so later
        return input_ids.new_zeros((len(input_ids), logits_to_keep), dtype=torch.float32), None, None
    logps = _logps(model, input_ids, logits_to_keep)
    if self.beta:
        with torch.no_grad():
            if self.ref_model is not None:
                _logps(self.ref_model, input_ids, logits_to_keep)
            else:
                with self.accelerator.unwrap_model(model).disable_adapter():
                    _logps(model, input_ids, logits_to_keep)
    return logps, torch.zeros_like(logps.detach()) if compute_entropy else None, None


def _logps(model: Any, input_ids: Any, keep: int) -> Any:
    logits = model(input_ids=input_ids, logits_to_keep=keep + 1).logits
    return log_softmax_rows(logits[:, :-1, :], input_ids[:, -keep:])
