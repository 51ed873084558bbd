"""The JSON keeps its schema, on samples and on real files; the schema is documented and tied to the vocabulary."""

from __future__ import annotations

import copy
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from benchmarks.faults.mutate import mutate
from memprof.analysis.report_files import schema, validate
from memprof.errors import InputError
from memprof.report.codec import dumps
from memprof.vocabulary import Category, Evidence, Group, History, Kind, Phase
from tests.reports.sample import sample

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


def _verdicts(data: Any) -> tuple[bool, bool]:
    """Return whether memprof takes ``data``, and whether jsonschema's reading of the schema does."""
    kind = {"$defs": schema()["$defs"], "$ref": f"#/$defs/{data['schema'].partition('.')[2].partition('/')[0]}"}
    try:
        validate(data)
    except InputError:
        return False, Draft202012Validator(kind).is_valid(data)
    return True, Draft202012Validator(kind).is_valid(data)


def test_verdicts_are_those_of_another_reader_of_schemas() -> None:
    seeds = [sample(kind)[0] for kind in ("cuda", "trace", "simulated")]
    seen = set()
    for seed in range(300):
        draw = random.Random(seed)
        report = copy.deepcopy(draw.choice(seeds))
        mutate(report, draw, "report")
        if report.get("schema") == "memprof.report/1":
            ours, theirs = _verdicts(json.loads(json.dumps(report)))
            assert ours == theirs, seed
            seen.add(ours)
    assert seen == {True, False}


def test_the_schema_says_nothing_beside_a_reference() -> None:
    """Draft 7, by which the schema is compiled, does not read what stands there."""
    parts = [schema()]
    while parts:
        part = parts.pop()
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        assert not (isinstance(part, dict) and "$ref" in part and part.keys() - {"$ref", "description"}), part


def test_the_deepest_place_is_named() -> None:
    report = copy.deepcopy(sample()[0])
    report["device_peak"]["grown_by"] = [{"bytes": "many", "phase": None, "stack": []}]
    with pytest.raises(InputError, match=r"'many' must be integer \(at device_peak/grown_by/0/bytes\)"):
        validate(report)


def test_explanations_have_a_schema_too() -> None:
    allocations = sample()[0]["peak"]["allocations"]
    validate({"schema": "memprof.explain/1", "allocations": allocations})
    with pytest.raises(InputError):
        validate({"schema": "memprof.explain/1", "allocations": [{"address": 1}]})


def test_schema_speaks_the_vocabulary() -> None:
    definitions = schema()["$defs"]
    for name, words in (("category", Category), ("group", Group), ("phase", Phase), ("evidence", Evidence)):
        assert definitions[name]["enum"] == [str(w) for w in words]
    source = definitions["source"]["properties"]
    assert source["kind"]["enum"] == [str(k) for k in Kind]
    assert source["history"]["enum"] == [str(h) for h in History]


def keys_of(data: Any, definition: dict[str, Any]) -> set[str]:
    """Keys of ``data`` that its definition does not name, at any depth."""
    definitions = schema()["$defs"]
    while "$ref" in definition or "anyOf" in definition:
        reference = definition.get("$ref") or next(d["$ref"] for d in definition["anyOf"] if "$ref" in d)
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
    assert keys_of(report, schema()["$defs"]["report"]) == set()
    validate({"schema": "memprof.explain/1", "allocations": analysis.explain("peak")})


def test_every_key_is_documented() -> None:
    page = (ROOT / "docs" / "report-json.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`([a-z_]+)`", page))
    for name, definition in schema()["$defs"].items():
        for key in definition.get("properties", {}):
            assert key in documented, f"{name}.{key}"


def test_numbers_json_has_no_word_for() -> None:
    assert json.loads(dumps({"a": [float("inf"), 1.5], "b": {"c": float("nan")}})) == {
        "a": ["inf", 1.5],
        "b": {"c": "nan"},
    }
    assert dumps({"\x1b": "\u202e"}).isascii()
