"""Read the zoo's rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from memprof.files import read_toml


@dataclass(frozen=True)
class Row:
    """One program.

    Args:
        name: of the function in ``programs.py`` that prepares it.
        repository, commit, entry: where it is.
        half: ``first`` (worked with) or ``second`` (opened once, after the rules).
        style: what it is, in a line.
        vocabulary, hidden: extents that mean the vocabulary and the model's width.
        value_models: classes of critics.
    """

    name: str
    repository: str
    commit: str
    entry: str
    half: str
    style: str
    vocabulary: tuple[int, ...]
    hidden: tuple[int, ...]
    value_models: tuple[str, ...] = ()


def read_rows() -> dict[str, Row]:
    """Return the rows of ``rows.toml`` by name."""
    raw = read_toml(Path(__file__).with_name("rows.toml"))
    rows = {}
    for entry in raw["program"]:
        lists = {k: tuple(v) for k, v in entry.items() if isinstance(v, list)}
        rows[entry["name"]] = Row(**{**entry, **lists})
    return rows
