"""The knowledge files: every reference, condition and template is one the engine can use, and patterns are linear."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

if sys.version_info >= (3, 11):
    import re._parser as sre
else:
    import sre_parse as sre

from memprof.oom import explain, find_failures, stack
from memprof.oom import facts as facts_module
from memprof.oom.arithmetic import parts_of
from memprof.oom.derived import BY_NUMBERS, VALUES
from memprof.oom.facts import FailureFacts, facts_of
from memprof.oom.failure import Failure
from memprof.oom.framework_settings import PLAIN, frameworks, names_in
from memprof.oom.knowledge_files import (
    REMEDY_FILES,
    Cause,
    Circumstance,
    FactRule,
    Remedy,
    answers,
    causes,
    circumstances,
    facts_file,
    remedies_of,
    table,
)
from memprof.oom.known_messages import DEVICE_FORMS, FORMS, NOT_MEMORY, TRIGGERS, answer_of
from memprof.oom.message_form import Form
from memprof.oom.reading import engine_share, fields, find, frames, matches, normalize
from memprof.oom.wording import choose, fill
from tests.oom.wordings import EXAMPLES

KEYS = {"form", "backend", "phase", "cause", "reason", "framework_kind", "constraint"}
VALUES_READ = {group for form in (*FORMS, *DEVICE_FORMS) for group in form.pattern.groupindex}
VALUES_READ |= set(Failure.__dataclass_fields__)


def remedies() -> dict[str, Remedy]:
    return {key: row for name in REMEDY_FILES for key, row in remedies_of(name).items()}


def rules() -> Iterator[Cause | Circumstance | Remedy | FactRule]:
    yield from (*causes(), *circumstances(), *answers().values(), *remedies().values(), *facts_file().fact.values())


def conditions() -> Iterator[str]:
    """Yield every name of a fact that a rule asks for."""
    for rule in rules():
        for key in ("when", "any", "unless", "all", "help_when", "instead_when"):
            yield from getattr(rule, key, ())
        yield from (
            name
            for key in ("do_when", "why_when", "because_when")
            for names in getattr(rule, key, ())
            for name in names
        )
        yield from [rule.already] if isinstance(rule, Remedy) and rule.already else []


def test_every_fact_that_is_asked_for_is_defined() -> None:
    file = facts_file()
    (failure,) = find_failures("CUDA out of memory. Tried to allocate 2.00 GiB")
    known = {*file.fact, *file.setting, *file.capture, *file.number, *file.size, *BY_NUMBERS, *VALUES, *VALUES_READ}
    known |= set(facts_of(failure, parts_of(failure), None, PLAIN).given)
    for name in conditions():
        key, _, value = name.removeprefix("!").partition(":")
        assert key in (KEYS if value else known), name


def test_every_remedy_that_is_named_is_there_and_every_remedy_is_named() -> None:
    named = {item for rule in rules() for item in getattr(rule, "tries", ()) if isinstance(item, str)}
    named |= {item for work in table("remedies")["work"].values() for listed in work.values() for item in listed}
    assert named <= set(remedies())
    assert set(remedies()) - named == {"snapshot"}


def test_every_message_has_an_answer_and_a_trigger_for_long_logs() -> None:
    for form in FORMS:
        # a device's messages are decided by their numbers
        assert form.kind == "device" or answer_of(form).because
        assert any(trigger in EXAMPLES[form.id].text.lower() for trigger in TRIGGERS), form.id


def test_a_framework_is_known_by_its_own_files() -> None:
    for names in frameworks():
        assert names.example
        found = names_in(names.example)
        assert found is not None
        assert found.framework == names.framework


def test_an_unknown_number_makes_no_fact_hold() -> None:
    facts = FailureFacts({"asked": 2**30, "total": None})
    assert facts.has("asked")
    assert facts.has("!total")
    assert not facts.has("asked_above_total")
    assert not facts.has("asked_quarter_of_device")
    assert facts.value("asked_percent") is None
    assert FailureFacts({"asked": 2**31, "total": 2**30}).has("asked_above_total")


def test_a_rule_holds_with_all_of_when_one_of_any_and_none_of_unless() -> None:
    facts = FailureFacts({"backend": "HIP", "asked": 1})
    assert facts.holds(Remedy(do="", when=("backend:HIP",), any=("total", "asked"), unless=("backend:CUDA",)))
    assert not facts.holds(Remedy(do="", when=("backend:HIP", "total")))
    assert not facts.holds(Remedy(do="", any=("total", "free")))
    assert not facts.holds(Remedy(do="", unless=("asked",)))


def test_a_key_that_no_rule_has_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="wen"):
        msgspec.convert({"do": "x", "wen": ["y"]}, Remedy)


def test_templates_drop_what_is_not_known() -> None:
    scope = FailureFacts({"asked": 2**30, "x": 1.25, "n": 3})
    assert fill("{asked}[[ of {total}]] at {x:.1f}{n:size|}", scope) == "1.00 GiB at 1.23 B"
    assert fill("{total}", scope) is None
    assert choose(("{total}", "{n} left", "none"), scope) == "3 left"
    assert choose(("a", "b"), scope, [("total",), ()]) == "b"
    assert fill("x[[{?asked} known]][[{?total} lost]]", scope) == "x known"


# ------------------------------------------------------------------------------------------------- linear time

READERS = (fields, frames, normalize, find, matches, engine_share, facts_module, stack, explain)


def patterns() -> Iterator[tuple[str, re.Pattern[str]]]:
    """Yield every regular expression that meets a text: of forms, conditions, frameworks and readers."""
    for form in (*FORMS, *DEVICE_FORMS, *NOT_MEMORY):
        yield form.id, form.pattern
        yield from ((f"{form.id}, frames", p) for p in map(re.compile, filter(None, (form.frames, form.asked_by))))
    file = facts_file()
    for name, rule in file.fact.items():
        for key in ("frames", "near", "inner", "last", "code", "message", "around", "log", "text"):
            if source := getattr(rule, key):
                yield f"{name}, {key}", re.compile(source)
    for kind in ("setting", "capture", "number"):
        yield from ((f"{kind} {name}", re.compile(source)) for name, source in getattr(file, kind).items())
    for names in frameworks():
        yield from ((f"{names.framework}: {sign[:50]}", re.compile(sign)) for sign in names.signs)
    yield from ((f"share: {pattern.pattern[:50]}", pattern) for _, pattern in engine_share.line_patterns())
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


def test_forms_are_of_the_kinds_that_are_told_apart() -> None:
    assert {form.kind for form in FORMS} <= {"device", "driver", "library", "cpu", "host", "killed", "engine"}
    assert all(isinstance(form, Form) and form.says for form in NOT_MEMORY)
