"""A model on several devices: every device is reported, and the one that ran out of memory is the one shown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from memprof.reports.document.build import document_of
from memprof.reports.html.report import render_html
from msgspec.structs import replace

from memprof.analysis.analysis import analyze
from memprof.analysis.headline import headline_of
from memprof.recording.cuda.history import CudaHistory
from memprof.recording.recorder import AllocationTags, DeviceInfo
from memprof.recording.session import Session
from memprof.report.run import OutOfMemory
from memprof.snapshot import load_snapshot, snapshot_from_raw
from memprof.timeline.timeline import build_timeline
from memprof.units import GIB
from tests.recording.fake_cuda import Allocator
from tests.report.files import validate
from tests.reports.document.drawn import render_terminal
from tests.synthetic import SnapshotBuilder

MIB = 1 << 20


def two_devices(failed: int | None = None, survived: bool = False) -> dict[str, Any]:
    """A snapshot with 64 MiB on device 0 and 96 MiB on device 1; on one of them an allocation may fail."""
    builders = [SnapshotBuilder(device=d, n_devices=2) for d in (0, 1)]
    for builder, size in zip(builders, (64, 96), strict=True):
        builder.free(builder.alloc(size * MIB, "forward"))
        if builder.device == failed:
            builder._event("oom", 0, 512 * MIB, [])
            builder.events[-1] |= {"device_free": 3 * MIB}
    raw, other = (builder.raw() for builder in builders)
    raw["segments"] += other["segments"]
    raw["device_traces"][1] = other["device_traces"][1]
    info = {"type": "cuda", "name": "Pretend"}
    raw["memprof"] = {
        "schema": "memprof.snapshot/1", "kind": "cuda", "non_torch_bytes": 7 * MIB,
        "device": {"index": 0, **info, "total_bytes": 80 * MIB},
        "devices": [{"index": i, **info, "total_bytes": (80 + 40 * i) * MIB} for i in (0, 1)],
    }  # fmt: skip
    if survived:
        row = {"requested_bytes": 512 * MIB, "time_us": 0, "went_on_us": 1 << 40, "phase": "forward", "step": 3}
        raw["memprof"]["survived"] = [row]
    return raw


def test_every_device_is_reported_and_the_page_says_so() -> None:
    analysis = analyze(snapshot_from_raw(two_devices()))
    report = analysis.to_dict()
    validate(report)
    assert [d["device"] for d in report["devices"]] == [0, 1]
    assert [d["shown"] for d in report["devices"]] == [False, True]
    assert [d["peak"]["allocated_bytes"] for d in report["devices"]] == [64 * MIB, 96 * MIB]
    for device in report["devices"]:
        assert sum(device["peak"]["categories"].values()) == device["peak"]["active_bytes"]
    assert report["peak"]["allocated_bytes"] == 96 * MIB
    # What the recorder asked the driver is about its own device, 0; each device has its own memory.
    assert report["peak"]["non_torch_bytes"] is None
    assert [d["device_total_bytes"] for d in report["devices"]] == [80 * MIB, 120 * MIB]
    assert report["source"]["device_total_bytes"] == 120 * MIB
    assert report["capacity"] == {"bytes": 120 * MIB, "from": "device"}
    document = document_of(analysis)
    for text in (render_terminal(document, 120), render_html(document)):
        assert "Device 0" in text
        assert "--device 0 reports it" in text
        assert "All 2 devices" in text
        assert "report is about device 1" in " ".join(text.split())
    own = analyze(snapshot_from_raw(two_devices()), 0).to_dict()
    assert (own["source"]["device"], own["peak"]["non_torch_bytes"]) == (0, 7 * MIB)
    assert [d["shown"] for d in own["devices"]] == [True, False]


def test_one_device_says_nothing_of_others() -> None:
    builder = SnapshotBuilder()
    builder.alloc(MIB, "forward")
    report = analyze(snapshot_from_raw(builder.raw())).to_dict()
    assert report["devices"] == []
    assert not [n for n in report["notes"] if "devices" in n]


@pytest.mark.parametrize(
    ("failed", "survived", "shown"), [(0, False, 0), (1, False, 1), (0, True, 1), (None, False, 1)]
)
def test_the_device_that_ran_out_of_memory_is_shown(failed: int | None, survived: bool, shown: int) -> None:
    report = analyze(snapshot_from_raw(two_devices(failed, survived))).to_dict()
    assert report["source"]["device"] == shown
    assert (report["oom"] is not None) is (failed is not None and not survived)


def out_of_memory_on_one(peaks: Sequence[int], request: int = 4, frames: Sequence[str] = ()) -> str:
    """The cause of an error on device 1 of 80 GiB, the devices' peaks given in GiB."""
    failure = OutOfMemory(
        requested_bytes=request * GIB, device_free_bytes=GIB, phase=None, step=None, stack=tuple(frames)
    )
    found = analyze(snapshot_from_raw(two_devices(1))).report
    first = found.devices[0]
    devices = [
        replace(
            first,
            device=i,
            shown=i == 1,
            device_total_bytes=80 * GIB,
            peak=replace(first.peak, allocated_bytes=n * GIB),
        )
        for i, n in enumerate(peaks)
    ]
    return headline_of(replace(found, oom=failure, devices=tuple(devices))).cause


def test_unevenly_used_devices_are_the_first_cause() -> None:
    cause = out_of_memory_on_one((8, 78, 20))
    assert cause.startswith(
        "The devices are unevenly used: device 1 peaks at 78.00 GiB, device 2 at 20.00 GiB, device 0 at 8.00 GiB; "
        "spread evenly, each needs 36.67 GiB. "
    )
    assert "DataParallel" not in cause
    frames = ("a/site-packages/torch/nn/parallel/data_parallel.py:193 forward", "train.py:3 <module>")
    assert "torch.nn.DataParallel computes the loss on one device" in out_of_memory_on_one((8, 78, 20), frames=frames)
    # Full everywhere, nearly even, not used at all, or too large even when spread evenly.
    for peaks in ((78, 78, 78), (70, 78), (0, 78, 0)):
        assert "unevenly" not in out_of_memory_on_one(peaks)
    assert "unevenly" not in out_of_memory_on_one((8, 78), request=300)


class TwoDevices(Allocator):
    """Two cards of one process, whose history is one: device 0's recorder sees both."""

    def __init__(self) -> None:
        super().__init__(0)
        self.second = Allocator(1)

    def record(self, context: str | None, stacks: str, max_entries: int, skip: list[str], clear: bool) -> None:
        super().record(context, stacks, max_entries, skip, clear)
        self.second.record(context, stacks, max_entries, skip, clear)

    def snapshot(self) -> dict[str, Any]:
        raw = super().snapshot()
        raw["device_traces"].append(list(self.second.trace))
        return raw

    def segments(self) -> list[dict[str, Any]]:
        return super().segments() + self.second.segments()


def test_a_gap_is_closed_on_every_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaHistory, "other_device", lambda self, i: DeviceInfo(i, "cuda", "Pretend", 24 * 10**9))
    both = TwoDevices()
    session = Session(recorder := CudaHistory(torch.device("cuda", 0), backend=both))
    session.start()
    recorder.set_tags(AllocationTags("generate", 1))
    gone = both.second.malloc(512 * 3)
    recorder._suspend()
    both.second.free(gone)
    both.second.malloc(512 * 8)
    both.malloc(512)
    recorder._resume()
    both.second.malloc(512)
    session.stop()
    session.write(tmp_path / "two.pickle")
    snapshot = load_snapshot(tmp_path / "two.pickle")
    assert [device.index for device in snapshot.run.devices] == [0, 1]
    line = build_timeline(snapshot, 1)
    assert (int(line.active[0]), int(line.active[-1]), int(line.active.max())) == (0, 512 * 9, 512 * 9)
    assert [n for n in line.notes if "contradict" in n or "although" in n or "missing from" in n] == []


def test_a_failure_that_the_run_survived_names_another_device_than_the_report_s() -> None:
    builder = SnapshotBuilder(device=0, n_devices=2)
    builder.alloc(64 * MIB, "forward")
    raw = builder.raw({"schema": "memprof.snapshot/1", "kind": "cuda"})
    failure = {"requested_bytes": 1024 * MIB, "time_us": 1, "went_on_us": 2, "step": 3, "phase": "forward"}
    raw["memprof"]["survived"] = [{**failure, "device": device} for device in (0, 1)]
    own, other = (n for n in analyze(snapshot_from_raw(raw)).to_dict()["notes"] if "1.00 GiB" in n)
    assert "failed in forward of step 3; the error" in own
    assert "failed in forward of step 3 on device 1; the error" in other


def test_a_device_that_holds_nothing_beside_one_whose_tensors_have_owners() -> None:
    """As one of two ranks leaves it, each on its own card with both in sight."""
    builder = SnapshotBuilder(device=0, n_devices=2)
    address = builder.alloc(64 * MIB, "forward")
    raw = builder.raw({"schema": "memprof.snapshot/1", "kind": "cuda"})
    # torch notes each snapshot in every device's trace.
    raw["device_traces"][1] = [{"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "time_us": builder.time_us}]
    raw["memprof"]["owners"] = [[address, builder.time_us, "weights", "parameter", "w"]]
    info = {"type": "cuda", "name": "Pretend", "total_bytes": 80 * MIB}
    raw["memprof"] |= {"device": {"index": 0, **info}, "devices": [{"index": i, **info} for i in (0, 1)]}
    report = analyze(snapshot_from_raw(raw)).to_dict()
    validate(report)
    assert [d["peak"]["allocated_bytes"] for d in report["devices"]] == [64 * MIB, 0]
    assert report["peak"]["categories"]["weights"] == 64 * MIB
