"""The knowledge files: every reference, condition and template is one the engine can use, and patterns are linear."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import re._parser as sre
else:
    import sre_parse as sre

from memprof.oom import evidence, explain, stack
from memprof.oom.expressions import Scope, check, evaluate
from memprof.oom.framework_settings import frameworks, names_in
from memprof.oom.knowledge_files import MESSAGE_FILES, table
from memprof.oom.known_messages import DEVICE_FORMS, FORMS, NOT_MEMORY, TRIGGERS, answer_of
from memprof.oom.message_form import Form
from memprof.oom.reading import engine_share, fields, find, frames, matches, normalize
from memprof.oom.wording import choose, fill
from tests.oom.examples import EXAMPLES

FILES = (*MESSAGE_FILES, "causes", "flags", "remedies", "torch", "elsewhere", "framework_settings")
CONDITIONS = ("when", "impossible", "useless", "frees", "instead_when")
REMEDIES = {key for name in FILES for key in table(name).get("remedy", {})}


def entries() -> Iterator[dict[str, Any]]:
    for name in FILES:
        data = table(name)
        yield from (data.get("cause", []) + data.get("circumstance", []))
        yield from [*data.get("remedy", {}).values(), *data.get("answer", {}).values()]


def test_every_condition_is_one_that_can_be_evaluated() -> None:
    for entry in entries():
        sources = [entry[key] for key in CONDITIONS if isinstance(entry.get(key), str)]
        sources += entry.get("let", {}).values()
        sources += [source for key in ("do_when", "why_when", "because_when") for source in entry.get(key, [])]
        for source in sources:
            check(source)
            for pattern in re.findall(r"'((?:[^'\\]|\\.)*)'", source):
                re.compile(pattern)
    for source in [*table("causes")["let"].values(), *table("flags")["flag"].values()]:
        check(source)


def test_every_remedy_that_is_named_is_there_and_every_remedy_is_named() -> None:
    named = {item for entry in entries() for item in entry.get("try", []) if isinstance(item, str)}
    named |= {item for work in table("remedies")["work"].values() for listed in work.values() for item in listed}
    assert named <= REMEDIES
    assert REMEDIES - named == {"snapshot"}


def test_every_message_has_an_answer_and_a_trigger_for_long_logs() -> None:
    for form in FORMS:
        # a device's messages are decided by their numbers
        assert form.kind == "device" or answer_of(form)["because"]
        assert any(trigger in EXAMPLES[form.id].text.lower() for trigger in TRIGGERS), form.id


def test_a_framework_is_known_by_its_own_files() -> None:
    for names in frameworks():
        assert names.example
        found = names_in(names.example)
        assert found is not None
        assert found.framework == names.framework


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("a < 2 and b", None),
        ("unknown > 1 or a == 1", True),
        ("not (unknown > 1)", True),
        ("unknown + 1", None),
        ("2 * GiB", 2**31),
        ("'x' if a else 'y'", "x"),
        ("c", 2),
        ("d", None),
    ],
)
def test_an_unknown_number_makes_no_condition_hold(source: str, value: object) -> None:
    scope = Scope({"a": 1, "b": None}, {}).within({"c": "a + 1", "d": "d + 1"})
    assert evaluate(source, scope) == value


@pytest.mark.parametrize("source", ["a.b", "[1]", "__import__('os')", "lambda: 1", "a if"])
def test_nothing_else_is_evaluated(source: str) -> None:
    with pytest.raises((ValueError, SyntaxError, KeyError)):
        evaluate(source, Scope({"a": 1}, {}))


def test_templates_drop_what_is_not_known() -> None:
    scope = Scope({"asked": 2**30, "x": 1.25, "n": 3}, {})
    assert fill("{asked}[[ of {total}]] at {x:.1f}{n:size|}", scope) == "1.00 GiB at 1.23 B"
    assert fill("{total}", scope) is None
    assert choose(["{total}", "{n} left", "none"], scope) == "3 left"
    assert choose(["a", "b"], scope, ["n > 5", "True"]) == "b"


# ------------------------------------------------------------------------------------------------- linear time

READERS = (fields, frames, normalize, find, matches, engine_share, evidence, stack, explain)


def texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from texts(inner)


def patterns() -> Iterator[tuple[str, re.Pattern[str]]]:
    """Yield every regular expression that meets a text: of forms, conditions, frameworks and readers."""
    for form in (*FORMS, *DEVICE_FORMS, *NOT_MEMORY):
        yield form.id, form.pattern
        yield from ((f"{form.id}, frames", p) for p in (form.frames, form.asked_by) if p is not None)
    for name in FILES:
        for source in texts(table(name)):
            for pattern in re.findall(r"\w\('((?:[^'\\]|\\.)*)'", source):
                yield f"{name}: {pattern[:50]}", re.compile(pattern)
        for key, remedy in table(name).get("remedy", {}).items():
            if "already" in remedy:
                yield f"{key}, already", re.compile(f"(?i){remedy['already']}")
    for names in frameworks():
        yield from ((f"{names.framework}: {sign.pattern[:50]}", sign) for sign in names.signs)
    yield from ((f"share: {row.find}", row.pattern) for row in engine_share._lines())
    for module in READERS:
        for name, value in vars(module).items():
            rows = value if isinstance(value, dict) else {"": value}
            yield from ((f"{module.__name__}.{name} {k}", p) for k, p in rows.items() if isinstance(p, re.Pattern))


PATTERNS: dict[str, re.Pattern[str]] = dict(patterns())


def repeats(tree: Any, around: int = 1) -> Iterator[int]:
    """Yield for each repeat of a parsed pattern how often its body may run at one place: repeats around it multiply."""
    for operation, value in tree:
        if str(operation) in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            times = around * int(value[1])
            yield times
            yield from repeats(value[2], times)
        elif isinstance(value, tuple | list):
            yield from (n for part in value for n in _inside(part, around))


def _inside(part: Any, around: int) -> Iterator[int]:
    if hasattr(part, "data"):
        yield from repeats(part, around)
    elif isinstance(part, list):
        yield from (n for inner in part for n in _inside(inner, around))


def longest(pattern: re.Pattern[str]) -> int:
    """Return how often a repeat's body may run from one place on; 2^32 for one without an end."""
    return max(repeats(sre.parse(pattern.pattern, pattern.flags & ~re.UNICODE)), default=0)


@pytest.mark.parametrize("name", PATTERNS)
def test_every_repeat_has_an_end(name: str) -> None:
    """So the work at one place of a text is bounded, and that on the whole text linear: a count, not a time."""
    assert longest(PATTERNS[name]) <= 4_000


def test_a_repeat_without_an_end_is_seen_wherever_it_stands() -> None:
    for source in (r"a*", r"(?:x|(b+))y", r"(?=a{2,})b", r"[a-z]*?1"):
        assert longest(re.compile(source)) > 10**6
    assert longest(re.compile(r"(?:a{0,50}b){0,20}")) == 1_000


def hostile(pattern: str) -> list[str]:
    """Return pieces that, repeated, make a pattern that backtracks try every way to part them."""
    literals = sorted(set(re.findall(r"[a-z_,:=]{4,}", pattern)), key=len)[-3:]
    heads = re.findall(r"^(?:\(\?:)?([a-z_,:=]{3,})", pattern)
    pieces = ["1", "1,", "1.", "a", " ", "/", "9gib", "(", "[1", "-", *literals, *heads, "".join(literals)]
    return [piece for piece in pieces if piece]


def backtracks(pattern: re.Pattern[str], piece: str) -> bool:
    """Say whether eight times the text takes far more than eight times as long: 64 times where it is quadratic."""
    took = {}
    for size in (2_000, 16_000):
        text = piece * (size // len(piece))
        begun = time.process_time()
        for _match in pattern.finditer(text):
            pass
        took[size] = time.process_time() - begun
    return took[16_000] > 0.1 and took[16_000] > 25 * took[2_000]


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_takes_time_linear_in_its_text(name: str) -> None:
    pattern = PATTERNS[name]
    for piece in hostile(pattern.pattern):
        # a machine that is busy may once seem to show it
        assert not (backtracks(pattern, piece) and backtracks(pattern, piece)), piece


def test_a_pattern_that_backtracks_is_caught() -> None:
    assert backtracks(re.compile(r"[a-z]*1"), "a")
    assert not backtracks(re.compile(r"[a-z]{0,20}1"), "a")


def test_forms_are_of_the_kinds_that_are_told_apart() -> None:
    assert {form.kind for form in FORMS} <= {"device", "driver", "library", "cpu", "host", "killed", "engine"}
    assert all(isinstance(form, Form) and form.says for form in NOT_MEMORY)
