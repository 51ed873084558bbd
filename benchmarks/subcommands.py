"""Make groups of benchmark commands: one command a folder, its benchmarks as subcommands."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click


class _Group(click.Group):
    """Import a subcommand's module when it is asked for, so that a group's help needs none of what they need."""

    def __init__(self, package: str, table: Mapping[str, tuple[str, str]], **attributes: Any) -> None:
        super().__init__(**attributes)
        self._package, self._table = package, table

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._table)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self._table:
            return None
        module, _, attribute = self._table[name][0].partition(":")
        command: click.Command = getattr(import_module(f"{self._package}.{module}"), attribute or "main")
        command.help = _as_indented(command.help or "")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, told) for name, (_, told) in self._table.items()])


def _as_indented(text: str) -> str:
    """Mark paragraphs that are indented, as command lines are, so that click does not join their lines."""
    parts = text.split("\n\n")
    return "\n\n".join(f"\b\n{part}" if part.startswith("    ") else part for part in parts)


def group_of(package: str, about: str | None, table: Mapping[str, tuple[str, str]]) -> click.Group:
    """Make the command ``python -m PACKAGE``.

    Args:
        package: the folder's package.
        about: the help text.
        table: by subcommand, its module in the package (``module`` for ``main``, or ``module:attribute``) and one line
            of help.
    """
    return _Group(package, table, name=f"python -m {package}", help=about)
