"""Start from these reward functions, in the form TRL's ``GRPOTrainer`` takes.

    trainer = GRPOTrainer(..., reward_funcs=[correct_number, soft_format, proximity])

Each is called with ``completions`` (chat messages or plain strings) and the dataset's other columns by name, and
returns one float a completion. Those that take settings are made by a function: ``length_between(80, 400)``.

The first group is for word problems answered as ``<reasoning>...</reasoning><answer>...</answer>``, the second for
writing an e-mail. Rewards that are all or nothing are constant within a group until the model hits them once, and a
constant reward trains nothing: put a graded one beside them (``tag_count``, ``proximity``, ``length_between``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

__all__ = [
    "EMAIL_REWARDS",
    "MATH_REWARDS",
    "answer_of",
    "contains_keywords",
    "correct_number",
    "has_greeting",
    "has_subject",
    "integer_answer",
    "last_number",
    "length_between",
    "number_in",
    "proximity",
    "signed_by",
    "soft_format",
    "strict_format",
    "tag_count",
    "text_of",
]

Reward = Callable[..., list[float]]

_TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
_STRICT = re.compile(r"<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n?", re.DOTALL)
_SOFT = re.compile(r"<reasoning>.*?</reasoning>\s*<answer>.*?</answer>", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
# 1,234.5 and 1234.5, but of "1,2" only single numbers: commas must part thousands.
_NUMBER = re.compile(r"(?<![\w.])-?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?![0-9])")
_GREETING = re.compile(r"^\s*(?:dear|hello|hi|good (?:morning|afternoon|evening))\b[^\n]{0,80}$", re.I | re.M)
_CLOSING = re.compile(r"(?:(?:best|kind|warm) regards|regards|sincerely|yours \w+|best|thanks|thank you),?", re.I)


# -- reading a completion --------------------------------------------------------------------------------------------


def text_of(completion: Any) -> str:
    """Return the last thing the assistant wrote, whether the completion is a string or a list of chat messages."""
    if isinstance(completion, str):
        return completion
    for message in reversed(completion):
        content = message.get("content")
        if message.get("role", "assistant") == "assistant" and content:
            return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    return ""


def answer_of(text: str) -> str | None:
    """Return what stands in the last answer block; None where there is none."""
    blocks = _ANSWER.findall(text)
    return blocks[-1].strip() if blocks else None


def number_in(text: str) -> Decimal | None:
    """Return the one number ``text`` consists of, a currency or percent sign and a full stop aside; else None."""
    bare = text.strip().removesuffix(".").removesuffix("%").strip()
    match = _NUMBER.fullmatch(bare)
    return Decimal(bare.replace(",", "").replace("$", "")) if match else None


def last_number(text: str) -> Decimal | None:
    """Return the last number anywhere in ``text``."""
    found = _NUMBER.findall(text)
    return number_in(found[-1]) if found else None


# -- word problems ---------------------------------------------------------------------------------------------------


def correct_number(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """Reward 2 where the answer block holds exactly the right number (18, 18.0 and $18 are one number), else 0."""
    pairs = zip(completions, answer, strict=True)
    return [2.0 * _is_right(text_of(completion), str(right)) for completion, right in pairs]


def _is_right(text: str, right: str) -> bool:
    given, wanted = answer_of(text), number_in(right)
    return given is not None and wanted is not None and number_in(given) == wanted


def integer_answer(completions: Sequence[Any], **_: Any) -> list[float]:
    """Reward 0.5 where the answer block holds digits and nothing else, else 0."""
    return [0.5 * bool(re.fullmatch(r"-?[0-9]+", answer_of(text_of(c)) or "")) for c in completions]


def strict_format(completions: Sequence[Any], **_: Any) -> list[float]:
    """Reward 0.5 where the whole completion is the two blocks, every tag on a line of its own, else 0."""
    return [0.5 * bool(_STRICT.fullmatch(text_of(c)) and _once(text_of(c))) for c in completions]


def soft_format(completions: Sequence[Any], **_: Any) -> list[float]:
    """Reward 0.5 where the two blocks follow each other somewhere, each tag written once, else 0."""
    return [0.5 * bool(_SOFT.search(text_of(c)) and _once(text_of(c))) for c in completions]


def _once(text: str) -> bool:
    return all(text.count(tag) == 1 for tag in _TAGS)


def tag_count(completions: Sequence[Any], **_: Any) -> list[float]:
    """Reward 0.125 for each of the four tags written exactly once, less 0.001 a character after the last block.

    Never below 0, so that a long ending cannot cost more than the tags earn.
    """
    return [_tags(text_of(c)) for c in completions]


def _tags(text: str) -> float:
    earned = 0.125 * sum(text.count(tag) == 1 for tag in _TAGS)
    after = text.rpartition("</answer>")[2].strip() if "</answer>" in text else ""
    return max(0.0, earned - 0.001 * len(after))


def proximity(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """Reward 0 to 1: how near the answer block's number comes, or the last number where there is no such block.

    1 / (1 + relative error), halved where the number stood outside an answer block.
    """
    return [_near(text_of(c), number_in(str(a))) for c, a in zip(completions, answer, strict=True)]


def _near(text: str, right: Decimal | None) -> float:
    block = answer_of(text)
    inside = number_in(block) if block is not None else None
    found = inside if inside is not None else last_number(text)
    if found is None or right is None:
        return 0.0
    closeness = 1 / (1 + abs(found - right) / (1 + abs(right)))
    return float(closeness) * (1.0 if inside is not None else 0.5)


# -- an e-mail -------------------------------------------------------------------------------------------------------


def has_subject(completions: Sequence[Any], **_: Any) -> list[float]:
    """Reward 1 where the first line is ``Subject: ...`` with something in it, else 0."""
    return [float(bool(re.match(r"\s*subject:[ \t]*\S", text_of(c), re.I))) for c in completions]


def has_greeting(completions: Sequence[Any], **_: Any) -> list[float]:
    """Reward 1 where a line greets somebody, else 0."""
    return [float(bool(_GREETING.search(text_of(c)))) for c in completions]


def contains_keywords(completions: Sequence[Any], keywords: Sequence[Sequence[str]], **_: Any) -> list[float]:
    """Reward the share of the ``keywords`` column's words that occur, as whole words, in any letter case.

    No keywords asked for is all of them found: 1.
    """
    return [_share(text_of(c), words) for c, words in zip(completions, keywords, strict=True)]


def _share(text: str, words: Sequence[str]) -> float:
    found = [bool(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.I)) for word in words]
    return sum(found) / len(found) if found else 1.0


def length_between(low: int, high: int) -> Reward:
    """Make a reward of 1 for ``low`` to ``high`` words, falling in proportion outside: 0 at none and at twice ``high``.

    Raises:
        ValueError: not 0 < low <= high.
    """
    if not 0 < low <= high:
        raise ValueError(f"a length between {low} and {high} words: the lower must be above 0 and not above the other.")

    def length(completions: Sequence[Any], **_: Any) -> list[float]:
        counts = [len(text_of(c).split()) for c in completions]
        return [min(1.0, count / low, max(0.0, 2 - count / high)) for count in counts]

    length.__name__ = f"length_between_{low}_{high}"  # the name TRL logs
    return length


def signed_by(name: str) -> Reward:
    """Make a reward of 1 where the text ends with a closing phrase and ``name`` below it, 0.5 with the name only."""

    def signature(completions: Sequence[Any], **_: Any) -> list[float]:
        return [_signature(text_of(c), name) for c in completions]

    signature.__name__ = "signature"
    return signature


def _signature(text: str, name: str) -> float:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    if not lines or lines[-1].casefold() != name.casefold():
        return 0.0
    return 1.0 if len(lines) > 1 and _CLOSING.fullmatch(lines[-2]) else 0.5


MATH_REWARDS: tuple[Reward, ...] = (tag_count, soft_format, strict_format, integer_answer, correct_number)
EMAIL_REWARDS: tuple[Reward, ...] = (has_subject, has_greeting, contains_keywords, length_between(40, 160))
