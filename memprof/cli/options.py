"""Options and small steps that several commands share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from memprof.analysis.analysis import Analysis
    from memprof.simulate.verdict import Verdict

__all__ = [
    "analysed",
    "device_option",
    "emit",
    "end_with_verdict",
    "format_option",
    "json_option",
    "print_report",
    "redact_option",
    "rules_option",
    "save_json",
    "working",
]

F = TypeVar("F", bound=Callable[..., Any])

device_option = click.option(
    "--device",
    type=click.IntRange(min=0),
    metavar="N",
    help="Which device of the snapshot; default: the one with the highest peak.",
)
format_option = click.option(
    "--format",
    "style",
    type=click.Choice(["text", "json", "markdown"]),
    default="text",
    help="What is printed; default: text.",
)
json_option = click.option(
    "--json", "json_file", type=click.Path(path_type=Path, allow_dash=True), metavar="FILE",
    help="Also write the JSON to FILE; - prints it alone on standard output.",
)  # fmt: skip
rules_option = click.option(
    "--rules",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Stack rules (TOML) that add to the shipped ones and override them.",
)
redact_option = click.option(
    "--redact", is_flag=True, help="Leave out home directories, host and user names, command lines and tokens."
)


def analysed(path: Path, device: int | None, rules: Path | None) -> Analysis:
    """The snapshot at ``path``, attributed.

    Raises:
        InputError: the file, or the file of rules, cannot be used.
        UsageError: the snapshot holds nothing of ``device``.
    """
    from memprof.advice.advised import analyze
    from memprof.snapshot import load_snapshot

    rule_set = None
    if rules is not None:
        from memprof.attribution.rules import load_rules

        rule_set = load_rules(rules)
    with working(f"Reading {path.name}"):
        return analyze(load_snapshot(path), device, rule_set)


@contextmanager
def working(what: str) -> Iterator[None]:
    """A spinner on a terminal, nothing in a pipe."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(what)):
        yield


def emit(text: str) -> None:
    """Print a result; characters the terminal's encoding lacks become question marks, never a traceback."""
    stream = sys.stdout
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding))
    stream.flush()


def save_json(answer: dict[str, Any], path: Path | None) -> None:
    """Write an answer to the file ``--json`` names, if it names one, and say so.

    Raises:
        InputError: the file cannot be written.
    """
    if path is None:
        return
    from memprof.reports.json import write_json

    write_json(answer, path)
    click.echo(f"JSON: {path}", err=True)


def print_report(report: dict[str, Any], style: str) -> None:
    """Print one run's report as ``--format`` asks."""
    if style == "json":
        from memprof.reports.json import dumps

        emit(dumps(report))
        return
    from memprof.reports.document.build import build_document

    document = build_document(report)
    if style == "markdown":
        from memprof.reports.markdown import render_markdown

        emit(render_markdown(document))
        return
    from memprof.reports.terminal.report import print_document

    print_document(document)


def end_with_verdict(verdict: Verdict | None) -> None:
    """Say on standard error whether a simulated run fits; one that does not ends the process with exit code 4."""
    if verdict is None:
        return
    click.echo(verdict.sentence(), err=True)
    if not verdict.fits:
        sys.exit(4)
