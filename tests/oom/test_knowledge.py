"""The knowledge files: every reference, condition and template is one the engine can use, and patterns are linear."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from memprof.oom.expressions import Scope, check, evaluate
from memprof.oom.form import Form
from memprof.oom.frameworks import frameworks, names_in
from memprof.oom.messages import DEVICE_FORMS, FORMS, NOT_MEMORY, TRIGGERS, answer_of
from memprof.oom.reading import fields
from memprof.oom.tables import MESSAGE_FILES, table
from memprof.oom.wording import choose, fill
from tests.oom.examples import EXAMPLES

FILES = (*MESSAGE_FILES, "causes", "remedies", "torch", "elsewhere", "frameworks")
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
    for source in table("causes")["let"].values():
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

PATTERNS: dict[str, re.Pattern[str]] = {
    **{form.id: form.pattern for form in (*FORMS, *DEVICE_FORMS, *NOT_MEMORY)},
    **{f"field {name}": pattern for name, pattern in fields._FIELDS.items()},
    "process": fields._PROCESS,
    "index": fields._INDEX,
}


def hostile(pattern: str) -> list[str]:
    """Return pieces that, repeated, make a pattern that backtracks try every way to part them."""
    literals = sorted(set(re.findall(r"[a-z_,:=]{4,}", pattern)), key=len)[-3:]
    heads = re.findall(r"^(?:\(\?:)?([a-z_,:=]{3,})", pattern)
    return ["1", "1,", "1.", "a", "9gib", "(", "[1", "-", *literals, *heads, "".join(literals)]


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
