"""What is held outside torch: NVML's answers and refusals, the sampler, what a recording keeps of both."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from memprof.reports.document.outside_torch import outside_facts
from memprof.reports.html.report import render_html

from memprof.analysis.outside_torch import outside_report
from memprof.config.gpus import CONTEXT_BYTES
from memprof.recording.system.nvml import DeviceMeter
from memprof.recording.system.outside_torch import Outside
from memprof.recording.system.sampler import Sampler
from memprof.report.codec import to_builtins
from memprof.report.run import NonTorchMemory, OtherProcess
from memprof.snapshot.validation import read_run
from tests.report.files import validate
from tests.reports.document.drawn import render_terminal
from tests.reports.sample import sample
from tests.reports.typed import build_document

GIB = 2**30
UUID = "GPU-1b2c"


class Library:
    """As much of pynvml as is asked; the hardware it would ask is not here."""

    def __init__(self, processes: list[tuple[int, int | None]], used: int = 6 * GIB, known: str = UUID) -> None:
        self.processes, self.used, self.known = processes, used, known
        self.calls = 0
        self.broken = False

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:
        if name != self.known:
            raise RuntimeError("Not Found")
        return name

    def nvmlDeviceIsMigDeviceHandle(self, handle: str) -> int:
        return int(handle.startswith("MIG-"))

    def nvmlDeviceGetMemoryInfo(self, _handle: str) -> Any:
        self.calls += 1
        if self.broken:
            raise RuntimeError("GPU is lost")
        return SimpleNamespace(total=24 * GIB, used=self.used, free=24 * GIB - self.used)

    def nvmlDeviceGetComputeRunningProcesses(self, _handle: str) -> list[Any]:
        return [SimpleNamespace(pid=p, usedGpuMemory=n) for p, n in self.processes]


def test_our_share_and_theirs() -> None:
    meter = DeviceMeter("1b2c", library=Library([(os.getpid(), 4 * GIB), (1, GIB), (2, GIB // 2)]))
    reading = meter.read()
    assert reading is not None
    assert (reading.own, reading.others, reading.used, reading.total) == (4 * GIB, 3 * GIB // 2, 6 * GIB, 24 * GIB)
    assert (meter.reason, meter.mig) == ("", False)


def test_a_container_that_renumbers_processes() -> None:
    alone = DeviceMeter(UUID, library=Library([(4_000_000, 5 * GIB)])).read()
    assert alone is not None
    assert (alone.own, alone.others) == (5 * GIB, 0)  # one process alone can only be this one
    meter = DeviceMeter(UUID, library=Library([(4_000_000, GIB), (4_000_001, GIB)]))
    several = meter.read()
    assert several is not None
    assert (several.own, several.others, several.used) == (None, None, 6 * GIB)
    assert "does not list this process" in meter.reason


def test_a_driver_that_hides_sizes() -> None:
    reading = DeviceMeter(UUID, library=Library([(os.getpid(), None), (7, None)])).read()
    assert reading is not None
    assert (reading.own, reading.others) == (None, None)


@pytest.mark.parametrize(("known", "visible"), [("MIG-77", "MIG-77"), ("MIG-1b2c", None)])
def test_a_slice_of_a_device(known: str, visible: str | None) -> None:
    meter = DeviceMeter(UUID, visible, Library([(os.getpid(), GIB)], known=known))
    assert meter.mig is True
    assert meter.read() is not None


def test_refusals_are_said_once_and_nothing_is_asked_again() -> None:
    unknown = DeviceMeter("other", library=Library([]))
    assert unknown.read() is None
    assert unknown.reason.startswith("NVML reports an error (Not Found)")
    library = Library([(os.getpid(), GIB)])
    meter = DeviceMeter(UUID, library=library)
    assert meter.read() is not None
    library.broken = True
    assert meter.read() is None
    assert meter.read() is None
    assert library.calls == 2
    assert "stopped answering (GPU is lost)" in meter.reason


def test_a_machine_without_the_library() -> None:
    """The real path where there is no driver: with nvidia-ml-py installed or without."""
    import ctypes.util

    if ctypes.util.find_library("nvidia-ml"):
        pytest.skip("there is a driver here")
    meter = DeviceMeter("GPU-0")
    assert meter.read() is None
    assert "non-PyTorch memory is unknown" in meter.reason


def test_what_a_recording_keeps() -> None:
    library = Library([(os.getpid(), 4 * GIB), (9, 2 * GIB)])
    outside = Outside(0, DeviceMeter(UUID, library=library))
    assert outside.row(1, 3 * GIB)[2:] == [4 * GIB, None, 6 * GIB, 2 * GIB, 3 * GIB]
    library.processes, library.used = [(os.getpid(), 9 * GIB), (9, 3 * GIB)], 12 * GIB
    outside.row(2, 8 * GIB)
    library.processes, library.used = [(os.getpid(), GIB)], GIB
    outside.row(3, GIB)
    kept = outside.to_plain()
    assert (kept["first_own_bytes"], kept["first_reserved_bytes"]) == (4 * GIB, 3 * GIB)
    assert (kept["used_bytes"], kept["own_bytes"], kept["others_bytes"]) == (12 * GIB, 9 * GIB, 3 * GIB)
    assert kept["processes"] == [[os.getpid(), 9 * GIB], [9, 3 * GIB]]
    assert kept["capacity_bytes"] == 24 * GIB


# -- the sampler -----------------------------------------------------------------------------------------------------


def test_rows_that_say_nothing_new_are_left_out() -> None:
    figures = [0, 0, 5 << 20, (5 << 20) + 1, 0]
    rows = iter([[i, n] for i, n in enumerate(figures)])
    kept: list[list[int | None]] = []
    over = threading.Event()

    def look() -> list[int | None]:
        row = next(rows, None)
        if row is None:
            over.set()
            raise RuntimeError
        return list(row)

    sampler = Sampler(look, kept.append)
    sampler._pause = 0.001
    sampler.start()
    assert over.wait(5)
    sampler.stop()
    assert [row[1] for row in kept] == [0, 5 << 20, 0]
    assert sampler.looks == len(figures)


def test_at_most_ten_looks_a_second_and_none_after_the_end() -> None:
    seen: list[float] = []
    sampler = Sampler(lambda: [time.time_ns() // 1000, len(seen)], lambda _row: None, hertz=1000)
    look = sampler._look
    sampler._look = lambda: (seen.append(time.monotonic()), look())[1]
    sampler.start()
    time.sleep(0.55)
    sampler.stop()
    count = len(seen)
    assert 1 <= count <= 6
    time.sleep(0.15)
    assert len(seen) == count
    assert not any(t.name == "memprof-sampler" for t in threading.enumerate())


# -- in the report ---------------------------------------------------------------------------------------------------


def reported(noted: dict[str, Any] | None, samples: list[Any]) -> NonTorchMemory | None:
    run = read_run({"outside": noted, "samples": samples}, [])
    return outside_report(run.outside, run.samples)


def test_what_is_outside_is_told_apart_and_adds_up() -> None:
    library = Library([(os.getpid(), 4 * GIB), (9, 2 * GIB)])
    outside = Outside(0, DeviceMeter(UUID, library=library))
    samples = [outside.row(1, 3 * GIB)]
    library.processes, library.used = [(os.getpid(), 10 * GIB), (9, 3 * GIB)], 14 * GIB
    samples.append(outside.row(2, 8 * GIB))
    found = reported(outside.to_plain(), samples)
    assert found is not None
    assert (found.at_start_bytes, found.grown_bytes, found.highest_bytes) == (GIB, GIB, 2 * GIB)
    parts = (found.own_bytes, found.others_bytes, found.unnamed_bytes)
    assert sum(part or 0 for part in parts) == found.highest_used_bytes
    assert found.processes == (OtherProcess(pid=9, bytes=3 * GIB),)
    report, _ = sample()
    validate({**report, "outside": to_builtins(found)})
    facts = {f.label: f.value for f in outside_facts(found)}
    assert facts["Before recording"] == facts["Since then"] == "1.00 GiB"
    document = build_document({**report, "outside": to_builtins(found)})
    assert "On the device outside torch" in render_html(document)
    assert "Non-PyTorch memory, before recording: 1.00 GiB" in render_terminal(document)


def test_a_groups_share_is_bounded_by_what_came_since_recording_began() -> None:
    library = Library([(os.getpid(), 4 * GIB)])
    outside = Outside(0, DeviceMeter(UUID, library=library))
    samples = [outside.row(1, 3 * GIB)]
    library.processes = [(os.getpid(), 6 * GIB)]
    samples.append(outside.row(2, 3 * GIB))
    found = reported({**outside.to_plain(), "process_groups": 8}, samples)
    assert found is not None
    assert (found.grown_bytes, found.group_at_most_bytes) == (2 * GIB, GIB // 4)
    assert found.estimated_bytes is None  # the driver told all
    (since,) = [f.note for f in outside_facts(found) if f.label == "Since then"]
    assert "(8 process groups, on average at most 256.00 MiB each)" in since


def test_a_context_is_estimated_for_each_process_whose_share_is_not_told() -> None:
    """As in a container, or beside other Ray workers that the driver lists without sizes."""
    library = Library([(os.getpid(), 4 * GIB), (7, None), (8, None)])
    outside = Outside(0, DeviceMeter(UUID, library=library))
    samples = [outside.row(1, 3 * GIB)]
    found = reported(outside.to_plain(), samples)
    assert found is not None
    assert found.estimated_bytes == CONTEXT_BYTES * 2
    (said,) = [f.note for f in outside_facts(found) if f.label == "Estimated"]
    assert said == "not measured: a CUDA context of usual size for 2 other processes"


def test_a_refusal_is_shown_and_a_trace_has_nothing_to_say() -> None:
    outside = Outside(0, DeviceMeter("other", library=Library([])))
    found = reported(outside.to_plain(), [outside.row(1, GIB)])
    assert found is not None
    assert found.highest_used_bytes is None
    assert [f.label for f in outside_facts(found)] == ["Not known", "Estimated"]
    assert found.estimated_bytes == CONTEXT_BYTES
    assert reported(None, []) is None
    assert outside_facts(None) == ()


@pytest.mark.parametrize("noted", [{"processes": [["x", 1], 3, [1, "y"]], "used_bytes": -1, "allocators": [7]}, {}])
def test_a_damaged_part_is_no_trouble(noted: dict[str, Any]) -> None:
    found = reported(noted, [[1, 2], [1, 2, None, None, None, None, None]])
    assert found is not None
    validate({**sample()[0], "outside": to_builtins(found)})
