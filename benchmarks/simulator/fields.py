"""Count what memprof does with the fields of the configurations that a run is written in.

    python -m benchmarks.simulator fields

The table is ``memprof/config/trainer_fields.toml``; ``tests/config/test_fields.py`` compares it with the installed
releases of TRL, transformers and PEFT.
"""

from __future__ import annotations

import click

from benchmarks.tabling import table
from memprof.config.trainer_fields import class_fields


def fields_table() -> str:
    """Count fields by class and by what memprof does with them; *noted* ones are outside the training step."""
    rows: list[list[object]] = []
    for name, of in class_fields().items():
        noted = sum(row.noted for row in of.not_simulated.values())
        neutral = len(of.no_memory | of.earlier)
        rows.append(
            [f"`{name}`", len(of.simulated), len(of.executed), neutral, noted, len(of.not_simulated) - noted]
        )
    total = [sum(int(str(row[column])) for row in rows) for column in range(1, 6)]
    return table(("class", "simulated", "executed", "no memory", "noted", "refused"), [*rows, ["all", *total]])


@click.command(help=__doc__)
def main() -> None:
    print(fields_table(), end="")
