"""Find GPUs by name: their true memory, and what a process holds there outside torch. No torch here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from memprof.errors import UsageError, did_you_mean
from memprof.files import read_toml
from memprof.units import GIB, format_gib, parse_size

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
    multiprocessors: int = 108

    @property
    def maker(self) -> str:
        """Return ``nvidia``, ``amd`` or ``intel``; a card known by its size alone is taken for NVIDIA's."""
        return str((row_of(self.name) or {}).get("maker", "nvidia"))

    @property
    def threads_per_processor(self) -> int:
        return _THREADS.get(self.capability, 2048)

    @property
    def before_ampere(self) -> bool:
        """Tell whether this is a card of NVIDIA's without units for bfloat16 and without attention's flash kernel."""
        return (0, 0) < self.capability < (8, 0)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, from which :func:`gpu_of` makes the card again in another process."""
        return {**asdict(self), "capability": list(self.capability)}

    @property
    def available_bytes(self) -> int:
        """Return what torch's allocator can reserve when nobody else uses the card."""
        return max(0, self.total_bytes - self.context_bytes)


# What a card is sold as is this much more, at most, than what its driver reports.
_SIZES_APART = 0.1
# A device with less is a number that lacks its unit.
_LEAST_BYTES = 2**20
# What drivers and shops add to the names of cards.
_NOT_IN_NAMES = re.compile(
    r"nvidia|geforce|tesla|amd instinct|intel|data center gpu|\((?:r|tm|emulated)\)|graphics|generation|pcie|sxm\d?"
    r"|hbm\d?e?|[\s_-]+"
)
# Threads that one multiprocessor holds, by compute capability, where they are not 2048 (CUDA's programming guide).
_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}


@cache
def _cards() -> dict[str, Any]:
    """Return the rows of ``cards.toml``, which says what stands in them, and the cards' other names."""
    return read_toml(Path(__file__).with_name("cards.toml"))


def row_of(name: str) -> dict[str, Any] | None:
    """Return a card's row of ``cards.toml``, None for a card known by its size alone."""
    row: dict[str, Any] | None = _cards()["cards"].get(name)
    return row


def known_gpus() -> list[Gpu]:
    """List every GPU known by name."""
    return [
        Gpu(name, row["mib"] * MIB, tuple(row["capability"]), multiprocessors=row["processors"])
        for name, row in _cards()["cards"].items()
    ]


def find_gpu(text: str) -> Gpu:
    """Find a GPU by name (``H100``, ``rtx 4090``, ``4090``, ``NVIDIA A100-SXM4-80GB``) or size (``24GB``, ``24GiB``);
    UsageError for what is neither."""
    names = {_key(gpu.name): gpu for gpu in known_gpus()}
    wanted = _key(text)
    wanted = _key(_cards()["aliases"].get(wanted, wanted))
    for name in (wanted, "rtx" + wanted):
        if name in names:
            return names[name]
    if re.match(r"\s*\d", text):
        if not (size := parse_size(text)):
            raise UsageError(f"{text}: no card has no memory; give a size such as 24GB.")
        return Gpu(text.strip(), size)
    meant = did_you_mean(wanted, {key: gpu.name for key, gpu in names.items()})
    known = f"{text!r} is not a size and no card that is known{meant}"
    listed = "" if meant else f", or one of {', '.join(_cards()['cards'])}"
    raise UsageError(f"{known}: give a size such as 24GB{listed}.")


def capacity_bytes(capacity: str | int) -> int:
    """Return the bytes of a device named by size or by card (:func:`find_gpu`), or given in bytes as a number; the one
    reader of every option that takes a capacity. UsageError: neither; or a number too small to be meant as bytes."""
    if isinstance(capacity, int) and capacity >= _LEAST_BYTES:
        return capacity
    return find_gpu(str(capacity)).total_bytes


def gpu_of(card: str | Gpu | Mapping[str, Any]) -> Gpu:
    """Return the card that is given as text (:func:`find_gpu`), as itself, or as :meth:`Gpu.to_dict` wrote it."""
    if isinstance(card, Gpu):
        return card
    if isinstance(card, str):
        return find_gpu(card)
    major, minor = card["capability"]
    return Gpu(**{**card, "capability": (major, minor)})


def _key(text: str) -> str:
    return _NOT_IN_NAMES.sub("", text.lower())


def note_of(gpu: Gpu) -> str | None:
    """Note what a simulation borrows: a maker's kernels, an older card of that size; None where it borrows nothing."""
    known = {
        "amd": "attention is taken to have the kernels of an H100",
        "intel": "attention is taken to be computed in full, which holds more than a kernel of its own does",
    }.get(gpu.maker)
    if known is None:
        return older_note(gpu)
    return (
        f"{gpu.name}: its memory, and torch's allocator, whose rules are CUDA's there too; what its kernels and "
        f"libraries ask for was never compared, and {known}."
    )


def size_words(name: str) -> str:
    """Say how many GiB a size such as ``24GB`` is, beside a card that is sold so; empty for a card's name or GiB."""
    sold = re.fullmatch(r"\s*(\d+)\s*GB?\s*", name, re.IGNORECASE)
    if sold is None:
        return ""
    words = f"{name.strip()} is {format_gib(parse_size(name))} GiB"
    alike = [
        card
        for card in known_gpus()
        if card.maker == "nvidia" and not card.before_ampere and 0 <= int(sold[1]) * GIB - card.total_bytes < 0.9 * GIB
    ]
    if not alike:
        return words
    least = min(alike, key=lambda card: card.total_bytes)
    return f"{words} (a card sold as such, {least.name}, has {format_gib(least.total_bytes)}: name yours)"


def older_note(gpu: Gpu) -> str | None:
    """Say which cards without flash attention are of this size; None for a card with a name, or of another size."""
    if not gpu.name[:1].isdigit():
        return None
    older = [
        card.name
        for card in known_gpus()
        if card.before_ampere and abs(card.total_bytes / gpu.total_bytes - 1) < _SIZES_APART
    ]
    if not older:
        return None
    names = f"{' and '.join(older)} {'is' if len(older) == 1 else 'are'}"
    return (
        f"{gpu.name} is taken for a card from Ampere on. {names} of this size too, with no flash kernel, and may hold "
        f"attention's weights of tokens x tokens. Name the card (--gpu {older[0]})."
    )


_EMULATED = (
    "This card has no bfloat16 units: torch emulates them at float32's rate. Half precision is fp16 (fp16: true and "
    "bf16: false, or --dtype float16)."
)
# Seen on an emulated T4 with TRL 1.16 and torch 2.13, by recipe.
_REFUSED = {
    "trl": " TRL accepts bf16 there, and its loss then fails: \"gemm input type at::BFloat16 and output type float is "
    'only supported for CUDA devices with compute capability 8.0 or higher".',
    "lean": " The lean trainer refuses bf16 there, because its loss sums such products in float32.",
}

# Seen on an emulated T4 with TRL 1.16 and torch 2.13; the kernel that refuses is CUDA's of every card.
_SCALED = (
    "TRL 1.16 keeps a 4-bit model's adapters in bfloat16, and the loss scaler of fp16: true fails on their gradients: "
    "\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'. Use bf16: true, or "
    "--dtype float16 with fp16: false and bf16: false."
)


def bfloat16_note(gpu: Gpu, config: Mapping[str, Any]) -> str | None:
    """Say what becomes of bfloat16 on a card without units for it, or under fp16's loss scaler; else None."""
    if config.get("load_in_4bit") and config.get("mixed_precision") == "fp16" and config.get("recipe") != "lean":
        return _SCALED
    half = "bf16" in (config.get("mixed_precision"), config.get("dtype")) or config.get("dtype") == "bfloat16"
    if not half or not gpu.before_ampere:
        return None
    return _EMULATED + _REFUSED.get(str(config.get("recipe")), "")


def workspaces_of(gpu: Gpu) -> tuple[int, ...]:
    """Return the sizes that cuBLAS's workspace may have: one on a named card of NVIDIA's, all where it is not known."""
    if row_of(gpu.name) is not None and gpu.maker == "nvidia":
        return (workspace_bytes(gpu),)
    return tuple(sorted({workspace_bytes(known) for known in known_gpus()}))


def workspace_bytes(gpu: Gpu | None) -> int:
    """Return the size of cuBLAS's workspace of one handle and stream, torch's default."""
    return 32 * MIB if gpu is None or gpu.capability >= (9, 0) else 8_519_680
