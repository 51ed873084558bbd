"""Reward word problems answered as ``<reasoning>…</reasoning><answer>…</answer>``.

Each function takes TRL's arguments, ``completions`` as lists of chat messages (or plain strings) and the
dataset's ``answer`` column, and returns one float per completion.

A 135M model rarely matches the format and almost never the number. Those two rewards alone would be constant
within a group; advantage, loss and gradient would be zero and the weights would not move. So
:func:`progress_reward` gives every completion a graded reward, and the demo trains.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

_LAYOUT = re.compile(r"\s*<reasoning>.+?</reasoning>\s*<answer>.+?</answer>\s*", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")


def format_reward(completions: Sequence[Any], **_: Any) -> list[float]:
    """Give 1 where the whole completion is one reasoning block followed by one answer block, else 0."""
    return [float(_LAYOUT.fullmatch(_text(c)) is not None) for c in completions]


def accuracy_reward(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """Give 2 where the answer block holds exactly the right number, else 0."""
    return [2.0 * (_answered(_text(c)) == _number(a)) for c, a in zip(completions, answer, strict=True)]


def progress_reward(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """Give between 0 and 1 for the tags used, for how near the last number is, and for brevity, in equal parts."""
    return [_progress(_text(c), _number(a)) for c, a in zip(completions, answer, strict=True)]


REWARDS = (format_reward, accuracy_reward, progress_reward)


def _progress(text: str, target: float | None) -> float:
    tags = sum(tag in text for tag in _TAGS) / len(_TAGS)
    last = _number(matches[-1]) if (matches := _NUMBER.findall(text)) else None
    near = 0.0 if last is None or target is None else 1.0 / (1.0 + abs(last - target) / (1.0 + abs(target)))
    brevity = math.exp(-len(text) / 400.0)
    return (tags + near + brevity) / 3.0


def _text(completion: Any) -> str:
    """Return the assistant's text, from a string or a list of messages."""
    return completion if isinstance(completion, str) else str(completion[0]["content"])


def _answered(text: str) -> float | None:
    block = _ANSWER.search(text)
    return _number(block.group(1)) if block else None


def _number(text: str) -> float | None:
    """Parse ``text`` that is one number, without currency and percent signs; None for anything else."""
    bare = text.strip().strip("$%. ")
    return float(bare.replace(",", "")) if _NUMBER.fullmatch(bare) else None
