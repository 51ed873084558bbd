"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["device_option", "redact_option", "rules_option", "seconds_option"]

device_option = click.option(
    "--device",
    type=click.IntRange(min=0),
    metavar="N",
    help="Look at this device of the snapshot; default: the one that ran out of memory, else the fullest.",
)
rules_option = click.option(
    "--rules",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Add these stack rules (TOML) to the shipped ones, which they override.",
)
redact_option = click.option(
    "--redact", is_flag=True, help="Leave out home directories, host and user names, command lines and tokens."
)
seconds_option = click.option(
    "--seconds", type=click.FloatRange(min=0), default=180.0, show_default=True, metavar="S",
    help="Start no simulation after this long; estimate the rest.",
)  # fmt: skip
