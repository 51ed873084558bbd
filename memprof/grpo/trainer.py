"""``LeanGRPOTrainer``: TRL's ``GRPOTrainer`` with the same loss and gradients in a fraction of the memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from trl import GRPOTrainer
from trl.extras.profiling import profiling_decorator

from memprof.grpo.config import LeanGRPOConfig
from memprof.grpo.head import Head, add_lean_head
from memprof.grpo.schemes import scheme_of
from memprof.grpo.scoring import score_without_graph
from memprof.grpo.steps import PiecewiseStep
from memprof.grpo.support import check_supported, whole_batch_reason
from memprof.grpo.trim import Row, rows_of

__all__ = ["LeanGRPOTrainer"]

logger = logging.getLogger(__name__)


class LeanGRPOTrainer(GRPOTrainer):
    """Drop-in for ``trl.GRPOTrainer``: same arguments, data, rewards, logs and checkpoints.

    ``args`` may be a :class:`~memprof.grpo.LeanGRPOConfig`, which adds switches, or a plain ``GRPOConfig``. Generation,
    rewards, advantages and the formula of the loss are TRL's own code. What differs is how a micro-batch goes through
    the model: in pieces without padding, each with its forward and backward, the loss's normalisers being those of
    the whole.

    Raises:
        UsageError: a combination that cannot work, named.
    """

    def __init__(self, model: Any, reward_funcs: Any = None, args: Any = None, *rest: Any, **options: Any) -> None:
        name = model if isinstance(model, str) else getattr(model.config, "_name_or_path", "") or "model"
        lean = LeanGRPOConfig.of(args, f"{name.rstrip('/').split('/')[-1]}-GRPO")
        self._given_logps: Any = None
        self._said: set[str] = set()
        check_supported(lean)
        super().__init__(model, reward_funcs, lean, *rest, **options)
        base = self._base_model(self.model)
        add_lean_head(base)
        self._lean_head = Head.of(base, self.temperature, lean.cast_lm_head_to_fp32, lean.loss_chunk_tokens)
        self._whole_batch_reason = whole_batch_reason(self)
        if self._whole_batch_reason:
            self._say(f"TRL's own step is used: {self._whole_batch_reason}.", logging.WARNING)

    @profiling_decorator
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """The loss of a micro-batch. In training, all pieces but the last have had their backward when it returns.

        The result carries the graph of the last piece and the value of the whole: its backward is the step's last.
        """
        rows = None if return_outputs else self._rows(inputs)
        if rows is None:
            whole: torch.Tensor = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            return whole
        if not torch.is_grad_enabled():
            plain: torch.Tensor = self._compute_loss(model, inputs)  # its log-probabilities come in pieces
            return plain
        scheme = scheme_of(self, inputs, known_loss=self._loss_is_trls)
        self._say(f"pieces by the scheme {scheme.name!r}: {scheme.why}")
        return PiecewiseStep(self, model, inputs, rows, scheme.name).run()

    @profiling_decorator
    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **more: Any,
    ) -> Any:
        if self._given_logps is not None:
            return self._given_logps
        cut = input_ids.shape[1] - logits_to_keep
        inputs = {
            "prompt_ids": input_ids[:, :cut],
            "prompt_mask": attention_mask[:, :cut],
            "completion_ids": input_ids[:, cut:],
            "completion_mask": attention_mask[:, cut:],
            **more,
        }
        rows = None if torch.is_grad_enabled() or compute_aux_loss else self._rows(inputs)
        if rows is None:
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, compute_aux_loss, **more
            )
        logps, entropies = score_without_graph(self, model, inputs, rows, compute_entropy)
        return logps, entropies if compute_entropy else None, None

    def _rows(self, inputs: Mapping[str, Any]) -> Any:
        """The rows to cut into pieces, or None where TRL's own path is the one for these inputs."""
        if self._whole_batch_reason:
            return None
        if any(inputs.get(name) is not None for name in _IMAGE_INPUTS):
            self._say("TRL's own step is used for batches with images.", logging.WARNING)
            return None
        rows = rows_of(inputs)
        if rows is None:
            self._say("TRL's own step is used for batches whose attention masks have holes.", logging.WARNING)
        return rows

    def _same_count(self, pieces: list[list[Row]]) -> list[list[Row]]:
        """``pieces``, with empty ones added where ranks run each forward together: all have as many as the most.

        Under DDP ranks meet in the last piece's backward only, so their counts may differ.
        """
        kind = str(getattr(self.accelerator.distributed_type, "value", "NO")).upper()
        if self.accelerator.num_processes == 1 or kind not in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "TP"):
            return pieces
        count = torch.tensor([len(pieces)], device=self.accelerator.device)
        most = int(self.accelerator.gather(count).max())
        return pieces + [[] for _ in range(most - len(pieces))]

    @property
    def _loss_is_trls(self) -> bool:
        return type(self)._compute_loss is GRPOTrainer._compute_loss and "_compute_loss" not in vars(self)

    def _base_model(self, model: Any) -> Any:
        """The causal LM inside accelerate's and PEFT's wrappers."""
        model = self.accelerator.unwrap_model(model)
        return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model

    def _say(self, what: str, level: int = logging.INFO) -> None:
        """Log a line once."""
        if what not in self._said:
            self._said.add(what)
            logger.log(level, "LeanGRPOTrainer: %s", what)


_IMAGE_INPUTS = (
    "pixel_values",
    "image_grid_thw",
    "pixel_attention_mask",
    "spatial_shapes",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
    "num_images",
)
