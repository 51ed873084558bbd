"""Write docs/cli.md, every command with its options, from what ``--help`` says.

    python -m benchmarks.docs cli-reference [--check]

A test compares, so a changed option needs the page written again.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Sequence

import click

from benchmarks.tabling import ROOT
from memprof.cli import main as memprof

PAGE = ROOT / "docs" / "cli.md"
HEAD = """\
# The command line

Every command and option, as `memprof COMMAND --help` shows them. `python -m benchmarks.docs cli-reference` writes this
page.

- An option that several commands have is described at the first of them.
- Sizes: `24GB` is 24 × 10⁹ bytes, `24GiB` is 24 × 2³⁰.
- [Exit codes](reading-a-report.md#exit-codes).
"""


_RANGE = re.compile(r"; (?:[\d.]+<=)?x[<>]=[\d.]+(?=\])| \[(?:[\d.]+<=)?x[<>]=[\d.]+\]")


class _Markdown(click.HelpFormatter):
    """Write help as Markdown: usage as code, paragraphs as they are, options as lists.

    ``known`` names the command that an option was described for already; here it is then named only.
    """

    def __init__(self, command: str, known: dict[tuple[str, str], str]) -> None:
        super().__init__()
        self.command, self.known = command, known
        self.repeated: dict[str, list[str]] = {}
        self.heading = ""

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        self.write(f"\n## {prog}\n\n`{prog} {args}`\n")

    def write_heading(self, heading: str) -> None:
        self.heading = "\n" if heading == "Options" else f"\n**{heading}**\n\n"

    def write_paragraph(self) -> None:
        self.write("\n")

    def write_text(self, text: str) -> None:
        for paragraph in text.split("\n\n"):
            if paragraph.lstrip().startswith("\b"):
                self.write(f"\n```text\n{paragraph.strip(chr(8)).strip(chr(10))}\n```\n")
            else:
                self.write(f"\n{' '.join(paragraph.split())}\n")

    def write_dl(self, rows: Sequence[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        for names, text in rows:
            if "--help" in names:
                continue
            first = self.known.setdefault((names, text), self.command)
            if first != self.command:
                self.repeated.setdefault(first, []).append(f"`--{names.partition('--')[2].split()[0]}`")
                continue
            self.write(self.heading)
            self.heading = ""
            item = f"- `{names}`: {_RANGE.sub('', ' '.join(text.split()))}"
            self.write(textwrap.fill(item, 120, subsequent_indent="  ", break_on_hyphens=False) + "\n")

    def write_repeated(self) -> None:
        """Name the options that another command has too."""
        for first, names in self.repeated.items():
            also = f"As in [`memprof {first}`](#memprof-{first}): {', '.join(names)}."
            self.write("\n" + "\n".join(textwrap.wrap(also, 120, break_on_hyphens=False)) + "\n")


def page() -> str:
    """Return the page's text."""
    # The command's own context: click keeps the help option that the first context asked for, here without -h.
    context = memprof.make_context("memprof", [], resilient_parsing=True)
    text = HEAD
    known: dict[tuple[str, str], str] = {}
    for name in memprof.list_commands(context):
        command = memprof.get_command(context, name)
        assert command is not None
        formatter = _Markdown(name, known)
        command.format_help(click.Context(command, info_name=name, parent=context), formatter)
        formatter.write_repeated()
        text += formatter.getvalue()
    lines = [line.rstrip() for line in text.splitlines()]
    kept = [line for i, line in enumerate(lines) if line or (i and lines[i - 1])]  # one blank line at a time
    return "\n".join(kept) + "\n"


@click.command(help=__doc__)
@click.option("--check", is_flag=True, help="Write nothing; exit code 1 if the page is not current.")
def main(check: bool) -> None:
    text = page()
    if check and PAGE.read_text(encoding="utf-8") != text:
        sys.exit(f"{PAGE.relative_to(ROOT)} is not current: run python -m benchmarks.docs cli-reference")
    if not check:
        PAGE.write_text(text, encoding="utf-8")
