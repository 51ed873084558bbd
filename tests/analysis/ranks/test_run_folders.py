"""Where a run writes and where its recordings are looked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import memprof
from memprof.analysis.ranks.run_folders import earlier_runs, other_runs, places_of_run, run_started, unused_folder
from memprof.errors import InputError
from memprof.report.files import write_answer
from tests.cli.test_report_ranks import record


def old(path: Path, at: float = 1000.0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    os.utime(path, (at, at))


@pytest.mark.parametrize("name", ["step-000002.rank-0.pickle", "report.html", "counters.rank-3.jsonl", "trainer-2"])
def test_a_folder_with_an_earlier_run_is_numbered(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "_memprof"
    assert unused_folder(folder, 2000.0) == folder
    old(folder / name)
    assert unused_folder(folder, 2000.0) == tmp_path / "_memprof-2"
    old(tmp_path / "_memprof-2" / name)
    assert unused_folder(folder, 2000.0) == tmp_path / "_memprof-3"


def test_what_this_run_wrote_and_what_is_no_runs_does_not_count(tmp_path: Path) -> None:
    old(tmp_path / "out" / "step-000002.rank-1.pickle", at=2001.0)
    old(tmp_path / "out" / "model.safetensors")
    assert unused_folder(tmp_path / "out", 2000.0) == tmp_path / "out"
    assert unused_folder(tmp_path / "out") == tmp_path / "out-2"  # no other rank may have written there


def test_python_analyses_a_folder_as_the_command_line_does(tmp_path: Path) -> None:
    run = tmp_path / "_memprof"
    for rank in range(3):
        record(run / f"step-000002.rank-{rank}.pickle", rank % 2, rank=rank, world_size=3)
    for rank in (0, 1):
        path = run / f"step-000002.rank-{rank}.pickle"
        write_answer(memprof.analyze(path).report, path.with_suffix(".json"))
    found = memprof.analyze(tmp_path)
    assert found.snapshot.path == str(run / "step-000002.rank-1.pickle")
    assert memprof.analyze(str(run)).report == found.report
    for path in run.glob("*.pickle"):
        path.unlink()
    with pytest.raises(InputError, match="has reports and no snapshot"):
        memprof.analyze(tmp_path)


def test_recordings_are_looked_for_in_the_newest_run(tmp_path: Path) -> None:
    assert places_of_run(tmp_path) == (tmp_path, tmp_path / "_memprof")
    for name in ("_memprof", "_memprof-2", "_memprof-10", "_memprof-old"):
        (tmp_path / name).mkdir()
    assert places_of_run(tmp_path) == (tmp_path, tmp_path / "_memprof-10")


def test_a_folder_that_a_run_of_this_process_wrote_to_is_not_chosen_again(tmp_path: Path) -> None:
    """Whatever the clock of the file system says: what was written seems later than everything."""
    folder = tmp_path / "_memprof"
    claimed = {folder}
    assert unused_folder(folder, 2000.0, claimed) == folder  # nothing was written
    old(folder / "counters.rank-0.jsonl", at=9e9)
    assert unused_folder(folder, 2000.0, claimed) == tmp_path / "_memprof-2"


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("", "_memprof-10 is the newest of 3 runs in this folder. The others are _memprof-2, _memprof."),
        ("_memprof-2", "_memprof-2 is not the newest of 3 runs in this folder. The others are _memprof-10, _memprof."),
        ("_memprof", "_memprof is not the newest of 3 runs in this folder. The others are _memprof-10, _memprof-2."),
        ("alone", ""),
        ("nowhere", ""),
        ("_memprof/report.html", ""),
    ],
)
def test_other_runs_are_named(tmp_path: Path, place: str, says: str) -> None:
    for name in ("_memprof", "_memprof-2", "_memprof-10", "alone"):
        old(tmp_path / name / "report.html")
    (tmp_path / "_memprof-11").mkdir()  # nothing was written to it
    (tmp_path / "_memprof-0").mkdir()
    assert other_runs(tmp_path / place) == says


@pytest.mark.parametrize("line", ['{"schema": "memprof.counters/1", "started": 9.5, "rank": 0}', "[1]", "", "{"])
def test_the_newest_run_is_known_by_when_it_started(tmp_path: Path, line: str) -> None:
    """By the time of its oldest file, if no file says so."""
    old(tmp_path / "_memprof" / "step-000002.rank-0.pickle", at=500.0)
    old(tmp_path / "_memprof" / "report.html", at=3000.0)  # drawn again later
    counters = tmp_path / "_memprof-2" / "counters.rank-0.jsonl"
    old(counters)
    counters.write_text(f"{line}\n")
    os.utime(counters, (1000.0, 1000.0))
    says = line.startswith('{"')
    assert run_started(tmp_path / "_memprof") == 500.0
    assert run_started(tmp_path / "_memprof-2") == (9.5 if says else 1000.0)
    newest = "_memprof" if says else "_memprof-2"
    assert places_of_run(tmp_path) == (tmp_path, tmp_path / newest)
    assert other_runs(tmp_path).startswith(f"{newest} is the newest of 2 runs")
    folders = {tmp_path / "_memprof", tmp_path / "_memprof-2"}
    assert earlier_runs(folders) == folders - {tmp_path / newest}
    assert earlier_runs({tmp_path / "_memprof-2", tmp_path / "_memprof-3"}) == set()  # numbered by somebody else


def test_a_folder_with_one_run_has_no_others(tmp_path: Path) -> None:
    old(tmp_path / "_memprof" / "report.html")
    assert other_runs(tmp_path) == ""


def test_many_runs_are_counted(tmp_path: Path) -> None:
    for number in range(2, 12):
        old(tmp_path / f"_memprof-{number}" / "report.html")
    assert other_runs(tmp_path).endswith("_memprof-10, _memprof-9, _memprof-8, _memprof-7, _memprof-6 and 4 more.")
