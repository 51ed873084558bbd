"""Read tables that other people have published (``published_tables.toml``), so that a run can be compared with them.

Their figures are sums of components, each at its own peak; nobody has measured them as one peak. They are shown with
their source, the badge ``published``, and this remark.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from memprof.errors import UsageError
from memprof.files import read_toml
from memprof.report.comparison import Published
from memprof.units import GIB
from memprof.vocabulary import Group

_SUM = "The published figures add components, each at its own peak; the sum is not a peak anybody measured."


@dataclass(frozen=True)
class _Column:
    """Hold one run of a table: its label, its remarks, and GiB by group."""

    label: str
    notes: tuple[str, ...]
    gib: Mapping[str, float]


@dataclass(frozen=True)
class PublishedTable:
    """Hold a published table: its ``source``, the run's ``setting``, and its columns."""

    source: str
    setting: str
    columns: tuple[_Column, ...]


def published_tables() -> dict[str, PublishedTable]:
    """Return every table by its name."""
    tables = read_toml(Path(__file__).with_suffix(".toml"))
    return {
        name: PublishedTable(rows["source"], rows["setting"], tuple(_Column(**column) for column in rows["columns"]))
        for name, rows in tables.items()
    }


def published_columns(name: str) -> list[Published]:
    """Return a table's columns.

    Raises:
        UsageError: there is no such table.
    """
    tables = published_tables()
    if name not in tables:
        raise UsageError(f"--published {name!r}: there is {', '.join(sorted(tables))}.")
    table = tables[name]
    return [_published(name, table, column) for column in table.columns]


def _published(name: str, table: PublishedTable, column: _Column) -> Published:
    groups = {Group(group): round(gib * GIB) for group, gib in column.gib.items()}
    return Published(
        label=column.label,
        set=name,
        source=table.source,
        setting=table.setting,
        groups={**groups, Group.TOTAL: sum(groups.values())},
        notes=(_SUM, *column.notes),
    )
