"""Find GPUs by name: their true memory, and what a process holds there outside torch. No torch here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from memprof.errors import UsageError
from memprof.units import parse_size

__all__ = ["CONTEXT_BYTES", "Gpu", "find_gpu", "gpu_of", "known_gpus", "workspace_bytes"]

MIB = 2**20
# CUDA's context and the kernels loaded into it, for a process that uses cuBLAS and attention kernels. An estimate:
# there is no figure that holds for every driver; measure your own with nvidia-smi.
CONTEXT_BYTES = 600 * MIB


@dataclass(frozen=True)
class Gpu:
    """``total_bytes`` is what the driver reports (``torch.cuda.mem_get_info()[1]``), less than the name says."""

    name: str
    total_bytes: int
    capability: tuple[int, int] = (8, 0)
    context_bytes: int = CONTEXT_BYTES

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, from which :func:`gpu_of` makes the card again in another process."""
        return {**asdict(self), "capability": list(self.capability)}

    @property
    def available_bytes(self) -> int:
        """Return what torch's allocator can reserve when nobody else uses the card."""
        return max(0, self.total_bytes - self.context_bytes)


# Totals in MiB as the driver reports them for the card with ECC on, where it has ECC.
_TABLE = {
    "T4": (15095, (7, 5)),
    "V100-16GB": (16151, (7, 0)),
    "V100-32GB": (32501, (7, 0)),
    "RTX 3060": (11909, (8, 6)),
    "RTX 3090": (24122, (8, 6)),
    "RTX 4070": (11872, (8, 9)),
    "RTX 4080": (15974, (8, 9)),
    "RTX 4090": (24080, (8, 9)),
    "RTX 5090": (32110, (12, 0)),
    "A10": (22515, (8, 6)),
    "A10G": (22515, (8, 6)),
    "A40": (45416, (8, 6)),
    "A6000": (48539, (8, 6)),
    "L4": (22564, (8, 9)),
    "L40S": (45373, (8, 9)),
    "A100-40GB": (40338, (8, 0)),
    "A100-80GB": (81050, (8, 0)),
    "H100": (81079, (9, 0)),
    "H100 NVL": (95320, (9, 0)),
    "GH200": (96768, (9, 0)),
    "H200": (143156, (9, 0)),
    "B200": (182642, (10, 0)),
    "MI300X": (196288, (9, 4)),
}
_ALIASES = {"a100": "A100-80GB", "v100": "V100-16GB", "h100-80gb": "H100", "rtxa6000": "A6000"}


def known_gpus() -> list[Gpu]:
    """List every GPU known by name."""
    return [Gpu(name, total * MIB, capability) for name, (total, capability) in _TABLE.items()]


def find_gpu(text: str) -> Gpu:
    """Find a GPU by name (``H100``, ``rtx 4090``) or size (``24GB``, ``24GiB``).

    Raises:
        UsageError: neither a name that is known nor a size.
    """
    names = {_key(gpu.name): gpu for gpu in known_gpus()}
    wanted = _key(text)
    wanted = _key(_ALIASES.get(wanted, wanted))
    if wanted in names:
        return names[wanted]
    if "rtx" + wanted in names:
        return names["rtx" + wanted]
    if re.match(r"\s*\d", text):
        size = parse_size(text)
        if size:
            return Gpu(text.strip(), size)
    raise UsageError(f"--gpu {text!r}: give a size such as 24GB, or one of {', '.join(_TABLE)}.")


def gpu_of(card: str | Gpu | Mapping[str, Any]) -> Gpu:
    """Return the card that is given as text (:func:`find_gpu`), as itself, or as :meth:`Gpu.to_dict` wrote it.

    Raises:
        UsageError: a text that is neither a known name nor a size.
    """
    if isinstance(card, Gpu):
        return card
    if isinstance(card, str):
        return find_gpu(card)
    major, minor = card["capability"]
    return Gpu(**{**card, "capability": (major, minor)})


def _key(text: str) -> str:
    return re.sub(r"[\s_]+", "", text.lower()).removeprefix("nvidia").removeprefix("geforce")


def workspace_bytes(gpu: Gpu | None) -> int:
    """Return the size of cuBLAS's workspace of one handle and stream, torch's default."""
    return 32 * MIB if gpu is None or gpu.capability >= (9, 0) else 8_519_680
