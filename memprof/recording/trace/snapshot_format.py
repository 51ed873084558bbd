"""Write a tensor trace's records as torch writes a CUDA memory snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from memprof.recording.frames import Stack, StackWriter
from memprof.recording.recorder import AllocationTags, BlockRecord, RawSnapshot, Segment, Trace
from memprof.recording.trace.module_scope import Running

_POOL = (0, 0)


class StorageBirth(NamedTuple):
    """Record an allocated storage."""

    time_us: int
    address: int
    nbytes: int
    captured: Any
    tags: AllocationTags
    region: str
    running: Running | None
    shape: tuple[int, ...]
    dtype: Any
    func: Any


class Died(NamedTuple):
    """Record a freed storage."""

    time_us: int
    address: int
    nbytes: int


class Held(NamedTuple):
    """Describe a storage alive when the snapshot was taken."""

    address: int
    nbytes: int
    captured: Any


class _TagWriter:
    """Write ``user_metadata`` strings, equal ones once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], str] = {}

    def write(self, born: StorageBirth) -> str:
        key = (born.tags, born.region, born.running, born.shape, born.dtype, born.func)
        text = self._known.get(key)
        if text is None:
            text = self._known[key] = "memprof:" + ";".join(f"{k}={v}" for k, v in self._pairs(born) if v is not None)
        return text

    @staticmethod
    def _pairs(born: StorageBirth) -> list[tuple[str, str | None]]:
        running, tags = born.running, born.tags
        return [
            ("phase", tags.phase),
            ("step", None if tags.step is None else str(tags.step)),
            ("region", born.region),
            ("shape", "x".join(map(str, born.shape)) or None),
            ("dtype", str(born.dtype).removeprefix("torch.")),
            ("op", None if born.func is None else str(born.func)),
            ("module", running.name if running else None),
            ("role", tags.role or (running.role if running else None)),
        ]


def write_snapshot(
    records: Sequence[StorageBirth | Died], held: Sequence[Held], index: int, stacks: StackWriter
) -> RawSnapshot:
    """Return what ``torch.cuda.memory._snapshot()`` would have: segments, one for every storage, one trace a device,
    settings."""
    records = sorted(records, key=lambda r: r.time_us)
    trace = _events(records, stacks)
    written = stacks.write([h.captured for h in held])
    pairs = sorted(zip(held, written, strict=True), key=lambda pair: pair[0].address)
    segments = [_segment(one, frames, index) for one, frames in pairs]
    return {
        "segments": segments,
        "device_traces": [*([] for _ in range(index)), trace],
        "allocator_settings": {},
        "external_annotations": [],
    }


def _events(records: Sequence[StorageBirth | Died], stacks: StackWriter) -> Trace:
    captured = stacks.write([r.captured for r in records if isinstance(r, StorageBirth)])
    frames = iter(captured)
    tags = _TagWriter()
    nowhere: Stack = []
    events: Trace = []
    last = 0

    def event(action: str, r: StorageBirth | Died, where: Stack, text: str) -> None:
        nonlocal last
        last = max(last + 1, r.time_us)
        events.append(
            {
                "action": action,
                "addr": r.address,
                "size": r.nbytes,
                "stream": 0,
                "time_us": last,
                "compile_context": "",
                "user_metadata": text,
                "frames": where,
            }
        )

    for record in records:
        if isinstance(record, StorageBirth):
            event("alloc", record, next(frames), tags.write(record))
        else:
            event("free_requested", record, nowhere, "")
            event("free_completed", record, nowhere, "")
    return events


def _segment(held: Held, frames: Stack, index: int) -> Segment:
    size = held.nbytes
    block: BlockRecord = {
        "address": held.address, "size": size, "requested_size": size, "state": "active_allocated", "frames": frames,
    }  # fmt: skip
    return {
        "device": index,
        "address": held.address,
        "total_size": size,
        "allocated_size": size,
        "active_size": size,
        "requested_size": size,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": _POOL,
        "is_expandable": False,
        "frames": frames,
        "blocks": [block],
    }
