"""What each line of the program allocated: at the peak, at its own peak, and with which text."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memprof import analyze, load_snapshot
from memprof.analysis.source_files import SourceText, mismatch, recorded_texts, texts_below
from memprof.report.allocations import SourceLine
from memprof.snapshot.recorded_run import SourceFile
from memprof.vocabulary import Category
from tests.synthetic import SnapshotBuilder, frame


def line(number: int, file: str = "/job/train.py", n_bytes: int = 10) -> SourceLine:
    return SourceLine(
        file=file, line=number, function="f", bytes=n_bytes, count=1, own_peak_bytes=n_bytes,
        categories={Category.WEIGHTS: n_bytes},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "number", "words"),
    [
        ("a = f()\nb = g()", 2, ""),
        ("a = f()\nb = g()", 5, "It has 2 lines, and a stack names line 5"),
        ("a = f()\n\nb = g()", 2, "No code is on line 2"),
        ("a = f()\n   # b\n", 2, "No code is on line 2"),
    ],
)
def test_a_text_that_cannot_be_what_ran_is_said(text: str, number: int, words: str) -> None:
    found = mismatch(SourceText(tuple(text.split("\n"))), [line(number)])
    assert found.startswith(words)
    assert bool(found) == bool(words)


def test_a_file_that_was_cut_may_be_longer() -> None:
    assert mismatch(SourceText(("a = f()",), cut=True), [line(99)]) == ""


def test_files_are_found_by_the_longest_end_of_their_path(tmp_path: Path) -> None:
    (tmp_path / "job" / "model").mkdir(parents=True)
    (tmp_path / "job" / "model" / "nn.py").write_text("inner = 1\n")
    (tmp_path / "nn.py").write_text("outer = 1\n")
    (tmp_path / "train.py").write_text("train = 1\n")
    paths = ["/root/job/model/nn.py", "C:\\work\\job\\train.py", "/root/job/absent.py"]
    found = texts_below(tmp_path, paths, None)
    assert {path: text.lines[0] for path, text in found.items()} == {paths[0]: "inner = 1", paths[1]: "train = 1"}


def test_a_file_changed_after_the_snapshot_is_doubtful(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("x = 1\n")
    os.utime(file, (2_000_000_000, 2_000_000_000))
    assert "changed" in texts_below(tmp_path, ["train.py"], "2020-01-01T00:00:00+00:00")["train.py"].doubt
    assert texts_below(tmp_path, ["train.py"], "2040-01-01T00:00:00+00:00")["train.py"].doubt == ""
    assert texts_below(tmp_path, ["train.py"], "no date")["train.py"].doubt == ""


def test_a_recorded_file_that_was_edited_meanwhile_is_doubtful() -> None:
    texts = recorded_texts([SourceFile(path="a.py", text="x\ny", edited=True), SourceFile(path="b.py", text="z")])
    assert texts["a.py"].lines == ("x", "y")
    assert "changed" in texts["a.py"].doubt
    assert texts["b.py"] == SourceText(("z",))


def test_lines_have_the_bytes_of_the_peak_and_their_own_peak(tmp_path: Path) -> None:
    """The innermost line of the program counts; what a library allocates alone counts for no line."""
    build = SnapshotBuilder()
    library = frame("linear", "/usr/lib/python3/site-packages/torch/nn/functional.py", 9)
    stacks = {
        "big": [library, frame("forward", "/job/model.py", 7), frame("main", "/job/train.py", 2)],
        "small": [frame("main", "/job/train.py", 5)],
        "none": [library],
    }
    wanted = [("small", 4096), ("big", 8192), ("small", 2048), ("none", 512)]
    addresses = []
    for name, size in wanted:
        addresses.append(build.alloc(size, "f"))
        for event in build.events[-2:]:
            event["frames"] = stacks[name]
        build.live[addresses[-1]]["frames"] = stacks[name]
        if len(addresses) == 1:
            build.free(addresses[0])
    report = analyze(load_snapshot(build.save(tmp_path / "run.pickle"))).report
    found = {(Path(one.file).name, one.line): one for one in report.source_lines}
    assert {place: (one.bytes, one.own_peak_bytes, one.count) for place, one in found.items()} == {
        ("model.py", 7): (8192, 8192, 1),
        ("train.py", 5): (2048, 4096, 1),
    }
    assert all(sum(one.categories.values()) == one.bytes for one in report.source_lines)
    assert report.peak.active_bytes == 8192 + 2048 + 512
    assert [one.bytes for one in report.source_lines] == [8192, 2048]
