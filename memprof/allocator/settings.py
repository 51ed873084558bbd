"""Parse ``PYTORCH_CUDA_ALLOC_CONF``, and compute the block and segment sizes that follow from it.

The rules are those of torch's ``AllocatorConfig``. All sizes are bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from memprof.errors import UsageError

__all__ = [
    "MIB",
    "MIN_BLOCK",
    "SEGMENT_ROUND",
    "SMALL_LIMIT",
    "SMALL_SEGMENT",
    "UNLIMITED",
    "AllocatorSettings",
    "parse_settings",
    "settings_of",
]

MIB = 2**20
MIN_BLOCK = 512
SMALL_LIMIT = MIB  # blocks up to this size live in the small pool
SMALL_SEGMENT = 2 * MIB
MIN_LARGE_SEGMENT = 10 * MIB  # requests of this size or more get a segment of their own size
SEGMENT_ROUND = 2 * MIB
UNLIMITED = 1 << 62


@dataclass(frozen=True)
class AllocatorSettings:
    """Hold the settings of ``PYTORCH_CUDA_ALLOC_CONF`` (``PYTORCH_ALLOC_CONF``); sizes are bytes.

    ``roundup_divisions`` has one entry for each power of two from 1 MiB to 32 GiB; 0 and 1 mean off.
    """

    max_split_size: int = UNLIMITED
    max_non_split_rounding: int = 20 * MIB
    large_segment_size: int = 20 * MIB
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False
    roundup_divisions: tuple[int, ...] = (0,) * 16

    def round_size(self, size: int) -> int:
        """Return the block bytes for a request, before any unsplit rest is added."""
        if size < MIN_BLOCK:
            return MIN_BLOCK
        divisions = self.roundup_divisions[min(max(size.bit_length() - 21, 0), 15)]
        if divisions > 1 and size > MIN_BLOCK * divisions:
            return _round_to_division(size, divisions)
        return -(-size // MIN_BLOCK) * MIN_BLOCK

    def segment_size(self, block: int) -> int:
        """Return the bytes of the segment that the device is asked for to make room for a block."""
        if block <= SMALL_LIMIT:
            return SMALL_SEGMENT
        if block < MIN_LARGE_SEGMENT:
            return self.large_segment_size
        return -(-block // SEGMENT_ROUND) * SEGMENT_ROUND


def _round_to_division(size: int, divisions: int) -> int:
    floor = 1 << (size.bit_length() - 1)
    if size == floor:
        return size
    step = floor >> (divisions.bit_length() - 1)
    return floor if step == 0 else -(-size // step) * step


def parse_settings(text: str) -> AllocatorSettings:
    """Parse a ``PYTORCH_CUDA_ALLOC_CONF`` string; options that do not affect sizes are ignored.

    Raises:
        UsageError: the string is malformed or a value is out of range.
    """
    values: dict[str, Any] = {}
    for key, value in _pairs(text):
        try:
            _apply(values, key, value)
        except ValueError:
            raise UsageError(f"allocator setting {key}:{value} cannot be used; see PyTorch's notes on it.") from None
    return AllocatorSettings(**values)


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    rest = text.replace(" ", "")
    while rest:
        match = re.match(r"([A-Za-z0-9_]+):(\[[^\]]*\]|[^,:\[\]]+)(?:,|$)", rest)
        if match is None:
            raise UsageError(f"allocator settings {text!r} are not of the form name:value,name:value.")
        yield match.group(1), match.group(2)
        rest = rest[match.end() :]


def _apply(values: dict[str, Any], key: str, value: str) -> None:
    if key == "max_split_size_mb":
        # torch refuses a limit at or below its large segment
        if int(value) <= 20:
            raise ValueError(value)
        values["max_split_size"] = int(value) * MIB
    elif key == "max_non_split_rounding_mb":
        values["max_non_split_rounding"] = int(value) * MIB
    elif key == "large_segment_size_mb":
        values["large_segment_size"] = int(value) * MIB
    elif key == "garbage_collection_threshold":
        values["garbage_collection_threshold"] = float(value)
        if not 0 < float(value) < 1:
            raise ValueError(value)
    elif key == "expandable_segments":
        if value not in ("True", "False", "true", "false"):
            raise ValueError(value)
        values["expandable_segments"] = value in ("True", "true")
    elif key == "roundup_power2_divisions":
        values["roundup_divisions"] = _divisions(value)


def _divisions(value: str) -> tuple[int, ...]:
    """Parse ``4`` (for all sizes) or ``[256:1,512:2,>:8]`` (each from its size in MB up)."""
    if not value.startswith("["):
        return (_power_of_two(value),) * 16
    table = [0] * 16
    previous = -1
    for item in filter(None, value[1:-1].split(",")):
        size, _, count = item.partition(":")
        divisions = _power_of_two(count)
        if size == ">":
            table[previous + 1 :] = [divisions] * (15 - previous)
            break
        index = min(_power_of_two(size).bit_length() - 1, 15)
        # Sizes below the first one listed share its setting, as in torch.
        first = 0 if previous < 0 else index
        table[first : index + 1] = [divisions] * (index + 1 - first)
        previous = index
    return tuple(table)


def _power_of_two(text: str) -> int:
    number = int(text)
    if number < 1 or number & (number - 1):
        raise ValueError(text)
    return number


def settings_of(recorded: dict[str, Any]) -> AllocatorSettings:
    """Read a snapshot's ``allocator_settings``; missing or unusable ones keep their defaults."""
    values: dict[str, Any] = {}
    split = recorded.get("max_split_size")
    if isinstance(split, int) and 0 < split < UNLIMITED:
        values["max_split_size"] = split
    threshold = recorded.get("garbage_collection_threshold")
    if isinstance(threshold, float) and 0 < threshold < 1:
        values["garbage_collection_threshold"] = threshold
    values["expandable_segments"] = recorded.get("expandable_segments") is True
    divisions = recorded.get("roundup_power2_divisions")
    if isinstance(divisions, dict):
        table = [divisions.get(str(1 << i), 0) for i in range(16)]
        if all(isinstance(d, int) and (d == 0 or (d > 0 and not d & (d - 1))) for d in table):
            values["roundup_divisions"] = tuple(table)
    return AllocatorSettings(**values)
