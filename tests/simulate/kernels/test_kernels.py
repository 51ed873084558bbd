"""What kernels ask for beside their results, and which attention is chosen, as torch's CUDA build does on each card.

``recorded.json``: torch's own allocator on emulated cards (``python -m benchmarks.simulator emulated-kernels``).
"""

from __future__ import annotations

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


def _simulated(card: str, name: str) -> list[int]:
    from memprof.config.gpus import find_gpu
    from memprof.simulate.run import simulate
    from tests.simulate.kernels.operations import OPERATIONS

    events: list[int] = []

    def run(session: Any) -> None:
        work = OPERATIONS[name]("cpu")
        before = len(session.fake_recorder._events)
        work()
        sign = {"alloc": 1, "free_requested": -1}
        events.extend(
            sign[e.action] * e.size for e in session.fake_recorder._events[before:] if e.action in sign
        )

    simulate(run, gpu=find_gpu(card), stacks=False)
    return events


@pytest.mark.parametrize("card", CARDS)
def test_kernels_ask_for_what_they_ask_for_on_the_card(card: str) -> None:
    far = {}
    for name, by_card in RECORDED["operations"].items():
        real = by_card[card]
        if isinstance(real, str):  # the card has no such kernel
            continue
        ours = _peak(_simulated(card, name))
        if abs(ours - _peak(real)) > max(2048, 0.005 * _peak(real)):
            far[name] = (ours, _peak(real))
    assert not far


def test_reductions_ask_for_the_same_bytes() -> None:
    wrong = {}
    for name, by_card in RECORDED["operations"].items():
        if name.startswith(("sum ", "mean ", "norm ", "norms ")):
            for card, real in by_card.items():
                ours = [n for n in _simulated(card, name) if n > 0]
                if sorted(ours) != sorted(n for n in real if n > 0):
                    wrong[card, name] = (ours, real)
    assert not wrong
