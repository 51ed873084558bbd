"""Compute the loss by Liger's own fused linear GRPO loss."""

from __future__ import annotations

from typing import Any

import torch

from memprof.compat import optional_packages as optional_names

__all__ = ["liger_loss"]


def liger_loss(self: Any, model: Any, inputs: dict[str, Any]) -> Any:
    """Call Liger's fused linear GRPO loss as its users do, with the completion's hidden states and the head."""
    loss = optional_names.LIGER_LOSS.get()(
        beta=self.beta,
        compiled=False,
        use_ref_model=self.beta != 0.0,
        loss_type=self.loss_type,
        max_completion_length=self.max_completion_length,
        temperature=self.temperature,
    )
    inner = self.accelerator.unwrap_model(model)
    while hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    keep = inputs["completion_ids"].size(1)
    with self.accelerator.autocast():
        hidden = inner.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        hidden = hidden[:, :-1, :][:, -keep:, :]
        head = inner.get_output_embeddings()
        value, _ = loss(
            _input=hidden,
            lin_weight=head.weight,
            selected_token_ids=inputs["completion_ids"],
            attention_mask=inputs["completion_mask"],
            advantages=inputs["advantages"],
            bias=head.bias,
            old_per_token_logps=inputs.get("old_per_token_logps"),
            ref_per_token_logps=inputs.get("ref_per_token_logps"),
        )
    return value / self.current_gradient_accumulation_steps
