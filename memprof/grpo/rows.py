"""Find the real tokens of a micro-batch: each row's prompt and completion without their padding.

TRL pads prompts on the left and completions on the right, once, to the longest of the whole generation batch. A row
without its padding needs no attention mask: what is left is causal.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memprof.compat.torch import FAKE_TENSOR
from memprof.grpo.micro_batch_inputs import MicroBatch

#: Where tokens of completions are in ``[B, T]``: an index for such a tensor that picks them out, ``[N]``.
Place = Any


@dataclass(frozen=True)
class Row:
    """Row ``index`` of a micro-batch: ``prompt`` and ``completion`` tokens after ``offset`` tokens of padding."""

    index: int
    offset: int
    prompt: int
    completion: int

    @property
    def length(self) -> int:
        return self.prompt + self.completion


def rows_of(inputs: MicroBatch) -> list[Row] | None:
    """Return the rows of TRL's micro-batch, or None where a mask has holes (then nothing can be cut away)."""
    prompt_mask, completion_mask = inputs["prompt_mask"], inputs["completion_mask"]
    size, width, kept = prompt_mask.shape[0], prompt_mask.shape[1], completion_mask.shape[1]
    if is_fake(prompt_mask):
        return [Row(i, 0, width, kept) for i in range(size)]
    prompt, completion = prompt_mask.bool(), completion_mask.bool()
    holes = (prompt[:, 1:] < prompt[:, :-1]).any() | (completion[:, 1:] > completion[:, :-1]).any()
    # One transfer: a device is waited for once.
    found = torch.cat([prompt.sum(1), completion.sum(1), holes.long().reshape(1)]).tolist()
    if found[-1]:
        return None
    rows = [Row(i, width - found[i], found[i], found[size + i]) for i in range(size)]
    # Without a prompt nothing predicts the first token; TRL asks the padding before it.
    return None if any(row.completion and not row.prompt for row in rows) else rows


def is_fake(tensor: torch.Tensor) -> bool:
    """Tell whether the tensor has no values (``FakeTensorMode``, ``meta``)."""
    return tensor.is_meta or isinstance(tensor, _fake_tensor())


@functools.cache
def _fake_tensor() -> type:
    kind: type = FAKE_TENSOR.get()
    return kind


def longest(rows: Sequence[Row]) -> int:
    """Count the tokens of the longest row, 0 for none."""
    return max((row.length for row in rows), default=0)


def places_of(rows: Sequence[Row], device: torch.device) -> Callable[[int, int], Place]:
    """Return what tells where in ``[B, T]`` tokens ``start:stop`` of the rows' completions, end to end, are."""
    if len(rows) == 1:
        index = rows[0].index
        return lambda start, stop: (index, slice(start, stop))
    lines = torch.cat([torch.full((row.completion,), row.index) for row in rows]).to(device)
    columns = torch.cat([torch.arange(row.completion) for row in rows]).to(device)
    return lambda start, stop: (lines[start:stop], columns[start:stop])


def row_inputs(
    inputs: MicroBatch, rows: Sequence[Row], pad_id: int, *, counts_padding: bool = True
) -> dict[str, torch.Tensor]:
    """Build the model's inputs for ``rows`` alone: they start together and are padded on the right to the longest.

    No attention mask: under a causal mask no token sees the padding after it. ``position_ids`` are those of TRL's
    batch, padding included, left out where nothing was padded and for a model that counts tokens by its mask.
    """
    prompt_ids, completion_ids = inputs["prompt_ids"], inputs["completion_ids"]
    width, start = longest(rows), prompt_ids.shape[1]
    sequences = []
    for row in rows:
        ids = torch.cat([prompt_ids[row.index, start - row.prompt :], completion_ids[row.index, : row.completion]])
        sequences.append(torch.nn.functional.pad(ids, (0, width - row.length), value=pad_id))
    made = {"input_ids": torch.stack(sequences)}
    if counts_padding and any(row.offset for row in rows):
        offsets = torch.tensor([[row.offset] for row in rows], device=prompt_ids.device)
        made["position_ids"] = offsets + torch.arange(width, device=prompt_ids.device)
    return made


def parts_of(total: int, size: int) -> Iterable[slice]:
    """Cut ``total`` tokens into parts of at most ``size``, in order: only the last may be shorter."""
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]
