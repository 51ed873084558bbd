"""Load the remedies of the knowledge files, and choose those that apply to a run: for texts and for advice."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from memprof.oom.expressions import Scope, evaluate
from memprof.oom.knowledge_files import MESSAGE_FILES, table
from memprof.oom.wording import fill


@cache
def remedy(name: str) -> dict[str, Any]:
    """Return a remedy by its id, with the conditions of its own table; tables after the one it is in are not read.

    Raises:
        KeyError: there is none.
    """
    for file in ("remedies", *MESSAGE_FILES):
        if (found := table(file).get("remedy", {}).get(name)) is not None:
            entry: dict[str, Any] = found
            return entry
    raise KeyError(name)


def possible(entry: Mapping[str, Any], scope: Scope) -> bool:
    """Tell whether a remedy applies, is not refused there, not set already, and of use to the numbers."""
    if not evaluate(entry.get("when", "True"), scope):
        return False
    if evaluate(entry.get("impossible", "False"), scope) or evaluate(entry.get("useless", "False"), scope):
        return False
    return "already" not in entry or not scope.functions["set_in_log"](entry["already"])


def change(name: str, scope: Scope) -> dict[str, Any] | None:
    """Return a remedy as advice for a recording: ``action``, ``setting``, ``costs``, ``exact``, ``toll``.

    None where the remedy is not open to the run, or its framework has no setting for it.
    """
    entry = table("remedies")["change"][name]
    if not possible(remedy(entry["remedy"]), scope):
        return None
    found = {key: fill(entry[key], scope) for key in ("action", "setting", "costs")}
    return None if None in found.values() else {**found, "exact": entry["exact"], "toll": entry["toll"]}
