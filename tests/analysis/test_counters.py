"""The counters file: bounded, readable while it is written, and nothing else is taken for one."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path

import pytest
from memprof.reports import renderers

from memprof.analysis.counters import SCHEMA, find_counters, read_counters, read_run
from memprof.errors import InputError
from tests.report.counters import append, counters_file, plain


def row(step: int) -> dict[str, object]:
    return {"step": step, "time": 1.0, "recorded": False, "host_rss": step * 1000, "phases": {}}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = counters_file(tmp_path / "new" / "_memprof", 3, {"world_size": 8})
    for step in (1, 2):
        append(file, row(step))
    append(file, {"step": 2, "categories": {"weights": 5}, "groups": {"total": 5}})
    read = read_counters(file.path)
    assert (read.rank, read.world_size, plain(read.newest)) == (3, 8, row(2))
    assert [r.step for r in read.steps] == [1, 2]
    assert plain(read.recorded)["categories"] == {"weights": 5}
    assert read.ended is None
    append(file, {"ended": 9.0, "step": 2, "error": False})
    assert plain(read_counters(file.path).ended) == {"ended": 9.0, "step": 2, "error": False}


def test_a_line_says_what_is_not_known_and_leaves_out_what_was_not_asked(tmp_path: Path) -> None:
    file = counters_file(tmp_path, 0, {"model_name": None, "world_size": 2, "max_steps": 3})
    lines = [
        {"step": 1, "time": 1764278400.125, "recorded": False, "host_rss": 5, "host_pinned": None,
         "peak_allocated": None, "phases": {}},
        {"step": 1, "phase": "backward", "peak_allocated": 7, "time": 2.5, "categories": {"weights": 5}, "groups": {}},
        {"ended": 3.5, "step": 1, "error": False},
    ]  # fmt: skip
    for line in lines:
        append(file, line)
    about, *written = file.path.read_text().splitlines()
    assert list(json.loads(about)) == ["schema", "rank", "started", "model_name", "world_size", "max_steps"]
    assert written == [json.dumps(line, separators=(",", ":")) for line in lines]


def test_a_rank_that_only_an_earlier_run_had_is_left_out(tmp_path: Path) -> None:
    counters_file(tmp_path, 0, {"run_id": "new", "started": 2000.0})
    counters_file(tmp_path, 1, {"run_id": "old", "started": 1000.0})
    counters_file(tmp_path, 2, {"run_id": None, "started": 1500.0})  # ranks that could not agree
    assert [rank.rank for rank in read_run(tmp_path)] == [0, 2]
    counters_file(tmp_path, 3, {"run_id": None, "started": 3000.0})
    assert [rank.rank for rank in read_run(tmp_path)] == [0, 2, 3]


def test_the_file_stays_small_and_keeps_the_whole_course(tmp_path: Path) -> None:
    file = counters_file(tmp_path, 0, {}, max_bytes=6000)
    sizes = []
    for step in range(1, 1000):
        peaks = {"peak_allocated": 10**9 if step == 5 else None if step % 2 else step, "peak_reserved": None}
        phases = {"forward": 10**8} if step == 6 else {"backward": step}
        append(file, {**row(step), **peaks, "phases": phases, "recorded": step == 7})
        if step in (100, 200):
            append(file, {"step": step, "categories": {"weights": step}, "groups": {}})
        sizes.append(os.path.getsize(file.path))
    assert max(sizes) <= 6000
    read = read_counters(file.path)
    steps = [r.step for r in read.steps]
    assert steps == sorted(set(steps))
    assert steps[-5:] == [995, 996, 997, 998, 999]
    assert len(steps) >= 12
    assert steps[0] < 150
    gaps = [b - a for a, b in itertools.pairwise(steps)]
    assert max(gaps) <= 128
    assert [r.step for r in read.steps if r.recorded] == steps[:1]  # the line of step 7
    assert max(r.size("peak_allocated") or 0 for r in read.steps) == 10**9
    assert plain(read.steps[0])["phases"]["forward"] == 10**8
    assert all(r.host_rss == r.step * 1000 for r in read.steps)  # not a peak: the last step's
    assert plain(read.recorded) == {"step": 200, "categories": {"weights": 200}, "groups": {}}
    assert not list(tmp_path.glob("*.tmp"))


def test_a_deleted_file_is_begun_anew(tmp_path: Path) -> None:
    folder = tmp_path / "out" / "_memprof"
    file = counters_file(folder, 0, {"world_size": 2})
    append(file, row(1))
    shutil.rmtree(tmp_path / "out")
    append(file, row(2))
    read = read_counters(folder / "counters.rank-0.jsonl")
    assert (read.world_size, [r.step for r in read.steps]) == (2, [2])


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    file = counters_file(tmp_path, 0, {})
    other = tmp_path / "other"
    other.write_text("somebody's")
    file.path.unlink()
    file.path.symlink_to(other)
    with pytest.raises(OSError, match="symbolic links"):
        append(file, row(1))
    assert other.read_text() == "somebody's"


def test_the_end_alone_can_be_read(tmp_path: Path) -> None:
    file = counters_file(tmp_path, 0, {"world_size": 2})
    for step in range(1, 200):
        append(file, row(step))
    read = read_counters(file.path, newest_bytes=1000)
    assert read.world_size == 2
    assert [r.step for r in read.steps][-3:] == [197, 198, 199]
    assert len(read.steps) < 20


def test_a_new_training_begins_a_new_file(tmp_path: Path) -> None:
    counters_file(tmp_path, 0, {}).append(row(7))
    counters_file(tmp_path, 0, {}).append(row(1))
    assert [r.step for r in read_counters(tmp_path / "counters.rank-0.jsonl").steps] == [1]


def test_lines_that_are_not_whole_are_passed_over(tmp_path: Path) -> None:
    file = counters_file(tmp_path, 0, {})
    append(file, row(1))
    with open(file.path, "ab") as stream:
        stream.write(b'garbage\n[1]\n{"step": "two"}\n' + json.dumps(row(2)).encode())  # the last has no end yet
    assert [r.step for r in read_counters(file.path).steps] == [1]


def test_sizes_that_no_memory_has_are_left_out(tmp_path: Path) -> None:
    phases = {"forward": -(2**63), "backward": 10**19, "rollout": True, "generate": "1", "idle": None, "step": 7}
    file = counters_file(tmp_path, 0, {"device_total_bytes": 1e300})
    append(file, {**row(1), "allocated": -5, "reserved": None, "phases": phases, "cached": 2**80})
    append(file, {"step": 1, "categories": {"weights": 5, "inputs": -1}, "groups": []})
    read = read_counters(file.path)
    step = plain(read.steps[0])
    assert step.keys() & {"allocated", "cached"} == set()
    assert (step["reserved"], step["phases"]) == (None, {"step": 7})
    assert plain(read.recorded) == {"step": 1, "categories": {"weights": 5}}
    assert "device_total_bytes" not in plain(read.about)
    assert "step" in renderers.draw("watch", [read])


@pytest.mark.parametrize("content", [b"", b"{}\n", b"[]\n", b"\x80\x04", b'{"schema": "memprof.counters/9"}\n'])
def test_other_files_are_refused_in_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "counters.rank-0.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=SCHEMA):
        read_counters(path)


def test_files_are_found_in_a_run_by_rank(tmp_path: Path) -> None:
    for rank in (10, 2, 0):
        counters_file(tmp_path / "_memprof", rank, {})
    found = [p.name for p in find_counters(tmp_path)]
    assert found == [f"counters.rank-{n}.jsonl" for n in (0, 2, 10)]
    assert [p.name for p in find_counters(tmp_path / "_memprof")] == found
    with pytest.raises(InputError, match="no such folder"):
        find_counters(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"counters\.rank"):
        find_counters(tmp_path / "empty")
