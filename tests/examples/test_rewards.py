"""The reward functions people start from: what they pay for, and what they do not."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rewards import (
    EMAIL_REWARDS,
    MATH_REWARDS,
    answer_of,
    contains_keywords,
    correct_number,
    has_greeting,
    has_subject,
    integer_answer,
    last_number,
    length_between,
    number_in,
    proximity,
    signed_by,
    soft_format,
    strict_format,
    tag_count,
    text_of,
)

GOOD = "<reasoning>\n16 - 3 - 4 = 9, 9 * 2 = 18\n</reasoning>\n<answer>\n18\n</answer>\n"
LOOSE = "<reasoning>9 * 2</reasoning> <answer>18</answer>"
EMAIL = "Subject: Offer\nDear Ana,\n" + "we ship the order on Monday. " * 8 + "\nKind regards,\nBen"


def chat(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


def one(function: Any, text: Any, **columns: Any) -> float:
    (value,) = function(prompts=["?"], completions=[text], **{name: [given] for name, given in columns.items()})
    assert isinstance(value, float)
    return value


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("18", 18), ("$18.00", 18), (" 1,234.50. ", Decimal("1234.5")), ("-3", -3), ("12%", 12),
        ("0.1", Decimal("0.1")), ("", None), ("18 eggs", None), ("1,2", None), ("eighteen", None),
        ("1e5", None), ("nan", None), ("--3", None),
        ("12 13", None), ("3/4", None),
    ],
)  # fmt: skip
def test_a_number_is_one_number(text: str, number: Decimal | int | None) -> None:
    assert number_in(text) == number


@pytest.mark.parametrize(
    ("text", "number"), [("so 9 * 2 = 18.", 18), ("it costs $1,200", 1200), ("no number", None), ("at v2.1a", None)]
)
def test_the_last_number_is_found_in_prose(text: str, number: int | None) -> None:
    assert last_number(text) == number


def test_completions_come_as_strings_and_as_messages() -> None:
    tool = [{"role": "assistant", "content": None}, {"role": "tool", "content": "7"}, *chat("18")]
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "8"}]}]
    assert [text_of(c) for c in ("18", chat("18"), tool, parts)] == ["18"] * 4
    assert text_of([]) == text_of([{"role": "assistant", "content": None}]) == ""


def test_the_last_answer_counts() -> None:
    assert answer_of("<answer>1</answer> no: <answer> 2 </answer>") == "2"
    assert answer_of("<answer>1") is None


@pytest.mark.parametrize(
    ("text", "paid"),
    [(GOOD, 2.0), (LOOSE, 2.0), ("<answer>$18.0</answer>", 2.0), ("<answer>19</answer>", 0.0), ("18", 0.0), ("", 0.0)],
)
def test_only_the_exact_number_in_the_block_is_paid(text: str, paid: float) -> None:
    assert one(correct_number, text, answer="18") == one(correct_number, chat(text), answer="18") == paid
    assert one(correct_number, text, answer="not a number") == 0.0


def test_thousands_do_not_matter() -> None:
    assert one(correct_number, "<answer>1,234</answer>", answer="1234") == 2.0


@pytest.mark.parametrize(
    ("text", "paid"),
    [("18", 0.5), ("-18", 0.5), ("18.0", 0.0), ("$18", 0.0), ("1,800", 0.0), ("", 0.0), ("18 eggs", 0.0)],
)
def test_integers_only(text: str, paid: float) -> None:
    assert one(integer_answer, f"<answer>\n{text}\n</answer>") == paid


@pytest.mark.parametrize(
    ("text", "strict", "soft"),
    [
        (GOOD, 0.5, 0.5),
        (LOOSE, 0.0, 0.5),
        ("Well: " + LOOSE, 0.0, 0.5),
        (GOOD + "PS", 0.0, 0.5),
        (GOOD + GOOD, 0.0, 0.0),
        ("<answer>18</answer><reasoning>x</reasoning>", 0.0, 0.0),
        ("<reasoning>x</reasoning>", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_formats(text: str, strict: float, soft: float) -> None:
    assert (one(strict_format, text), one(soft_format, text)) == (strict, soft)


@pytest.mark.parametrize(
    ("text", "paid"),
    [
        (GOOD, 0.5), (LOOSE, 0.5), ("<reasoning>x", 0.125), ("<reasoning><reasoning>", 0.0), ("", 0.0),
        (LOOSE + "x" * 100, 0.4), (LOOSE + "x" * 5000, 0.0),
    ],
)  # fmt: skip
def test_tags_are_counted_and_endings_cost(text: str, paid: float) -> None:
    assert one(tag_count, text) == pytest.approx(paid)


def test_nearer_is_better_and_a_block_counts_double() -> None:
    blocks = [one(proximity, f"<answer>{n}</answer>", answer="18") for n in (18, 17, 10, -1000)]
    assert blocks[0] == 1.0
    assert blocks == sorted(blocks, reverse=True)
    assert len(set(blocks)) == 4
    assert one(proximity, "I think 17", answer="18") == pytest.approx(blocks[1] / 2)
    assert one(proximity, "no idea", answer="18") == one(proximity, "18", answer="?") == 0.0


def test_an_email_that_has_everything() -> None:
    rows = {"completions": [chat(EMAIL), EMAIL], "keywords": [["order", "monday"], ["order", "refund"]]}
    assert [f(**rows) for f in EMAIL_REWARDS] == [[1.0, 1.0], [1.0, 1.0], [1.0, 0.5], [1.0, 1.0]]
    assert signed_by("Ben")(**rows) == [1.0, 1.0]


@pytest.mark.parametrize("text", ["", "the subject: x", "Subject:", "Subject:\nDear Ana,"])
def test_no_subject_is_no_subject(text: str) -> None:
    assert one(has_subject, text) == 0.0


@pytest.mark.parametrize(
    ("text", "paid"), [("Hi Ana!", 1.0), ("dear all", 1.0), ("History of", 0.0), ("Oh dear.", 0.0)]
)
def test_greetings(text: str, paid: float) -> None:
    assert one(has_greeting, text) == paid


def test_keywords_are_whole_words() -> None:
    assert one(contains_keywords, "ordering C++ now", keywords=["order", "c++"]) == 0.5
    assert one(contains_keywords, "anything", keywords=[]) == 1.0


@pytest.mark.parametrize(
    ("words", "paid"), [(0, 0.0), (5, 0.5), (10, 1.0), (20, 1.0), (30, 0.5), (40, 0.0), (400, 0.0)]
)
def test_length_falls_off_on_both_sides(words: int, paid: float) -> None:
    assert one(length_between(10, 20), "word " * words) == pytest.approx(paid)


def test_length_needs_an_order() -> None:
    with pytest.raises(ValueError, match="lower"):
        length_between(20, 10)


@pytest.mark.parametrize(
    ("text", "paid"),
    [("x\nBest regards,\nBen", 1.0), ("x\nben", 0.5), ("Ben wrote", 0.0), ("x\nRegards,\nAnn", 0.0), ("", 0.0)],
)
def test_signatures(text: str, paid: float) -> None:
    assert one(signed_by("Ben"), text) == paid


def test_every_reward_has_the_name_trl_logs() -> None:
    names = [function.__name__ for function in (*MATH_REWARDS, *EMAIL_REWARDS, proximity, signed_by("Ben"))]
    assert len(set(names)) == len(names)
    assert "length_between_40_160" in names


@given(st.text(max_size=300), st.text(max_size=20), st.lists(st.text(min_size=1, max_size=9), max_size=3))
def test_no_text_breaks_a_reward(text: str, right: str, words: list[str]) -> None:
    pieces = [text, f"<answer>{text}</answer>", f"<reasoning>{text}</reasoning><answer>{right}</answer>"]
    columns = {"answer": [right] * 3, "keywords": [words] * 3}
    for function in (*MATH_REWARDS, *EMAIL_REWARDS, proximity, signed_by("Ben")):
        assert all(0.0 <= value <= 2.0 for value in function(completions=pieces, **columns))
