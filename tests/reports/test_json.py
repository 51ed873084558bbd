"""The JSON keeps its schema, on samples and on real files; the schema is documented and tied to the vocabulary."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from memprof.reports.json import dumps, schema, validate, write_json

from memprof.errors import InputError
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


def test_files_hold_the_same(tmp_path: Path) -> None:
    report = sample()[0]
    write_json(report, tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text()) == report
