"""Every file is whole or not there, whatever kills, fills or races its writer; what is no file is never waited for."""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from memprof.analysis.counters import read_counters
from memprof.errors import InputError
from memprof.files import refuse_special, write_text, write_whole
from memprof.report.files import write_answer
from memprof.snapshot import load_snapshot
from memprof.snapshot.writer import save_snapshot
from tests.report.counters import append, counters_file
from tests.report.files import read_memprof_json
from tests.reports.sample import sample
from tests.reports.typed import report_of
from tests.synthetic import SnapshotBuilder

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and limits of a POSIX system")


def _snapshot(letter: str) -> dict[str, Any]:
    made = SnapshotBuilder()
    made.alloc(1 << 20, letter)
    return {**made.raw(), "padding": [letter * 99] * 20_000}


def _write_snapshot(folder: Path) -> Iterator[None]:
    raws = [_snapshot(letter) for letter in "ab"]
    while True:
        for raw in raws:
            save_snapshot(raw, folder / "run.pickle")
            yield


def _write_page(folder: Path) -> Iterator[None]:
    from memprof.reports.html.report import render_html

    from tests.reports.typed import build_document

    page = render_html(build_document(*sample("trace")))
    while True:
        write_text(folder / "page.html", page)
        yield


def _write_json(folder: Path) -> Iterator[None]:
    report = report_of(sample()[0])
    while True:
        write_answer(report, folder / "report.json")
        yield


def _write_counters(folder: Path) -> Iterator[None]:
    while True:
        file = counters_file(folder, 0, {"pid": 1}, max_bytes=1 << 16)
        for step in range(400):
            append(file, {"step": step, "time": 1.0, "phases": {"y" * 400: 1}})
            yield


def _write_cache(_: Path) -> Iterator[None]:
    from memprof.plan.cache import store

    while True:
        for letter in "ab":
            store("key", {letter: letter * 500_000})
            yield


def _read_cache(path: Path) -> None:
    ((letter, text),) = json.loads(path.read_text()).items()
    assert text == letter * 500_000


def _read_page(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert text.rstrip().endswith("</html>")


def _read_counters(path: Path) -> None:
    *whole, _half = path.read_bytes().split(b"\n")
    steps = [row["step"] for row in map(json.loads, whole) if "step" in row]
    assert [row.step for row in read_counters(path).steps] == steps  # the last line may be half
    assert steps == list(range(steps[0], steps[-1] + 1)) if steps else len(whole) == 1


def _read_report(path: Path) -> None:
    assert read_memprof_json(path) is not None


#: Each kind of file: who writes it again and again, its name, and what reads it, which fails where it is not whole.
KINDS: dict[str, tuple[Callable[[Path], Iterator[None]], str, Callable[[Path], object]]] = {
    "snapshot": (_write_snapshot, "run.pickle", load_snapshot),
    "page": (_write_page, "page.html", _read_page),
    "json": (_write_json, "report.json", _read_report),
    "counters": (_write_counters, "counters.rank-0.jsonl", _read_counters),
    "cache": (_write_cache, "key.json", _read_cache),
}


def forked(does: Callable[[], object]) -> int:
    """Run in a fork that ends without a word; return its process."""
    child = os.fork()
    if not child:
        try:
            does()
        finally:
            os._exit(1)
    return child


@pytest.mark.parametrize("kills", [8, pytest.param(200, marks=pytest.mark.heavy)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_writer_leaves_a_whole_file(
    kind: str, kills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMPROF_CACHE", str(tmp_path))
    writes, name, read = KINDS[kind]
    draw, midway = random.Random(kind), 0
    writer = writes(tmp_path)
    next(writer)
    began = time.monotonic()
    for _ in range(4):
        next(writer)
    once = max((time.monotonic() - began) / 4, 0.002)
    for _ in range(kills):
        started, tell = os.pipe()

        def again(tell: int = tell) -> None:
            os.write(tell, b"x")
            for _ in writes(tmp_path) if kind == "counters" else writer:  # a run begins its counters anew
                pass

        child = forked(again)
        os.close(tell)
        assert os.read(started, 1), "the writer failed"
        time.sleep(draw.uniform(0, 3 * once))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(started)
        read(tmp_path / name)
        left = [p for p in tmp_path.iterdir() if p.name != name]
        assert all(p.name.startswith(".memprof-") and p.name.endswith(".part") for p in left), left
        midway += bool(left)
        for path in left:
            os.utime(path, (0, 0))  # as old as if it had been left yesterday: the next writer deletes it
    assert kills < 100 or kind == "counters" or midway, "no kill came while a file was unfinished"


def test_what_was_left_is_deleted_by_the_next_and_what_is_being_written_is_not(tmp_path: Path) -> None:
    for name, age in ((".memprof-0.part", 0), (".memprof-1.part", time.time()), (".memprof-2.txt", 0)):
        (tmp_path / name).write_text("x")
        os.utime(tmp_path / name, (age, age))
    write_whole(tmp_path / "a", "whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".memprof-1.part", ".memprof-2.txt", "a"]


# ---- a full disk -----------------------------------------------------------------------------------------------------


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Have every write beyond ``size`` bytes of a file fail, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
@pytest.mark.parametrize("kind", ["snapshot", "page", "json", "cache"])
def test_a_full_disk_leaves_the_earlier_file(
    kind: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMPROF_CACHE", str(tmp_path))
    writes, name, _ = KINDS[kind]
    writer = writes(tmp_path)
    next(writer)
    before = (tmp_path / name).read_bytes()
    with files_of_at_most(int(share * len(before))):
        if kind == "cache":  # the next plan takes longer
            next(writer)
        else:
            with pytest.raises(InputError) as caught:
                next(writer)
            assert str(tmp_path / name) in str(caught.value)
            assert "\n" not in str(caught.value)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {name: before}


@pytest.mark.parametrize("room", [0, 1, 37])
def test_counters_keep_no_half_line(room: int, tmp_path: Path) -> None:
    file = counters_file(tmp_path, 0, {"pid": 1})
    append(file, {"step": 1, "time": 1.0})
    before = file.path.read_bytes()
    with files_of_at_most(len(before) + room), pytest.raises(OSError, match=r"No space|too large"):
        append(file, {"step": 2, "time": 2.0, "phases": {"y" * 100: 1}})
    assert file.path.read_bytes() == before
    append(file, {"step": 3, "time": 3.0})
    assert [row.step for row in read_counters(file.path).steps] == [1, 3]


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder on a filesystem of 64 KiB."""
    (place := tmp_path / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    try:
        done = subprocess.run(mount, capture_output=True, check=False).returncode
    except OSError:
        done = 1
    if done:
        pytest.skip("needs the right to mount a filesystem")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_disk_that_is_really_full(tiny_disk: Path, tmp_path: Path) -> None:
    (tmp_path / "run.pickle").write_bytes(pickle.dumps(_snapshot("a")))
    (tiny_disk / "filler").write_bytes(b"x" * (60 << 10))
    (tiny_disk / "page.html").write_text("before")
    for words in (["-o", str(tiny_disk / "page.html")], ["--json", str(tiny_disk / "page.html")]):
        command = [sys.executable, "-m", "memprof", "report", str(tmp_path / "run.pickle"), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 3, done.stderr
        assert "No space left on device" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
        assert (tiny_disk / "page.html").read_text() == "before"
    with pytest.raises(InputError, match="No space left on device"):
        save_snapshot(_snapshot("b"), tiny_disk / "run.pickle")
    (tiny_disk / "filler").write_bytes(b"x" * (40 << 10))
    file = counters_file(tiny_disk, 0, {})
    steps = (append(file, {"step": step, "time": 1.0, "phases": {"y" * 999: 1}}) for step in range(1000))
    with pytest.raises(OSError, match="No space"):
        list(steps)
    assert file.path.read_bytes().endswith(b"}\n")
    assert 0 < len(read_counters(file.path).steps) < 30
    assert {p.name for p in tiny_disk.iterdir()} == {"filler", "page.html", file.path.name}


# ---- two writers, links, the umask -----------------------------------------------------------------------------------


def test_two_writers_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_whole(path, "a" * 300_000)

    def writes(letter: str) -> Callable[[], None]:
        def run() -> None:
            while True:
                write_whole(path, letter * 300_000)

        return run

    children = [forked(writes(letter)) for letter in "ab"]
    seen, until = set(), time.monotonic() + 10
    try:
        while time.monotonic() < until and len(seen) < 2:
            for _ in range(50):
                text = path.read_text()
                assert len(text) == 300_000
                assert len(set(text)) == 1
                seen.add(text[0])
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert seen == {"a", "b"}


def test_a_link_in_the_place_of_the_file_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (elsewhere := tmp_path / "elsewhere").write_text("untouched")
    for target in (elsewhere, tmp_path / "nothing"):
        (link := tmp_path / "report.json").unlink(missing_ok=True)
        link.symlink_to(target)
        write_text(link, "new")
        assert not link.is_symlink()
        assert link.read_text() == "new"
        assert elsewhere.read_text() == "untouched"
        assert not (tmp_path / "nothing").exists()


def test_the_unfinished_file_cannot_be_foreseen_and_is_opened_through_no_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    monkeypatch.setattr("os.replace", lambda one, other: names.append(Path(one).name))
    for _ in range(100):
        write_whole(tmp_path / "a", "x")
    assert len({name[len(".memprof-") : -len(".part")] for name in names}) == 100
    assert min(map(len, names)) >= len(".memprof-.part") + 16
    (elsewhere := tmp_path / "elsewhere").write_text("untouched")
    monkeypatch.setattr("os.urandom", bytes)
    (tmp_path / f".memprof-{bytes(8).hex()}.part").symlink_to(elsewhere)
    with pytest.raises(FileExistsError):
        write_whole(tmp_path / "a", "x")
    assert elsewhere.read_text() == "untouched"


def test_counters_are_appended_through_no_link(tmp_path: Path) -> None:
    file = counters_file(tmp_path, 0, {})
    file.path.unlink()
    (elsewhere := tmp_path / "elsewhere").write_text("untouched")
    file.path.symlink_to(elsewhere)
    with pytest.raises(OSError, match="symbolic link"):
        append(file, {"step": 1})
    file.path.unlink()
    os.mkfifo(file.path)
    with pytest.raises(OSError, match="No such device"):
        append(file, {"step": 1})
    assert elsewhere.read_text() == "untouched"


@pytest.mark.parametrize("mask", [0o077, 0o027, 0o002])
def test_files_have_the_users_umask(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        write_text(tmp_path / "page.html", "x")
        save_snapshot(_snapshot("a"), tmp_path / "run.pickle")
        counters_file(tmp_path, 0, {})
    finally:
        os.umask(before)
    assert {stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()} == {0o666 & ~mask}


# ---- what is no file -------------------------------------------------------------------------------------------------


def test_a_pipe_that_nobody_reads_a_socket_and_a_folder_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    (folder := tmp_path / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        for path in (pipe, tmp_path / "s", folder):
            before = path.stat()
            for write in (write_text, lambda p, _: save_snapshot(_snapshot("a"), p)):
                with pytest.raises(InputError, match=f"{path.name}.*(No such device|directory)"):
                    write(path, "x")
            assert path.stat()[:4] == before[:4]
    assert {p.name for p in tmp_path.iterdir()} == {"pipe", "s", "folder"}


def test_a_pipe_that_somebody_reads_is_written_to(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    until = time.monotonic() + 10
    while True:
        try:
            write_text(pipe, "x" * 200_000)
            break
        except InputError:  # the reader has not opened it yet
            assert time.monotonic() < until
            time.sleep(0.005)
    reader.join(10)
    assert read == ["x" * 200_000]


def test_devices_stay_devices_and_standard_output_is_no_file_to_replace(tmp_path: Path) -> None:
    write_text(Path("/dev/null"), "x")
    save_snapshot(_snapshot("a"), "/dev/null")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    before = os.readlink("/dev/stdout")
    program = "from pathlib import Path; from memprof.files import write_text; write_text(Path('/dev/stdout'), 'whole')"
    with (tmp_path / "out").open("w") as out:
        subprocess.run([sys.executable, "-c", program], stdout=out, check=True, timeout=60)
    assert (tmp_path / "out").read_text() == "whole"
    assert os.readlink("/dev/stdout") == before


def test_reading_refuses_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(InputError, match="not a regular file"):
            refuse_special(path)
