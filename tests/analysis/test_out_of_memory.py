"""Out of memory under a limit of the process: reserved memory counts against it, whatever the device has free."""

from __future__ import annotations

from typing import Any

import pytest
from memprof.reports.document.build import oom_sentence
from memprof.reports.terminal.out_of_memory import oom_lines

from memprof.analysis.analysis import analyze
from memprof.snapshot import snapshot_from_raw
from tests.report.plain import as_oom, as_report
from tests.synthetic import SnapshotBuilder

MIB = 1 << 20


def failed(
    asked: int, device_free: int, limit: int | None, held: int = 60 * MIB, idle: int = 30 * MIB, told: bool = True
) -> dict[str, Any]:
    """The report of a run that held some memory, kept some idle in its cache, and failed to get more.

    ``told``: the recording says what the limit was, or with None that there was none; older ones do not.
    """
    builder = SnapshotBuilder()
    builder.alloc(held, "forward")
    builder.free(builder.alloc(idle, "forward"))
    builder._event("oom", 0, asked, [])
    builder.events[-1]["device_free"] = device_free
    oom = {"requested_bytes": asked, "device_free_bytes": device_free, "time_us": builder.time_us, "phase": "forward",
           "step": 1, "stack": [], "device": 0, **({"limit_bytes": limit} if told else {})}  # fmt: skip
    extra = {"schema": "memprof.snapshot/1", "kind": "cuda", "oom": oom,
             "device": {"index": 0, "type": "cuda", "name": "Pretend", "total_bytes": 1 << 34}}  # fmt: skip
    return analyze(snapshot_from_raw(builder.raw(extra))).to_dict()


def _sentence(report: dict[str, Any]) -> str:
    oom = as_oom(report["oom"])
    assert oom is not None
    return oom_sentence(oom)


def test_a_limit_counts_what_is_reserved() -> None:
    """60 MiB in use and 30 idle are 90 reserved: under a limit of 100, 20 more do not go, though 40 would be left."""
    report = failed(asked=50 * MIB, device_free=1 << 33, limit=100 * MIB)
    oom = report["oom"]
    assert (oom["limit_bytes"], oom["limited"], oom["reserved_bytes"]) == (100 * MIB, True, 90 * MIB)
    assert oom["fits_defragmented"] is False  # 10 left of the limit and 30 idle
    sentence = _sentence(report)
    assert "90.00 MiB of 100.00 MiB" in sentence
    lines = "\n".join(oom_lines(as_report(report)))
    assert "with 90.00 MiB reserved of the 100.00 MiB this process may" in lines
    assert "8.00 GiB free" not in lines
    assert failed(asked=35 * MIB, device_free=1 << 33, limit=100 * MIB)["oom"]["fits_defragmented"] is True


def test_the_allocators_piece_decides_not_the_request() -> None:
    """8 MiB take a segment of 20: with 10 left of the limit the limit refuses it."""
    oom = failed(asked=8 * MIB, device_free=1 << 33, limit=100 * MIB, idle=30 * MIB)["oom"]
    assert oom["limited"] is True
    assert failed(asked=8 * MIB, device_free=6 * MIB, limit=1000 * MIB)["oom"]["limited"] is False


@pytest.mark.parametrize(("free", "limited"), [(1 << 33, True), (60 * MIB, True), (49 * MIB, False), (0, False)])
def test_a_limit_nobody_recorded_shows_by_a_device_with_room(free: int, limited: bool) -> None:
    report = failed(asked=50 * MIB, device_free=free, limit=None, told=False)
    assert report["oom"]["limited"] is limited
    sentence = _sentence(report)
    assert ("a per-process memory limit was reached" in sentence) is limited


def test_a_recording_that_knows_of_no_limit_names_none() -> None:
    """With expandable segments a card refuses a piece of 20 MiB where the driver has more free than was asked for."""
    assert failed(asked=50 * MIB, device_free=60 * MIB, limit=None)["oom"]["limited"] is False


def test_a_full_card_is_no_limit() -> None:
    report = failed(asked=50 * MIB, device_free=4 * MIB, limit=None)
    sentence = _sentence(report)
    assert "limit" not in sentence
    assert "4.00 MiB were free on the device" in sentence
