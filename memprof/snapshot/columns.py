"""Lists of dicts, as torch writes them, to numpy columns with interned stacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memprof.snapshot.model import I32, I64, Action, Blocks, BlockState, Frame, Segments, StackTable, Trace

__all__ = ["Interner", "read_segments", "read_trace"]

_ACTIONS = {a.name.lower(): int(a) for a in Action if a is not Action.UNKNOWN}
_STATES = {
    "active_allocated": int(BlockState.ACTIVE),
    "active_pending_free": int(BlockState.PENDING_FREE),
    "active_awaiting_free": int(BlockState.PENDING_FREE),
    "inactive": int(BlockState.INACTIVE),
}
_ACTION, _FRAMES = itemgetter("action"), itemgetter("frames")


class Interner:
    """Stacks, pools and metadata strings of one file, each kept once.

    torch shares one ``frames`` list between the events of one stack, so identity is tried first;
    equal lists that are different objects are found by content.
    """

    def __init__(self) -> None:
        self.pools: list[tuple[int, int]] = [(0, 0)]
        self.metadata: list[str] = [""]
        self._pool_ids: dict[tuple[int, int], int] = {(0, 0): 0}
        self._metadata_ids: dict[str, int] = {"": 0}
        self._frames: dict[Frame, int] = {}
        self._frame_by_identity: dict[int, int] = {}
        self._stacks: dict[tuple[int, ...], int] = {(): 0}
        self._stack_by_identity: dict[int, int] = {}
        # Identities are only good while the object lives: everything remembered by id is kept here.
        self._alive: list[Any] = []

    def stack(self, frames: Any) -> int:
        """The id of a list of frames (0 for none)."""
        if not frames or not isinstance(frames, (list, tuple)):
            return 0
        known = self._stack_by_identity.get(id(frames))
        if known is None:
            by_identity = self._frame_by_identity
            try:
                key = tuple([by_identity[id(f)] for f in frames])
            except KeyError:
                key = tuple([self._frame(f) for f in frames])
            known = self._stacks.setdefault(key, len(self._stacks))
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
        """The id of a pool's ``(owner, id)`` pair."""
        if not isinstance(raw, (list, tuple)) or len(raw) != 2 or not all(isinstance(p, int) for p in raw):
            return 0
        key = (int(raw[0]), int(raw[1]))
        known = self._pool_ids.get(key)
        if known is None:
            known = self._pool_ids[key] = len(self.pools)
            self.pools.append(key)
        return known

    def text(self, raw: Any) -> int:
        """The id of a metadata string (0 for none)."""
        if not isinstance(raw, str):
            return 0
        known = self._metadata_ids.get(raw)
        if known is None:
            known = self._metadata_ids[raw] = len(self.metadata)
            self.metadata.append(raw)
        return known

    def stack_table(self) -> StackTable:
        """Everything interned so far; forgets the identities and lets the raw frames go."""
        self._stack_by_identity.clear()
        self._frame_by_identity.clear()
        self._alive.clear()
        return StackTable(frames=list(self._frames), stacks=list(self._stacks))


def _frame(raw: Any) -> Frame:
    if not isinstance(raw, dict):
        return Frame("??", 0, str(raw)[:500] if isinstance(raw, str) else "??")
    file, line, name = raw.get("filename"), raw.get("line"), raw.get("name")
    return Frame(
        file if isinstance(file, str) else "??",
        int(line) if isinstance(line, int) and -1 << 31 < line < 1 << 31 else 0,
        name if isinstance(name, str) else "??",
    )


def _ints(items: Iterable[Any], count: int) -> I64:
    return np.fromiter(items, np.int64, count)


def _column(events: list[dict[str, Any]], key: str, default: int = 0) -> I64:
    """One integer field of every event; ``default`` where it is missing or None."""
    try:
        return _ints(map(itemgetter(key), events), len(events))
    except (KeyError, TypeError):
        return _ints((v if (v := e.get(key)) is not None else default for e in events), len(events))


def _interned(items: Iterable[Any], count: int, intern: Callable[[Any], int]) -> I32:
    """Ids of objects, one call of ``intern`` for each distinct object, not for each event."""
    objects = list(items)
    identities = _ints(map(id, objects), count)
    _, first, inverse = np.unique(identities, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    ids = np.empty(len(first), np.int32)
    for position in order.tolist():
        ids[position] = intern(objects[first[position]])
    return ids[inverse.reshape(-1)]


def read_trace(events: list[Any], interner: Interner, device: int, notes: list[str]) -> Trace:
    """One device's events as columns. Unknown actions are kept as such and counted in ``notes``."""
    count = len(events)
    if not all(isinstance(e, dict) for e in events):
        raise TypeError("an entry of the trace is no record")
    names = [e.get("action") for e in events]
    codes = _ACTIONS
    action = np.fromiter((codes.get(n, 9) if isinstance(n, str) else 9 for n in names), np.uint8, count)
    _note_unknown(names, action, device, notes)
    address = _column(events, "addr")
    for index in np.flatnonzero(action == Action.OOM).tolist():
        free = events[index].get("device_free")
        address[index] = free if isinstance(free, int) else -1
    time_us, has_times = _times(events, count)
    return Trace(
        action=action,
        address=address,
        size=_column(events, "size"),
        time_us=time_us,
        stream=_column(events, "stream"),
        pool=_optional(events, "pool_id", interner.pool),
        stack=_interned((e.get("frames") for e in events), count, interner.stack),
        metadata=_optional(events, "user_metadata", interner.text),
        has_times=has_times,
    )


def _optional(events: list[dict[str, Any]], key: str, intern: Callable[[Any], int]) -> I32:
    """A field that only newer releases write: not looked for where neither end of the trace has it."""
    if key not in events[0] and key not in events[-1]:
        return np.zeros(len(events), np.int32)
    return np.fromiter((intern(e.get(key)) for e in events), np.int32, len(events))


def _times(events: list[dict[str, Any]], count: int) -> tuple[I64, bool]:
    if "time_us" not in events[0] and "time_us" not in events[-1]:
        return np.arange(count, dtype=np.int64), False
    return _column(events, "time_us"), True


def _note_unknown(names: list[Any], action: NDArray[np.uint8], device: int, notes: list[str]) -> None:
    unknown = np.flatnonzero(action == Action.UNKNOWN).tolist()
    if unknown:
        counts = Counter(str(names[i])[:40] for i in unknown)
        listed = ", ".join(f"{name} ({n})" for name, n in counts.most_common(5))
        notes.append(f"device {device}: {len(unknown)} events of unknown actions were skipped: {listed}")


def read_segments(raw: list[dict[str, Any]], interner: Interner) -> tuple[Segments, Blocks]:
    """One device's segments and their blocks, by address."""
    raw = sorted(raw, key=itemgetter("address"))
    count = len(raw)
    rows: list[tuple[int, int, int, int, int, int]] = []
    for index, segment in enumerate(raw):
        _read_blocks(segment, index, interner, rows)
    table = np.array(rows, np.int64).reshape(len(rows), 6)
    segments = Segments(
        address=_column(raw, "address"),
        total=_column(raw, "total_size"),
        stream=_column(raw, "stream"),
        pool=np.fromiter((interner.pool(s.get("segment_pool_id")) for s in raw), np.int32, count),
        stack=np.fromiter((interner.stack(s.get("frames")) for s in raw), np.int32, count),
        large=np.fromiter((s.get("segment_type") == "large" for s in raw), np.bool_, count),
        expandable=np.fromiter((bool(s.get("is_expandable")) for s in raw), np.bool_, count),
    )
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
    segment: dict[str, Any], index: int, interner: Interner, rows: list[tuple[int, int, int, int, int, int]]
) -> None:
    """Append a segment's blocks. Where they have no address (torch 2.0) they follow one another."""
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
        rows.append((address, size, 0 if inactive else requested, state, index, interner.stack(frames)))
        address += size
