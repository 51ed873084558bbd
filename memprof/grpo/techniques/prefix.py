"""Run a group's prompt through the model once for all its completions, with exact gradients.

The G completions of a GRPO group begin with the same P tokens. Their keys and values (and the last hidden state, which
predicts each completion's first token) are computed once and taken as leaves: each completion runs alone (or a few
packed in a row), attends to them, and its backward leaves gradients on them. When all are done the prompt's own
backward runs once with the sums. Tokens computed: ``P + sum(C_i - 1)`` instead of ``sum(P + C_i)``; in memory at a
time: one completion's graph, and the prompt's.

    prefix = forward_prompt(body, prompt_ids)
    for ids in completions:
        (hidden,) = forward_completions(body, prefix, [ids])     # [C, H]: row t predicts token t
        loss(hidden, ids).backward()
    prefix.backward()

Composes with :mod:`memprof.grpo.techniques.checkpointing` and :mod:`memprof.grpo.techniques.tiled_mlp`, adapters and
autocast. What would not be exact is refused by :func:`memprof.grpo.techniques.segment_attention.segment_refusal`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memprof.grpo.techniques.packing import Body, packed_arguments, run_packed
from memprof.grpo.techniques.shared_prefix import SharedPrefix


def forward_prompt(body: Body, prompt_ids: torch.Tensor, *, fp32_gradients: bool = True) -> SharedPrefix:
    """Run ``prompt_ids [1, P]`` (or ``[P]``) through ``body``, a transformers model without its head or whatever calls
    one with the same keyword arguments, and keep what completions need."""
    ids = prompt_ids.reshape(-1)
    prefix = SharedPrefix(ids.shape[0], fp32_gradients=fp32_gradients)
    hidden = run_packed(body, packed_arguments([ids], becomes=prefix))
    # A copy of one row, so that the other P - 1 can go.
    prefix.keep_last(hidden[0, -1:].clone())
    return prefix


def forward_completions(body: Body, prefix: SharedPrefix, completions: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return hidden states ``[C_i, H]`` for each completion's ids ``[C_i]``, run as one row; row t predicts token t,
    and the last token is not computed: nothing follows it."""
    longer = [ids[:-1] for ids in completions if ids.shape[0] > 1]
    rest: list[torch.Tensor] = []
    if longer:
        hidden = run_packed(body, packed_arguments(longer, prefix=prefix))[0]
        rest = list(hidden.split([ids.shape[0] for ids in longer]))  # type: ignore[no-untyped-call]
    following = iter(rest)
    first = prefix.last_hidden
    return [torch.cat([first, next(following)]) if ids.shape[0] > 1 else first[: ids.shape[0]] for ids in completions]
