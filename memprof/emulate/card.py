"""What a pretended card is: a name of the project's GPU table, or a size."""

from __future__ import annotations

from memprof.config.gpus import Gpu, find_gpu
from memprof.errors import UsageError

_DEFAULT = "H100"


def find_card(card: str | None) -> Gpu:
    """Find a card by name (``4090``) or size (``24GB``: an A100's capability with that memory); None is an H100.

    Raises:
        UsageError: neither, or no card of NVIDIA's.
    """
    found = find_gpu(card or _DEFAULT)
    if found.maker != "nvidia":
        raise UsageError(f"--gpu {card!r}: memprof emulate pretends NVIDIA's cards only.")
    return found
