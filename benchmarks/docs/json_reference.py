"""Write docs/report-json.md, every key of memprof's JSON, from the docstrings of the model (memprof/report).

    python -m benchmarks.docs json-reference [--check]

A test compares, so a changed docstring needs the page written again.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import click
import msgspec

from benchmarks.tabling import ROOT
from memprof.report.base import Model
from memprof.report.codec import answers, described
from memprof.report.counters import LINES

PAGE = ROOT / "docs" / "report-json.md"
HEAD = """\
# JSON reference

Every command that prints a result also writes it as JSON: `memprof report SNAPSHOT --json FILE` (`-` for standard
output) writes one `memprof.report/1` object. In Python, `memprof.analyze(path).report` is the same data as typed
objects, with the class and field names below.

Sizes are integers in bytes. Times are microseconds on the recording's own clock (0, 1, 2 ... for snapshots without
times). `null` (`None` in Python) means not known, never zero. A `Stack` is a list of `"file:line function"`, innermost
frame first. Keys may be added within a version; none is removed or changes its meaning.
`memprof.report.codec.schema()` returns the JSON Schema.
"""


def _reached(kind: type[Model], seen: dict[str, type[Model]]) -> None:
    """Add the classes that ``kind`` leads to, itself first, in the order of its fields."""
    if kind.__name__ in seen:
        return
    seen[kind.__name__] = kind
    names = {inner.__name__: inner for inner in _subclasses(Model)}
    for field in msgspec.structs.fields(kind):
        for name in re.findall(r"\w+", _type_name(kind, field.name)):
            if name in names:
                _reached(names[name], seen)


def _subclasses(kind: type[Model]) -> Iterator[type[Model]]:
    for inner in kind.__subclasses__():
        yield inner
        yield from _subclasses(inner)


def _type_name(kind: type[Model], field: str) -> str:
    """Return the type of a field as its class writes it, without what only validation needs."""
    written = next(str(base.__annotations__[field]) for base in kind.__mro__ if field in vars(base)["__annotations__"])
    written = re.sub(r"Annotated\[(.*), msgspec\.Meta\(.*\)\]", r"\1", written)
    return written.replace("msgspec.UnsetType | ", "").replace(" | msgspec.UnsetType", "")


def _section(kind: type[Model]) -> Iterator[str]:
    summary, fields = described(kind)
    schema = kind.__struct_config__.tag
    yield f"\n## {kind.__name__}{f': `{schema}`' if schema else ''}\n\n{_markdown(summary)}\n\n"
    if schema:
        yield f"- `schema`: `{schema}`.\n"
    for field in msgspec.structs.fields(kind):
        said = f": {_markdown(fields[field.name])}" if field.name in fields else ""
        alias = f" (`{field.name}` in Python)" if field.encode_name != field.name else ""
        yield f"- `{field.encode_name}`{alias}, `{_type_name(kind, field.name)}`{said}\n"


def _markdown(text: str) -> str:
    return text.replace("``", "`")


def page() -> str:
    """Return the page's text."""
    found: dict[str, type[Model]] = {}
    for kind in (*answers().values(), *LINES):
        _reached(kind, found)
    return HEAD + "".join("".join(_section(kind)) for kind in found.values())


@click.command(help=__doc__)
@click.option("--check", is_flag=True, help="Write nothing; exit code 1 if the page is not current.")
def main(check: bool) -> None:
    text = page()
    if check and PAGE.read_text(encoding="utf-8") != text:
        sys.exit(f"{PAGE.relative_to(ROOT)} is not current: run python -m benchmarks.docs json-reference")
    if not check:
        PAGE.write_text(text, encoding="utf-8")
