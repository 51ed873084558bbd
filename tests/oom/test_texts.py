"""Texts in the form of public issues, and what an answer must and must not say: written before memprof read them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from memprof.reports.renderers import draw

from benchmarks.oom.texts import checked
from memprof.files import read_toml
from memprof.oom.explain import explain_log
from memprof.report.oom import ExplainedFailure


class FreshText(msgspec.Struct, forbid_unknown_fields=True):
    """One text; ``cause`` is empty where memory did not run out, ``numbers`` are GiB."""

    id: str
    half: str
    text: str
    cause: str = ""
    first: str = ""
    never: str = ""
    numbers: tuple[float, ...] = ()


TEXTS = msgspec.convert(read_toml(Path(__file__).parent / "fresh_texts.toml")["text"], tuple[FreshText, ...])


def sizes(failure: ExplainedFailure) -> Iterator[float]:
    """Yield every figure of an answer in GiB; facts of engines may be in GiB already."""
    for value in (*msgspec.structs.asdict(failure).values(), *failure.facts.values()):
        if isinstance(value, int | float):
            yield from (value / 2**30, float(value))
    yield from (row.bytes / 2**30 for row in failure.processes)


def faults(text: FreshText) -> Iterator[str]:
    """Yield what is wrong with the answer to a text."""
    failures = explain_log(text.text).failures
    if bool(failures) != bool(text.cause):
        yield "recognised"
    if not failures or not text.cause:
        return
    failure = failures[0]
    if not re.search(text.cause, f"{failure.cause}: {failure.because}", re.I | re.S):
        yield f"cause: {failure.cause}: {failure.because}"
    first = failure.suggestions[0].action if failure.suggestions else ""
    if not re.search(text.first, first, re.I):
        yield f"first: {first}"
    if text.never and re.search(text.never, first, re.I):
        yield f"never: {first}"
    for number in text.numbers:
        if not any(abs(found - number) <= 0.005 * number for found in sizes(failure)):
            yield f"number: {number}"


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text.id)
def test_a_text_is_answered_as_it_must_be(text: FreshText) -> None:
    assert not list(faults(text))


def test_every_text_is_read_as_an_expert_reads_it(shared: Path) -> None:
    """Real texts with what an expert says of each, if the machine has them (``benchmarks/oom`` scores them)."""
    index = shared / "oom" / "INDEX.json"
    if not index.is_file():
        pytest.skip("the real texts are not here")
    wrong = []
    for entry in json.loads(index.read_text(encoding="utf-8")):
        answer = explain_log((shared / "oom" / f"{entry['n']:02d}.txt").read_text(encoding="utf-8"))
        draw("oom", answer)
        wrong += [(entry["n"], name) for name, right in checked(entry["expect"], answer.failures) if not right]
    assert wrong == []
