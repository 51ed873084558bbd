"""Write docs/report-json.md, every key of memprof's JSON, from the descriptions in the schema.

    python -m benchmarks.docs json-reference [--check]

A test compares, so a changed schema needs the page written again.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import click

from benchmarks.tabling import ROOT
from memprof.analysis.report_files import schema

PAGE = ROOT / "docs" / "report-json.md"
HEAD = """\
# The JSON, field by field

`memprof report SNAPSHOT --json FILE` (`-`: standard output) writes one object of `memprof.report/1`; other commands
write `memprof.explain/1`, `memprof.compare/1`, `memprof.plan/1` and `memprof.serving/1`. `python -m benchmarks.docs
json-reference` writes this page from their JSON Schema (`memprof/analysis/report.schema.json`).

Sizes are bytes, integers. Times are microseconds on the recording's own clock (0, 1, 2 ... for snapshots without
times). `null` means not known, never zero. A `stack` is a list of `"file:line function"`, innermost frame first. Keys
may be added within version 1; none is removed or changes meaning.
"""


def _reached(name: str, seen: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the definitions that ``name`` leads to, itself first, in the order its keys name them."""
    definition = schema()["$defs"][name]
    if name not in seen:
        seen[name] = definition
        for other in re.findall(r'"#/\$defs/(\w+)"', json.dumps(definition)):
            _reached(other, seen)
    return seen


def _section(definition: dict[str, Any]) -> Iterator[str]:
    yield f"\n## {definition['title']}\n"
    if "description" in definition:
        yield f"\n{definition['description']}\n"
    rows: dict[str, list[str]] = {}
    for key, value in definition.get("properties", {}).items():
        if "description" in value:
            rows.setdefault(value["description"], []).append(f"`{key}`")
    if rows:
        yield "\n"
        yield from (f"- {', '.join(keys)}: {said}\n" for said, keys in rows.items())


def page() -> str:
    """Return the page's text."""
    found: dict[str, dict[str, Any]] = {}
    for kind in schema()["oneOf"]:
        _reached(kind["$ref"].rpartition("/")[2], found)
    return HEAD + "".join("".join(_section(definition)) for definition in found.values() if "title" in definition)


@click.command(help=__doc__)
@click.option("--check", is_flag=True, help="Write nothing; exit code 1 if the page is not current.")
def main(check: bool) -> None:
    text = page()
    if check and PAGE.read_text(encoding="utf-8") != text:
        sys.exit(f"{PAGE.relative_to(ROOT)} is not current: run python -m benchmarks.docs json-reference")
    if not check:
        PAGE.write_text(text, encoding="utf-8")
