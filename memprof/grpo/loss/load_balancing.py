"""Take a router's auxiliary loss apart: into sums over tokens, which add up over the pieces of a micro-batch.

transformers' ``load_balancing_loss_func`` is ``E * sum_e (counts_e / n) * (probabilities_e / n)``: ``counts`` says how
often each of ``E`` experts was chosen, ``probabilities`` sums what the router gave it, and ``n`` counts the tokens of
all layers. Counts have no gradient. Once those of the whole micro-batch are known, the loss is linear in the sums of
probabilities, so that each piece has a share of its value and of its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from memprof.compat import require, transformers
from memprof.errors import UsageError
from memprof.grpo.rows import is_fake


class RoutedTokens(NamedTuple):
    """Sums over some tokens of all layers: ``counts`` and ``probabilities`` ``[E]`` fp32; ``tokens``: their number."""

    counts: torch.Tensor
    probabilities: torch.Tensor
    tokens: int

    def plus(self, other: RoutedTokens | None) -> RoutedTokens:
        """Add the sums of ``other``, without its graph."""
        if other is None:
            return self
        added = other.probabilities.detach().to(self.counts.device)
        counts = self.counts + other.counts.to(self.counts.device)
        return RoutedTokens(counts, self.probabilities + added, self.tokens + other.tokens)


@dataclass(frozen=True)
class LoadBalancing:
    """The auxiliary loss of a model whose router chooses ``chosen`` of ``experts`` for each token."""

    experts: int
    chosen: int

    @classmethod
    def of(cls, model: Any) -> LoadBalancing:
        """Read the sizes where TRL does, whatever the model's family; UsageError where they have other names: TRL's own
        step fails then."""
        text = model.config.get_text_config()
        try:
            return cls(text.num_experts, text.num_experts_per_tok)
        except AttributeError as absent:
            raise UsageError(
                f"TRL cannot compute the router's auxiliary loss here ({absent}): set router_aux_loss_coef=0."
            ) from absent

    def routed(self, logits: Sequence[torch.Tensor], real: torch.Tensor | None) -> RoutedTokens:
        """Add up the router logits ``[tokens, E]`` of each layer. ``real``: the tokens to count; None: all of them."""
        device = logits[0].device
        counts = torch.zeros(self.experts, dtype=torch.float32, device=device)
        probabilities, tokens = torch.zeros_like(counts), 0
        for layer in logits:
            given = layer.to(device)
            given = given if real is None else given.index_select(0, real.to(device))
            weights = torch.nn.functional.softmax(given, dim=-1)
            found = torch.topk(weights, self.chosen, dim=-1).indices.reshape(-1)
            counts.scatter_add_(0, found, torch.ones_like(found, dtype=torch.float32))
            probabilities = probabilities + weights.float().sum(0)
            tokens += given.shape[0]
        return RoutedTokens(counts, probabilities, tokens)

    def share(self, part: RoutedTokens, whole: RoutedTokens) -> torch.Tensor:
        """Compute the share that ``part`` has in the loss over ``whole``, with the graph of ``part``."""
        counts = whole.counts.to(part.probabilities.device)
        return (counts * part.probabilities).sum() * (self.experts / whole.tokens**2)

    def refusal(self) -> str | None:
        """Say why sums over tokens are not the loss that the installed transformers computes, or return None."""
        try:
            require("lean.moe")
        except UsageError as refused:
            return str(refused).removesuffix(".")
        if is_fake(torch.empty(1)):
            return None
        theirs, ours = self._tried(transformers.LOAD_BALANCING.get())
        same = torch.allclose(torch.as_tensor(theirs, dtype=torch.float32), ours, rtol=1e-4)
        return None if same else "transformers' load_balancing_loss_func no longer consists of sums over tokens"

    def _tried(self, function: Any) -> tuple[Any, torch.Tensor]:
        """Compute the loss of some router logits by transformers' function, and from the sums of two pieces."""
        mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]])
        place = torch.arange(2 * mask.numel() * self.experts, dtype=torch.float32)
        logits = (3 * torch.sin(place**1.5)).view(2, mask.numel(), self.experts).unbind()
        real = mask.flatten().nonzero()[:, 0]
        pieces = [self.routed(logits, real[:2]), self.routed(logits, real[2:])]
        whole = pieces[0].plus(pieces[1])
        ours = torch.stack([self.share(piece, whole) for piece in pieces]).sum()
        return function(logits, self.experts, self.chosen, mask), ours
