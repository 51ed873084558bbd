"""Add up a device message's numbers, and find the one that explains the failure.

The rules, which the tests hold one by one:

* A limit of the process is compared with what torch has *reserved*, as torch does.
* What the driver counts on the device and neither this process nor a named one holds is *not explained*. It is never
  given to "other processes", unless the message names some without saying how much they hold.
* An in-use figure below torch's own reserved memory, or above any device, contradicts torch: it is reported, not used.
* Sizes have two decimals: differences below 0.02 of their unit mean nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memprof.units import GIB, format_bytes

if TYPE_CHECKING:
    from memprof.oom.failure import Failure

_LARGEST_DEVICE = 2**44
_UNEXPLAINED = GIB // 2
_FREE = "the driver's figure for free memory is above the whole device: it is not used"
_NONSENSE = "the driver's figure for {whose} is above any device (WSL answers so): it is not used"


@dataclass(frozen=True)
class Parts:
    """Hold who had how many bytes; None where the message does not say."""

    in_use: int | None
    allocated: int | None
    cached: int | None
    reserved: int | None
    outside: int | None
    others: int | None
    unexplained: int | None
    own_process: int | None
    processes: tuple[tuple[int, int], ...]
    contradictions: tuple[str, ...]


def parts_of(failure: Failure) -> Parts:
    """Return what the numbers of a message say of who held the device."""
    allocated, cached = failure.allocated, failure.unallocated
    reserved = failure.reserved
    if reserved is None and allocated is not None and cached is not None:
        reserved = allocated + cached
    at_least = reserved if reserved is not None else allocated
    contradictions: list[str] = []
    named = tuple((pid, held) for pid, held in failure.processes if held <= _most(failure))
    in_use = _believed(failure, at_least, contradictions)
    if failure.free != free_bytes(failure):
        contradictions.append(_FREE)
    if len(named) < len(failure.processes):
        contradictions.append(_NONSENSE.format(whose="a process"))
    own, processes = None, named
    if failure.in_use is None and at_least is not None:
        own, in_use, processes = _own_process(named, at_least)
    outside = failure.other
    if in_use is not None and reserved is not None:
        outside = max(0, in_use - reserved)
    others = sum(held for _, held in processes) if processes else None
    unexplained = _unexplained(failure, in_use, reserved, others)
    told = (in_use, allocated, cached, reserved, outside, others, unexplained, own, processes)
    return Parts(*told, tuple(contradictions))


def _most(failure: Failure) -> int:
    """Return the largest figure that any process can have on the device."""
    return min(_LARGEST_DEVICE, 2 * (failure.total or _LARGEST_DEVICE))


def _believed(failure: Failure, at_least: int | None, contradictions: list[str]) -> int | None:
    """Return this process's in-use figure; None, and why, where it cannot be right: below ``at_least``, torch's own."""
    in_use = failure.in_use
    if in_use is None:
        return None
    if in_use > _most(failure):
        contradictions.append(_NONSENSE.format(whose="this process"))
        return None
    if at_least is not None and in_use < at_least - max(at_least // 100, 2**24):
        contradictions.append(
            f"the driver says this process has {format_bytes(in_use)} in use, yet torch alone holds "
            f"{format_bytes(at_least)}: the driver does not count per process here (a container, WSL or missing "
            "rights), so its figures per process are not used"
        )
        return None
    return in_use


def _own_process(
    named: tuple[tuple[int, int], ...], at_least: int
) -> tuple[int | None, int | None, tuple[tuple[int, int], ...]]:
    """Find this process among those named: in a container the driver numbers them otherwise than the program.

    Returns its id and what it holds (None where none fits), and the processes that are left.
    """
    fitting = [(held - at_least, pid, held) for pid, held in named if held >= at_least * 0.999]
    if not fitting:
        return None, None, named
    _, own, held = min(fitting)
    rest = list(named)
    rest.remove((own, held))
    return own, held, tuple(rest)


def _unexplained(failure: Failure, in_use: int | None, reserved: int | None, others: int | None) -> int | None:
    """Return the device's total less all that the message names; None below half a GiB."""
    own = in_use if in_use is not None else reserved
    free = free_bytes(failure)
    if failure.total is None or free is None or own is None:
        return None
    rest = failure.total - free - own - (others or 0)
    return rest if rest > _UNEXPLAINED else None


def free_bytes(failure: Failure) -> int | None:
    """Return what was free on the device; None where that is not told, or more than the whole device."""
    above = failure.free is not None and failure.total is not None and failure.free > failure.total
    return None if above else failure.free


def missing_bytes(failure: Failure) -> int | None:
    """Return how much more the device would have needed free, 0 where it had enough; None where that is not told."""
    free = free_bytes(failure)
    return None if failure.requested is None or free is None else max(0, failure.requested - free)
