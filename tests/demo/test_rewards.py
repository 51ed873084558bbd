"""The demo's rewards: what they pay for, and that they tell completions of one group apart."""

from __future__ import annotations

import pytest

from memprof.demo.rewards import REWARDS, accuracy_reward, format_reward, progress_reward

GOOD = "<reasoning>3 and 4 make 7.</reasoning>\n<answer>7</answer>"


def said(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (GOOD, 1.0),
        (f"  {GOOD}\n", 1.0),
        ("<reasoning>two\nlines</reasoning><answer>7</answer>", 1.0),
        (f"Sure! {GOOD}", 0.0),
        (f"{GOOD} Anything else?", 0.0),
        ("<answer>7</answer><reasoning>late</reasoning>", 0.0),
        ("<reasoning></reasoning><answer>7</answer>", 0.0),
        ("7", 0.0),
        ("", 0.0),
    ],
)
def test_format_pays_for_the_whole_layout_only(text: str, reward: float) -> None:
    assert format_reward(said(text)) == [reward]


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        (GOOD, "7", 2.0),
        ("<answer> $1,250.00 </answer>", "1250", 2.0),
        ("<answer>-3</answer>", "-3", 2.0),
        ("<answer>70</answer>", "7", 0.0),
        ("<answer>7 apples</answer>", "7", 0.0),
        ("The answer is 7", "7", 0.0),
        ("<answer></answer>", "7", 0.0),
        ("<answer>,</answer>", "7", 0.0),
    ],
)
def test_accuracy_pays_for_exactly_the_number(text: str, answer: str, reward: float) -> None:
    assert accuracy_reward(said(text), answer=[answer]) == [reward]


def test_progress_stays_between_nothing_and_one() -> None:
    texts = ("", GOOD, "x" * 5000, "999999999999999999999", "-0.5", "7")
    for reward in progress_reward(said(*texts), answer=["7"] * len(texts)):
        assert 0.0 <= reward <= 1.0


def test_progress_rises_with_each_part() -> None:
    answer = ["40", "40"]
    far, near = progress_reward(said("It is 9000", "It is 0041"), answer=answer)
    without, with_tag = progress_reward(said("12345678901234567890", "<answer>01234567890123"), answer=answer)
    long, short = progress_reward(said("word " * 80, "word"), answer=answer)
    assert far < near
    assert without < with_tag
    assert long < short


def test_progress_tells_useless_completions_apart() -> None:
    """What the other two cannot do: a group of wrong, unformatted answers still has a spread."""
    group = said("I would say 12.", "Perhaps 30?", "No idea at all", "80 or 90")
    answer = ["31"] * 4
    assert set(format_reward(group)) == set(accuracy_reward(group, answer=answer)) == {0.0}
    assert len(set(progress_reward(group, answer=answer))) == 4


def test_plain_strings_are_completions_too() -> None:
    for reward in REWARDS:
        assert reward(completions=[GOOD], answer=["7"]) == reward(completions=said(GOOD), answer=["7"])
