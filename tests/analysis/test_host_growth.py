"""Host memory that grows from step to step: which part it is, and that what only warms up is none."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

import pytest
from memprof.reports.document.build import host_facts
from memprof.reports.renderers import draw

from memprof.analysis.counters import read_counters
from memprof.analysis.host_growth import host_growth, host_report
from memprof.recording.system.host import host_parts
from memprof.report.codec import to_builtins
from memprof.report.counters import StepCounters
from memprof.report.run import Host
from memprof.snapshot.recorded_run import HostMemory
from tests.report.counters import append, counters_file, line_of
from tests.report.files import validate
from tests.reports.sample import sample

G = 2**30
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")


def _lines(rows: list[dict[str, int]]) -> list[StepCounters]:
    return [line_of(row) for row in rows]


def rows(**grows: float) -> list[dict[str, int]]:
    """Return twenty steps of 10 GiB, with parts that grow by so many GiB each step."""
    base = {"host_rss": 10 * G, "host_anon": 8 * G, "host_children": 2 * G, "host_arenas": G, "host_files": G}
    return [{"step": step, **{k: n + round(grows.get(k, 0) * step * G) for k, n in base.items()}} for step in range(20)]


@pytest.mark.parametrize(
    ("grows", "first", "each"),
    [
        ({"host_children": 0.5}, "host_children", 0.5),
        ({"host_rss": 0.2, "host_anon": 0.2}, "host_anon", 0.2),
        ({"host_rss": 0.2, "host_anon": 0.2, "host_arenas": 0.19}, "host_arenas", 0.2),
        ({"host_rss": 0.3, "host_files": 0.3}, "host_files", 0.3),
    ],
)
def test_the_part_that_grows_is_named(grows: dict[str, float], first: str, each: float) -> None:
    found = host_growth(_lines(rows(**grows)))
    assert found is not None
    assert next(iter(found.parts)) == first.removeprefix("host_")
    assert found.bytes / found.steps == pytest.approx(each * G)
    assert f"by {each:.3f} GiB a step" in found.sentence


def test_what_warms_up_stands_still_or_jumps_once_is_no_growth() -> None:
    assert host_growth(_lines(rows())) is None
    assert host_growth(_lines(rows(host_rss=1)[:9])) is None  # too few steps
    warm = [{"step": i, "host_rss": (2 if i < 2 else 20) * G} for i in range(20)]
    assert host_growth(_lines(warm)) is None
    once = [{"step": i, "host_rss": (10 if i < 11 else 20) * G} for i in range(20)]
    assert host_growth(_lines(once)) is None
    assert host_growth(_lines([{"step": i} for i in range(20)])) is None


def test_watch_says_it(tmp_path: Path) -> None:
    file = counters_file(tmp_path, 0, {})
    for row in rows(host_children=0.5):
        append(file, {"time": time.time(), **row})
    text = draw("watch", [read_counters(file.path)])
    assert "Host memory grows by 0.500 GiB a step" in text
    assert "dataloader workers" in text
    assert json.loads(file.path.read_text().splitlines()[1])["host_anon"] == 8 * G


def _hold(size: int, ready: object, done: object) -> None:
    block = b"x" * size
    ready.set()  # type: ignore[attr-defined]
    done.wait()  # type: ignore[attr-defined]
    assert block


@linux
def test_parts_are_those_of_the_process_and_its_children(tmp_path: Path) -> None:
    before = host_parts()
    block = bytearray(os.urandom(1 << 20) * 64)  # 64 MiB of private memory
    after = host_parts()
    assert after["host_anon"] - before["host_anon"] == pytest.approx(64 << 20, rel=0.1)
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    child = context.Process(target=_hold, args=(96 << 20, ready, done))
    child.start()
    try:
        assert ready.wait(60)
        assert host_parts()["host_children"] - after["host_children"] > 90 << 20
    finally:
        done.set()
        child.join()
    assert len(block) == 64 << 20


def test_a_report_says_which_part_of_host_memory_grew(tmp_path: Path) -> None:
    """The counters beside a snapshot are its run's; somebody else's snapshot has no neighbours that are read."""
    file = counters_file(tmp_path, 0, {"world_size": 1})
    for row in rows(host_pinned=0.25, host_rss=0.25):
        append(file, {"step": row["step"], **row, "host_pinned": G + row["step"] * G // 4})
    host = HostMemory(rss_bytes=15 * G, pinned_bytes=None)
    found, note = host_report(host, str(tmp_path / "step-000019.rank-0.pickle"), 0)
    assert found is not None
    assert found.growth is not None
    assert note == found.growth.sentence
    assert found.growth.parts == {"pinned": 16 * G // 4}
    assert "torch's cache of pinned memory 4.00 GiB" in found.growth.sentence
    as_recorded = Host(rss_bytes=15 * G)
    assert host_report(host, str(tmp_path / "step-000019.rank-1.pickle"), 1) == (as_recorded, None)
    assert host_report(None, str(tmp_path / "step-000019.rank-0.pickle"), 0) == (None, None)
    report = {**sample()[0], "host": to_builtins(found)}
    validate(report)
    facts = {fact.label: fact.value for fact in host_facts(found)}
    assert facts["Grown in 16 steps"] == "4.00 GiB"
    assert facts["of it torch's cache of pinned memory"] == "4.00 GiB"


def test_counters_that_cannot_be_read_are_said_to_be(tmp_path: Path) -> None:
    (tmp_path / "counters.rank-0.jsonl").write_text("no counters\n")
    host = HostMemory(rss_bytes=15 * G, pinned_bytes=None)
    found, note = host_report(host, str(tmp_path / "step-000019.rank-0.pickle"), 0)
    assert found == Host(rss_bytes=15 * G)
    assert note is not None
    assert note.startswith("Whether host memory grew from step to step is not known: counters.rank-0.jsonl: not a ")
