"""What kernels ask for beside their results, and which attention is chosen, as torch's CUDA build does on each card.

``recorded.json``: torch's own allocator on emulated GPUs (``python -m benchmarks.simulator emulated-kernels``).
"""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "recorded.json").read_text(encoding="utf-8"))
CARDS = list(RECORDED["attention"])


def _peak(events: list[int]) -> int:
    """The highest sum of blocks: requests rounded up to 512 bytes, as the allocator does."""
    held = highest = 0
    for size in events:
        block = -(-abs(size) // 512) * 512
        held += block if size > 0 else -block
        highest = max(highest, held)
    return highest


def _in_turns(events: list[int]) -> list[list[int]]:
    """Group what is given back in a row, in whatever order: the free blocks are the same after it."""
    turns = [list(group) for _, group in itertools.groupby(events, key=lambda size: size > 0)]
    return [turn if turn[0] > 0 else sorted(turn) for turn in turns]


@functools.cache
def _simulated(card: str) -> dict[str, list[int]]:
    """Run every operation on fake tensors, as on this card; what each asked for and gave back."""
    from memprof.config.gpus import find_gpu
    from memprof.simulate.run import simulate
    from tests.simulate.kernels.operations import OPERATIONS

    found: dict[str, list[int]] = {}
    sign = {"alloc": 1, "free_requested": -1}

    def run(session: Any) -> None:
        events = session.fake_recorder.blocks.trace.events
        for name, make in OPERATIONS.items():
            work = make("cpu")
            before = len(events)
            kept = work()
            del kept
            found[name] = [sign[e.action] * e.size for e in events[before:] if e.action in sign]
            del work

    simulate(run, gpu=find_gpu(card), stacks=False)
    return found


@pytest.mark.parametrize("card", CARDS)
def test_kernels_ask_for_what_they_ask_for_on_the_card(card: str) -> None:
    far = {}
    for name, by_card in RECORDED["operations"].items():
        real = by_card[card]
        if isinstance(real, str):  # the card has no such kernel
            continue
        ours = _peak(_simulated(card)[name])
        if abs(ours - _peak(real)) > max(2048, 0.005 * _peak(real)):
            far[name] = (ours, _peak(real))
    assert not far


@pytest.mark.parametrize("card", CARDS)
def test_reductions_ask_for_the_same_bytes_in_the_same_order(card: str) -> None:
    wrong = {}
    for name, by_card in RECORDED["operations"].items():
        if name.startswith(("sum ", "mean ", "norm ", "norms ")):
            ours, real = ([n for n in events if n > 0] for events in (_simulated(card)[name], by_card[card]))
            if ours != real:
                wrong[name] = (ours, real)
    assert not wrong


@pytest.mark.parametrize("card", ["T4", "V100-16GB"])
def test_attention_in_full_asks_and_gives_back_in_the_same_order(card: str) -> None:
    wrong = {}
    begins = ("attention float16 256", "attention float16 300", "backward of softmax")
    full = [name for name in RECORDED["operations"] if name.startswith(begins)]
    assert len(full) == 3
    for name in full:
        ours, real = _simulated(card)[name], RECORDED["operations"][name][card]
        if _in_turns(ours) != _in_turns(real):
            wrong[name] = (ours, real)
    assert not wrong


@pytest.mark.parametrize("card", CARDS)
def test_attention_is_chosen_as_torch_chooses_it_on_the_card(card: str) -> None:
    from memprof.config.gpus import find_gpu
    from memprof.simulate.fake_cuda.sdpa_kernels import sdpa_choice
    from tests.simulate.kernels.operations import ATTENTION, attention_arguments

    wrong = {}
    for case, real in zip(ATTENTION, RECORDED["attention"][card], strict=True):
        dtype, width, masked, grad, grouped, told = case
        query, key, _, mask = attention_arguments(dtype, width, masked, grad, grouped, "meta")
        ours = sdpa_choice(query, key, mask, told, None, find_gpu(card).capability)
        if ours[0] != real:
            wrong[case] = (ours, real)
    assert not wrong


@pytest.mark.parametrize(
    ("card", "words"),
    [
        ("T4", "compute capability 7.5 has no flash kernel, and the memory-efficient ones don't support grouped heads"),
        ("V100-16GB", "compute capability 7.0 has no flash kernel"),
        ("Arc B580", "a GPU of unknown compute capability has no flash kernel"),
        *((name, None) for name in ("RTX 4090", "A100-80GB", "H100", "B200")),
    ],
)
def test_why_attention_is_computed_in_full_is_said(card: str, words: str | None) -> None:
    from memprof.config.gpus import find_gpu
    from memprof.simulate.run import simulate

    def run(session: Any) -> None:
        query, key = (torch.empty(1, heads, 64, 32, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2))
        for _ in range(2):
            torch.nn.functional.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)

    notes = [n for n in simulate(run, gpu=find_gpu(card))["memprof"]["notes"] or [] if n.startswith("Attention is")]
    assert len(notes) == (words is not None)
    assert words is None or words in notes[0]


def test_results_that_fill_the_card_are_not_divided() -> None:
    from memprof.simulate.recorder.reductions import Processors, reduction_buffers

    card = Processors(108, 2048)  # 432 blocks of 512 threads at a time
    assert reduction_buffers([1000, 1 << 18], [1 << 18, 1], [1], 4, card) == []
    assert reduction_buffers([100, 1 << 18], [1 << 18, 1], [1], 4, card) != []


def test_the_cards_differ() -> None:
    assert len(set(RECORDED["attention"].values())) > 1
    products = RECORDED["operations"]["a product, with its workspace"]
    assert products["H100"] != products["RTX 4090"]


@pytest.mark.parametrize("card", CARDS)
def test_the_workspace_is_the_cards(card: str) -> None:
    from memprof.config.gpus import find_gpu, workspace_bytes

    assert workspace_bytes(find_gpu(card)) == RECORDED["operations"]["a product, with its workspace"][card][1]
