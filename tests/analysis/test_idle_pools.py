"""What lies idle in the private pools of CUDA graphs is said, with the pool's name."""

from __future__ import annotations

from memprof.analysis.analysis import analyze
from memprof.snapshot import snapshot_from_raw
from tests.synthetic import SnapshotBuilder

MIB = 1 << 20


def test_a_pool_that_is_mostly_free_has_a_note() -> None:
    run = SnapshotBuilder()
    run.alloc(1000 * MIB, "main")
    inside = run.alloc(100 * MIB, "main")
    freed = run.alloc(500 * MIB, "main")
    run.free(freed)
    raw = run.raw()
    run.alloc(10 * MIB, "main")
    for segment in raw["segments"]:
        if segment["address"] in (inside, freed):
            segment["segment_pool_id"] = (0, 1)
    report = analyze(snapshot_from_raw(raw)).report
    assert not [n for n in report.notes if "private pool" in n]  # the peak itself is full
    held = [note for note in analyze(snapshot_from_raw(_after(raw, run))).report.notes if "private pool" in note]
    assert "(0, 1)" in held[0]
    assert "500.00 MiB" in held[0]


def _after(raw: dict[str, object], run: SnapshotBuilder) -> dict[str, object]:
    run.alloc(700 * MIB, "main")
    pools = {s["address"]: s.get("segment_pool_id") for s in raw["segments"]}  # type: ignore[attr-defined]
    again = run.raw()
    for segment in again["segments"]:
        if pools.get(segment["address"]):
            segment["segment_pool_id"] = pools[segment["address"]]
    return again
