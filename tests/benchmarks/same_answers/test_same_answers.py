"""The comparison of two versions' answers finds one byte, and leaves out what it was told to and nothing else."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from benchmarks.same_answers.__main__ import main
from benchmarks.same_answers.collect import read_answer, write_answer
from benchmarks.same_answers.compare import Difference, differences, lines, without_places
from benchmarks.same_answers.compare import compare as compared
from benchmarks.same_answers.questions import KINDS, questions, snapshots_below
from tests.synthetic import SnapshotBuilder

MEMPROF = Path(sys.executable).with_name("memprof")


def _snapshots(folder: Path, more: int = 0) -> Path:
    """A readable snapshot whose peak is one block of ``5000 + more`` bytes, and a file that is refused."""
    (folder / "deep").mkdir(parents=True)
    built = SnapshotBuilder()
    built.free(built.alloc(5000 + more, "forward"))
    built.alloc(3000, "backward")
    built.save(folder / "deep" / "one.pickle")
    (folder / "refused.pickle").write_bytes(b"not a pickle")
    return folder


def _collect(snapshots: Path, truth: Path, out: Path, *only: str) -> Result:
    kinds = [word for kind in only for word in ("--only", kind)]
    places = ["--snapshots", str(snapshots), "--truth", str(truth), "--out", str(out)]
    return CliRunner().invoke(main, ["collect", "--memprof", str(MEMPROF), *places, *kinds])


def _compare(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["compare", *map(str, arguments)])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The answers about the same snapshots twice (``first``, ``again``), and with one byte more (``altered``)."""
    place = tmp_path_factory.mktemp("answers")
    truth = place / "truth"
    truth.mkdir()
    for out, more in (("first", 0), ("again", 0), ("altered", 1)):
        kinds = ("report", "explain") if more else ("report", "explain", "compare")
        done = _collect(_snapshots(place / f"of-{out}", more), truth, place / out, *kinds)
        assert done.exit_code == 0, done.output
    return place


def test_the_same_version_answers_alike_wherever_the_files_lie(place: Path) -> None:
    told = _compare(place / "first", place / "again", "--screens")
    assert told.exit_code == 0, told.output
    assert "12 answers compared, 0 differ" in told.output
    assert "differs" not in told.output


def test_one_byte_more_is_found_and_named(place: Path) -> None:
    told = _compare(place / "first", place / "altered", "--only", "report")
    assert told.exit_code == 1
    found = compared(place / "first", place / "altered", kinds=("report", "explain")).answers
    assert Difference(("answer", "peak", "requested_bytes"), 5000, 5001) in found["report/snapshots/deep/one"]
    assert "answer.peak.requested_bytes\n      before  5000\n      after   5001\n" in told.output
    assert found["explain/snapshots/deep/one"] != []
    assert found["report/snapshots/refused"] == []
    assert max(map(len, told.output.splitlines())) <= 80


def test_only_what_was_named_is_ignored(place: Path, tmp_path: Path) -> None:
    altered, name = tmp_path / "altered", "report/snapshots/deep/one"
    shutil.copytree(place / "first", altered)
    record = read_answer(altered, name)
    record["answer"]["source"]["versions"]["memprof"] = "another"
    write_answer(altered, name, record)
    told = _compare(place / "first", altered)
    assert told.exit_code == 0, told.output
    assert "ignored  source.versions.memprof: 1 values differ" in told.output

    record["answer"]["notes"].append("another note")
    record["answer"]["source"]["torch"] = "another"
    write_answer(altered, name, record)
    assert _compare(place / "first", altered, "--ignore", "notes").exit_code == 1
    assert _compare(place / "first", altered, "--ignore", "notes", "--ignore", "torch.source").exit_code == 1
    assert _compare(place / "first", altered, "--ignore", "notes", "--ignore", "source.torch").exit_code == 0


def test_a_refused_file_keeps_its_exit_code_and_sentence(place: Path, tmp_path: Path) -> None:
    name = "report/snapshots/refused"
    record = read_answer(place / "first", name)
    assert record["exit_code"] == 3
    assert "snapshots/refused.pickle" in record["stderr"][0]
    altered = tmp_path / "altered"
    shutil.copytree(place / "first", altered)
    write_answer(altered, name, {**record, "exit_code": 0})
    assert compared(place / "first", altered).answers[name] == [Difference(("exit_code",), 3, 0)]


def test_an_answer_that_one_side_lacks_differs(place: Path, tmp_path: Path) -> None:
    fewer = tmp_path / "fewer"
    shutil.copytree(place / "first", fewer)
    (fewer / "explain/snapshots/deep/one.json.gz").unlink()
    for pair in ((place / "first", fewer), (fewer, place / "first")):
        told = _compare(*pair)
        assert told.exit_code == 1
        assert "differs  explain/snapshots/deep/one: 1 values" in told.output
    assert _compare(place / "first", fewer, "--only", "report").exit_code == 0


def test_a_screen_is_compared_where_asked(place: Path, tmp_path: Path) -> None:
    altered, name = tmp_path / "altered", "report/snapshots/deep/one.text"
    shutil.copytree(place / "first", altered)
    record = read_answer(altered, name)
    record["answer"][0] += " and more"
    write_answer(altered, name, record)
    assert _compare(place / "first", altered).exit_code == 0
    assert _compare(place / "first", altered, "--screens").exit_code == 1


def test_answers_of_two_versions_are_not_mixed(place: Path, tmp_path: Path) -> None:
    mixed = tmp_path / "mixed"
    shutil.copytree(place / "first", mixed)
    about = (mixed / "about.json").read_text(encoding="utf-8")
    (mixed / "about.json").write_text(about.replace('"version": "', '"version": "not '), encoding="utf-8")
    told = _collect(place / "of-first", place / "truth", mixed, "explain")
    assert told.exit_code == 2
    assert "choose another folder" in told.output
    assert _compare(place / "first", place / "truth").exit_code == 2
    assert _collect(place / "truth", place / "truth", tmp_path / "none", "report").exit_code == 2


def test_every_kind_of_value_that_differs_is_found() -> None:
    before = {"a": 1, "b": [1, 2], "c": True, "d": None, "e": {"f": "x"}}
    after = {"a": 1.0, "b": [1], "c": 1, "e": {"f": "y"}, "g": 0}
    assert [str(found) for found in differences(before, after)] == ["a", "b[1]", "c", "d", "e.f", "g"]
    assert list(differences(before, before)) == []


def test_a_simulated_stack_loses_places_and_no_frame_of_a_library() -> None:
    stack = [
        "/old/memprof/grpo/head.py:54 scored",
        "/old/memprof/grpo/steps.py:9 run",
        "/old/.venv/lib/python3.11/site-packages/trl/trainer/grpo_trainer.py:7 _prepare_inputs",
        "/old/memprof_like/train.py:3 main",
        "/old/.venv/bin/memprof:8 <module>",
    ]
    told = without_places({"stack": stack, "deep": [{"stack": stack[2:]}]}, ["/old/memprof", "/old/.venv/bin/memprof"])
    library = ["trl/trainer/grpo_trainer.py:7 _prepare_inputs", "/old/memprof_like/train.py:3 main"]
    own = "(memprof's own code)"
    assert told == {"stack": [own, *library, own], "deep": [{"stack": [*library, own]}]}


def test_long_values_are_shown_where_they_part(place: Path) -> None:
    told = compared(place / "first", place / "first")
    told.answers = {"report/x": [Difference(("notes", 0), "a" * 300 + "left", "a" * 300 + "right")]}
    shown = list(lines(told, {}))
    assert any("left" in line for line in shown)
    assert any("right" in line for line in shown)
    assert max(map(len, shown)) <= 80


def test_every_kind_asks_something_once(tmp_path: Path) -> None:
    files = snapshots_below({"snapshots": _snapshots(tmp_path / "s")})
    assert files == {"snapshots": ["snapshots/deep/one.pickle", "snapshots/refused.pickle"]}
    asked = {kind: questions(kind, files) for kind in KINDS}
    assert {kind: len(found) for kind, found in asked.items()} == {
        "report": 8, "compare": 2, "explain": 2, "simulate": 3, "demo": 1
    }  # fmt: skip
    assert all(question.kind == kind for kind, found in asked.items() for question in found)
    assert len({question.name for found in asked.values() for question in found}) == 16
