"""Hold a recording against the allocator's counters, taken by the program that made it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: The share of the peak that may be unattributed.
UNATTRIBUTED = 0.01
HEAD = ("case", "categories' sum", "active", "peak", "counter", "unattributed", "phases")
_SHORT = {
    "load": "ld", "generate": "gen", "reward": "rew", "old_logprobs": "old", "reference_logprobs": "ref",
    "forward": "fwd", "backward": "bwd", "optimizer_step": "opt", "other": "oth", "evaluate": "eval",
}  # fmt: skip


@dataclass(frozen=True)
class Balance:
    """What a report says beside what the allocator counted, in bytes; ``lost``: the part that is not in the history."""

    categories: int
    active: int
    peak: int
    counter: int
    unattributed: int
    lost: int
    phases: tuple[str, ...]

    @classmethod
    def of(cls, report: dict[str, Any], counters: dict[str, int]) -> Balance:
        """Take the figures at the peak; ``counters`` as :class:`tests.cuda.programs.ledger.Ledger` reads them."""
        peak = report["peak"]
        phases = tuple(dict.fromkeys(phase["phase"] for phase in report["phases"]))
        return cls(
            sum(peak["categories"].values()),
            peak["active_bytes"],
            peak["allocated_bytes"],
            counters["allocated_bytes"],
            peak["categories"]["unattributed"],
            peak.get("not_in_history_bytes") or 0,
            phases,
        )

    def check(self, *, whole: bool = True) -> None:
        """Fail unless nothing is missing, the peak is the counter's and at most a hundredth is unattributed.

        Where the history is not ``whole``, what it lost is unattributed besides, and must not be nothing.
        """
        assert self.categories == self.active
        assert self.peak == self.counter
        assert self.unattributed - self.lost <= UNATTRIBUTED * self.active
        assert (self.lost == 0) == whole

    def columns(self, case: str) -> list[str]:
        """Return the table's row."""
        share = f"{100 * self.unattributed / max(1, self.active):.2f}%"
        found = (f"{n:,}" for n in (self.categories, self.active, self.peak, self.counter))
        return [case, *found, share, " ".join(_SHORT.get(phase, phase) for phase in self.phases)]


def lines(rows: Iterable[list[str]]) -> list[str]:
    """Set the table: names to the left, figures to the right."""
    table = [list(HEAD), *rows]
    wide = [max(len(row[column]) for row in table) for column in range(len(HEAD))]
    last = len(HEAD) - 1
    return [
        "  ".join(
            cell.ljust(wide[column] if column != last else 0) if column in (0, last) else cell.rjust(wide[column])
            for column, cell in enumerate(row)
        )
        for row in table
    ]


def report_of(snapshot: Path) -> dict[str, Any]:
    """Read the JSON the callback wrote beside a snapshot."""
    found: dict[str, Any] = json.loads(snapshot.with_suffix(".json").read_text(encoding="utf-8"))
    return found


def analysed(snapshot: Path) -> dict[str, Any]:
    """Report on a snapshot as ``memprof report`` does."""
    from memprof import analyze, load_snapshot

    found: dict[str, Any] = analyze(load_snapshot(snapshot)).to_dict()
    return found
