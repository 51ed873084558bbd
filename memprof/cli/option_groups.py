"""Show a command's options in named groups, because nobody reads a list of fifty."""

from __future__ import annotations

from collections.abc import Mapping

import click


def grouped(groups: Mapping[str, str], rest: str = "Output") -> type[click.Command]:
    """Make a command class that shows its options by group: ``groups`` maps a group's title to its options' Python
    names, separated by blanks; options in no group come last, under ``rest``."""
    group_of = {name: title for title, names in groups.items() for name in names.split()}

    class Grouped(click.Command):
        def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
            rows: dict[str, list[tuple[str, str]]] = {title: [] for title in (*groups, rest)}
            for option in self.get_params(ctx):
                if isinstance(option, click.Option) and (row := option.get_help_record(ctx)) is not None:
                    rows[group_of.get(option.name or "", rest)].append(row)
            for title, options in rows.items():
                if options:
                    with formatter.section(title):
                        formatter.write_dl(options)

    return Grouped
