"""Read and write torch memory snapshots."""

from memprof.snapshot.model import Action, Blocks, BlockState, Frame, Segments, Snapshot, StackTable, Trace
from memprof.snapshot.reader import load_snapshot, snapshot_from_raw

__all__ = [
    "Action", "BlockState", "Blocks", "Frame", "Segments", "Snapshot", "StackTable", "Trace", "load_snapshot",
    "snapshot_from_raw",
]  # fmt: skip
