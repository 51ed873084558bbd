"""Give torch allocator settings, and tell which it refuses and what it makes of the others."""

from __future__ import annotations

from typing import Any

import torch

from tests.cuda.programs.answer import answer


def main(asked: list[str]) -> list[dict[str, Any] | None]:
    """Return what torch keeps of each string, as a snapshot says it; None where it refuses the string."""
    torch.zeros(1, device="cuda")
    return [kept(text) for text in asked]


def kept(text: str) -> dict[str, Any] | None:
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    try:
        torch._C._accelerator_setAllocatorSettings(text)
    except (RuntimeError, ValueError, IndexError):
        return None
    settings: dict[str, Any] = torch.cuda.memory._snapshot()["allocator_settings"]
    return settings


if __name__ == "__main__":
    answer(main)
