"""What is found below a log directory."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from memprof.integrations.board.recordings import Recordings


def touch(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


def found(*places: tuple[str, Path]) -> list[tuple[str, int, int]]:
    return [(r.run, r.step, r.rank) for r in Recordings(list(places)).all()]


def test_runs_are_named_as_tensorboard_names_them(tmp_path: Path) -> None:
    touch(
        tmp_path,
        "a/_memprof/step-000002.rank-0.pickle", "a/_memprof/step-000002.rank-1.pickle",
        "b/c/_memprof/step-9.rank-0.pickle",
        "own/step-000007.rank-0.pickle", "a/_memprof/report.html", "a/_memprof/step-000003.rank-0.json",
        ".hidden/_memprof/step-1.rank-0.pickle", "a/checkpoint-5/_memprof/step-1.rank-0.pickle", "a/other.pickle",
    )  # fmt: skip
    assert found(("", tmp_path)) == [("a", 2, 0), ("a", 2, 1), ("b/c", 9, 0), ("own", 7, 0)]
    assert found(("", tmp_path / "a")) == [("a", 2, 0), ("a", 2, 1)]
    assert found(("", tmp_path / "a" / "_memprof")) == [("_memprof", 2, 0), ("_memprof", 2, 1)]
    assert found(("left", tmp_path / "a"), ("right", tmp_path / "b"))[::2] == [("left", 2, 0), ("right/c", 9, 0)]


def test_the_run_that_wrote_last_is_listed_first(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from memprof.integrations.board.plugin import _newest_run_first

    for number, name in enumerate(("a/_memprof", "a/_memprof-2", "a/_memprof-3", "b/_memprof")):
        touch(tmp_path, *(f"{name}/step-{step}.rank-0.pickle" for step in (2, 4)))
        for step in (2, 4):
            os.utime(tmp_path / name / f"step-{step}.rank-0.pickle", (0, 1000 * (number % 3) + step))
    listed = [(r.run, r.step) for r in _newest_run_first(Recordings([("", tmp_path)]).all())]
    assert listed[:4] == [("a/_memprof-3", 2), ("a/_memprof-3", 4), ("a/_memprof-2", 2), ("a/_memprof-2", 4)]
    assert {run for run, _ in listed[4:]} == {"a", "b"}


def test_links_are_not_followed(tmp_path: Path) -> None:
    touch(tmp_path, "out/step-1.rank-0.pickle", "log/_memprof/step-1.rank-0.pickle")
    os.symlink(tmp_path / "out", tmp_path / "log" / "linked")
    os.symlink(tmp_path / "out" / "step-1.rank-0.pickle", tmp_path / "log" / "_memprof" / "step-2.rank-0.pickle")
    assert found(("", tmp_path / "log")) == [("log", 1, 0)]


def test_what_is_not_there_is_not_found(tmp_path: Path) -> None:
    touch(tmp_path, "a/_memprof/step-000002.rank-0.pickle")
    recordings = Recordings([("", tmp_path)])
    assert recordings.get("a", 2, 0) is not None
    for run in ("../a", "a/", "/a", "", "a/_memprof", str(tmp_path / "a")):
        assert recordings.get(run, 2, 0) is None
    assert Recordings([("", tmp_path / "gone")]).all() == []


@pytest.mark.parametrize(
    ("logdir", "spec", "expected"),
    [
        ("/logs", "", [("", Path("/logs"))]),
        ("", "", []),
        ("gs://bucket/logs", "", []),
        ("", "a:/x/y,/z", [("a", Path("/x/y")), ("", Path("/z"))]),
    ],
)
def test_tensorboards_ways_of_naming_places(logdir: str, spec: str, expected: list[tuple[str, Path]]) -> None:
    pytest.importorskip("tensorboard")
    from memprof.integrations.board.plugin import _places

    assert _places(SimpleNamespace(logdir=logdir, flags=SimpleNamespace(logdir_spec=spec))) == expected


def test_a_report_is_parsed_again_only_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    from memprof.integrations.board import plugin

    parsed: list[str] = []
    read = plugin._read_listed
    monkeypatch.setattr(plugin, "_read_listed", lambda path: (parsed.append(path.name), read(path))[1])
    touch(tmp_path, *(f"a/step-{n}.rank-0.pickle" for n in (1, 2, 3)))
    for step in (1, 2, 3):
        report(tmp_path, step, 100 * step)
    tab = plugin.MemoryTab(SimpleNamespace(logdir=str(tmp_path), flags=None))

    def peaks() -> list[int | None]:
        found = Recordings([("", tmp_path)]).all()
        listed = tab._listed(found)
        return [plugin._row(r, listed.get(r.json)).peak_bytes for r in found]

    assert peaks() == peaks() == [100, 200, 300]
    assert len(parsed) == 3
    report(tmp_path, 2, 2222)
    (tmp_path / "a" / "step-3.rank-0.json").unlink()
    assert peaks() == [100, 2222, None]
    assert parsed[3:] == ["step-2.rank-0.json"]
    assert len(tab._read) == 2


def report(root: Path, step: int, peak: int) -> None:
    text = f'{{"peak": {{"allocated_bytes": {peak}, "phase": "backward"}}}}'
    (root / f"a/step-{step}.rank-0.json").write_text(text, encoding="utf-8")
