"""Messages of every torch, as they come out of terminals, launchers and logs."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from memprof.reports.renderers import draw

from memprof.cli import main
from memprof.oom.explain import explain_log
from memprof.oom.reading.find import find_failures
from memprof.report.codec import to_json
from memprof.report.oom import ExplainedFailure
from tests.oom.wordings import WORDINGS, gib, mib

FULL = WORDINGS["2.4, private pools"].text
ISSUE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 344.00 MiB. GPU 0 has a total capacity of 14.75 GiB "
    "of which 320.00 MiB is free. Including non-PyTorch memory, this process has 14.43 GiB memory in use. Of the "
    "allocated memory 11.82 GiB is allocated by PyTorch, and 2.41 GiB is reserved by PyTorch but unallocated."
)


def one(text: str) -> ExplainedFailure:
    (failure,) = explain_log(text).failures
    return failure


def cause(text: str) -> str:
    return str(one(text).cause)


@pytest.mark.parametrize("name", WORDINGS)
def test_every_wording_is_read(name: str) -> None:
    (failure,) = find_failures(WORDINGS[name].text)
    assert {key: getattr(failure, key) for key in WORDINGS[name].says} == WORDINGS[name].says


@pytest.mark.parametrize("name", WORDINGS)
def test_every_wording_is_explained_and_drawn(name: str) -> None:
    answer = explain_log(WORDINGS[name].text)
    (failure,) = answer.failures
    assert failure.suggestions
    assert failure.because
    for text in (draw("oom", answer), draw("oom", answer, "markdown")):
        assert failure.suggestions[0].why[1:] in " ".join(text.split())
        assert all(row.name in text for row in failure.numbers)
    json.loads(to_json(answer))


def test_the_example_of_the_page_is_what_memprof_prints() -> None:
    """``...`` stands for lines that the page leaves out."""
    page = (Path(__file__).parents[2] / "docs" / "oom.md").read_text(encoding="utf-8")
    message, printed = re.findall(r"```text\n(.*?)\n```", page, re.S)[:2]
    drawn = draw("oom", explain_log(message), width=80)
    assert all(part.strip("\n") in drawn for part in re.split(r"(?m)^\.\.\.$", printed))


def test_the_sum_of_a_message_is_the_one_a_person_would_make() -> None:
    failure = one(ISSUE)
    assert failure.sum == "14.43 GiB in use = 11.82 allocated + 2.41 cached + 0.20 non-PyTorch"
    assert failure.missing_bytes == mib(24)
    assert failure.outside_torch_bytes == gib(14.43) - gib(11.82) - gib(2.41)
    assert failure.cause == "fragmentation"
    assert failure.suggestions[0].action.endswith("expandable_segments:True")


def test_private_pools_are_inside_what_is_allocated() -> None:
    failure = one(FULL)
    assert failure.private_pools_bytes == gib(3.25)
    assert failure.outside_torch_bytes == gib(78.06) - gib(75.5) - gib(1.31)
    assert failure.cause == "limit"  # 75.50 + 2.00 is above the 76.00 allowed


def test_in_a_container_the_process_that_fits_is_taken_for_ones_own() -> None:
    failure = one(WORDINGS["2.1"].text)
    assert failure.in_use_bytes == gib(14.52)
    assert failure.other_processes_bytes is None
    assert "20398" in next(row.meaning for row in failure.numbers if row.name == "in use")


def test_a_figure_beyond_any_device_is_not_repeated() -> None:
    failure = one(WORDINGS["2.6"].text)
    assert failure.in_use_bytes is None
    assert failure.sum is None


CAUSES = {
    "2.0": "fragmentation",  # 1.95 GiB cached, 1.25 asked for
    "2.0 with a limit": "limit",
    "2.1": "fragmentation",  # 261 MiB missing, 330 cached: enough in one piece with what is free
    "2.2, another process": "other_processes",
    "2.6": "fragmentation",
    "HIP": "unexplained",
    "XPU": "larger_than_device",
    "MPS": "limit",
    "CPU": "cpu",
    "driver": "driver",
    "kernel": "killed",
}


@pytest.mark.parametrize("name", CAUSES)
def test_the_trouble_is_named(name: str) -> None:
    assert cause(WORDINGS[name].text) == CAUSES[name]


def test_full_outside_and_refused() -> None:
    def message(asked: str, free: str, used: str, allocated: str, cached: str) -> str:
        return (
            f"CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of 24.00 GiB of which {free} "
            f"is free. Including non-PyTorch memory, this process has {used} memory in use. Of the allocated memory "
            f"{allocated} is allocated by PyTorch, and {cached} is reserved by PyTorch but unallocated."
        )

    assert cause(message("2.00 GiB", "1.00 GiB", "23.00 GiB", "22.40 GiB", "100.00 MiB")) == "full"
    assert cause(message("2.00 GiB", "1.00 GiB", "23.00 GiB", "15.00 GiB", "100.00 MiB")) == "outside_torch"
    assert cause(message("2.00 GiB", "3.00 GiB", "21.00 GiB", "20.00 GiB", "100.00 MiB")) == "refused"


# -- as people paste them --------------------------------------------------------------------------------------


def wrapped(width: int) -> str:
    return "\n".join(textwrap.wrap(FULL, width))


PASTED = {
    "bare": FULL,
    "wrapped by a terminal": wrapped(80),
    "wrapped and quoted": "".join(f"> {line}\n" for line in wrapped(72).splitlines()),
    "coloured": FULL.replace("CUDA", "\x1b[31;1mCUDA\x1b[0m").replace("75.50", "\x1b[1m75.50\x1b[0m"),
    "windows": FULL.replace(". ", ".\r\n"),
    "in a log": f"step 3 loss 0.1\n{FULL}\nwandb: run finished\nERROR:torch: exit\n",
    "ray": f"(ActorRolloutRefWorker pid=123, ip=10.0.0.1) {FULL}",
    "hard wrapped, with a prefix each": "\n".join(f"[rank3]: {line}" for line in wrapped(90).splitlines()),
}


@pytest.mark.parametrize("how", PASTED)
def test_pasted(how: str) -> None:
    (failure,) = find_failures(PASTED[how])
    says = WORDINGS["2.4, private pools"].says
    assert {key: getattr(failure, key) for key in says} == says
    assert failure.total == gib(79.11)
    assert failure.rank == (3 if "prefix" in how else None)


def test_several_ranks_and_a_launcher_that_repeats_them() -> None:
    other = FULL.replace("GPU 3", "GPU 1").replace("1.02 GiB is free", "12.00 MiB is free")
    log = (
        f"[rank3]: {FULL}\n[rank1]: {other}\n[rank3]: {FULL}\n"
        f"Root Cause:\n{FULL}\n  exitcode  : -9 (pid: 41)\nSignal 9 (SIGKILL) received by PID 41\n"
    )
    answer = explain_log(log)
    assert [f.kind for f in answer.failures] == ["device", "killed"]
    assert [row.rank for row in answer.failures[0].ranks] == [3, 1]
    assert "2 ranks" in answer.notes[0]


TRACEBACKS = {
    "generate": ("/site-packages/transformers/generation/utils.py", "_sample"),
    "backward": ("/site-packages/torch/autograd/graph.py", "_engine_run_backward"),
    "optimizer_step": ("/site-packages/torch/optim/adamw.py", "step"),
    "load": ("/site-packages/transformers/modeling_utils.py", "from_pretrained"),
    "old_logprobs": ("/site-packages/trl/trainer/grpo_trainer.py", "_get_per_token_logps_and_entropies"),
    "forward": ("/site-packages/torch/nn/modules/module.py", "_call_impl"),
}


@pytest.mark.parametrize("phase", TRACEBACKS)
def test_the_traceback_says_what_it_was_doing(phase: str) -> None:
    path, function = TRACEBACKS[phase]
    outer = "_generate_and_score_completions" if phase == "old_logprobs" else "train"
    log = (
        'Traceback (most recent call last):\n  File "/home/me/run.py", line 7, in <module>\n    go()\n'
        f'  File "/usr/lib/python3/site-packages/trl/x.py", line 1, in {outer}\n'
        f'  File "{path}", line 12, in {function}\n    x = y\n' + ISSUE.replace("2.41", "0.01")
    )
    failure = one(log)
    assert (failure.phase, failure.frame) == (phase, "/home/me/run.py:7 <module>")


def test_text_about_memory_is_no_message() -> None:
    assert find_failures("We ran out of memory. The GPU out of memory handling is in the FAQ out of memory.") == []


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.text(max_size=60),
            st.sampled_from([w.text for w in WORDINGS.values()]),
            st.sampled_from(["\x1b[31m", "\n", "\r", "[rank", "]:", "9" * 30, " GiB", "Process 1 has ", "Traceback"]),
        ),
        max_size=8,
    ),
    st.integers(0, 400),
    st.integers(0, 400),
)
def test_nothing_crashes_it(parts: list[str], cut: int, drop: int) -> None:
    text = "".join(parts)
    text = text[:cut] + text[cut + drop :]
    answer = explain_log(text)
    json.loads(to_json(answer))
    draw("oom", answer)
    draw("oom", answer, "markdown")


def test_a_message_at_the_end_of_a_large_log_has_its_line() -> None:
    noise = "2026-11-20 step 17 | loss 0.123 | Process 12 has nothing | 3.00 GiB of something ; CUDA out of luck\n"
    (failure,) = find_failures(noise * 100_000 + FULL)
    assert failure.line == 100_001


# -- the command -----------------------------------------------------------------------------------------------


def invoke(*args: str, text: str | bytes = "") -> Any:
    return CliRunner().invoke(main, ["oom", *args], input=text, standalone_mode=True)


def test_from_standard_input_and_from_a_file(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_bytes(ISSUE.encode("utf-16"))
    piped, read = invoke("-", text=ISSUE), invoke(str(log))
    assert piped.exit_code == read.exit_code == 0
    assert piped.stdout == read.stdout
    assert "14.43 GiB in use = 11.82 allocated + 2.41 cached + 0.20 non-PyTorch" in piped.stdout


def test_json_goes_alone(tmp_path: Path) -> None:
    answer = json.loads(invoke("-", "--json", "-", text=ISSUE).stdout)
    assert answer["schema"] == "memprof.oom/1"
    assert answer["failures"][0]["outside_torch_bytes"] == pytest.approx(0.2 * 2**30, rel=1e-6)
    assert invoke("-", "--format", "json", text=ISSUE).stdout == invoke("-", "--json", "-", text=ISSUE).stdout
    invoke("-", "--json", str(tmp_path / "a.json"), text=ISSUE)
    assert json.loads((tmp_path / "a.json").read_text()) == answer


def test_markdown_is_a_table() -> None:
    lines = invoke("-", "--format", "markdown", text=ISSUE).stdout.splitlines()
    assert lines[0].startswith("### ")
    assert len([line for line in lines if re.match(r"\| [\w -]+ \| [\d.]+ [MG]iB \| ", line)]) == 7


@pytest.mark.parametrize(
    ("args", "text", "code", "says"),
    [
        (["-"], "all is well", 3, "standard input contains no out-of-memory message"),
        (["nowhere.log"], "", 3, "cannot be read"),
        (["-", "--json", "-", "--format", "markdown"], ISSUE, 2, "drop --format"),
        ([], "", 2, "Missing argument"),
    ],
)
def test_mistakes_end_in_a_sentence(args: list[str], text: str, code: int, says: str) -> None:
    done = invoke(*args, text=text)
    assert done.exit_code == code
    assert says in done.stderr
    assert done.stdout == ""
