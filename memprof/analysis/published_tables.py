"""Hold tables that other people have published, so that a run can be compared with them.

Their figures are sums of components, each at its own peak; nobody has measured them as one peak. They are shown with
their source, the badge ``published``, and this remark.
"""

from __future__ import annotations

from typing import Any

from memprof.errors import UsageError
from memprof.units import GIB
from memprof.vocabulary import Group

_SUM = "The published figures add components, each at its own peak; the sum is not a peak anybody measured."

# The published table writes GB and means GiB: its 78.3 is 2 x 2 bytes x 8 x 20480 x 128256 vocabulary entries, and its
# "20K context" is 20480 tokens.
PUBLISHED: dict[str, dict[str, Any]] = {
    "unsloth-2025": {
        "source": "Unsloth, Long-context GRPO, 20 February 2025, https://unsloth.ai/blog/grpo",
        "setting": "Llama-3.1-8B, 20480 tokens of context, 8 generations",
        "columns": [
            {
                "label": "Unsloth (published)",
                "gib": {Group.TRAINING: 42.0, Group.GRPO_LOSS: 9.8, Group.INFERENCE: 0.0, Group.KV_CACHE: 2.5},
                "notes": [_SUM, "Published in GB, meant as GiB; the KV cache is one sequence's."],
            },
            {
                "label": "TRL + FA2 (published)",
                "gib": {Group.TRAINING: 414.0, Group.GRPO_LOSS: 78.3, Group.INFERENCE: 16.0, Group.KV_CACHE: 2.5},
                "notes": [
                    _SUM,
                    "Published in GB, meant as GiB; the KV cache is one sequence's; the inference cost is the engine's "
                    "second copy of the weights.",
                    "Not reproducible: no recipe was published for the 414 GiB of training memory.",
                ],
            },
        ],
    },
}


def published_columns(name: str) -> list[dict[str, Any]]:
    """Return a table's columns: ``label``, ``set`` (``name``), ``source``, ``setting``, ``groups`` in bytes, ``notes``.

    Raises:
        UsageError: there is no such table.
    """
    if name not in PUBLISHED:
        raise UsageError(f"--published {name!r}: there is {', '.join(sorted(PUBLISHED))}.")
    rows = PUBLISHED[name]
    return [
        {
            "label": column["label"],
            "set": name,
            "source": rows["source"],
            "setting": rows["setting"],
            "groups": _groups(column["gib"]),
            "notes": list(column["notes"]),
        }
        for column in rows["columns"]
    ]


def _groups(gib: dict[Group, float]) -> dict[str, int]:
    """Return the bytes of each published row, and their sum; rows that were not published are absent."""
    groups = {str(group): round(value * GIB) for group, value in gib.items()}
    return {**groups, str(Group.TOTAL): sum(groups.values())}
