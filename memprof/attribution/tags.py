"""Parse the tags that recorders write beside allocations: ``memprof:phase=forward;region=backward;shape=8x128;...``.

The strings are interned in the snapshot, so each distinct one is parsed once. ``docs/snapshot-format.md`` lists
the keys. torch 2.14 and later write a dict given to ``torch.cuda.memory._set_memory_metadata`` as JSON: of it phase,
category and step are taken, in memprof's words; of ``_annotate_tensor`` the category. Any other ``user_metadata``
comes from other tools and is ignored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memprof.vocabulary import Category, Phase

PREFIX = "memprof:"
_PHASES = {p.value: p.code for p in Phase}
_CATEGORIES = {c.value: c.code for c in Category}


def parse_tag(text: str) -> dict[str, str]:
    """Return the key=value pairs of one tag; none for a string that is neither memprof's nor a dict of torch's."""
    if text.startswith("{"):
        return _of_dict(text)
    if not text.startswith(PREFIX):
        return {}
    pairs = (part.partition("=") for part in text[len(PREFIX) :].split(";"))
    return {key.strip(): value for key, equals, value in pairs if equals}


def _of_dict(text: str) -> dict[str, str]:
    """Take what memprof understands of a user's dict: phase and category by their ids, and the step."""
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    known = {"phase": _PHASES, "category": _CATEGORIES}
    pairs = {key: said[key] for key, ids in known.items() if isinstance(said.get(key), str) and said[key] in ids}
    step = said.get("step")
    return pairs | ({"step": str(step)} if type(step) is int and step >= 0 else {})


@dataclass(frozen=True)
class TagColumns:
    """Hold columns beside ``snapshot.metadata``, one entry per distinct string; -1 or "" where a key is missing."""

    pairs: list[dict[str, str]]
    phase: NDArray[np.int64]
    step: NDArray[np.int64]
    category: NDArray[np.int64]
    last_extent: NDArray[np.int64]
    rank: NDArray[np.int64]
    present: bool

    def column(self, key: str) -> list[str]:
        """Return the value of ``key`` in each distinct tag; "" where it is missing."""
        return [pairs.get(key, "") for pairs in self.pairs]


def read_tags(metadata: list[str]) -> TagColumns:
    """Parse every distinct metadata string once."""
    pairs = [parse_tag(text) for text in metadata]
    shapes = [_shape(p.get("shape", "")) for p in pairs]
    return TagColumns(
        pairs=pairs,
        phase=np.array([_PHASES.get(p.get("phase", ""), -1) for p in pairs], np.int64),
        step=np.array([_number(p.get("step", "")) for p in pairs], np.int64),
        category=np.array([_CATEGORIES.get(p.get("category", ""), -1) for p in pairs], np.int64),
        last_extent=np.array([s[-1] if s else -1 for s in shapes], np.int64),
        rank=np.array([len(s) for s in shapes], np.int64),
        present=any(pairs),
    )


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else -1


def _shape(text: str) -> list[int]:
    extents = [_number(part) for part in text.split("x")] if text else []
    return extents if all(e >= 0 for e in extents) else []
