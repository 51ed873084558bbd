"""Constants by which torch's ``CUDACachingAllocator`` rounds requests up to blocks and blocks to segments, in bytes."""

from __future__ import annotations

MIB = 2**20
MIN_BLOCK = 512
SMALL_LIMIT = MIB  # blocks up to this size live in the small pool
SMALL_SEGMENT = 2 * MIB
MIN_LARGE_SEGMENT = 10 * MIB  # requests of this size or more get a segment of their own size
SEGMENT_ROUND = 2 * MIB
UNLIMITED = 1 << 62
#: The release of torch from which on the oldest segment's block is taken; 2.12 was not tried.
OLDEST_FIRST_SINCE = (2, 13)
