"""Turn the lists of dicts that torch writes into numpy columns with interned stacks."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memprof.foreign import RawRecord
from memprof.snapshot.model import I32, I64, Action, Blocks, BlockState, Frame, Segments, StackTable, Trace
from memprof.text import clean_text

_ACTIONS = {a.name.lower(): int(a) for a in Action if a is not Action.UNKNOWN}
_STATES = {
    "active_allocated": int(BlockState.ACTIVE),
    "active_pending_free": int(BlockState.PENDING_FREE),
    "active_awaiting_free": int(BlockState.PENDING_FREE),
    "inactive": int(BlockState.INACTIVE),
}


# Sizes and addresses beyond these cannot be memory; they would overflow 64-bit sums. Some devices' addresses begin at
# 2^63: their columns have the same bits, signed.
_MAX_SIZE, _MAX_ADDRESS, _MAX_SUM = 1 << 50, 1 << 62, float(1 << 61)
_FIRST_WIDE, _ALL_BITS = 1 << 63, (1 << 64) - 1
_LONGEST = 4000  # characters of a file name or function; C++ signatures come near this


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector: reading and writing make millions of containers and no garbage cycles.

    Looking for cycles among them would be most of the time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Interner:
    """Keep each stack, pool and metadata string of a file once, and give it an id.

    torch shares frames, and sometimes whole ``frames`` lists, between events. So a list is looked up
    by its own identity, then by its frames' identities, and only then by content.

    Args:
        shared: the lists that stand in the data as their positions here.
    """

    def __init__(self, shared: Sequence[Any] = ()) -> None:
        self._shared = shared
        self.pools: list[tuple[int, int]] = [(0, 0)]
        self.metadata: list[str] = [""]
        self._pool_ids: dict[tuple[int, int], int] = {(0, 0): 0}
        self._metadata_ids: dict[str, int] = {"": 0}
        self._frames: dict[Frame, int] = {}
        self._frame_by_identity: dict[int, int] = {}
        self._stacks: dict[tuple[int, ...], int] = {(): 0}
        self._stack_by_identity: dict[int, int] = {}
        self._stack_by_frames: dict[tuple[int, ...], int] = {}
        # An identity is valid only while its object lives, so every object remembered by id is kept here.
        self._alive: list[Any] = []

    def stack(self, frames: Any) -> int:
        """Return the id of a list of frames, or of the position of a shared one; 0 where there are none."""
        if type(frames) is int:
            frames = self._shared[frames] if 0 <= frames < len(self._shared) else None
        if not frames or not isinstance(frames, (list, tuple)):
            return 0
        known = self._stack_by_identity.get(id(frames))
        if known is None:
            identities = tuple(map(id, frames))
            known = self._stack_by_frames.get(identities)
            if known is None:
                key = tuple([self._frame(f) for f in frames])
                known = self._stacks.setdefault(key, len(self._stacks))
                self._stack_by_frames[identities] = known
            self._stack_by_identity[id(frames)] = known
            self._alive.append(frames)
        return known

    def _frame(self, raw: Any) -> int:
        known = self._frame_by_identity.get(id(raw))
        if known is None:
            frame = _frame(raw)
            known = self._frames.setdefault(frame, len(self._frames))
            self._frame_by_identity[id(raw)] = known
            self._alive.append(raw)
        return known

    def pool(self, raw: Any) -> int:
        """Return the id of a pool's ``(owner, id)`` pair; 0 (the default pool) for anything else."""
        if not isinstance(raw, (list, tuple)) or len(raw) != 2 or not all(isinstance(p, int) for p in raw):
            return 0
        key = (int(raw[0]), int(raw[1]))
        known = self._pool_ids.get(key)
        if known is None:
            known = self._pool_ids[key] = len(self.pools)
            self.pools.append(key)
        return known

    def text(self, raw: Any) -> int:
        """Return the id of a metadata string; 0 where there is none."""
        if not isinstance(raw, str):
            return 0
        known = self._metadata_ids.get(raw)
        if known is None:
            known = self._metadata_ids[raw] = len(self.metadata)
            self.metadata.append(clean_text(raw))
        return known

    def stack_table(self) -> StackTable:
        """Return all stacks interned so far, and release the raw frames and their identities."""
        self._stack_by_identity.clear()
        self._stack_by_frames.clear()
        self._frame_by_identity.clear()
        self._alive.clear()
        self._shared = ()
        return StackTable(frames=list(self._frames), stacks=list(self._stacks))


def _frame(raw: Any) -> Frame:
    if not isinstance(raw, dict):
        return Frame("??", 0, clean_text(raw, _LONGEST) if isinstance(raw, str) else "??")
    file, line, name = raw.get("filename"), raw.get("line"), raw.get("name")
    return Frame(
        clean_text(file, _LONGEST) if isinstance(file, str) else "??",
        int(line) if isinstance(line, int) and 0 <= line < 1 << 31 else 0,
        clean_text(name, _LONGEST) if isinstance(name, str) else "??",
    )


def _ints(items: Iterable[Any], count: int) -> I64:
    return np.fromiter(items, np.int64, count)


def _values(events: list[RawRecord], key: str) -> list[Any]:
    """Return one field of every event; None where it is missing."""
    try:
        return list(map(itemgetter(key), events))
    except KeyError:
        return [e.get(key) for e in events]


def _column(events: list[RawRecord], key: str) -> I64:
    """Return one integer field of every event; 0 where it is missing or None."""
    try:
        return _ints(map(itemgetter(key), events), len(events))
    except (KeyError, TypeError):
        return _ints((e.get(key) or 0 for e in events), len(events))


def _handles(events: list[RawRecord], key: str, lowest: int) -> I64:
    """Return addresses or streams, which may be unsigned, as a column; 0 where one is missing.

    Raises:
        ValueError: one is below ``lowest``, or has more than 64 bits.
    """
    try:
        column = _column(events, key)
        if len(column) and column.min() < lowest:
            raise ValueError(f"{key} is out of range")
        return column
    except OverflowError:
        return _ints((_handle(event.get(key) or 0, lowest) for event in events), len(events))


def _handle(value: Any, lowest: int = 0) -> int:
    """Return an address or a stream as a column has it.

    Raises:
        TypeError, ValueError: it is no number, is below ``lowest``, or has more than 64 bits.
    """
    if not lowest <= value <= _ALL_BITS:
        raise ValueError("an address or a stream is out of range")
    return int(value) - (1 << 64) if value >= _FIRST_WIDE else int(value)


def check_range(address: I64, size: I64) -> None:
    """Refuse sizes and addresses that cannot be memory.

    Raises:
        ValueError: a size is negative, a size or an address is too large, or the sizes' sum overflows.
    """
    if not len(size):
        return
    if size.min() < 0 or size.max() > _MAX_SIZE or address.max() > _MAX_ADDRESS:
        raise ValueError("a size or an address is out of range")
    if size.sum(dtype=np.float64) > _MAX_SUM:
        raise ValueError("the sizes add up to more than any memory")


def _by_value(values: list[Any], intern: Callable[[Any], int]) -> I32:
    """Return the ids of values, calling ``intern`` once for each distinct value that can be hashed."""
    try:
        table = {v: intern(v) for v in dict.fromkeys(values)}
        return np.fromiter(map(table.__getitem__, values), np.int32, len(values))
    except TypeError:
        return np.fromiter(map(intern, values), np.int32, len(values))


def _stack_ids(lists: list[Any], interner: Interner) -> I32:
    """Return the ids of lists of frames, interning each object and each position once, in order of appearance."""
    keys = [v if type(v) is int else -id(v) for v in lists]
    ids = {key: interner.stack(v) for key, v in dict(zip(keys, lists, strict=True)).items()}
    return np.fromiter(map(ids.__getitem__, keys), np.int32, len(keys))


def read_trace(events: list[Any], interner: Interner, device: int, notes: list[str]) -> Trace:
    """Return one device's events as columns. Unknown actions are kept as ``UNKNOWN`` and counted in ``notes``.

    Raises:
        TypeError, OverflowError, ValueError: an event is not what torch writes.
    """
    count = len(events)
    if set(map(type, events)) != {dict}:
        raise TypeError("an entry of the trace is not a record")
    names = _values(events, "action")
    action = _by_value(names, action_code).astype(np.uint8)
    unknown = np.flatnonzero(action == Action.UNKNOWN).tolist()
    note_unknown((names[i] for i in unknown), device, notes)
    address = _handles(events, "addr", 0)
    for index in np.flatnonzero(action == Action.OOM).tolist():
        free = events[index].get("device_free")
        address[index] = free if type(free) is int and 0 <= free < 1 << 62 else -1
    size = _column(events, "size")
    check_range(address, size)
    has_times = "time_us" in events[0] or "time_us" in events[-1]
    return Trace(
        action=action,
        address=address,
        size=size,
        time_us=_times(events) if has_times else np.arange(count, dtype=np.int64),
        stream=_handles(events, "stream", -_FIRST_WIDE),
        pool=_optional(events, "pool_id", interner.pool),
        stack=_stack_ids(_values(events, "frames"), interner),
        metadata=_optional(events, "user_metadata", interner.text),
        has_times=has_times,
    )


def _times(events: list[RawRecord]) -> I64:
    """Return the events' times. An event without one gets the time before it; differences cannot overflow."""
    try:
        times = _ints(map(itemgetter("time_us"), events), len(events))
    except (KeyError, TypeError):
        times = _filled([e.get("time_us") for e in events])
    return np.clip(times, -(1 << 61), 1 << 61)


def _filled(values: list[Any]) -> I64:
    known = np.fromiter((v is not None for v in values), np.bool_, len(values))
    return times_filled(_ints((v if v is not None else 0 for v in values), len(values)), known)


def times_filled(times: I64, known: NDArray[np.bool_]) -> I64:
    """Return the times, each unknown one replaced by the last known before it."""
    last = np.maximum.accumulate(np.where(known, np.arange(len(times)), -1))
    return times[np.where(last < 0, int(np.argmax(known)), last)]


def action_code(name: Any) -> int:
    return _ACTIONS.get(name, int(Action.UNKNOWN)) if isinstance(name, str) else int(Action.UNKNOWN)


def _optional(events: list[RawRecord], key: str, intern: Callable[[Any], int]) -> I32:
    """Return the ids of a field that only newer releases write; 0 where neither end of the trace has it."""
    if key not in events[0] and key not in events[-1]:
        return np.zeros(len(events), np.int32)
    return _by_value(_values(events, key), intern)


def note_unknown(names: Iterable[Any], device: int, notes: list[str]) -> None:
    """Add a note on events whose actions, one name an event, are not known."""
    counts = Counter(clean_text(name, 40) if isinstance(name, str) else "no name" for name in names)
    if counts:
        listed = ", ".join(f"{name} ({n})" for name, n in counts.most_common(5))
        notes.append(f"device {device}: {counts.total()} events of unknown actions were skipped: {listed}")


def read_segments(raw: list[RawRecord], interner: Interner) -> tuple[Segments, Blocks]:
    """Return one device's segments and their blocks, sorted by address.

    Raises:
        KeyError, TypeError, OverflowError, ValueError: a segment or block is not what torch writes.
    """
    raw = sorted(raw, key=lambda segment: _handle(segment["address"]))
    count = len(raw)
    rows: list[tuple[int, int, int, int, int, int]] = []
    for index, segment in enumerate(raw):
        _read_blocks(segment, index, interner, rows)
    table = np.array(rows, np.int64).reshape(len(rows), 6)
    segments = Segments(
        address=_handles(raw, "address", 0),
        total=_column(raw, "total_size"),
        stream=_handles(raw, "stream", -_FIRST_WIDE),
        pool=np.fromiter((interner.pool(s.get("segment_pool_id")) for s in raw), np.int32, count),
        stack=np.fromiter((interner.stack(s.get("frames")) for s in raw), np.int32, count),
        large=np.fromiter((s.get("segment_type") == "large" for s in raw), np.bool_, count),
        expandable=np.fromiter((bool(s.get("is_expandable")) for s in raw), np.bool_, count),
    )
    check_range(segments.address, segments.total)
    check_range(table[:, 0], table[:, 1])
    check_range(table[:, 0], table[:, 2])
    blocks = Blocks(
        address=table[:, 0].copy(),
        size=table[:, 1].copy(),
        requested=table[:, 2].copy(),
        state=table[:, 3].astype(np.uint8),
        segment=table[:, 4].astype(np.int32),
        stack=table[:, 5].astype(np.int32),
    )
    return segments, blocks


def _read_blocks(
    segment: RawRecord, index: int, interner: Interner, rows: list[tuple[int, int, int, int, int, int]]
) -> None:
    """Append a segment's blocks to ``rows``. Blocks without an address (torch 2.0) follow one another."""
    address = segment["address"]
    for block in segment.get("blocks") or ():
        history = block.get("history") or ()
        newest = history[0] if isinstance(history, list) and history and isinstance(history[0], dict) else {}
        size = block["size"]
        address = block.get("address", address)
        state = _STATES.get(block.get("state"), int(BlockState.INACTIVE))
        requested = block.get("requested_size")
        if requested is None:
            requested = newest.get("real_size", size)
        frames = block.get("frames") or newest.get("frames")
        inactive = state == BlockState.INACTIVE
        rows.append((_handle(address), size, 0 if inactive else requested, state, index, interner.stack(frames)))
        address += size
