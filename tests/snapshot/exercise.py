"""Use a file in every way the reading side does; shared by the tests and the fuzzer."""

from __future__ import annotations

import pickle
from contextlib import suppress

from memprof.allocator.settings import AllocatorSettings
from memprof.errors import MemprofError
from memprof.snapshot import snapshot_from_raw
from memprof.snapshot.unpickle import plain_from_bytes
from memprof.timeline.segment_layout import idle_memory
from memprof.timeline.timeline import build_timeline
from tests.snapshot.programs import MIB, Program


def valid() -> bytes:
    program = Program(AllocatorSettings()).run([("malloc", 700, 0, 0), ("malloc", 5 * MIB, 7, 1), ("free", 0, 0, 0)])
    raw = program.raw(1) | {"memprof": {"phases": [{"phase": "load", "start_us": 0}], "owners": [[1, 2, "weights"]]}}
    return pickle.dumps(raw, protocol=4)


def everything(data: bytes) -> None:
    """Read and use a file in every way this part of the tool does."""
    snapshot = snapshot_from_raw(plain_from_bytes(data, "x"))
    for device in snapshot.devices:
        timeline = build_timeline(snapshot, device)
        split = idle_memory(timeline)
        for instant in {0, timeline.peak_instant, timeline.n_events}:
            rows = timeline.alive_at(instant)
            assert timeline.size[rows].sum() == timeline.active[instant]
            if timeline.reserved is not None:
                parts = split(instant)
                assert min(parts.values()) >= 0
                assert sum(parts.values()) == timeline.reserved[instant] - timeline.active[instant]
    for stack in range(len(snapshot.stacks.stacks)):
        str(snapshot.stacks.of(stack)).encode()


def survives(data: bytes) -> None:
    """Used, or refused in one sentence; any other exception fails the test."""
    with suppress(MemprofError):
        try:
            everything(data)
        except MemprofError as error:
            if "\n" in str(error):
                raise AssertionError(str(error)) from error
            raise
