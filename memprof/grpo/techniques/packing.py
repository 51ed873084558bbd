"""Run several short sequences through a model's body as one row, without padding and without a mask.

Each sequence has its own positions and attends to itself only (:mod:`memprof.grpo.techniques.segment_attention`), so
hidden states and gradients are those of the sequences one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from memprof.foreign import Kwargs
from memprof.grpo.techniques.segment_attention import PackedSequences, install_segment_attention
from memprof.grpo.techniques.shared_prefix import SharedPrefix

#: A transformers model without its head: keyword arguments in, something with ``last_hidden_state [1, S, H]`` out.
Body = Callable[..., Any]


def packed_arguments(
    sequences: Sequence[torch.Tensor], *, prefix: SharedPrefix | None = None, becomes: SharedPrefix | None = None
) -> Kwargs:
    """Build the keyword arguments that run ``sequences`` (1-D token ids, none empty) through a body as one row.

    ``prefix``: what all of them continue. ``becomes``: filled with the row's keys and values.
    """
    install_segment_attention()
    lengths = tuple(ids.shape[0] for ids in sequences)
    first = prefix.length if prefix is not None else 0
    device = sequences[0].device
    positions = torch.cat([torch.arange(first, first + n, device=device) for n in lengths])
    return {
        "input_ids": torch.cat(list(sequences))[None],
        "position_ids": positions[None],
        # A mask of four dimensions is passed on as it is: none is built from the positions, and this one is not used.
        "attention_mask": torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=device),
        "use_cache": False,
        "memprof_segments": PackedSequences(lengths, prefix, becomes),
    }


def run_packed(body: Body, arguments: Kwargs) -> torch.Tensor:
    """Call ``body`` with :func:`packed_arguments`, which must reach attention; return hidden states ``[1, S, H]``."""
    hidden: torch.Tensor = body(**arguments).last_hidden_state
    arguments["memprof_segments"].check()
    return hidden


def packed_forward(body: Body, sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return hidden states ``[length, H]`` of each sequence, computed in one row."""
    hidden = run_packed(body, packed_arguments(sequences))[0]
    return list(hidden.split([ids.shape[0] for ids in sequences]))  # type: ignore[no-untyped-call]
