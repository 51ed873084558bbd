"""``LeanGRPOTrainer``: TRL's ``GRPOTrainer`` with the same loss and gradients in a fraction of the memory."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache
from trl import GRPOTrainer
from trl.extras.profiling import profiling_decorator

from memprof.grpo.budget import keep_within_budget
from memprof.grpo.config import LeanGRPOConfig, checkpointing_of, tile_of
from memprof.grpo.generation import sequences_together
from memprof.grpo.loss.head import Head, add_lean_head
from memprof.grpo.reference import HostReference, load_reference
from memprof.grpo.step.pieces import PiecewiseStep
from memprof.grpo.step.schemes import scheme_of
from memprof.grpo.step.scoring import score_without_graph
from memprof.grpo.step.trim import Row, rows_of
from memprof.grpo.support import check_supported, reference_place, whole_batch_reason
from memprof.grpo.techniques.checkpointing import apply_checkpointing
from memprof.grpo.techniques.layers import counts_padding
from memprof.grpo.techniques.tiled_mlp import apply_tiled_mlp
from memprof.grpo.weights import choose_weights, rounded_optimizer

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
        given = inspect.signature(GRPOTrainer.__init__).bind(self, model, reward_funcs, lean, *rest, **options)
        chosen = {key: value for key, value in given.arguments.items() if key != "self"}
        self._given_logps: Any = None
        self._said: set[str] = set()
        check_supported(lean, known_loss=self._loss_is_trls)
        choose_weights(lean, chosen)
        adapter = chosen.get("peft_config") is not None or hasattr(model, "peft_config")
        place, why_device = reference_place(lean, adapter)
        with _no_copy(lean, place == "host"):
            super().__init__(**chosen)
        base = self._base_model(self.model)
        add_lean_head(base)
        self._counts_padding = counts_padding(base)
        self._lean_head = Head.of(base, self.temperature, lean.cast_lm_head_to_fp32, lean.loss_chunk_tokens)
        self._whole_batch_reason = whole_batch_reason(self)
        if self._whole_batch_reason:
            self._say(f"TRL's own step is used: {self._whole_batch_reason}.", logging.WARNING)
        self._place_reference(place, why_device, chosen.get("quantization_config"))
        self._techniques: list[Any] = []
        self._tile: int | None = None
        self._checkpointing = "auto"
        if lean.memory_budget is not None:
            keep_within_budget(self)
        self._apply_techniques(base)

    def _apply_techniques(self, base: Any) -> None:
        """What ``args`` says now, in place of what was applied before."""
        while self._techniques:
            self._techniques.pop()()
        kind, tile = checkpointing_of(self.args, base, self.accelerator.device), tile_of(self.args, base)
        self._tile, self._checkpointing = tile, kind
        if kind != "auto":
            # transformers would checkpoint whole layers once more when training starts.
            self.args.gradient_checkpointing = self.args.activation_checkpointing = False
            self._techniques.append(apply_checkpointing(base, kind, device=self.accelerator.device).remove)
            self._say(f"checkpointing: {kind}")
        if tile is not None:
            self._techniques.append(apply_tiled_mlp(base, tile))
            self._say(f"MLPs in tiles of {tile} tokens")

    def _place_reference(self, place: str, why_device: str, quantization_config: Any) -> None:
        if place == "host":
            self.beta = self.args.beta
            module = load_reference(self.model, self.args, quantization_config)
            self.ref_model = HostReference(module, self.accelerator.device)
            self._say("the reference stays in host memory and passes over the device layer by layer")
        elif place == "device":
            self._add_lean_head_to_reference()
            self._say(f"the reference is held on the device: {why_device or 'as asked'}")

    def _add_lean_head_to_reference(self) -> None:
        if self.ref_model is not None:
            add_lean_head(self.accelerator.unwrap_model(self.ref_model))

    @profiling_decorator  # type: ignore[untyped-decorator]
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

    @profiling_decorator  # type: ignore[untyped-decorator]
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
        if rows is None and isinstance(model, HostReference):
            with model.whole() as module:
                return super()._get_per_token_logps_and_entropies(
                    module, input_ids, attention_mask, logits_to_keep, batch_size, **more
                )
        if rows is None:
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, compute_aux_loss, **more
            )
        if isinstance(model, HostReference):
            return model.logps(self, inputs, rows), None, None
        logps, entropies = score_without_graph(self, model, inputs, rows, compute_entropy)
        return logps, entropies if compute_entropy else None, None

    def _generate_single_turn(
        self, prompt_ids: list[Any], images: Any, multimodal_fields: Any, *more: Any, **options: Any
    ) -> Any:
        """TRL's, a few sequences at a time where transformers generates; sampling then draws in another order."""
        size = len(prompt_ids)
        if not (self.use_vllm or self.use_transformers_continuous_batching or images or multimodal_fields):
            size = self._least(sequences_together(self, prompt_ids))
        generate = super()._generate_single_turn
        if size >= len(prompt_ids):
            found = generate(prompt_ids, images, multimodal_fields, *more, **options)
        else:
            self._say(f"{size} of {len(prompt_ids)} sequences generate at a time")
            parts = [
                generate(prompt_ids[start : start + size], images, multimodal_fields, *more, **options)
                for start in range(0, len(prompt_ids), size)
            ]
            found = [ids for part, _ in parts for ids in part], None
        if self.accelerator.device.type != "cpu":
            clear_device_cache()  # what the cache was in is of no use to training, whose blocks have other sizes
        return found

    def get_optimizer_cls_and_kwargs(self, args: Any, model: Any = None) -> Any:
        """TRL's choice, with stochastic rounding where bf16 weights are trained."""
        kind, keywords = GRPOTrainer.get_optimizer_cls_and_kwargs(args, model)
        return rounded_optimizer(self, kind, keywords)

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
        if not self._ranks_run_together:
            return pieces
        count = torch.tensor([len(pieces)], device=self.accelerator.device)
        most = int(self.accelerator.gather(count).max())
        return pieces + [[] for _ in range(most - len(pieces))]

    def _least(self, size: int) -> int:
        """The smallest ``size`` of all ranks where they run each forward together."""
        if not self._ranks_run_together:
            return size
        return int(self.accelerator.gather(torch.tensor([size], device=self.accelerator.device)).min())

    @property
    def _ranks_run_together(self) -> bool:
        """Whether a forward talks to other ranks: sharded weights, by accelerate or by transformers while loading."""
        if self.accelerator.num_processes == 1:
            return False
        kind = str(getattr(self.accelerator.distributed_type, "value", "NO")).upper()
        sharded = any(hasattr(parameter, "full_tensor") for parameter in self.model.parameters())
        return sharded or kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "TP")

    @property
    def _loss_is_trls(self) -> bool:
        """Whether the loss is TRL's function of TRL's log-probabilities, which no subclass has replaced."""
        own, logps = type(self), LeanGRPOTrainer._get_per_token_logps_and_entropies
        return (
            own._compute_loss is GRPOTrainer._compute_loss
            and "_compute_loss" not in vars(self)
            and own._get_per_token_logps_and_entropies is logps
        )

    @property
    def _compute_loss_is_ours(self) -> bool:
        return type(self).compute_loss is LeanGRPOTrainer.compute_loss

    def _base_model(self, model: Any) -> Any:
        """The causal LM inside accelerate's and PEFT's wrappers."""
        model = self.accelerator.unwrap_model(model)
        return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model

    def _warn(self, what: str) -> None:
        self._say(what, logging.WARNING)

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


@contextmanager
def _no_copy(args: Any, wanted: bool) -> Iterator[None]:
    """Let TRL build its trainer without a reference model: it makes none where ``beta`` is 0."""
    beta = args.beta
    if wanted:
        args.beta = 0.0
    try:
        yield
    finally:
        args.beta = beta
