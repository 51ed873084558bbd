"""Say what to give a vLLM that shares a card with a trainer: its share, its context, its sequences.

vLLM's share of a card (``gpu_memory_utilization``) has to hold the weights, the highest activations of a profiled
forward and the process's memory outside torch; the rest becomes the pool of keys and values. The share has to be free
when the engine starts, so the trainer's part counts too. Nothing is executed: all figures are closed forms.
"""

from __future__ import annotations

import math

from memprof.config.model_shape import ModelShape
from memprof.errors import UsageError
from memprof.report.plan import Serving
from memprof.units import GIB, format_bytes

_BLOCK = 16  # tokens of a block of vLLM's pool
_LEAST_BATCHED, _MOST_BATCHED = 2048, 8192  # tokens of the forward that vLLM profiles, by its defaults
_OUTSIDE = 0.5 * GIB  # the process's CUDA context, kernels and workspaces
_GRAPHS = 0.25 * GIB  # captured graphs, which live beside the share's pool
_ASLEEP = 1.0 * GIB  # what an engine that sleeps still holds
_MARGIN = 0.01  # shares are set in hundredths


def plan_serving(
    model: str,
    shape: ModelShape,
    gpu: str,
    total_bytes: int,
    trainer_bytes: int,
    max_model_len: int,
    max_num_seqs: int,
    *,
    weight_bytes: float = 2.0,
    kv_itemsize: int = 2,
) -> Serving:
    """Find the share for so many sequences of that length; fewer of them, then shorter ones, where the card has less.

    Args:
        model: its name, for the answer.
        shape: its extents.
        gpu: the card's name, for the answer.
        total_bytes: of the card.
        trainer_bytes: what the trainer holds when the engine starts (and while it is awake).
        max_model_len: tokens of the longest sequence.
        max_num_seqs: sequences wanted at once.
        weight_bytes: of a parameter in the engine: 2 in bf16, 0.56 in 4 bits, 1 in fp8.
        kv_itemsize: bytes of a key's or value's element.

    Raises:
        UsageError: a length or a number of sequences is below 1.
    """
    if max_model_len < 1 or max_num_seqs < 1:
        raise UsageError("a serving plan needs at least one sequence of at least one token.")
    weights = round(shape.parameters * weight_bytes)
    activations = activation_bytes(shape, max_model_len, max_num_seqs)
    floor = weights + activations + _OUTSIDE
    free = max(0, total_bytes - trainer_bytes)
    most = math.floor((free - _GRAPHS) / total_bytes / _MARGIN) * _MARGIN
    room = most * total_bytes - floor
    token = shape.kv_cache_bytes(1, kv_itemsize)
    sequences, length = _that_fit(shape, kv_itemsize, room, max_num_seqs, max_model_len)
    possible = length > 0
    needed = floor + _pool(shape, length, kv_itemsize) * sequences
    share = min(math.ceil(needed / total_bytes / _MARGIN - 1e-9) * _MARGIN, most) if possible else None
    pool = max(0, math.floor(share * total_bytes - floor)) if share is not None else 0
    return Serving(
        basis="modelled",
        model=model,
        gpu=gpu,
        total_bytes=total_bytes,
        trainer_bytes=trainer_bytes,
        free_bytes=free,
        gpu_memory_utilization=None if share is None else round(share, 2),
        max_model_len=length,
        max_num_seqs=sequences if possible else 0,
        weights_bytes=weights,
        activation_bytes=activations,
        outside_bytes=round(_OUTSIDE),
        kv_bytes=pool,
        kv_bytes_per_token=token,
        kv_tokens=pool // max(token, 1) // _BLOCK * _BLOCK,
        fits=possible and (sequences, length) == (max_num_seqs, max_model_len),
        notes=_notes(possible, sequences, length, max_num_seqs, max_model_len, floor, free),
    )


def _that_fit(shape: ModelShape, itemsize: int, room: float, sequences: int, length: int) -> tuple[int, int]:
    """Return how many sequences of which length fit ``room``: fewer first, then a shorter one; length 0: none fits."""
    one = _pool(shape, length, itemsize)
    if one <= room:
        return min(sequences, int(room // one)), length
    low, high = 0, length // _BLOCK  # blocks; sliding windows make the bytes of a length a bent line
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _pool(shape, middle * _BLOCK, itemsize) <= room else (low, middle - 1)
    return 1, low * _BLOCK


def activation_bytes(shape: ModelShape, max_model_len: int, max_num_seqs: int) -> int:
    """Return the highest activations of vLLM's profiled forward: a batch's MLP, or its sampler's logits in fp32."""
    tokens = min(max(_LEAST_BATCHED, max_model_len), _MOST_BATCHED)
    inner = shape.intermediate if not shape.experts else max(shape.expert_intermediate * 8, shape.hidden)
    forward = tokens * 2 * (3 * inner + 3 * shape.hidden)
    sampler = max_num_seqs * shape.vocabulary * (2 + 4 + 4)
    return max(forward, sampler)


def _pool(shape: ModelShape, tokens: int, itemsize: int) -> int:
    """Return the bytes of one sequence's keys and values, whole blocks."""
    return shape.kv_cache_bytes(math.ceil(tokens / _BLOCK) * _BLOCK, itemsize)


def _notes(
    possible: bool, sequences: int, length: int, wanted: int, wanted_length: int, floor: float, free: int
) -> tuple[str, ...]:
    found = ["Modelled by closed forms, not measured: vLLM's own profiling decides; leave a margin."]
    if not possible:
        found.append(
            f"Weights, activations and the process need {format_bytes(round(floor))}, and the trainer leaves "
            f"{format_bytes(free)}: offload the trainer while the engine runs, quantise the engine, or take another "
            "card."
        )
    elif length < wanted_length:
        found.append(f"One sequence of {wanted_length:,} tokens does not fit the pool; {length:,} do.")
    elif sequences < wanted:
        found.append(f"{sequences:,} of {wanted:,} sequences fit at full length at once; vLLM queues the others.")
    found.append(
        f"With sleep mode the engine frees all but about {format_bytes(round(_ASLEEP))} while the trainer works: "
        "its share then counts against the trainer's memory during generation only."
    )
    return tuple(found)
