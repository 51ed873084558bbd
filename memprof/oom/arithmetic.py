"""What a device message's numbers come to, and which of them is the trouble.

The rules, which the tests hold one by one:

* A limit of the process is compared with what torch has *reserved*, as torch does.
* What the driver counts on the device and neither this process nor a named one holds is *not explained*. It is never
  given to "other processes", unless the message names some without saying how much they hold.
* An in-use figure below torch's own reserved memory, or above any device, contradicts torch: it is reported, not used.
* Sizes have two decimals: differences below 0.02 of their unit mean nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from memprof.allocator.settings import MIB, AllocatorSettings
from memprof.oom.failure import Failure
from memprof.units import GIB, format_bytes

__all__ = ["Parts", "Verdict", "missing_bytes", "parts_of", "verdict"]

# What a CUDA context with its kernels takes, as a rule: beside torch's figures, and no cause of anything.
_CONTEXT = 3 * GIB // 4
_LARGEST_DEVICE = 2**44
_EXABYTE = 2**60
_LEVEL_ZERO_BLOCK = 4 * GIB
# As torch comes; a message does not say what was set.
_ALLOCATOR = AllocatorSettings()
# With so much of the device in live tensors, gaps are not what is wrong.
_LIVE = 0.97
_UNEXPLAINED = GIB // 2
# So many times torch's idle memory in others' hands, and gaps are not what is wrong.
_OUTWEIGHS = 8
# Outside torch, below both, is what contexts and NCCL take.
_NOTABLE, _NOTABLE_SHARE = 2 * GIB, 0.06
_ROUNDING = GIB // 50  # of three figures with two decimals
_NONSENSE = "the driver's figure for {whose} is above any device (WSL answers so): it is not used"


@dataclass(frozen=True)
class Parts:
    """Who held what, in bytes; None where the message does not say."""

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


@dataclass(frozen=True)
class Verdict:
    """The cause as an id, a finer id of why (its key in the advice), and a sentence."""

    cause: str
    reason: str
    because: str


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
    if len(named) < len(failure.processes):
        contradictions.append(_NONSENSE.format(whose="a process"))
    own, processes = None, named
    if failure.in_use is None and at_least is not None:
        own, in_use, processes = _own_process(named, at_least)
    outside = failure.other
    if in_use is not None and reserved is not None:
        outside = max(0, in_use - reserved)
    others = sum(held for _, held in processes) if processes else None
    return Parts(
        in_use,
        allocated,
        cached,
        reserved,
        outside,
        others,
        _unexplained(failure, in_use, reserved, others),
        own,
        processes,
        tuple(contradictions),
    )


def _most(failure: Failure) -> int:
    """Return the largest figure that any process can have on the device."""
    return min(_LARGEST_DEVICE, 2 * (failure.total or _LARGEST_DEVICE))


def _believed(failure: Failure, at_least: int | None, contradictions: list[str]) -> int | None:
    """Return the in-use figure of this process, or None and say why where it cannot be right.

    Args:
        at_least: what torch says it holds itself.
    """
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
    """Return what the device's total leaves over when all that is named is taken off; None below half a GiB."""
    own = in_use if in_use is not None else reserved
    if failure.total is None or failure.free is None or own is None:
        return None
    rest = failure.total - failure.free - own - (others or 0)
    return rest if rest > _UNEXPLAINED else None


def missing_bytes(failure: Failure) -> int | None:
    """Return how much more the device would have needed free, 0 where it had enough; None where that is not told."""
    if failure.requested is None or failure.free is None:
        return None
    return max(0, failure.requested - failure.free)


def verdict(failure: Failure, parts: Parts) -> Verdict:
    """Decide which of the numbers of a device message is the trouble."""
    asked = failure.requested
    if failure.form.id in ("mps.buffer", "mlx.malloc"):
        return _too_large_a_buffer(failure)
    if asked is None:
        return _cut_off(failure, parts)
    missing = missing_bytes(failure)
    for rule in (_larger, _xpu_block, _limited, _granted, _outweighed, _loose, _shared, _patched, _beside, _unnamed):
        if (found := rule(failure, parts, asked, missing)) is not None:
            return found
    return _full(failure, parts, asked, missing)


def _cut_off(failure: Failure, parts: Parts) -> Verdict:
    """Decide where the size asked for is not in the text."""
    if parts.allocated is None:
        return Verdict("unknown", "no_numbers", "the message gives no numbers; the lines around it in the log may.")
    live, idle = format_bytes(parts.allocated), format_bytes(parts.cached or 0)
    if (parts.cached or 0) > parts.allocated // 10:
        return Verdict(
            "unknown",
            "request_cut_off",
            f"the size asked for is cut off; {live} are in live tensors and {idle} idle in torch's cache: "
            "fragmentation "
            "if less than that was asked for.",
        )
    return Verdict(
        "full", "request_cut_off", f"the size asked for is cut off; {live} are in live tensors and only {idle} idle."
    )


def _too_large_a_buffer(failure: Failure) -> Verdict:
    limit = f" of {format_bytes(failure.allowed)}" if failure.allowed else ""
    return Verdict(
        "larger_than_device",
        "metal_buffer",
        (
            f"one buffer of {format_bytes(failure.requested or 0)} is above Metal's limit for a single buffer{limit}, "
            "whatever is free: the tensor's shape has to change."
        ),
    )


def _larger(failure: Failure, parts: Parts, asked: int, missing: int | None) -> Verdict | None:
    if asked >= _EXABYTE:
        return Verdict(
            "larger_than_device",
            "overflow",
            (
                "the size asked for is above an exabyte: a negative or overflowed size, so a shape or an index is "
                "wrong, "
                "not the amount of memory."
            ),
        )
    if failure.total is None or asked <= failure.total:
        return None
    return Verdict(
        "larger_than_device",
        "larger_than_device",
        (
            f"one tensor of {format_bytes(asked)} is larger than the whole device ({format_bytes(failure.total)}): no "
            "allocator setting helps, its shape has to change. " + _shapes(asked)
        ),
    )


def _shapes(asked: int) -> str:
    """Name the two kinds of tensor that grow so large, with the sizes that would make this one."""
    tokens = round((asked / 2 / 32) ** 0.5)
    wide = round(asked / 4 / 150_000)
    return (
        "Two kinds grow so: attention scores without a flash kernel (heads × tokens²; 32 heads in bf16 would be "
        f"{tokens:,} tokens) and logits (batch × tokens × vocabulary; fp32 over 150,000 words would be {wide:,} "
        "tokens)."
    )


def _xpu_block(failure: Failure, parts: Parts, asked: int, missing: int | None) -> Verdict | None:
    if failure.backend != "XPU" or asked < _LEVEL_ZERO_BLOCK or missing:
        return None
    if failure.total is None or failure.total - (parts.reserved or 0) <= asked:
        return None
    return Verdict(
        "refused",
        "xpu_single_allocation",
        (
            f"{format_bytes(asked)} in one block were refused on a {format_bytes(failure.total)} card of which torch "
            "holds "
            f"{format_bytes(parts.reserved or 0)}: Level Zero allows 4 GiB in a single allocation unless told "
            "otherwise."
        ),
    )


def _limited(failure: Failure, parts: Parts, asked: int, missing: int | None) -> Verdict | None:
    if failure.allowed is None:
        return None
    held = (parts.reserved or parts.allocated or 0) + (failure.other or 0)
    piece = _ALLOCATOR.segment_size(_ALLOCATOR.round_size(asked))
    if failure.backend == "MPS":
        held, piece = (parts.allocated or 0) + (failure.other or 0), asked
    if held + piece <= failure.allowed - _ROUNDING:
        return None
    other = f" and {format_bytes(failure.other)} of other Metal allocations" if failure.other else ""
    return Verdict(
        "limit",
        "mps_watermark" if failure.backend == "MPS" else "limit",
        (
            f"this process may use {format_bytes(failure.allowed)}; torch holds "
            f"{format_bytes(held - (failure.other or 0))}"
            f"{other}, so {format_bytes(asked)} more{_taken(asked, piece)} go over that limit, whatever the device has "
            "free."
        ),
    )


def _taken(asked: int, piece: int) -> str:
    return f" (torch takes them in a piece of {format_bytes(piece)})" if piece > 2 * asked else ""


def _granted(failure: Failure, parts: Parts, asked: int, missing: int | None) -> Verdict | None:
    if missing is None or missing:
        return None
    pages = -(-asked // (20 * MIB)) * 20 * MIB
    grows = f" With expandable segments torch takes 20 MiB at a time, here {format_bytes(pages)}, which is more."
    return Verdict(
        "refused",
        "refused",
        f"{format_bytes(failure.free or 0)} were free and {format_bytes(asked)} were refused all the same: a limit "
        "outside torch (a container, a MIG slice, the driver's address space, pinned host memory), or memory that was "
        f"given back while the message was written.{grows if pages > (failure.free or 0) else ''}",
    )


def _outweighed(failure: Failure, parts: Parts, asked: int, missing: int | None) -> Verdict | None:
    """Decide for others where they hold many times what lies idle in torch's cache."""
    cached = parts.cached or 0
    if parts.processes and max(parts.others or 0, parts.unexplained or 0) > _OUTWEIGHS * cached:
        return _shared(failure, parts, asked, missing)
    if not parts.processes and parts.in_use is None and (parts.unexplained or 0) > _OUTWEIGHS * cached:
        return _unnamed(failure, parts, asked, missing)
    if (
        failure.free is None
        and failure.total
        and (failure.total - (parts.reserved or 0)) > _OUTWEIGHS * max(cached, asked)
    ):
        return _unnamed(failure, parts, asked, missing)
    return None


def _loose(failure: Failure, parts: Parts, asked: int, missing: int | None) -> Verdict | None:
    cached = parts.cached or 0
    if cached < asked:
        return None
    live = (parts.allocated or 0) / failure.total if failure.total else 0.0
    if live >= _LIVE:
        return Verdict(
            "full",
            "full_with_gaps",
            (
                f"{100 * live:.0f} % of the device is in live tensors. torch also holds {format_bytes(cached)} in "
                "gaps, "
                f"more than the {format_bytes(asked)} asked for, but joining them would buy no more than that."
            ),
        )
    return Verdict(
        "fragmentation",
        "fragmentation",
        (
            f"torch holds {format_bytes(cached)} that nothing uses, more than the {format_bytes(asked)} asked for, "
            "but in "
            "pieces that are each too small."
        ),
    )


def _shared(failure: Failure, parts: Parts, asked: int, missing: int | None) -> Verdict | None:
    if missing is None or not parts.processes:
        return None
    if parts.reserved is None and parts.in_use is None and len(parts.processes) == 1:
        return None  # the only one that is named, and nothing says that it is not this one
    if parts.others is not None and parts.others >= missing:
        count = len(parts.processes)
        who = f"{count} other processes hold" if count > 1 else f"another process ({parts.processes[0][0]}) holds"
        return Verdict(
            "other_processes",
            "other_processes",
            (
                f"{who} {format_bytes(parts.others)} of this device; without {'them' if count > 1 else 'it'} the "
                f"{format_bytes(missing)} that are missing would be there."
            ),
        )
    silent = [pid for pid, held in parts.processes if held == 0]
    if silent and parts.unexplained is not None and parts.unexplained >= missing:
        return Verdict(
            "other_processes",
            "ranks_on_one_device",
            (
                f"{len(parts.processes)} other processes are on this device and the driver does not say how much each "
                f"holds; {format_bytes(parts.unexplained)} are in use beyond what torch holds here, and only "
                f"{format_bytes(failure.free or 0)} are free."
            ),
        )
    return None


def _patched(failure: Failure, parts: Parts, asked: int, missing: int | None) -> Verdict | None:
    if missing is None or (parts.cached or 0) < missing:
        return None
    if failure.total and (parts.allocated or 0) >= _LIVE * failure.total:
        return None
    return Verdict(
        "fragmentation",
        "fragmentation",
        (
            f"{format_bytes(missing)} are missing, and torch holds {format_bytes(parts.cached or 0)} that nothing "
            "uses: "
            "with what is free it would be enough in one piece."
        ),
    )


def _beside(failure: Failure, parts: Parts, asked: int, missing: int | None) -> Verdict | None:
    outside = parts.outside or 0
    notable = max(_NOTABLE, _NOTABLE_SHARE * (failure.total or 0))
    if missing is None or outside < notable or outside - _CONTEXT < missing or failure.backend == "MPS":
        return None
    return Verdict(
        "outside_torch",
        "outside_torch",
        (
            f"{format_bytes(outside)} of this process are outside torch's allocator, where a CUDA context takes "
            "about half "
            "a GiB: NCCL buffers, an engine's own pools, CUDA graphs, other libraries."
        ),
    )


def _unnamed(failure: Failure, parts: Parts, asked: int, missing: int | None) -> Verdict | None:
    if missing is not None:
        if parts.unexplained is None or parts.unexplained < missing + _CONTEXT:
            return None
        return Verdict(
            "unexplained",
            "unexplained",
            (
                f"{format_bytes(parts.unexplained)} of this device are in use and the message names nobody for them: "
                "other processes the driver does not show, or this process outside torch (an engine's pool, NCCL, "
                "graphs)."
            ),
        )
    if failure.total is None or parts.reserved is None or parts.reserved + asked > 0.8 * failure.total:
        return None
    return Verdict(
        "unexplained",
        "unexplained",
        (
            f"torch holds {format_bytes(parts.reserved)} of {format_bytes(failure.total)} and {format_bytes(asked)} "
            "did not "
            "fit: the message does not say what was free or who holds the rest."
        ),
    )


def _full(failure: Failure, parts: Parts, asked: int, missing: int | None) -> Verdict:
    if missing is None and parts.allocated is None:
        return Verdict(
            "unknown",
            "no_numbers",
            (f"{format_bytes(asked)} more did not fit; the message does not say what was free or who held the rest."),
        )
    short = (
        f"{format_bytes(missing)} more are needed" if missing is not None else f"{format_bytes(asked)} more did not fit"
    )
    if parts.allocated is not None:
        because = f"{format_bytes(parts.allocated)} are in live tensors, {short}, and no idle memory makes up for it."
        if (parts.outside or 0) >= _NOTABLE:
            because += f" {format_bytes(parts.outside or 0)} more of this process are outside torch."
    elif parts.in_use is None and failure.total is None:
        because = f"{short}; the message does not say how large the device is or who holds the rest."
    else:
        taken = parts.in_use if parts.in_use is not None else (failure.total or 0) - (failure.free or 0)
        who = "this process has" if parts.in_use is not None else "in use on the device are"
        because = (
            f"{who} {format_bytes(taken)}, {short}; the message does not say how much of it is live tensors and how "
            "much is idle cache."
        )
    return Verdict("full", "full", because)
