"""Round requests up to blocks and blocks to segments, by the allocator's settings. All sizes are bytes.

The rules are those of torch's ``CUDACachingAllocator`` and ``AllocatorConfig``.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 2**20
MIN_BLOCK = 512
SMALL_LIMIT = MIB  # blocks up to this size live in the small pool
SMALL_SEGMENT = 2 * MIB
MIN_LARGE_SEGMENT = 10 * MIB  # requests of this size or more get a segment of their own size
SEGMENT_ROUND = 2 * MIB
UNLIMITED = 1 << 62
#: The release of torch from which on the oldest segment's block is taken; 2.12 was not tried.
OLDEST_FIRST_SINCE = (2, 13)


@dataclass(frozen=True)
class AllocatorSettings:
    """Hold the settings of ``PYTORCH_CUDA_ALLOC_CONF`` (``PYTORCH_ALLOC_CONF``); sizes are bytes.

    ``roundup_divisions`` has one entry for each power of two from 1 MiB to 32 GiB; 0 and 1 mean off.
    ``oldest_first`` is torch's release, not a setting: of free blocks of one size, torch takes the one with the lowest
    address, and from :data:`OLDEST_FIRST_SINCE` on the one of the oldest segment, there the lowest address.
    """

    max_split_size: int = UNLIMITED
    max_non_split_rounding: int = 20 * MIB
    large_segment_size: int = 20 * MIB
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False
    roundup_divisions: tuple[int, ...] = (0,) * 16
    oldest_first: bool = True

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
