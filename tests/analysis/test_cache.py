"""What was found out of a large snapshot is kept, privately, and never believed when it is not whole."""

from __future__ import annotations

import dataclasses
import os
import stat
import threading
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from memprof.advice.analyze_with_advice import ReportOf, analyze, analyze_once
from memprof.analysis import cache
from memprof.analysis.cache import entries, entry_of
from memprof.analysis.cache.entries import Entry, Parts
from memprof.analysis.report_files import validate
from memprof.cli import main
from tests.synthetic import SnapshotBuilder

MIB = 2**20


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cache, "_LEAST", 1)
    monkeypatch.delenv("MEMPROF_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "memprof" / "recordings"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return written(tmp_path / "run.pickle")


def written(path: Path, size: int = MIB) -> Path:
    run = SnapshotBuilder()
    run.ghost(size)
    run.free(run.alloc(2 * size, "forward", "main"))
    run.alloc(3 * size, "step", metadata='{"phase": "forward"}')
    extra = {"schema": "memprof.snapshot/1", "kind": "cuda", "config": {"odd": [1.5, None, "\ud800"]}}
    return run.save(path, extra)


def parts_of(path: Path) -> Parts:
    found = analyze(path)
    return Parts(found.snapshot, found.timeline, found.attribution)


def entry(path: Path) -> Entry:
    found = entry_of(path, None)
    assert found is not None
    return found


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if dataclasses.is_dataclass(one):
        for field in dataclasses.fields(one):
            assert_same(getattr(one, field.name), getattr(other, field.name))
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    else:
        assert one == other


def test_the_second_reading_is_the_first(folder: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = analyze_once(run)
    assert len(list(folder.iterdir())) == 1
    monkeypatch.setattr("memprof.advice.analyze_with_advice.analyze", None)  # nothing is read again
    second = analyze_once(run)
    for one, other in zip(
        (first.snapshot, first.timeline, first.attribution),
        (second.snapshot, second.timeline, second.attribution),
        strict=True,
    ):
        assert_same(one, other)
    assert first.to_dict() == second.to_dict()


def test_the_second_report_is_the_first(folder: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(*options: str) -> str:
        result = CliRunner().invoke(main, ["report", str(run), *options])
        assert result.exit_code == 0, result.output
        return result.stdout

    styles = [("--json", "-"), ("--format", "markdown"), (), ("--redact", "--json", "-")]
    expected = [told("--no-cache", *style) for style in styles]
    assert [told(*style) for style in styles] == expected
    assert len(list(folder.iterdir())) == 2  # the parts, and the report
    monkeypatch.setattr("memprof.advice.analyze_with_advice.analyze", None)  # nothing is read again, redacted or not
    assert [told(*style) for style in styles] == expected
    monkeypatch.setattr("memprof.analysis.analysis.Analysis.to_dict", None)  # nor reckoned
    assert [told(*style) for style in styles[:-1]] == expected[:-1]


def test_a_kept_report_names_the_file_that_was_asked_for(folder: Path, run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "other name.pickle"
    copy.write_bytes(run.read_bytes())
    assert ReportOf().once(run)["source"]["files"] == [str(run)]
    assert ReportOf().once(copy)["source"]["files"] == [str(copy)]
    validate(ReportOf().once(copy))


def test_a_kept_report_lists_as_many_allocations_as_are_asked_for(folder: Path, run: Path) -> None:
    assert len(ReportOf(allocations=None).once(run)["peak"]["allocations"]) > 1
    for _ in range(2):
        assert len(ReportOf(allocations=1).once(run)["peak"]["allocations"]) == 1


def test_a_report_is_made_again_when_the_runs_counters_grow(folder: Path, run: Path) -> None:
    before = ReportOf().once(run)
    (place,) = set(folder.iterdir()) - {entry(run).path}
    (run.parent / "counters.rank-0.jsonl").write_text("no counters\n")
    assert entry(run).read_report(50) is None
    assert not place.exists()
    assert ReportOf().once(run) != before or before["host"] is None
    assert entry(run).read_report(50) == ReportOf().once(run)


def test_a_damaged_report_is_made_again(folder: Path, run: Path) -> None:
    expected = ReportOf().once(run)
    (place,) = set(folder.iterdir()) - {entry(run).path}
    whole = place.read_bytes()
    for damaged in (b"", whole[:-1], whole[:40] + b"x" + whole[41:]):
        place.write_bytes(damaged)
        assert entry(run).read_report(50) is None
        assert not place.exists()
        assert ReportOf().once(run) == expected
        assert place.read_bytes() == whole


def test_a_report_that_warned_is_not_kept(folder: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = ReportOf.of

    def warned(self: ReportOf, *given: Any) -> dict[str, Any]:
        warnings.warn("settings cannot be read", stacklevel=2)
        return of(self, *given)

    monkeypatch.setattr(ReportOf, "of", warned)
    for _ in range(2):
        with pytest.warns(UserWarning, match="settings cannot be read"):
            ReportOf().once(run)


def test_every_shared_snapshot_comes_back_as_it_was(folder: Path, shared: Path) -> None:
    for path in sorted((shared / "snapshots").glob("*.pickle")):
        parts = parts_of(path)
        entry(path).write(parts)
        found = entry(path).read()
        assert found is not None, path
        assert_same(parts, found)


def test_an_entry_belongs_to_content_device_and_version(
    folder: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    analyze_once(run)
    copy = tmp_path / "other name.pickle"
    copy.write_bytes(run.read_bytes())
    found = entry(copy).read()
    assert found is not None
    assert found.snapshot.path == str(copy)
    assert entry(written(tmp_path / "third.pickle", 2 * MIB)).read() is None
    other_device = entry_of(run, 0)
    assert other_device is not None
    assert other_device.read() is None
    monkeypatch.setattr(entries, "__version__", "0.0.0")
    assert entry(run).read() is None


def test_an_entry_of_other_source_files_is_not_read(folder: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    analyze_once(run)
    monkeypatch.setattr(entries, "_ROOMS", ("snapshot",))
    assert entry(run).read() is None


def test_a_damaged_entry_is_deleted_and_made_again(folder: Path, run: Path) -> None:
    expected = analyze_once(run).to_dict()
    place = entry(run).path
    whole = place.read_bytes()
    changed = [bytes([*whole[:at], whole[at] ^ 1, *whole[at + 1 :]]) for at in range(0, len(whole), len(whole) // 12)]
    for damaged in (b"", whole[:10], whole[: len(whole) // 2], whole[:-1], whole + b"x", *changed):
        place.write_bytes(damaged)
        assert entry(run).read() is None
        assert not place.exists()
    assert analyze_once(run).to_dict() == expected
    assert place.read_bytes() == whole


@pytest.mark.parametrize(
    ("said", "instead"),
    [(b'"tree": [', b'"tree": 0 '), (b'"<i8"', b'"|O8"'), (b'"Snapshot"', b'"Snapshat"'), (b'"key": "', b'"key": "0')],
)
def test_an_entry_with_a_right_checksum_that_is_none(folder: Path, run: Path, said: bytes, instead: bytes) -> None:
    analyze_once(run)
    place = entry(run).path
    body = place.read_bytes()[:-8].replace(said, instead)
    assert said not in body or said in instead
    place.write_bytes(body + zlib.crc32(body).to_bytes(8, "little"))
    assert entry(run).read() is None
    assert not place.exists()


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows: folders of a user are closed to others")
def test_entries_are_private(folder: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0)
    try:
        analyze_once(run)
    finally:
        os.umask(before)
    place = entry(run).path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    place.chmod(0o644)  # others could read it: it is not used, and made again
    assert entry(run).read() is None
    assert not place.exists()
    analyze_once(run)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)  # another user's folder
    assert entry_of(run, None) is None


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="links need rights on Windows")
def test_links_are_not_followed(folder: Path, run: Path, tmp_path: Path) -> None:
    analyze_once(run)
    place, elsewhere = entry(run).path, tmp_path / "elsewhere"
    os.replace(place, elsewhere)
    place.symlink_to(elsewhere)
    assert entry(run).read() is None
    assert elsewhere.exists()
    os.replace(folder, tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    assert entry_of(run, None) is None


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows: folders of a user are closed to others")
def test_a_folder_open_to_others_is_not_used(folder: Path, run: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert entry_of(run, None) is None
    assert analyze_once(run).peak.active_bytes
    assert list(folder.iterdir()) == []


def test_two_writers_at_once(folder: Path, run: Path) -> None:
    parts = parts_of(run)
    failures = []

    def work() -> None:
        for _ in range(10):
            entry(run).write(parts)
            if entry(run).read() is None:
                failures.append("not whole")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert [path.suffix for path in folder.iterdir()] == [".kept"]


def test_the_oldest_entries_make_room(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [written(tmp_path / f"{number}.pickle", (number + 1) * MIB) for number in range(4)]
    for number, path in enumerate(runs[:3]):
        analyze_once(path)
        os.utime(entry(path).path, (number, number))
    assert entry(runs[0]).read() is not None  # used: now the newest
    size = entry(runs[0]).path.stat().st_size
    monkeypatch.setattr(entries, "_MOST", 2 * size + size // 2)
    analyze_once(runs[3])
    assert [entry(path).path.exists() for path in runs] == [True, False, False, True]
    monkeypatch.setattr(entries, "_MOST", 1000)  # larger than half of all: not kept
    entry(runs[1]).write(parts_of(runs[1]))
    assert not entry(runs[1]).path.exists()


def test_a_file_that_changed_while_it_was_read_is_not_kept(folder: Path, run: Path) -> None:
    place, parts = entry(run), parts_of(run)
    written(run, 2 * MIB)
    place.write(parts)
    assert not place.path.exists()


def test_nothing_is_kept_where_it_is_switched_off(
    folder: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(*options: str) -> str:
        result = CliRunner().invoke(main, ["explain", str(run), *options])
        assert result.exit_code == 0, result.output
        return result.output

    first = told("--no-cache")
    assert not folder.exists()
    assert "MEMPROF_CACHE" not in os.environ
    assert told() == first
    assert len(list(folder.iterdir())) == 1
    assert told() == first
    monkeypatch.setenv("MEMPROF_CACHE", "0")
    assert entry_of(run, None) is None
    monkeypatch.setenv("MEMPROF_CACHE", str(tmp_path / "named"))
    assert told() == first
    assert len(list((tmp_path / "named" / "recordings").iterdir())) == 1
    monkeypatch.setattr(cache, "_LEAST", 10**9)
    assert entry_of(run, None) is None


def test_a_home_that_cannot_be_written_to_is_no_error(folder: Path, run: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    assert entry_of(run, None) is None
    assert analyze_once(run).peak.active_bytes
