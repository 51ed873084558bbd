"""The caching allocator's settings: read from text and from recordings, and written as torch writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeGuard

from memprof.allocator.alloc_conf import INTERVALS, AllocConf, parse_alloc_conf
from memprof.errors import UsageError

#: The environment variables that torch reads the settings from; the first one that is set wins, even if it is empty.
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

# Constants by which ``CUDACachingAllocator`` rounds requests up to blocks and blocks to segments, in bytes.
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
    """The settings of one process's caching allocator; sizes are bytes.

    Attributes:
        max_split_size: blocks of this size or more are never split. :data:`UNLIMITED`: all may be.
        max_non_split_rounding: how much larger than the request such a block may be.
        large_segment_size: the segment for a block from 1 to 10 MiB, and the page of large expandable segments.
        garbage_collection_threshold: share of the allowed memory above which torch frees cached blocks; 0: never.
        expandable_segments: whether segments grow by pages.
        roundup_divisions: one entry for each power of two from 1 MiB to 32 GiB; 0 and 1 mean off.
        memory_fraction: the share of the device that the process may reserve; see :meth:`on_device`.
        allowed_bytes: what the process may reserve by its memory fraction; None: no limit, and no garbage collection.
        oldest_first: torch's release, not a setting. Of free blocks of one size, torch takes the one with the lowest
            address; from 2.13 on the one of the oldest segment, there the lowest address.
        text: the string that the settings were read from, such as ``"expandable_segments:True"``.
        notes: sentences on what in the text is not modelled.
    """

    max_split_size: int = UNLIMITED
    max_non_split_rounding: int = 20 * MIB
    large_segment_size: int = 20 * MIB
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False
    roundup_divisions: tuple[int, ...] = (0,) * INTERVALS
    memory_fraction: float = 1.0
    allowed_bytes: int | None = None
    oldest_first: bool = True
    text: str = field(default="", compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)

    def round_size(self, size: int) -> int:
        """Return the block bytes for a request, before any unsplit rest is added."""
        if size < MIN_BLOCK:
            return MIN_BLOCK
        divisions = self.roundup_divisions[min(max(size.bit_length() - 21, 0), INTERVALS - 1)]
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

    def page_size(self, *, small: bool) -> int:
        """Return the bytes by which an expandable segment of the small or the large pool grows."""
        return SMALL_SEGMENT if small else self.large_segment_size

    def on_device(self, total: int | None) -> AllocatorSettings:
        """Return these settings with the memory fraction as bytes of a device (``total`` None: of unknown size)."""
        if total is None or self.memory_fraction >= 1:
            return replace(self, allowed_bytes=None)
        return replace(self, allowed_bytes=int(self.memory_fraction * total))

    def to_snapshot(self) -> dict[str, object]:
        """Return the snapshot's ``allocator_settings``, as torch 2.13 writes them, and ``oldest_first``."""
        return {
            VARIABLES[0]: self.text,
            "max_split_size": -1 if self.max_split_size >= UNLIMITED else self.max_split_size,
            "garbage_collection_threshold": self.garbage_collection_threshold,
            "expandable_segments": self.expandable_segments,
            "roundup_power2_divisions": {str(1 << i): d for i, d in enumerate(self.roundup_divisions)},
            "oldest_first": self.oldest_first,
        }


def _round_to_division(size: int, divisions: int) -> int:
    floor = 1 << (size.bit_length() - 1)
    if size == floor:
        return size
    step = floor >> (divisions.bit_length() - 1)
    return floor if step == 0 else -(-size // step) * step


def parse_settings(text: str) -> AllocatorSettings:
    """Parse a ``PYTORCH_CUDA_ALLOC_CONF`` string as torch's CUDA build does.

    Raises:
        UsageError: the string is malformed, torch has no such option, or a value is out of range.
    """
    conf = parse_alloc_conf(text)
    notes = _unmodelled(conf)
    if conf.garbage_collection_threshold and conf.memory_fraction == 1:
        notes.append(
            f"The allocator setting garbage_collection_threshold:{conf.garbage_collection_threshold:g} has no effect: "
            "torch collects garbage only if the process has a memory fraction below 1 "
            "(per_process_memory_fraction, or torch.cuda.set_per_process_memory_fraction)."
        )
    return _settings(text, conf, tuple(notes))


def settings_of(recorded: Mapping[str, object]) -> AllocatorSettings:
    """Read a snapshot's ``allocator_settings``.

    torch writes most settings under their own keys, and all of them in the text of the environment variable. A key wins
    over the text, because it is the value in effect. What is missing or unusable keeps torch's default, with a note.
    """
    text = conf_text(recorded) or ""
    try:
        conf = parse_alloc_conf(text, skip_unknown=True)
        notes = _unmodelled(conf) + [
            f"memprof does not know the recording's allocator setting {name}: block sizes are derived without it."
            for name in conf.unknown
        ]
        settings = _settings(text, conf, tuple(notes))
    except UsageError as error:
        note = f"The recording's allocator settings cannot be read, and only those with their own key are used: {error}"
        settings = AllocatorSettings(text=text, notes=(note,))
    split, threshold = recorded.get("max_split_size"), recorded.get("garbage_collection_threshold")
    if _is_integer(split) and (split < 0 or split > MIN_LARGE_SEGMENT):  # below 0: a size_t beyond 2^63, no limit
        settings = replace(settings, max_split_size=UNLIMITED if split < 0 else min(split, UNLIMITED))
    if isinstance(threshold, float) and 0 <= threshold < 1:
        settings = replace(settings, garbage_collection_threshold=threshold)
    if isinstance(expandable := recorded.get("expandable_segments"), bool):
        settings = replace(settings, expandable_segments=expandable)
    if (divisions := _divisions(recorded.get("roundup_power2_divisions"))) is not None:
        settings = replace(settings, roundup_divisions=divisions)
    # A simulation writes it; torch does not, and has written the other name since about the same release.
    oldest_first = recorded.get("oldest_first", "max_cached_size" in recorded) is True
    return replace(settings, oldest_first=oldest_first)


def conf_text(recorded: Mapping[str, object]) -> str | None:
    """Return the text of the settings that a snapshot holds; None where it holds none."""
    return next((text for name in VARIABLES if isinstance(text := recorded.get(name), str)), None)


def _unmodelled(conf: AllocConf) -> list[str]:
    return [f"The allocator setting {name}:{value} is not modelled: {why}." for name, value, why in conf.unmodelled]


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _divisions(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, dict):
        return None
    table = tuple(value.get(str(1 << i), 0) for i in range(INTERVALS))
    return table if all(_is_integer(d) and d >= 0 and not d & (d - 1) for d in table) else None


def _settings(text: str, conf: AllocConf, notes: tuple[str, ...]) -> AllocatorSettings:
    return AllocatorSettings(
        max_split_size=min(conf.max_split_size, UNLIMITED),
        max_non_split_rounding=min(conf.max_non_split_rounding, UNLIMITED),
        large_segment_size=min(conf.large_segment_size, UNLIMITED),
        garbage_collection_threshold=conf.garbage_collection_threshold,
        expandable_segments=conf.expandable_segments,
        roundup_divisions=tuple(conf.roundup_divisions),
        memory_fraction=conf.memory_fraction,
        text=text,
        notes=notes,
    )
