"""Parse ``PYTORCH_CUDA_ALLOC_CONF`` as torch does, oddities included.

torch reads the string twice: ``AcceleratorAllocatorConfig`` (``c10/core/AllocatorConfig.cpp``) reads the options of
every accelerator, then ``CUDAAllocatorConfig`` reads those of CUDA. Both split the string into tokens at ``,``, ``:``,
``[`` and ``]`` and drop white space. Neither checks that the token between two others is the right separator.
``tests/allocator/test_alloc_conf.py`` compares this parser with the installed library's own on generated strings.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NoReturn

from memprof.errors import UsageError

MIB = 2**20
#: The largest number of a C++ ``size_t``; torch's default for a limit that is not set.
LARGEST = 2**64 - 1
#: Powers of two from 1 MiB to 32 GiB, which ``roundup_power2_divisions`` sets apart.
INTERVALS = 16


@dataclass
class AllocConf:
    """The values that torch's parsers keep of a string; sizes are bytes.

    ``unmodelled`` has one ``(option, value, reason)`` for each option that changes memory and that memprof's model of
    the allocator leaves out. ``unknown`` are the options that no tested torch has.
    """

    large_segment_size: int = 20 * MIB
    max_split_size: int = LARGEST
    max_non_split_rounding: int = 20 * MIB
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False
    roundup_divisions: list[int] = field(default_factory=lambda: [0] * INTERVALS)
    memory_fraction: float = 1.0
    unmodelled: list[tuple[str, str, str]] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def parse_alloc_conf(text: str, *, skip_unknown: bool = False) -> AllocConf:
    """Parse a ``PYTORCH_CUDA_ALLOC_CONF`` string.

    Args:
        text: the string, such as ``"max_split_size_mb:128,expandable_segments:True"``.
        skip_unknown: pass over options that torch does not have, as a build of torch without CUDA does.

    Raises:
        UsageError: torch refuses the string.
    """
    parser = _Parser(text, skip_unknown)
    parser.parse_common_options()
    parser.parse_cuda_options()
    return parser.conf


class _Parser:
    """Two passes over the tokens of one string, at the place ``at``."""

    def __init__(self, text: str, skip_unknown: bool) -> None:
        self.conf = AllocConf()
        self.at = 0
        self._text = text
        self._skip_unknown = skip_unknown
        self._tokens: list[str] = re.findall(r"[,:\[\]]|[^,:\[\]]+", re.sub(r"[ \t\n\v\f\r]", "", text))  # C's isspace

    def parse_common_options(self) -> None:
        """Read the options of every accelerator."""
        self._parse_large_segment_size()
        self.conf.max_non_split_rounding = self.conf.large_segment_size
        self._for_each_option(_COMMON)

    def parse_cuda_options(self) -> None:
        """Read the options of CUDA."""
        self._for_each_option(_CUDA)

    def _for_each_option(self, options: dict[str, Callable[[_Parser], None]]) -> None:
        self.at = 0
        while self.at < len(self._tokens):
            name = self._tokens[self.at]
            if name in options:
                options[name](self)
            elif name in _COMMON or name in _CUDA or name == _LARGE_SEGMENT or self._skip_unknown:
                if not (name in _COMMON or name in _CUDA or name == _LARGE_SEGMENT or name in self.conf.unknown):
                    self.conf.unknown.append(name)
                self._skip_option()
            else:
                self._raise_unknown(name)
            self.at += 1
            if self.at < len(self._tokens):
                self.at += 1  # the comma, which torch does not check

    # -- tokens ------------------------------------------------------------------------------------------------

    def _token(self) -> str:
        if self.at >= len(self._tokens):
            raise UsageError(f"allocator settings {self._text!r} are not of the form name:value,name:value.")
        return self._tokens[self.at]

    def value(self) -> str:
        """Move from an option's name to its value, over the colon, and return the value."""
        self.at += 1
        self._token()
        self.at += 1
        return self._token()

    def _skip_option(self) -> None:
        if self.value() == "[":
            while self._token() != "]":
                self.at += 1

    def _parse_large_segment_size(self) -> None:
        # torch takes any token of this name for the option, wherever it stands.
        while self.at < len(self._tokens):
            if self._tokens[self.at] == _LARGE_SEGMENT:
                number = self.number(_LARGE_SEGMENT, self.value(), lowest=11)
                self.conf.large_segment_size = _mib(number)
            self.at += 1

    # -- values ------------------------------------------------------------------------------------------------

    def number(self, name: str, text: str, *, lowest: int = 0) -> int:
        """Read a whole number as C++'s ``stoull``: what follows the digits is passed over, -1 wraps around."""
        match = re.match(r"([+-]?)0*([0-9]+)", text)
        # Python refuses to convert thousands of digits; size_t has 20.
        magnitude = int(match[2]) if match and len(match[2]) <= 20 else LARGEST + 1
        if magnitude > LARGEST:
            self.refuse(name, text)
        number = -magnitude % (LARGEST + 1) if match and match[1] == "-" else magnitude
        if number < lowest:
            self.refuse(name, text)
        return number

    def power_of_two(self, name: str, text: str, *, or_zero: bool = False) -> int:
        """Read a power of two; with ``or_zero`` also 0."""
        number = self.number(name, text)
        if number & (number - 1) or (number == 0 and not or_zero):
            self.refuse(name, text)
        return number

    def real(self, name: str, text: str) -> float:
        """Read a number as C++'s ``stod``; what follows it is passed over."""
        match = _HEXADECIMAL.match(text) or _DECIMAL.match(text)
        if match is None:
            self.refuse(name, text)
        base = 16 if match.re is _HEXADECIMAL else 10
        try:
            number = float(match[0]) if base == 10 else float.fromhex(match[0])
        except OverflowError:
            self.refuse(name, text)
        if abs(number) == float("inf") or _underflows(abs(number), match, base):
            self.refuse(name, text)
        return number

    def flag(self, name: str, text: str) -> bool:
        """Read ``True`` or ``False``, spelt so."""
        if text not in ("True", "False"):
            self.refuse(name, text)
        return text == "True"

    def refuse(self, name: str, text: str) -> NoReturn:
        """Raise that torch does not accept this value."""
        raise UsageError(f"allocator setting {name}:{text} cannot be used; see PyTorch's notes on it.")

    def _raise_unknown(self, name: str) -> NoReturn:
        from difflib import get_close_matches

        near = get_close_matches(name, [_LARGE_SEGMENT, *_COMMON, *_CUDA], 1)
        hint = f" (near it: {near[0]})" if near else ""
        raise UsageError(f"torch has no allocator setting {name}{hint} and raises an error: remove it.")

    # -- the options of every accelerator ----------------------------------------------------------------------

    def max_split_size(self) -> None:
        """Read ``max_split_size_mb``, which may not be below the size of a large segment."""
        self.conf.max_split_size = self._at_least_a_large_segment("max_split_size_mb")

    def max_non_split_rounding(self) -> None:
        """Read ``max_non_split_rounding_mb``, which may not be below the size of a large segment."""
        self.conf.max_non_split_rounding = self._at_least_a_large_segment("max_non_split_rounding_mb")

    def _at_least_a_large_segment(self, name: str) -> int:
        return _mib(self.number(name, self.value(), lowest=self.conf.large_segment_size // MIB))

    def garbage_collection_threshold(self) -> None:
        """Read ``garbage_collection_threshold``, a share between 0 and 1."""
        share = self.real("garbage_collection_threshold", text := self.value())
        if not 0 < share < 1:
            self.refuse("garbage_collection_threshold", text)
        self.conf.garbage_collection_threshold = share

    def expandable_segments(self) -> None:
        """Read ``expandable_segments``."""
        self.conf.expandable_segments = self.flag("expandable_segments", self.value())

    def roundup_power2_divisions(self) -> None:
        """Read ``4`` (for all sizes) or ``[256:1,512:2,>:8]`` (each from its size in MiB up)."""
        name, table = "roundup_power2_divisions", self.conf.roundup_divisions
        if (text := self.value()) != "[":
            table[:] = [self.power_of_two(name, text)] * INTERVALS
            return
        first, last = True, 0
        self.at += 1
        while (bound := self._token()) != "]":
            divisions = self.power_of_two(name, self.value(), or_zero=True)
            if bound == ">":
                table[last + 1 :] = [divisions] * (INTERVALS - last - 1)
            else:
                last = min(self.power_of_two(name, bound).bit_length() - 1, INTERVALS - 1)
                if first:  # the sizes below the first one listed share its setting
                    table[:last] = [divisions] * last
                first, table[last] = False, divisions
            self.at += 1
            if self._token() != "]":
                self.at += 1  # the comma

    def common_flag(self) -> None:
        """Read an option of the host's memory that is on or off."""
        self.flag(self._tokens[self.at], self.value())

    def pinned_size(self) -> None:
        """Read a size of pinned memory, in MiB."""
        self._leave_out(lambda name, text: self.number(name, text), _PINNED)

    # -- the options of CUDA -----------------------------------------------------------------------------------

    def memory_fraction(self) -> None:
        """Read ``per_process_memory_fraction``, a share from 0 to 1."""
        share = self.real("per_process_memory_fraction", text := self.value())
        if not 0 <= share <= 1:
            self.refuse("per_process_memory_fraction", text)
        self.conf.memory_fraction = share

    def backend(self) -> None:
        """Read which allocator runs."""
        text = self.value()
        if text not in ("native", "cudaMallocAsync", "hipMallocAsync"):
            self.refuse("backend", text)
        if text != "native":
            self.conf.unmodelled.append(("backend", text, _OTHER_BACKEND))

    def reserved_pinned_size(self) -> None:
        """Read ``pinned_reserve_segment_size_mb``, which is more than 0."""
        self._leave_out(lambda name, text: self.number(name, text, lowest=1), _PINNED)

    def register_threads(self) -> None:
        """Read ``pinned_num_register_threads``, a power of two up to 128."""
        name, text = self._tokens[self.at], self.value()
        if self.power_of_two(name, text) > 128:
            self.refuse(name, text)

    def _leave_out(self, read: Callable[[str, str], int], reason: str) -> None:
        name, text = self._tokens[self.at], self.value()
        read(name, text)
        self.conf.unmodelled.append((name, text, reason))


def _mib(number: int) -> int:
    return min(number, LARGEST // MIB) * MIB


def _underflows(number: float, match: re.Match[str], base: int) -> bool:
    """Tell whether stod raises as this is no normal number, and was rounded: exact ones are taken.

    glibc calls a number normal if 53 bits of it would be, at any exponent.
    """
    if number > 2.0**-1022 or not re.search(r"[1-9a-fA-F]", match[1]):
        return False
    if not number:
        return True
    whole, _, rest = match[1].partition(".")
    if len(whole + rest + (match[2] or "")) > 4000:  # more than Python converts, and than an exact one needs
        return True
    power = Fraction(2 if base == 16 else 10) ** int(match[2] or 0)
    exact = Fraction(int(whole + rest, base), base ** len(rest)) * power
    return exact != Fraction(number) and exact < Fraction(2) ** -1022 - Fraction(2) ** -1076


# Numbers as C's strtod reads them: the digits, and the exponent.
_HEXADECIMAL = re.compile(r"[+-]?0[xX]([0-9a-fA-F]+\.?[0-9a-fA-F]*|\.[0-9a-fA-F]+)(?:[pP]([+-]?[0-9]+))?")
_DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE]([+-]?[0-9]+))?")


_PINNED = "the host's pinned buffers are counted as torch caches them by default"
_OTHER_BACKEND = "what is reserved is that of torch's native allocator, and the driver's pool caches other amounts"
_LARGE_SEGMENT = "large_segment_size_mb"
# What torch 2.2 to 2.13 know.
_COMMON: dict[str, Callable[[_Parser], None]] = {
    "max_split_size_mb": _Parser.max_split_size,
    "max_non_split_rounding_mb": _Parser.max_non_split_rounding,
    "garbage_collection_threshold": _Parser.garbage_collection_threshold,
    "roundup_power2_divisions": _Parser.roundup_power2_divisions,
    "expandable_segments": _Parser.expandable_segments,
    "pinned_use_background_threads": _Parser.common_flag,
    "pinned_max_round_threshold_mb": _Parser.pinned_size,
    "pinned_max_cached_size_mb": _Parser.pinned_size,
}
_CUDA: dict[str, Callable[[_Parser], None]] = {
    "per_process_memory_fraction": _Parser.memory_fraction,
    "backend": _Parser.backend,
    "pinned_reserve_segment_size_mb": _Parser.reserved_pinned_size,
    "pinned_num_register_threads": _Parser.register_threads,
    "pinned_use_cuda_host_register": _Parser.common_flag,
    "pinned_use_hip_host_register": _Parser.common_flag,
    "pinned_free_catch_all": _Parser.common_flag,
    "release_lock_on_cudamalloc": _Parser.common_flag,
    "release_lock_on_hipmalloc": _Parser.common_flag,
    "graph_capture_record_stream_reuse": _Parser.common_flag,
    "throw_on_cudamalloc_oom": _Parser.common_flag,
}
