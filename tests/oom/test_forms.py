"""Every form is found in its example, with its numbers, and has an answer of its own."""

from __future__ import annotations

import pytest
from memprof.reports.markdown.draw import text as escaped
from memprof.reports.renderers import draw

from memprof.oom.explain import explain_log
from memprof.oom.known_messages import FORMS, NOT_MEMORY
from memprof.oom.reading.find import find_failures, read_log
from memprof.report.codec import parse, to_json
from tests.oom.wordings import EXAMPLES, NOT_MEMORY_EXAMPLES

ABOUT = {form.id: form.says for form in NOT_MEMORY}


def test_every_form_has_an_example_and_every_example_a_form() -> None:
    ids = [form.id for form in FORMS]
    assert sorted(EXAMPLES) == sorted(ids)
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_form_is_found_with_its_numbers(name: str) -> None:
    (failure,) = find_failures(EXAMPLES[name].text)
    numbers = {name: getattr(failure, name) for name in ("requested", "device", "allowed", "total", "free")}
    said = {**numbers, **failure.facts}
    assert failure.form.id == name
    assert {key: said.get(key) for key in EXAMPLES[name].facts} == EXAMPLES[name].facts


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_form_is_explained_and_drawn(name: str) -> None:
    answer = explain_log(EXAMPLES[name].text)
    (failure,) = answer.failures
    assert failure.because
    assert len(failure.suggestions) >= 1
    assert all(len(line) <= 80 or " " not in line.strip() for line in draw("oom", answer, width=80).splitlines())
    assert escaped(failure.suggestions[0].why[1:]) in draw("oom", answer, "markdown")
    assert parse(to_json(answer).encode()) == answer


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_line_broken_anywhere_says_the_same(name: str) -> None:
    """Terminals break lines inside words and numbers."""
    whole = find_failures(EXAMPLES[name].text)[0]
    if whole.form.line_start or whole.form.whole_line or whole.form.frames:
        return
    for width in (37, 80):
        broken = "\n".join(
            line[i : i + width] for line in EXAMPLES[name].text.split("\n") for i in range(0, len(line), width)
        )
        failures = find_failures(broken)
        assert [f.form.id for f in failures] == [name], width
        assert failures[0].facts == whole.facts


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize(
    "prefix",
    [
        "[rank3]: ",
        "(WorkerDict pid=77, ip=10.0.0.1) ",
        "2026-11-20 10:00:00,123 - ERROR - ",
        "vllm-1  | ",
        "(EngineCore_DP0 pid=1094) ERROR 10-25 13:08:43 [core.py:708] ",
        "> ",
    ],
)
def test_a_prefix_changes_nothing(name: str, prefix: str) -> None:
    text = "\n".join(prefix + line for line in EXAMPLES[name].text.split("\n"))
    (failure,) = find_failures(text)
    assert failure.form.id == name
    alone = find_failures(EXAMPLES[name].text)[0].rank
    assert failure.rank == (3 if alone is None and "rank3" in prefix else alone)


@pytest.mark.parametrize("name", NOT_MEMORY_EXAMPLES)
def test_what_is_not_about_memory_is_said(name: str) -> None:
    assert find_failures(NOT_MEMORY_EXAMPLES[name]) == []
    assert [form.id for form in read_log(NOT_MEMORY_EXAMPLES[name]).elsewhere] == [name]
    assert explain_log(NOT_MEMORY_EXAMPLES[name]).notes == (
        f"This text is not about memory that ran out: {ABOUT[name]}.",
    )


def test_every_text_about_something_else_has_an_example() -> None:
    assert sorted(NOT_MEMORY_EXAMPLES) == sorted(form.id for form in NOT_MEMORY)


@pytest.mark.parametrize(
    "text",
    [
        "We ran out of memory. The GPU out of memory handling is in the FAQ out of memory.",
        "INFO CUDA graphs can take additional 1~3 GiB memory per GPU. If you are running out of memory, consider "
        "decreasing `gpu_memory_utilization` or enforcing eager mode.",
        "step 137 | loss 0.1 | exit criteria -9",
        "INFO 10-25 [kv_cache_utils.py:864] GPU KV cache size: 126,305 tokens",
        "the process was skilled in allocating memory",
        "[2024-08-02 01:24:59,694] [INFO] [launch.py:319:sigkill_handler] Killing subprocess 33131",
        "DeepSpeed: CPU Virtual Memory:  used = 31.0 GB, percent = 24.7%",
    ],
)
def test_ordinary_lines_are_no_failure(text: str) -> None:
    assert find_failures(text) == []
