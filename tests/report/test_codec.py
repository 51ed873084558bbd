"""The JSON keeps its schema, on samples and on real files; the schema is documented and tied to the vocabulary."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from benchmarks.faults.mutate import mutate
from memprof.errors import InputError
from memprof.report.base import Model
from memprof.report.codec import answers, described, dumps, from_builtins, parse, plain_entries, schema, to_json
from memprof.report.report import Report
from memprof.vocabulary import Category, Evidence, Group, History, Kind, Phase
from tests.reports.sample import sample


def validate(data: Any) -> None:
    """Raise InputError if plain data is not what its schema says."""
    from_builtins(data, answers().get(data["schema"], Report))


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("kind", ["cuda", "trace", "simulated"])
def test_samples_keep_the_schema(kind: str) -> None:
    validate(sample(kind)[0])


@pytest.mark.parametrize(
    ("spoil", "where"),
    [
        (lambda r: r.update(schema="memprof.report/9"), "schema"),
        (lambda r: r["peak"].pop("groups"), "groups"),
        (lambda r: r["peak"]["groups"].pop("kv_cache"), "kv_cache"),
        (lambda r: r["peak"]["categories"].update(food=1), "food"),
        (lambda r: r["peak"].update(active_bytes=1.5), "active_bytes"),
        (lambda r: r["phases"][0].update(phase="lunch"), "lunch"),
        (lambda r: r["peak"]["allocations"][0].pop("evidence"), "evidence"),
    ],
)
def test_what_breaks_the_schema_is_named(spoil: Any, where: str) -> None:
    report = copy.deepcopy(sample()[0])
    spoil(report)
    with pytest.raises(InputError, match=where):
        validate(report)


class _Fraction(float):
    """A number written with a point: no integer to memprof, while JSON Schema accepts 1.0 as one."""

    def is_integer(self) -> bool:
        return False


def _verdicts(data: Any) -> tuple[bool, bool]:
    """Return whether memprof accepts ``data``, and whether jsonschema's reading of the generated schema does."""
    kind = {"$defs": schema()["$defs"], "$ref": f"#/$defs/{answers()[data['schema']].__name__}"}
    theirs = Draft202012Validator(kind).is_valid(json.loads(json.dumps(data), parse_float=_Fraction))
    try:
        return isinstance(parse(json.dumps(data).encode()), Model), theirs
    except InputError:
        return False, theirs
    except ValueError:  # an integer of more than 20 digits, whatever the schema says of it
        return False, False


def test_verdicts_are_those_of_another_reader_of_schemas() -> None:
    seeds = [sample(kind)[0] for kind in ("cuda", "trace", "simulated")]
    seen = set()
    for seed in range(300):
        draw = random.Random(seed)
        report = copy.deepcopy(draw.choice(seeds))
        mutate(report, draw, "report")
        if report.get("schema") == "memprof.report/1":
            ours, theirs = _verdicts(report)
            assert ours == theirs, seed
            seen.add(ours)
    assert seen == {True, False}


def test_the_deepest_place_is_named() -> None:
    report = copy.deepcopy(sample()[0])
    report["device_peak"]["grown_by"] = [{"bytes": "many", "phase": None, "stack": []}]
    with pytest.raises(InputError, match=r"expected `int`, got `str` \(at device_peak/grown_by\[0\]/bytes\)"):
        validate(report)


def test_explanations_have_a_schema_too() -> None:
    allocations = sample()[0]["peak"]["allocations"]
    validate({"schema": "memprof.explain/1", "allocations": allocations})
    with pytest.raises(InputError):
        validate({"schema": "memprof.explain/1", "allocations": [{"address": 1}]})


def test_schema_speaks_the_vocabulary() -> None:
    for words in (Category, Group, Phase, Evidence, Kind, History):
        assert set(schema()["$defs"][words.__name__]["enum"]) == {str(word) for word in words}


def keys_of(data: Any, definition: dict[str, Any]) -> set[str]:
    """Keys of ``data`` that its definition does not name, at any depth."""
    definitions = schema()["$defs"]
    while "$ref" in definition or "anyOf" in definition:
        reference = definition.get("$ref") or next((d["$ref"] for d in definition["anyOf"] if "$ref" in d), "")
        if not reference:
            return set()
        definition = definitions[reference.rpartition("/")[2]]
    if isinstance(data, list):
        return set().union(*[keys_of(item, definition.get("items", {})) for item in data])
    if not isinstance(data, dict) or "properties" not in definition:
        return set()
    known = definition["properties"]
    unknown = set(data) - set(known)
    return unknown.union(*[keys_of(value, known[key]) for key, value in data.items() if key in known])


@pytest.mark.parametrize(
    "name", ["cs336-medium-infer-ctx512-t211", "flexgen-opt-oom-t20", "sd-guidance-legacy-list-t22"]
)
def test_real_reports_keep_the_schema_and_say_nothing_it_does_not_name(shared: Path, name: str) -> None:
    from memprof.analysis.analysis import analyze

    analysis = analyze(shared / "snapshots" / f"{name}.pickle")
    report = json.loads(dumps(analysis.to_dict()))
    validate(report)
    assert keys_of(report, schema()["$defs"]["Report"]) == set()
    validate({"schema": "memprof.explain/1", "allocations": plain_entries(analysis.explain("peak"))})


def _kinds(kind: type[Model] = Model) -> Iterator[type[Model]]:
    for inner in kind.__subclasses__():
        yield inner
        yield from _kinds(inner)


def test_every_key_is_documented() -> None:
    page = (ROOT / "docs" / "report-json.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`([a-z_]+)`", page))
    for name, definition in schema()["$defs"].items():
        for key in definition.get("properties", {}):
            assert key in documented, f"{name}.{key}"


def test_docstrings_describe_fields_that_exist() -> None:
    for kind in _kinds():
        summary, fields = described(kind)
        assert summary, kind
        assert set(fields) <= set(kind.__struct_fields__), kind


def test_numbers_json_has_no_word_for() -> None:
    assert json.loads(dumps({"a": [float("inf"), 1.5], "b": {"c": float("nan")}})) == {
        "a": ["inf", 1.5],
        "b": {"c": "nan"},
    }
    assert dumps({"\x1b": "\u202e"}).isascii()


def test_an_answer_that_is_read_is_written_to_the_same_bytes() -> None:
    from benchmarks.faults.inputs import snapshot
    from memprof.analysis.analysis import analyze
    from memprof.snapshot import snapshot_from_raw

    text = dumps(analyze(snapshot_from_raw(snapshot())).to_dict())
    answer = parse(text.encode())
    assert isinstance(answer, Report)
    assert to_json(answer) == text


def test_text_of_a_foreign_answer_is_made_printable() -> None:
    report = copy.deepcopy(sample()[0])
    report["notes"] = ["a\x1b[31mb\ud800\nc"]
    answer = parse(json.dumps(report).encode())
    assert isinstance(answer, Report)
    assert answer.notes == ("a\ufffd[31mb\ufffd\nc",)


def test_a_schema_without_a_model_is_named_and_anything_else_is_no_answer() -> None:
    assert parse(b'{"schema": "memprof.report/9"}') == "memprof.report/9"
    assert parse(b'{"schema": 7}') is None
    assert parse(b"[1]") is None
    for damaged in (
        b'{"schema": "memprof.report/1"',
        b'{"a": ' + b"[" * 60 + b"]" * 60 + b"}",
        b'{"a": 1' + b"0" * 30 + b"}",
    ):
        with pytest.raises(ValueError, match=r"."):
            parse(damaged)
