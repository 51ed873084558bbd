"""Describe to the functions of a step what the lean trainer has: settings, model, head, ranks, loss and log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memprof.config.piece_size import MOST_TOKENS
from memprof.grpo.loss.head import Head
from memprof.grpo.loss.load_balancing import LoadBalancing
from memprof.grpo.once_log import OnceLog
from memprof.grpo.step.ranks import RankGroup
from memprof.grpo.step.schemes import LossTerms

if TYPE_CHECKING:
    from memprof.grpo.config import LeanGRPOConfig


@dataclass(frozen=True)
class StepContext:
    """Hold what a step works with. Each step makes its own: settings, model and loss can change in between.

    Attributes:
        accelerator: accelerate's; its ``scaler`` is None but for fp16.
        policy: the model that is trained, in PEFT's wrapper if it has an adapter, without accelerate's.
        pad_id: token that fills up rows.
        counts_padding: a token's position is counted from the row's left edge, padding included.
        draws: a forward in training draws random numbers.
        group_size: completions of one prompt.
        completion_length: the most tokens that a completion can have.
        tile: tokens that go through an MLP together; None where it is not tiled.
        piece_tokens: tokens that go through the model together with a graph, and without; a longer sequence is alone.
        balancing: the router's auxiliary loss; None where there is none.
        adaptation: what is done where memory runs out; None: the error goes on.
        adapter_outside: why the model must not be called without PEFT's wrapper; None where it may be.
    """

    settings: LeanGRPOConfig
    accelerator: Any
    policy: Any
    head: Head
    loss: LossTerms
    ranks: RankGroup
    log: OnceLog
    pad_id: int
    counts_padding: bool
    draws: bool
    group_size: int
    completion_length: int
    tile: int | None = None
    piece_tokens: tuple[int, int] = (MOST_TOKENS, MOST_TOKENS)
    balancing: LoadBalancing | None = None
    adaptation: Any = None  # an Adaptation of memprof.grpo.step.out_of_memory, which stands above this file
    adapter_outside: str | None = None

    @property
    def scales_gradients(self) -> bool:
        """Tell whether gradients are scaled (fp16)."""
        return self.accelerator.scaler is not None

    def base_model(self, model: Any = None) -> Any:
        """Return the causal LM inside the wrappers of ``model``, or of the policy."""
        return base_model_of(self.accelerator, self.policy if model is None else model)


def base_model_of(accelerator: Any, model: Any) -> Any:
    """Return the causal LM inside accelerate's and PEFT's wrappers."""
    model = accelerator.unwrap_model(model)
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model
