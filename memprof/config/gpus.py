"""Find GPUs by name: their true memory, and what a process holds there outside torch. No torch here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from memprof.errors import UsageError, did_you_mean
from memprof.files import read_toml
from memprof.units import GIB, format_gib, parse_size

if TYPE_CHECKING:
    from memprof.report.run import KnownSettings

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
        row = row_of(self.name)
        return "nvidia" if row is None else row.maker

    @property
    def threads_per_processor(self) -> int:
        return _THREADS.get(self.capability, 2048)

    @property
    def before_ampere(self) -> bool:
        """Tell whether this is a card of NVIDIA's without units for bfloat16 and without attention's flash kernel."""
        return (0, 0) < self.capability < (8, 0)

    @property
    def available_bytes(self) -> int:
        """Return what torch's allocator can reserve when nobody else uses the card."""
        return max(0, self.total_bytes - self.context_bytes)


# What the driver reports is at least this share of the size a GPU is sold with (22.0 of 24 GiB on an A10G), at most
# a little more.
_SOLD = (0.915, 1.02)
# A device with less is a number that lacks its unit.
_LEAST_BYTES = 2**20
# What drivers and shops add to the names of cards.
_NOT_IN_NAMES = re.compile(
    r"nvidia|geforce|tesla|amd instinct|intel|data center gpu|\((?:r|tm|emulated)\)|graphics|generation|pcie|sxm\d?"
    r"|hbm\d?e?|\bgpu\b|[\s_-]+"
)
# A GPU's memory: a number, then its unit. A bare T would make "3090 T" a size.
_SIZE = re.compile(r"\s*\d+(?:\.\d+)?\s*(?:B|[KMGT]i?B|[MG]i?)\s*", re.IGNORECASE)
_NUMBER = re.compile(r"\s*\d+(?:\.\d+)?\s*")
# A name with its memory, such as "4060 Ti 16GB", without spaces; where the name ends is found by looking it up.
_NAME_AND_SIZE = re.compile(r"(.+\d)gi?b?")
# Several GPUs: 8xH100, 8 x H100, 2*4090; H100x8, H100 x 8, H100:8.
_COUNTED = (re.compile(r"(?P<n>\d+)\s*[x×*]\s*(?P<name>\S.*)"), re.compile(r"(?P<name>.*\S)\s*[x×*:]\s*(?P<n>\d+)"))
# Devices that are no GPU of CUDA, ROCm or XPU.
_OTHER_DEVICES = re.compile(
    r"\b(?:mac(?:book|\s?mini|\s?studio|\s?pro)?|imac|apple|mps|metal|m[1-9](?:\s?(?:pro|max|ultra))?|[tn]pu|cpu|"
    r"trainium|inferentia|gaudi)\b",
    re.IGNORECASE,
)
# No GPU has as much memory.
_MOST_BYTES = 4 * 2**40
# A size as GPUs are sold.
_SOLD_SIZE = re.compile(r"\s*(\d+)\s*GB?\s*", re.IGNORECASE)
# Threads that one multiprocessor holds, by compute capability, where they are not 2048 (CUDA's programming guide).
_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}


class CardRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of ``cards.toml``, which says what stands in it."""

    mib: int
    capability: tuple[int, int]
    processors: int
    half: float
    single: float
    memory: float
    host: float
    maker: str = "nvidia"


class _Cards(msgspec.Struct, frozen=True):
    """The rows of ``cards.toml`` and the cards' other names."""

    cards: dict[str, CardRow]
    aliases: dict[str, str]


@cache
def _cards() -> _Cards:
    return msgspec.convert(read_toml(Path(__file__).with_name("cards.toml")), _Cards)


def row_of(name: str) -> CardRow | None:
    """Return a card's row of ``cards.toml``, None for a card known by its size alone."""
    return _cards().cards.get(name)


def known_gpus() -> list[Gpu]:
    """List every GPU known by name."""
    return [
        Gpu(name, row.mib * MIB, row.capability, multiprocessors=row.processors) for name, row in _cards().cards.items()
    ]


def find_gpu(text: str) -> Gpu:
    """Find a GPU by its name or its memory.

    Args:
        text: a name (``H100``, ``rtx 4090``, ``4060 Ti 16GB``, ``NVIDIA A100-SXM4-80GB``), or a number with its unit
            (``24GB``, ``24GiB``). Names are matched first.

    Raises:
        UsageError: the text is neither, or names several GPUs (:func:`split_count`).
    """
    if (named := _named(text)) is not None:
        return named
    count, single = split_count(text)
    if count > 1:
        raise UsageError(f"{text!r} means {count} GPUs; give one GPU here: {single}.")
    if text.strip().startswith("-") and _SIZE.fullmatch(text.strip()[1:]):
        raise UsageError(f"{text!r}: GPU memory must be greater than zero, e.g. 24GB.")
    if _SIZE.fullmatch(text) or _NUMBER.fullmatch(text):
        size = parse_size(text)
        if not size:
            raise UsageError(f"{text!r}: GPU memory must be greater than zero, e.g. 24GB.")
        if size > _MOST_BYTES:
            raise UsageError(f"{text!r}: no GPU has this much memory; give the memory of one GPU, e.g. 24GB.")
        return Gpu(text.strip(), size)
    if (other := _OTHER_DEVICES.search(text)) is not None:
        hint = " To follow the CPU's code paths, use --device cpu." if other[0].lower() == "cpu" else ""
        supported = "memprof simulates only CUDA (NVIDIA), ROCm (AMD) and XPU (Intel) devices."
        raise UsageError(f"{text!r} is not supported: {supported}{hint}")
    raise UsageError(_unknown(text))


def split_count(text: str) -> tuple[int, str]:
    """Split ``8xH100``, ``2x 4090`` or ``H100:8`` into a number of GPUs and one GPU; other texts are one GPU."""
    if _named(text) is not None:
        return 1, text
    for pattern in _COUNTED:
        if (counted := pattern.fullmatch(text.strip())) and (n := int(counted["n"])) > 0:
            single = counted["name"]
            if _SIZE.fullmatch(single) or _named(single) is not None:
                return n, single
    return 1, text


def _named(text: str) -> Gpu | None:
    """Find a GPU by its name, which may end in its memory; None for an unknown name, and for a size."""
    names = {_key(gpu.name): gpu for gpu in known_gpus()}
    key = _key(text)
    if (found := _of_key(key, names)) is not None:
        return found
    with_size = _NAME_AND_SIZE.fullmatch(key.replace("(", "").replace(")", ""))
    if with_size is None:
        return None
    other: tuple[Gpu, str] | None = None
    for digits in (3, 2, 1):
        name, gib = with_size[1][:-digits], with_size[1][-digits:]
        if not gib.isdigit() or gib.startswith("0"):
            continue
        if (exact := _of_key(f"{name}{gib}gb", names)) is not None:
            return exact
        if (found := _of_key(name, names)) is not None and _is_sold_as(found, int(gib)):
            return found
        if other is None and found is not None:
            other = found, gib
    if other is not None:
        named, size = other
        has = format_gib(named.total_bytes)
        raise UsageError(
            f"{text!r}: no {named.name} with {size} GB is known (it has {has} GiB). Give the memory alone: {size}GB."
        )
    return None


def _of_key(key: str, names: Mapping[str, Gpu]) -> Gpu | None:
    key = key.replace("mobile", "laptop").replace("notebook", "laptop").replace("maxq", "laptop")
    aliases = _cards().aliases
    for name in (key, "rtx" + key, "gtx" + key):
        if (found := names.get(_key(aliases.get(name, name)))) is not None:
            return found
    return None


def _is_sold_as(gpu: Gpu, gib: int) -> bool:
    """Tell whether a GPU is sold with so many GB of memory, of which its driver reports a little less."""
    low, high = _SOLD
    return gib > 0 and low <= gpu.total_bytes / (gib * GIB) <= high


def _unknown(text: str) -> str:
    names = {_key(gpu.name): gpu.name for gpu in known_gpus()}
    meant = did_you_mean(_key(text), names)
    listed = "" if meant else f" Known GPUs: {', '.join(_cards().cards)}."
    return f"{text!r} is not a known GPU{meant}. For another GPU, give its memory, such as 24GB.{listed}"


def capacity_bytes(capacity: str | int) -> int:
    """Return the bytes of a device named by size or by card (:func:`find_gpu`), or given in bytes as a number; the one
    reader of every option that takes a capacity. UsageError: neither; or a number too small to be meant as bytes."""
    if isinstance(capacity, int) and capacity >= _LEAST_BYTES:
        return capacity
    return find_gpu(str(capacity)).total_bytes


def gpu_of(card: str | Gpu) -> Gpu:
    """Return the card that is given as text (:func:`find_gpu`) or as itself."""
    return card if isinstance(card, Gpu) else find_gpu(card)


def _key(text: str) -> str:
    return _NOT_IN_NAMES.sub("", text.lower())


def note_of(gpu: Gpu) -> str | None:
    """Note what a simulation borrows: a maker's kernels, an older card of that size; None where it borrows nothing."""
    known = {
        "amd": "attention is taken to have the kernels of an H100",
        "intel": "attention is assumed to be computed in full, which uses more memory than a fused kernel",
    }.get(gpu.maker)
    if known is None:
        return older_note(gpu)
    return (
        f"{gpu.name}: its memory, and torch's allocator, whose rules are CUDA's there too; what its kernels and "
        f"libraries ask for was never compared, and {known}."
    )


def size_words(name: str) -> str:
    """Say how many GiB a size such as ``24GB`` is, beside a card that is sold so; empty for a card's name or GiB."""
    sold = _SOLD_SIZE.fullmatch(name)
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
    has = f"{least.name}, has {format_gib(least.total_bytes)}"
    return f"{words} (a GPU sold with that size, {has}: give the model of yours)"


def older_note(gpu: Gpu) -> str | None:
    """Say which cards without flash attention are of this size; None for a card with a name, or of another size."""
    if not gpu.name[:1].isdigit():
        return None
    sold = _SOLD_SIZE.fullmatch(gpu.name)
    older = [
        card.name
        for card in known_gpus()
        if card.before_ampere and _is_sold_as(card, int(sold[1]) if sold else round(gpu.total_bytes / GIB))
    ]
    if not older:
        return None
    listed = f"{', '.join(older[:-1])} and {older[-1]}" if len(older) > 1 else older[0]
    names = f"{listed} {'is' if len(older) == 1 else 'are'}"
    return (
        f"{gpu.name} is taken to be Ampere or newer. {names} of this size too, with no flash kernel, and may use "
        f"attention's weights of tokens x tokens. Give the GPU model (--gpu {older[0]})."
    )


_EMULATED = (
    "This GPU has no bfloat16 units: torch emulates them at float32's rate. Half precision is fp16 (fp16: true and "
    "bf16: false, or --dtype float16)."
)
# Seen on an emulated T4 with TRL 1.16 and torch 2.13, by recipe.
_REFUSED = {
    "trl": ' TRL accepts bf16 there, and its loss then fails: "gemm input type at::BFloat16 and output type float is '
    'only supported for CUDA devices with compute capability 8.0 or higher".',
    "lean": " The lean trainer does not support bf16 there, because its loss accumulates such matmuls in float32.",
}

# Seen on an emulated T4 with TRL 1.16 and torch 2.13; the kernel that refuses is CUDA's of every card.
_SCALED = (
    "TRL 1.16 makes a 4-bit model's adapters in bfloat16, and the loss scaler of fp16: true fails on their gradients: "
    "\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'. Use bf16: true, or "
    "--dtype float16 with fp16: false and bf16: false."
)


def bfloat16_note(gpu: Gpu, config: KnownSettings) -> str | None:
    """Say what becomes of bfloat16 on a card without units for it, or under fp16's loss scaler; else None."""
    if config.load_in_4bit and config.mixed_precision == "fp16" and config.recipe != "lean":
        return _SCALED
    half = "bf16" in (config.mixed_precision, config.dtype) or config.dtype == "bfloat16"
    if not half or not gpu.before_ampere:
        return None
    return _EMULATED + _REFUSED.get(str(config.recipe), "")


def workspaces_of(gpu: Gpu) -> tuple[int, ...]:
    """Return the sizes that cuBLAS's workspace may have: one on a named card of NVIDIA's, all where it is not known."""
    if row_of(gpu.name) is not None and gpu.maker == "nvidia":
        return (workspace_bytes(gpu),)
    return tuple(sorted({workspace_bytes(known) for known in known_gpus()}))


def workspace_bytes(gpu: Gpu | None) -> int:
    """Return the size of cuBLAS's workspace of one handle and stream, torch's default."""
    return 32 * MIB if gpu is None or gpu.capability >= (9, 0) else 8_519_680
