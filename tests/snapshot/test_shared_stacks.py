"""Lists of frames that say the same are read once, and the snapshot is the one that reading them all gives."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memprof.errors import UnsafePickle
from memprof.snapshot import load_snapshot, snapshot_from_raw
from memprof.snapshot.unpickle import read_plain, read_shared


def same(a: Any, b: Any) -> bool:
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else bool(a == b)


def raw_snapshot(rounds: int) -> dict[str, Any]:
    """Allocations of three stacks with lists of their own, which frees share, and blocks alive at the end."""
    frames = [{"filename": f"model{i}.py", "line": i, "name": f"f{i}"} for i in range(300)]
    stacks = [frames[:3], frames[2:290], frames[295:]]
    trace, blocks = [], []
    for n in range(rounds):
        event = {"action": "alloc", "addr": 4096 * n, "size": 512, "stream": 0, "frames": list(stacks[n % 3])}
        trace.append(event)
        if n % 4:
            trace += [{**event, "action": action} for action in ("free_requested", "free_completed")]
        else:
            block = {"address": 4096 * n, "size": 512, "requested_size": 512, "state": "active_allocated"}
            blocks.append({**block, "frames": list(stacks[n % 3])})
    segment = {"device": 0, "address": 0, "total_size": 4096 * rounds, "stream": 0, "segment_type": "small"}
    return {"segments": [{**segment, "frames": list(stacks[0]), "blocks": blocks}], "device_traces": [trace]}


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_shared_lists_give_the_same_snapshot(tmp_path: Path, protocol: int) -> None:
    file = tmp_path / "run.pickle"
    file.write_bytes(pickle.dumps(raw_snapshot(40), protocol=protocol))
    whole = snapshot_from_raw(read_plain(file), path=str(file))
    assert same(load_snapshot(file), whole)
    assert set(np.unique(whole.traces[0].stack)) == {1, 2, 3}
    assert set(np.unique(whole.blocks[0].stack)) == {1, 2, 3}
    lists = read_shared(file)[1]
    assert len(lists) == (0 if protocol == 2 else 4)  # an older protocol is read as it is


def test_a_list_that_ends_with_a_new_frame_stays_where_it_is(tmp_path: Path) -> None:
    raw = raw_snapshot(40)
    events = raw["device_traces"][0]
    known = next(e["frames"] for e in events if len(e["frames"]) > 200)
    events.append({**events[-1], "frames": [*known, {"filename": "new.py", "line": 1, "name": "new"}]})
    file = tmp_path / "run.pickle"
    file.write_bytes(pickle.dumps(raw, protocol=4))
    snapshot = load_snapshot(file)
    assert same(snapshot, snapshot_from_raw(read_plain(file), path=str(file)))
    assert snapshot.stacks.of(int(snapshot.traces[0].stack[-1]))[-1].file == "new.py"


def test_a_global_behind_the_lists_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.pickle"
    good = pickle.dumps(raw_snapshot(40), protocol=4)
    file.write_bytes(good[:-1] + b"cos\nsystem\n0.")
    with pytest.raises(UnsafePickle):
        load_snapshot(file)


def test_the_end_of_a_damaged_file_is_told(tmp_path: Path) -> None:
    file = tmp_path / "run.pickle"
    file.write_bytes(pickle.dumps(raw_snapshot(40), protocol=4)[:-200])
    with pytest.raises(Exception, match="ends too early"):
        load_snapshot(file)
