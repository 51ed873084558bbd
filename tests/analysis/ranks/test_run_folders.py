"""Where a run writes and where its recordings are looked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memprof.analysis.ranks.run_folders import places_of_run, unused_folder


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


def test_recordings_are_looked_for_in_the_newest_run(tmp_path: Path) -> None:
    assert places_of_run(tmp_path) == (tmp_path, tmp_path / "_memprof")
    for name in ("_memprof", "_memprof-2", "_memprof-10", "_memprof-old"):
        (tmp_path / name).mkdir()
    assert places_of_run(tmp_path) == (tmp_path, tmp_path / "_memprof-10")
