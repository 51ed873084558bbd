"""Parse ``PYTORCH_CUDA_ALLOC_CONF`` by the rules of torch's ``AllocatorConfig``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from memprof.allocator.rounding import MIB, UNLIMITED, AllocatorSettings
from memprof.errors import UsageError


def parse_settings(text: str) -> AllocatorSettings:
    """Parse a ``PYTORCH_CUDA_ALLOC_CONF`` string as torch does; options that do not affect sizes are only checked.

    Raises:
        UsageError: the string is malformed, torch has no such option, or a value is out of range.
    """
    values: dict[str, Any] = {}
    for key, value in _pairs(text):
        found = _read(key, value)
        if (name := _OPTIONS[key].field) is not None:
            values[name] = found
    settings = AllocatorSettings(**values)
    for name in ("max_split_size", "max_non_split_rounding"):
        if values.get(name, UNLIMITED) < settings.large_segment_size:
            raise _unusable(f"{name}_mb", str(values[name] // MIB))
    return settings


def not_modelled(text: str) -> list[str]:
    """Say in sentences which options of a valid string change memory, and are not simulated."""
    notes = []
    for key, value in _pairs(text):
        found, (_, _, why, no_change) = _read(key, value), _OPTIONS[key]
        if why is not None and found != no_change:
            notes.append(f"The allocator setting {key}:{value} is not simulated: {why}.")
    return notes


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    rest = "".join(text.split())
    while rest:
        match = re.match(r"([^,:\[\]]+):(\[[^\]]*\]|[^,:\[\]]+)(?:,|$)", rest)
        if match is None:
            raise UsageError(f"allocator settings {text!r} are not of the form name:value,name:value.")
        yield match.group(1), match.group(2)
        rest = rest[match.end() :]


def _read(key: str, value: str) -> Any:
    if key not in _OPTIONS:
        from difflib import get_close_matches

        near = get_close_matches(key, _OPTIONS, 1)
        hint = f" (near it: {near[0]})" if near else ""
        raise UsageError(f"torch has no allocator setting {key}{hint}, and refuses it: drop it.")
    try:
        return _OPTIONS[key].read(value)
    except ValueError:
        raise _unusable(key, value) from None


def _unusable(key: str, value: str) -> UsageError:
    return UsageError(f"allocator setting {key}:{value} cannot be used; see PyTorch's notes on it.")


def _whole(text: str, lowest: int = 0) -> int:
    """Read digits and pass over what follows them, as C++'s ``stoull`` does: ``128MB`` is 128."""
    digits = re.match(r"\+?\d+", text)
    number = int(digits[0]) if digits else -1
    if not lowest <= number < 1 << 64:
        raise ValueError(text)
    return number


def _mib(lowest: int) -> Callable[[str], int]:
    return lambda text: min(_whole(text, lowest) * MIB, UNLIMITED)


def _share(text: str) -> float:
    number = re.match(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text)
    share = float(number[0]) if number else -1.0
    if not 0 <= share <= 1:
        raise ValueError(text)
    return share


def _open_share(text: str) -> float:
    if _share(text) in (0, 1):
        raise ValueError(text)
    return _share(text)


def _flag(text: str) -> bool:
    if text not in ("True", "False"):
        raise ValueError(text)
    return text == "True"


def _backend(text: str) -> str:
    if text not in ("native", "cudaMallocAsync", "hipMallocAsync"):
        raise ValueError(text)
    return text


def _threads(text: str) -> int:
    number = _power_of_two(text)
    if number > 128:
        raise ValueError(text)
    return number


def _divisions(value: str) -> tuple[int, ...]:
    """Parse ``4`` (for all sizes) or ``[256:1,512:2,>:8]`` (each from its size in MB up)."""
    if not value.startswith("["):
        return (_power_of_two(value),) * 16
    table = [0] * 16
    previous: int | None = None
    for item in filter(None, value[1:-1].split(",")):
        size, _, count = item.partition(":")
        divisions = 0 if count == "0" else _power_of_two(count)
        if size == ">":  # torch leaves the smallest sizes out where this stands alone
            above = (previous or 0) + 1
            table[above:] = [divisions] * (16 - above)
            continue
        index = min(_power_of_two(size).bit_length() - 1, 15)
        # Sizes below the first one listed share its setting, as in torch.
        first = 0 if previous is None else index
        table[first : index + 1] = [divisions] * (index + 1 - first)
        previous = index
    return tuple(table)


def _power_of_two(text: str) -> int:
    number = _whole(text, 1)
    if number & (number - 1):
        raise ValueError(text)
    return number


class _Option(NamedTuple):
    """Hold an option of torch's: how it is read, the field of the settings that it sets, why it is not simulated, and
    the value of it that changes nothing."""

    read: Callable[[str], Any]
    field: str | None = None
    left_out: str | None = None
    no_change: Any = None


_PINNED = "the host's pinned buffers are counted as torch keeps them by default"
_OTHER_BACKEND = "what is reserved is that of torch's native allocator, and the driver's pool keeps other amounts"
# What torch 2.2 to 2.13 know: c10/core/AllocatorConfig and c10/cuda/CUDAAllocatorConfig.
_OPTIONS = {
    "max_split_size_mb": _Option(_mib(20), "max_split_size"),
    "max_non_split_rounding_mb": _Option(_mib(20), "max_non_split_rounding"),
    "large_segment_size_mb": _Option(_mib(11), "large_segment_size"),
    "garbage_collection_threshold": _Option(_open_share, "garbage_collection_threshold"),
    "expandable_segments": _Option(_flag, "expandable_segments"),
    "roundup_power2_divisions": _Option(_divisions, "roundup_divisions"),
    "per_process_memory_fraction": _Option(_share, None, "the process is given all of the card", 1.0),
    "backend": _Option(_backend, None, _OTHER_BACKEND, "native"),
    "pinned_reserve_segment_size_mb": _Option(_mib(1), None, _PINNED),
    "pinned_max_round_threshold_mb": _Option(_mib(0), None, _PINNED),
    "pinned_max_cached_size_mb": _Option(_mib(0), None, _PINNED),
    "pinned_num_register_threads": _Option(_threads),
    "pinned_use_background_threads": _Option(_flag),
    "pinned_use_cuda_host_register": _Option(_flag),
    "pinned_use_hip_host_register": _Option(_flag),
    "pinned_free_catch_all": _Option(_flag),
    "release_lock_on_cudamalloc": _Option(_flag),
    "release_lock_on_hipmalloc": _Option(_flag),
    "graph_capture_record_stream_reuse": _Option(_flag),
    "throw_on_cudamalloc_oom": _Option(_flag),
}


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
    # A simulation says it; torch does not, and has written the other name since about the same release.
    values["oldest_first"] = recorded.get("oldest_first", "max_cached_size" in recorded) is True
    return AllocatorSettings(**values)
