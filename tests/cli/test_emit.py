"""What every command does with its answer: where it goes, what stands beside it, which exit code it gives."""

from __future__ import annotations

import dataclasses
import io
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from memprof.reports.renderers import Answer

from memprof.cli import main
from memprof.cli.emit import Output, emit
from memprof.cli.simulating import emit_simulated
from memprof.errors import UsageError
from memprof.report.oom import ExplainedText
from memprof.vocabulary import Phase
from tests.cli.test_cli import call

GIB = 2**30
EXPLAINED = ExplainedText(failures=(), engines=(), notes=("×",))
ANSWER = Answer("oom", EXPLAINED, lambda: EXPLAINED, caption="above")


def test_json_alone_on_standard_output_excludes_markdown(tmp_path: Path) -> None:
    assert Output.asked("text", Path("-")) == Output("json")
    assert Output.asked("json", Path("-"), tmp_path) == Output("json", None, tmp_path)
    assert Output.asked("markdown", tmp_path) == Output("markdown", tmp_path)
    with pytest.raises(UsageError, match="drop --format markdown"):
        Output.asked("markdown", Path("-"))


def test_only_the_answer_goes_to_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "answer.json"
    emit(ANSWER, Output("markdown", file), "a verdict")
    said = capsys.readouterr()
    assert said.out == "- ×\n"
    assert said.err == f"JSON: {file}\nabove\na verdict\n"
    emit(ANSWER, Output("json"))
    said = capsys.readouterr()
    assert said.out == file.read_text()
    assert said.err == ""


@pytest.mark.parametrize("way", ["-o", "--json"])
def test_what_is_read_is_not_written_over(way: str, tmp_path: Path) -> None:
    (file := tmp_path / "run.pickle").write_bytes(b"a recording")
    (tmp_path / "link").symlink_to(file)
    for command in ("report", "compare"):
        for name in (file, tmp_path / "link"):
            done = call(command, str(file), way, str(name))
            assert (done.exit_code, done.output) == (
                2,
                f"memprof: {name} is what this command reads; write to another file.\n",
            )
    done = call("report", str(file), "-o", str(tmp_path / "x"), "--json", str(tmp_path / "x"))
    assert (done.exit_code, "both name" in done.output) == (2, True)
    assert file.read_bytes() == b"a recording"


def test_names_of_files_are_shown_not_obeyed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    emit(ANSWER, Output("json", tmp_path / "a\x1b[31m.json"))
    assert "a\\x1b[31m.json" in capsys.readouterr().err


def test_characters_the_terminal_lacks_have_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    emit(ANSWER, Output("text"))
    assert raw.getvalue() == b"Note: x\n"


def test_a_verdict_is_said_beside_the_result_and_a_bad_one_is_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    from memprof.simulate.evaluate import Outcome
    from memprof.simulate.verdict import FitVerdict

    verdict = FitVerdict(
        gpu="a card", total_bytes=24 * GIB, needed_bytes=20 * GIB, reserved_bytes=19 * GIB, non_torch_bytes=GIB,
        margin=0.03, kept="3% kept", fits=True, flushes=False, phase=Phase.BACKWARD,
    )  # fmt: skip
    outcome = Outcome(raw={}, analysis=None, verdict=None)  # type: ignore[arg-type]
    emit_simulated(ANSWER, outcome, Output("json"))
    assert capsys.readouterr().err == ""
    emit_simulated(ANSWER, dataclasses.replace(outcome, verdict=verdict), Output("json"))
    bad = dataclasses.replace(verdict, needed_bytes=30 * GIB, fits=False)
    with pytest.raises(SystemExit) as ended:
        emit_simulated(ANSWER, dataclasses.replace(outcome, verdict=bad), Output("json"))
    assert ended.value.code == 4
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == ["Fits", "Does not fit"]


@pytest.mark.parametrize("option", ["-o", "--json"])
@pytest.mark.parametrize(("place", "why"), [("none/x.html", "no such folder"), (".", "is a directory")])
def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, place: str, why: str
) -> None:
    """Here the work would fail with another sentence: the model is not known."""
    monkeypatch.chdir(tmp_path)
    for command in ("plan", "simulate"):
        asked = [command, "--model", "no/such", "--gpu", "24GB", option, place]
        ended = CliRunner().invoke(main, asked)
        assert ended.exit_code == 3
        assert why in ended.stderr
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["page.pdf", "picture.PNG", "answer.json"])
def test_a_page_that_is_no_html_is_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    (file := tmp_path / "run.pickle").write_bytes(b"a recording")
    done = call("report", str(file), "-o", str(tmp_path / name))
    assert done.exit_code == 2
    assert done.output.count("\n") == 1
    assert "Name a file that ends in .html" in done.output
    assert not (tmp_path / name).exists()


def test_html_as_an_option_suggests_the_page(tmp_path: Path) -> None:
    done = call("report", str(tmp_path / "run.pickle"), "--html")
    assert done.exit_code == 2
    assert "-o FILE.html" in done.output
