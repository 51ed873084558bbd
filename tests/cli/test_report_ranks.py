"""``memprof report`` over the ranks of one run: folders, many files, mistakes."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from memprof._native import scanner
from memprof.snapshot.reader import memory_to_report
from memprof.snapshot.writer import save_snapshot
from tests.cli.test_cli import MIB, call, report_of
from tests.synthetic import SnapshotBuilder


def record(path: Path, extra_mib: int, **known: Any) -> Path:
    """A snapshot whose peak is 4 MiB and ``extra_mib`` more."""
    run = SnapshotBuilder()
    run.alloc(4 * MIB, "main")
    if extra_mib:
        run.free(run.alloc(extra_mib * MIB, "step", "main"))
    raw = run.raw()
    if known:
        raw["memprof"] = {"schema": "memprof.snapshot/1", "kind": "cuda", **known}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_snapshot(raw, path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ranks 0, 1 and 3 of four, the second the fullest; their reports' JSON beside two of them."""
    out = tmp_path / "run" / "_memprof"
    for rank, more in ((0, 2), (1, 10), (3, 4)):
        path = record(out / f"step-000002.rank-{rank}.pickle", more, rank=rank, world_size=4, node=f"gpu-{rank // 2}")
        if rank:
            assert call("report", path, "--json", path.with_suffix(".json")).exit_code == 0
    return tmp_path / "run"


def test_a_folder_is_merged_and_the_missing_rank_named(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = call("report", folder, "-o", page)
    assert result.exit_code == 0
    assert "Rank 1 peaks highest: 14.00 MiB" in result.stdout
    assert "No readable recording of rank 2." in result.stdout
    html = page.read_text(encoding="utf-8")
    assert "<h1>run: 3 of 4 ranks</h1>" in html  # the run's page, one rank of it a click away
    assert re.search(r'<a href="#in-full">Rank 1, which uses the most memory, in full</a>', html)
    assert html.index('id="ranks"') < html.index('id="in-full"')
    report = report_of(folder)
    assert [r["rank"] for r in report["ranks"]] == [0, 1, 3]
    assert [r["peak"]["active_bytes"] for r in report["ranks"]] == [6 * MIB, 14 * MIB, 8 * MIB]
    assert (report["source"]["rank"], report["peak"]["active_bytes"]) == (1, 14 * MIB)
    assert [n["ranks"] for n in report["across_ranks"]["nodes"]] == [[0, 1], [3]]
    assert report["across_ranks"]["missing"][0]["rank"] == 2


def test_markdown_and_allocations_of_the_rank_shown(folder: Path) -> None:
    result = call("report", folder, "--format", "markdown")
    assert "| 1 | " in result.stdout
    assert len(report_of(folder, "--allocations", "1")["peak"]["allocations"]) == 1


def test_a_report_older_than_its_snapshot_is_made_again(folder: Path) -> None:
    stale = folder / "_memprof" / "step-000002.rank-3.json"
    damaged = json.loads(stale.read_text())
    damaged["peak"]["active_bytes"] = 1
    stale.write_text(json.dumps(damaged))
    os.utime(stale, (1, 1))
    assert report_of(folder)["ranks"][2]["peak"]["active_bytes"] == 8 * MIB


def test_files_of_ranks_whose_snapshots_are_elsewhere(folder: Path) -> None:
    """Only the JSON came along: no timeline, everything else."""
    for rank in (1, 3):
        (folder / "_memprof" / f"step-000002.rank-{rank}.pickle").unlink()
    report = report_of(folder)
    assert report["source"]["rank"] == 1
    assert [r["rank"] for r in report["ranks"]] == [0, 1, 3]


def test_reports_kept_beside_any_frameworks_dumps_are_read_instead(tmp_path: Path) -> None:
    files = [record(tmp_path / f"mem_rank_{r}.pickle", 2 + r) for r in (0, 1, 2)]
    plain = report_of(tmp_path)
    assert not list(tmp_path.glob("*.json"))
    kept = report_of(tmp_path, "--keep-json")
    assert sorted(path.name for path in tmp_path.glob("*.json")) == [f"mem_rank_{r}.json" for r in (0, 1, 2)]
    read = report_of(tmp_path)
    assert "3 of 3 recordings were read from the JSON of their reports." in read["notes"]
    read["notes"].pop()
    assert plain == kept == read
    # What is older than its snapshot, made of another, or damaged does not stand for it, and a note says so.
    reports = [path.with_suffix(".json") for path in files]
    os.utime(reports[0], (1, 1))
    reports[1].write_text(reports[2].read_text())
    reports[2].write_text(reports[2].read_text()[:999])
    again = report_of(tmp_path)
    assert again["ranks"] == plain["ranks"]
    for path, why in zip(reports, ("older than", "not made from", "damaged"), strict=True):
        assert any(path.name in note and why in note for note in again["notes"]), why
    grown = record(files[0], 20, node="gpu-7")  # another file, of another size, as old as the report
    os.utime(grown, (1, 1))
    assert report_of(tmp_path)["ranks"][0]["peak"]["active_bytes"] == 24 * MIB
    refused = call("report", tmp_path, "--keep-json", "--device", "0")
    assert (refused.exit_code, "--keep-json" in refused.stderr) == (2, True)


def test_keeping_reports_touches_nobody_elses_files_and_loses_no_rank(tmp_path: Path) -> None:
    for rank in (0, 1):
        record(tmp_path / f"mem_rank_{rank}.pickle", 2)
    (tmp_path / "mem_rank_0.json").write_text('{"mine": 1}')
    (tmp_path / "mem_rank_1.json").mkdir()
    report = report_of(tmp_path, "--keep-json")
    assert [r["rank"] for r in report["ranks"]] == [0, 1]
    assert (tmp_path / "mem_rank_0.json").read_text() == '{"mine": 1}'
    assert any("mem_rank_0.json is not a report" in note for note in report["notes"])
    assert any("mem_rank_1.json" in note and "Not saved" in note for note in report["notes"])


def test_what_was_told_to_rank_0_stands_in_for_files(folder: Path, tmp_path: Path) -> None:
    told = folder / "_memprof" / "step-000002.ranks.json"
    assert call("report", folder, "--json", told).exit_code == 0
    for kind in ("pickle", "json"):
        (folder / "_memprof" / f"step-000002.rank-1.{kind}").unlink()
    report = report_of(folder)
    assert [r["rank"] for r in report["ranks"]] == [0, 1, 3]
    assert report["source"]["rank"] == 3  # the fullest of those whose files are here
    assert report["across_ranks"]["peak"]["highest_rank"] == 1


def test_files_of_an_earlier_larger_run_are_left_out(folder: Path) -> None:
    for rank in (6, 7):
        old = record(folder / "_memprof" / f"step-000002.rank-{rank}.pickle", 30, rank=rank, world_size=8)
        os.utime(old, (1, 1))
    report = report_of(folder)
    assert [r["rank"] for r in report["ranks"]] == [0, 1, 3]
    assert any("of 8 ranks, were left out (rank 6, 7)" in note for note in report["notes"])


def test_files_of_an_earlier_run_of_the_same_size_are_left_out(tmp_path: Path) -> None:
    """Written later than the newer run's, as copied files are; a rank that knows no id is of any run."""
    of = {0: ("new", 2000.5), 1: ("old", 1000.5), 2: (None, 2001.5)}
    for rank, (run, started) in of.items():
        path = tmp_path / f"step-000002.rank-{rank}.pickle"
        record(path, 2, rank=rank, world_size=4, run_id=run, run_started=started)
        os.utime(path, (5000 + rank, 5000 + rank))
    report = report_of(tmp_path)
    assert [r["rank"] for r in report["ranks"]] == [0, 2]
    assert "Files of an earlier run were left out (rank 1)." in report["notes"]
    files = sorted(tmp_path.glob("*.pickle"))
    refused = call("report", *files)
    assert (refused.exit_code, "are of several runs" in refused.stderr) == (3, True)
    assert call("report", files[0], files[2]).exit_code == 0


def test_an_out_of_memory_of_a_later_step_comes_first(folder: Path) -> None:
    place = folder / "_memprof"
    late = record(place / "step-000057.rank-3.pickle", 1, rank=3, world_size=4, node="gpu-1")
    report = json.loads(call("report", late, "--json", "-").stdout)
    report["oom"] = {"requested_bytes": 9, "device_free_bytes": 1, "phase": "forward", "step": 57, "stack": []}
    late.with_suffix(".json").write_text(json.dumps(report))
    record(place / "step-000060.rank-0.pickle", 1, rank=0, world_size=4)
    found = report_of(folder)
    assert any("Rank 3 ran out of memory in step 57" in note for note in found["notes"])
    assert any("Rank 0 has a newer recording, of step 60" in note for note in found["notes"])
    assert next(r for r in found["ranks"] if r["rank"] == 3)["oom"]["step"] == 57
    assert [r["rank"] for r in report_of(folder, "--step", "60")["ranks"]] == [0]


def test_snapshots_of_other_tools_by_their_names(tmp_path: Path) -> None:
    files = [record(tmp_path / f"rank{r}_memory.pickle", r) for r in (0, 1, 2)]
    for given in ([tmp_path], files):
        report = report_of(*given)
        assert [r["peak"]["active_bytes"] for r in report["ranks"]] == [4 * MIB, 5 * MIB, 6 * MIB]
        assert report["across_ranks"]["world_size"] is None
    nameless = [record(tmp_path / "x" / name, 1) for name in ("a.pickle", "b.pickle")]
    report = report_of(*nameless)
    assert [r["rank"] for r in report["ranks"]] == [0, 1]
    assert any("a.pickle does not say which rank it is of" in note for note in report["notes"])


@pytest.mark.parametrize("redact", [True, False])
def test_names_of_machines_can_be_left_out(folder: Path, tmp_path: Path, redact: bool) -> None:
    page = tmp_path / "page.html"
    result = call("report", folder, "-o", page, *(["--redact"] if redact else []))
    assert result.exit_code == 0
    assert ("gpu-1" in page.read_text(encoding="utf-8")) is not redact


def test_mistakes_are_one_sentence(folder: Path, tmp_path: Path) -> None:
    place = folder / "_memprof"
    one, two = place / "step-000002.rank-0.pickle", place / "step-000002.rank-1.pickle"
    (tmp_path / "empty").mkdir()
    again = record(tmp_path / "again" / one.name, 0, rank=0, world_size=4)
    other = record(tmp_path / "other" / "step-000002.rank-2.pickle", 0, rank=2, world_size=8)
    damaged = tmp_path / "rank5.json"
    damaged.write_text('{"schema": "memprof.report/1", "source": 3}')
    cases = [
        ((tmp_path / "empty",), 3, "no recordings there"),
        ((folder, "--step", "9"), 2, "recordings of step 2"),
        ((one, "--step", "2"), 2, "this is one file"),
        ((folder, one), 2, "give one folder alone"),
        ((one, one), 2, "given twice"),
        ((one, again), 3, "rank 0 is there twice"),
        ((one, other), 3, "a run of 4 ranks and of one of 8"),
        ((two, damaged), 3, "not a report that memprof understands: expected `object`, got `int` (at source)"),
        ((two, tmp_path / "nowhere.pickle"), 3, "nowhere.pickle"),
    ]
    for arguments, code, words in cases:
        result = call("report", *arguments)
        assert (result.exit_code, words in result.stderr) == (code, True), (arguments, result.stderr)
        assert len(result.stderr.strip().split("\n")) == 1


@pytest.mark.parametrize("option", [("--keep-json",), ("--executor", "ray")])
def test_what_is_for_ranks_is_refused_for_one_file(option: tuple[str, ...], tmp_path: Path) -> None:
    """They were taken and did nothing."""
    refused = call("report", record(tmp_path / "mem.pickle", 2), *option)
    assert (refused.exit_code, option[0] in refused.stderr) == (2, True)


def test_ranks_without_a_file_are_counted_and_named(tmp_path: Path) -> None:
    """Other tools' dumps do not say how many ranks there were: "rank 7 of 5 shown in full"."""
    for rank in (0, 3, 5, 6, 7):
        record(tmp_path / f"mem_rank_{rank}.pickle", 2 if rank < 7 else 9)
    result = call("report", tmp_path)
    text = " ".join(result.stdout.split())
    assert "rank 7 of 8 shown in full" in text
    assert "No readable recording of ranks 1, 2 and 4." in text
    report = report_of(tmp_path)
    assert (report["source"]["world_size"], report["across_ranks"]["world_size"]) == (8, 8)
    assert [row["rank"] for row in report["across_ranks"]["missing"]] == [1, 2, 4]


def test_ranks_that_cannot_be_read_are_not_said_to_peak_alike(tmp_path: Path) -> None:
    for rank in range(8):
        path = record(tmp_path / f"mem_rank_{rank}.pickle", 2)
        if rank > 4:
            path.write_bytes(path.read_bytes()[:300])
    text = " ".join(call("report", tmp_path).stdout.split())
    assert "The 5 ranks here peak alike" in text
    assert "No readable recording of ranks 5–7." in text
    assert report_of(tmp_path)["source"]["world_size"] == 8


def test_notes_of_many_ranks_are_one(tmp_path: Path) -> None:
    """Each of 32 ranks had a note of its own."""
    place = tmp_path / "_memprof"
    for rank in range(7):
        record(place / f"step-000002.rank-{rank}.pickle", 2, rank=rank, world_size=8)
    for rank in range(6):
        record(place / f"step-{3 + rank % 2:06}.rank-{rank}.pickle", 2, rank=rank, world_size=8)
    notes = report_of(tmp_path)["notes"]
    newer = [note for note in notes if "newer" in note]
    assert newer == ["Ranks 0–5 have newer recordings, of steps 3 and 4 (see --step)."]
    nameless = [record(tmp_path / "x" / f"{name}.pickle", 1) for name in "abcdefgh"]
    notes = report_of(*nameless)["notes"]
    assert sum("does not say which rank" in note for note in notes) == 5
    assert "And 3 more notes like these, of other recordings." in notes


def test_the_memory_for_a_rank_is_estimated_by_its_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was six times the file's size, for a packed file too: large machines read too few ranks at once."""
    if scanner() is not None:
        assert memory_to_report(tmp_path / "rank0.pickle", 100) == 200
    monkeypatch.setenv("MEMPROF_NATIVE", "0")
    assert memory_to_report(tmp_path / "rank0.pickle", 100) == 400
    assert memory_to_report(tmp_path / "rank0.pickle.gz", 100) == 8000
