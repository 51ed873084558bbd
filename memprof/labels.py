"""Short headings for files: as little of each path as tells it from the others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

__all__ = ["distinct", "short_names"]


def short_names(paths: Sequence[Path]) -> list[str]:
    """Each path's own name without its endings, or the parts that differ where the names are alike."""
    names = [_bare(path) for path in paths]
    return [
        name if names.count(name) == 1 else _longer(path, paths, name) for path, name in zip(paths, names, strict=True)
    ]


def _bare(path: Path) -> str:
    """The name without what only says how the file is written."""
    name = re.sub(r"(?i)\.gz$", "", path.name)
    return re.sub(r"(?i)\.(?:pickle|pkl|json)$", "", name) or path.name


def _longer(path: Path, paths: Sequence[Path], name: str) -> str:
    """The last folder in which ``path`` differs from the others of its name, then its name."""
    rivals = [other for other in paths if other != path and _bare(other) == name]
    for folder in path.parents:
        depth = len(path.parts) - len(folder.parts) - 1
        others = {other.parents[depth].name for other in rivals if depth < len(other.parents)}
        if folder.name and others != {folder.name}:
            return f"{folder.name}/{name}"
    return path.name


def distinct(labels: Sequence[str]) -> list[str]:
    """The same labels, repeats numbered: ``run``, ``run (2)``."""
    found: list[str] = []
    for label in labels:
        n = sum(1 for i, other in enumerate(labels[: len(found)]) if other == label)
        found.append(label if not n else f"{label} ({n + 1})")
    return found
