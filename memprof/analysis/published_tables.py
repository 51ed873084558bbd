"""Read tables that other people have published (``published_tables.toml``), so that a run can be compared with them.

Their figures are sums of components, each at its own peak; nobody has measured them as one peak. They are shown with
their source, the badge ``published``, and this remark.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memprof.errors import UsageError
from memprof.files import read_toml
from memprof.units import GIB
from memprof.vocabulary import Group

_SUM = "The published figures add components, each at its own peak; the sum is not a peak anybody measured."


def published_tables() -> dict[str, dict[str, Any]]:
    """Return every table by its name."""
    return read_toml(Path(__file__).with_suffix(".toml"))


def published_columns(name: str) -> list[dict[str, Any]]:
    """Return a table's columns: ``label``, ``set`` (``name``), ``source``, ``setting``, ``groups`` in bytes, ``notes``.

    Raises:
        UsageError: there is no such table.
    """
    tables = published_tables()
    if name not in tables:
        raise UsageError(f"--published {name!r}: there is {', '.join(sorted(tables))}.")
    rows, found = tables[name], []
    for column in rows["columns"]:
        groups = {group: round(gib * GIB) for group, gib in column["gib"].items()}
        found.append(
            {
                "label": column["label"],
                "set": name,
                "source": rows["source"],
                "setting": rows["setting"],
                "groups": {**groups, str(Group.TOTAL): sum(groups.values())},
                "notes": [_SUM, *column["notes"]],
            }
        )
    return found
