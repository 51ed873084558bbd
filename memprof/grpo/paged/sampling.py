"""Choose the next tokens as transformers' ``generate`` does, from draws that belong to a sequence and a position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    EosTokenCriteria,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MaxLengthCriteria,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from memprof.grpo.paged.support import NotPaged

# Each works on one position's scores; the repetition penalty also reads which tokens the row has.
_ROW_BY_ROW = (
    EpsilonLogitsWarper, EtaLogitsWarper, InfNanRemoveLogitsProcessor, LogitNormalization, MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor, SuppressTokensLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper,
    TopPLogitsWarper, TypicalLogitsWarper,
)  # fmt: skip


@dataclass(frozen=True)
class Sampling:
    """What ``generate`` chooses tokens with: transformers' own ``processors`` in its order, ``draws`` ``[sequences,
    tokens]`` float64 in [0, 1) (None: greedy), ids that ``stop`` a sequence, and the ``longest`` it gets."""

    processors: list[Any]
    draws: torch.Tensor | None
    stop: frozenset[int]
    longest: int

    @classmethod
    def of(cls, processors: Any, criteria: Any, config: Any, sequences: int, prompt: int) -> Sampling:
        """Read what ``generate`` prepared for ``sequences`` prompts of ``prompt`` tokens, padding included; NotPaged
        for a setting that works on whole rows, or on the batch."""
        others = [type(p).__name__ for p in processors if type(p) not in _ROW_BY_ROW]
        others += [type(c).__name__ for c in criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)]
        if (beams := getattr(config, "num_beams", None) or 1) > 1:
            others.append(f"{beams} beams")
        if (cache := getattr(config, "cache_implementation", None)) not in (None, "dynamic"):
            others.append(f"a {cache} cache")
        if (answers := getattr(config, "num_return_sequences", None) or 1) > 1:
            others.append(f"{answers} answers to a prompt")
        if others:
            raise NotPaged(f"generate would use {', '.join(others)}")
        longest = config.max_length - prompt
        stop = {int(t) for c in criteria if isinstance(c, EosTokenCriteria) for t in c.eos_token_id}
        draws = host_draws(sequences, longest) if config.do_sample else None
        penalty = RepetitionPenaltyLogitsProcessor  # generate tells it how long each row's padding is
        own = [penalty(p.penalty) if isinstance(p, penalty) else p for p in processors]
        return cls(own, draws, frozenset(stop), longest)

    @property
    def reads_tokens(self) -> bool:
        """Tell whether scores depend on the tokens a row has."""
        return any(isinstance(p, RepetitionPenaltyLogitsProcessor) for p in self.processors)

    def next_tokens(
        self, logits: torch.Tensor, rows: list[int], positions: list[int], ids: torch.Tensor | None
    ) -> torch.Tensor:
        """Choose one token a row by ``logits [rows, vocabulary]``; return them, ``[rows]``, on the device.

        ``rows`` and ``positions`` say which new token of which sequence each is. ``ids [rows, length]`` are the tokens
        of each row so far, where :attr:`reads_tokens`; a row may repeat one of its own to be as long as the others.
        """
        given = ids if ids is not None else torch.zeros(len(rows), 1, dtype=torch.long, device=logits.device)
        scores = logits.to(torch.float32, copy=True)
        for processor in self.processors:
            scores = processor(given, scores)
        if self.draws is None:
            return scores.argmax(-1)
        draws = self.draws[rows, positions].to(scores.device)
        return _inverted(scores.softmax(-1), draws)


def host_draws(sequences: int, longest: int) -> torch.Tensor:
    """Draw ``[sequences, longest]`` float64 on the host. A function, so that a simulation keeps the host apart."""
    return torch.rand(sequences, longest, dtype=torch.float64)


def _inverted(probabilities: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Return the token at which each row's cumulative probability passes its draw: distributed as multinomial's."""
    total = probabilities.to(torch.float64).cumsum_(-1)
    wanted = (draws * total[:, -1]).unsqueeze(-1)
    found = torch.searchsorted(total, wanted, right=True).squeeze(-1)
    last = torch.searchsorted(total, total[:, -1:].contiguous()).squeeze(-1)  # the last token of any probability
    return torch.minimum(found, last)
