"""Snapshots whose truth is known: a program run on the allocator's model, recorded as torch would."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from memprof.allocator.model import AllocatorOutOfMemory, CachingAllocator
from memprof.allocator.settings import AllocatorSettings

MIB = 2**20

FRAMES = [
    [
        {"filename": "/site-packages/torch/nn/modules/linear.py", "line": 125, "name": "forward"},
        {"filename": "train.py", "line": 7, "name": "<module>"},
    ],
    [{"filename": "C:\\work\\train.py", "line": 9, "name": "step"}],
    [],
]


@dataclass
class Program:
    """A run: torch's snapshot of it, and the size of every block the allocator gave."""

    settings: AllocatorSettings
    capacity: int | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    block_size: dict[int, int] = field(default_factory=dict)  # by the event of its alloc

    def __post_init__(self) -> None:
        self.allocator = CachingAllocator(self.settings, self.capacity, self._record)
        self.live: list[int] = []
        self.pending: set[int] = set()

    def _record(self, action: str, address: int, size: int, stream: int, pool: int) -> None:
        index = len(self.events)
        event: dict[str, Any] = {"action": action, "addr": address, "size": size, "stream": stream}
        if action == "oom":
            event["device_free"] = event.pop("addr")
        event |= {"time_us": 10 * index, "frames": FRAMES[index % 3], "pool_id": (0, pool)}
        self.events.append(event)

    def run(self, steps: list[tuple[str, int, int, int]]) -> Program:
        """Steps are (what, number, stream, pool); a number chooses a size or a live block."""
        for what, number, stream, pool in steps:
            if what == "malloc":
                try:
                    address, size = self.allocator.malloc(number, stream, pool)
                except AllocatorOutOfMemory:
                    continue
                self.live.append(address)
                self.block_size[len(self.events) - 1] = size
            elif what == "empty":
                self.allocator.empty_cache()
            elif what == "done":
                self._complete(number)
            elif self.live:
                address = self.live.pop(number % len(self.live))
                if what == "free":
                    self.allocator.free(address)
                else:  # another stream still reads it
                    block = self.allocator.block_at(address)
                    self.pending.add(address)
                    self._record("free_requested", address, block.requested, block.pool.stream, block.pool.pool)
        return self

    def _complete(self, number: int) -> None:
        """Let a stream be done with a block that waits for it."""
        if self.pending:
            address = sorted(self.pending)[number % len(self.pending)]
            self.pending.remove(address)
            count = len(self.events)
            self.allocator.free(address)
            del self.events[count]  # the request, which was made long ago

    def segments(self) -> list[dict[str, Any]]:
        """The allocator's, with the blocks whose free was requested and has not been completed."""
        found = self.allocator.segments()
        for segment in found:
            for block in segment["blocks"]:
                if block["address"] in self.pending:
                    block["state"] = "active_pending_free"
                    segment["allocated_size"] -= block["size"]
        return found

    def raw(self, start: int = 0) -> dict[str, Any]:
        """torch's snapshot, of which the events before ``start`` were not recorded."""
        names = {str(1 << i): d for i, d in enumerate(self.settings.roundup_divisions)}
        return {
            "segments": self.segments(),
            "device_traces": [[dict(e) for e in self.events[start:]]],
            "allocator_settings": {
                "max_split_size": self.settings.max_split_size if self.settings.max_split_size < 1 << 60 else -1,
                "expandable_segments": self.settings.expandable_segments,
                "roundup_power2_divisions": names,
            },
        }


sizes = st.one_of(
    st.integers(1, 4 * 512),
    st.integers(1, 3 * MIB),
    st.integers(MIB - 2, 24 * MIB),
    st.sampled_from([MIB, MIB + 1, 2 * MIB, 10 * MIB - 512, 10 * MIB, 20 * MIB, 21 * MIB, 64 * MIB]),
)
steps = st.one_of(
    st.tuples(st.just("malloc"), sizes, st.sampled_from([0, 0, 0, 7]), st.sampled_from([0, 0, 0, 1])),
    st.tuples(st.sampled_from(["free", "free", "free", "pend"]), st.integers(0, 99), st.just(0), st.just(0)),
    st.tuples(st.just("empty"), st.just(0), st.just(0), st.just(0)),
)
settings = st.builds(
    AllocatorSettings,
    max_split_size=st.sampled_from([1 << 62, 1 << 62, 32 * MIB]),
    expandable_segments=st.sampled_from([False, False, True]),
    roundup_divisions=st.sampled_from([(0,) * 16, (0,) * 16, (4,) * 16]),
)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Random programs: streams, private pools, pending frees, split limits, expandable segments."""
    chosen = draw(settings)
    capacity = draw(st.sampled_from([None, None, 200 * MIB]))
    return Program(chosen, capacity).run(draw(st.lists(steps, min_size=1, max_size=60)))


def raised(raw: dict[str, Any], by: int = 1 << 63) -> dict[str, Any]:
    """Move a snapshot's addresses and streams, to where some devices have them."""
    for segment in raw["segments"]:
        segment["address"] += by
        segment["stream"] += by
        for block in segment["blocks"]:
            block["address"] += by
    for trace in raw["device_traces"]:
        for event in trace:
            event["stream"] += by
            if "addr" in event:
                event["addr"] += by
    return raw
