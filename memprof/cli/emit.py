"""Hand a command's answer over: to files, to standard output, and as an exit code. Every command ends here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import click

from memprof.cli.progress import working
from memprof.errors import UsageError, one_line
from memprof.files import refuse_unwritable
from memprof.reports.renderers import Answer, formats_of, render

_Option = Callable[[Callable[..., Any]], Callable[..., Any]]

_DOES_NOT_FIT = 4
# Endings of files that somebody expects to be something else than a page.
_NO_PAGES = {".csv", ".gif", ".jpeg", ".jpg", ".json", ".md", ".pdf", ".pickle", ".png", ".svg", ".txt", ".webp"}


@dataclass(frozen=True)
class Output:
    """Hold where an answer goes: ``style`` is the printed format, files are None where none is named."""

    style: str = "text"
    json_file: Path | None = None
    page: Path | None = None

    @classmethod
    def asked(cls, style: str, json_file: Path | None, page: Path | None = None) -> Output:
        """Read the options: ``--json -`` prints JSON instead of what ``--format`` says; UsageError where that is
        markdown."""
        if json_file is None or str(json_file) != "-":
            return cls(style, json_file, page)
        if style == "markdown":
            raise UsageError("--json - prints JSON alone on standard output; drop --format markdown or name a file.")
        return cls("json", None, page)

    @property
    def wants_json(self) -> bool:
        return self.style == "json" or self.json_file is not None


_json_option = click.option(
    "--json", "json_file", type=click.Path(path_type=Path, allow_dash=True), metavar="FILE",
    help="Write the JSON to FILE too; - prints it alone on standard output.",
)  # fmt: skip


def output_options(kind: str, page: str | None = None, json_file: bool = True) -> _Option:
    """Give a command ``--format`` in the formats of ``kind`` and, where it has them, ``-o`` with ``page`` as its help
    and ``--json``; it gets them as one ``output``.

    Places that cannot be written to are refused before the command begins.
    """
    styles = click.Choice([style for style in formats_of(kind) if style != "html"])
    shown = "Choose what is printed; default: text."
    options: list[_Option] = [click.option("--format", "style", type=styles, default="text", help=shown)]
    page_only = page is not None and "FILE.html" in page
    if page is not None:
        metavar = "FILE.html" if page_only else "FILE"
        file = click.Path(path_type=Path)
        options.insert(0, click.option("-o", "--output", "page", type=file, metavar=metavar, help=page))
    if json_file:
        options.append(_json_option)

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def command(
            *args: Any, style: str, json_file: Path | None = None, page: Path | None = None, **given: Any
        ) -> Any:
            output = Output.asked(style, json_file, page)
            for file in filter(None, (output.json_file, output.page)):
                refuse_unwritable(file)
                _refuse_inputs(file, given)
            if output.page is not None and page_only and output.page.suffix.lower() in _NO_PAGES:
                raise UsageError(
                    f"-o {output.page}: the page is HTML. Name a file that ends in .html; a browser prints it as PDF."
                )
            if output.json_file is not None and output.json_file == output.page:
                raise UsageError(f"-o and --json both name {output.page}; give two names.")
            return function(*args, output=output, **given)

        wrapped: Callable[..., Any] = command
        for option in reversed(options):
            wrapped = option(wrapped)
        return wrapped

    return add


def _refuse_inputs(file: Path, given: Mapping[str, object]) -> None:
    """Refuse to write over what the command reads."""
    values = [one for value in given.values() for one in (value if isinstance(value, tuple) else (value,))]
    for path in (value for value in values if isinstance(value, Path)):
        if file.is_file() and path.exists() and file.samefile(path):
            raise UsageError(f"{file} is what this command reads; write to another file.")


def emit(answer: Answer, output: Output, verdict: str = "", fits: bool = True) -> None:
    """Write an answer's files, print it, and end (SystemExit) with exit code 4 where something does not fit; InputError
    where a file cannot be written.

    Only the answer goes to standard output. The names of files, the answer's caption and the verdict go to standard
    error.
    """
    from memprof.files import write_text

    if output.json_file is not None:
        write_text(output.json_file, render(answer, "json"))
        click.echo(f"JSON: {one_line(output.json_file)}", err=True)
    if output.page is not None:
        with working("Writing the page"):
            write_text(output.page, render(answer, "html"))
        click.echo(f"Page: {one_line(output.page)}", err=True)
    if answer.caption and output.style != "json":
        click.echo(answer.caption, err=True)
    _print(answer, output.style)
    if verdict:
        click.echo(verdict, err=True)
    if not fits:
        sys.exit(_DOES_NOT_FIT)


def _print(answer: Answer, style: str) -> None:
    from memprof.reports.terminal.screen import abilities, write_to

    size = abilities(sys.stdout) if style == "text" else ()
    write_to(sys.stdout, render(answer, style, *size))
