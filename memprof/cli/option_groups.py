"""Show a command's options in named groups, because nobody reads a list of fifty."""

from __future__ import annotations

from collections.abc import Mapping

import click

from memprof.errors import UsageError


def grouped(
    groups: Mapping[str, str],
    rest: str = "Output",
    aliases: Mapping[str, str] | None = None,
    advice: Mapping[str, str] | None = None,
) -> type[click.Command]:
    """Make a command class that shows its options by group.

    Args:
        groups: maps a group's title to its options' Python names, separated by blanks; the first that names one has it.
        rest: the title of options in no group, which come last.
        aliases: other names of options, which work and are not shown; mapped to the options.
        advice: names that are no options, with what to give instead.
    """
    group_of: dict[str, str] = {}
    for title, names in groups.items():
        for name in names.split():
            group_of.setdefault(name, title)

    class Grouped(click.Command):
        def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
            own = {name for option in self.get_params(ctx) for name in (*option.opts, *option.secondary_opts)}
            return super().parse_args(ctx, _with_own_names(args, own, aliases or {}, advice or {}))

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


def _with_own_names(args: list[str], own: set[str], aliases: Mapping[str, str], advice: Mapping[str, str]) -> list[str]:
    """Replace other names of options by their own; UsageError for a name that ``advice`` knows, and for an option that
    is given under two names, of which one would be dropped."""
    found: list[str] = []
    written: dict[str, str] = {}
    for place, text in enumerate(args):
        if text == "--":
            return [*found, *args[place:]]
        name, equals, value = text.partition("=")
        plain = name.lower().replace("_", "-")
        if name.startswith("--") and name not in own and plain not in own:
            if plain not in aliases and (instead := advice.get(plain)) is not None:
                raise UsageError(f"{name} is not an option: {instead}.")
            name = aliases.get(plain, name)
        elif name.startswith("--") and name not in own:
            name = plain
        if name.startswith("--"):
            said = text.partition("=")[0]
            if (before := written.setdefault(name, said)) != said:
                raise UsageError(f"{before} and {said} are the same option: give one of them.")
            opposite = written.get(f"--{name[5:]}" if name.startswith("--no-") else f"--no-{name[2:]}")
            if opposite is not None:
                raise UsageError(f"{opposite} and {said} contradict each other: give one of them.")
        found.append(f"{name}{equals}{value}")
    return found
