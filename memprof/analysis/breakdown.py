"""Break the bytes alive at one instant down by category, and check that no byte is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from memprof.analysis.peaks.counter_check import DETAIL, UnrecordedPeak
from memprof.attribution.result import Attribution, PhaseSpan
from memprof.snapshot.model import I64
from memprof.timeline.timeline import Timeline
from memprof.vocabulary import GROUP_OF, GUESSES, Category, Evidence, Group, Phase

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_CATEGORIES = list(Category)
_EVIDENCE = list(Evidence)
_PHASES = list(Phase)


@dataclass(frozen=True)
class ReservedSplit:
    """Hold reserved bytes that are not active: free segments, free parts of used ones, and free parts of pools."""

    cached: int = 0
    inactive_split: int = 0
    private_pools: int = 0

    @property
    def total(self) -> int:
        """Return the sum."""
        return self.cached + self.inactive_split + self.private_pools


class Breakdown:
    """Describe the composition of memory at one instant. All figures are bytes of blocks unless named otherwise.

    The categories add up to ``active_bytes`` exactly; so do the groups and the kinds of evidence.
    ``span`` is the phase whose peak this is; ``None`` for any other instant. ``unseen`` is what the allocator counted
    beyond the history (see :mod:`memprof.analysis.peaks.counter_check`): it is unattributed.
    """

    def __init__(
        self,
        timeline: Timeline,
        attribution: Attribution,
        instant: int,
        *,
        span: PhaseSpan | None = None,
        split: Callable[[int], dict[str, int]] | None = None,
        unmapped_bytes: int = 0,
        unseen: UnrecordedPeak | None = None,
    ) -> None:
        self._timeline, self._attribution, self._split = timeline, attribution, split
        self._unseen = unseen
        self.instant = instant
        self.span = span
        self.unmapped_bytes = unmapped_bytes

    def __repr__(self) -> str:
        return f"Breakdown({self.phase}, step={self.step}, active_bytes={self.active_bytes:,})"

    def _repr_html_(self) -> str:
        from memprof.reports.notebook import breakdown_fragment

        return breakdown_fragment(self)

    def figure(self) -> Figure:
        """Return a ``plotly.graph_objects.Figure`` with a bar for each category."""
        from memprof.reports.figures import breakdown_figure

        return breakdown_figure(self)

    @cached_property
    def rows(self) -> I64:
        """Return the timeline's rows alive at this instant."""
        return self._timeline.alive_at(self.instant)

    @property
    def time_us(self) -> int:
        """Return the time of this instant in microseconds, on the snapshot's own clock."""
        return self._timeline.time_us(self.instant)

    @property
    def phase(self) -> Phase:
        """Return the phase at this instant: the span's, else that of the event that led here."""
        if self.span is not None:
            return Phase(self.span.phase)
        track = self._attribution.track
        if not len(track.phase):
            return Phase.OTHER
        return _PHASES[int(track.phase[max(self.instant - 1, 0)])]

    @property
    def step(self) -> int | None:
        """Return the optimizer step; ``None`` where it is not known."""
        if self.span is not None:
            return self.span.step
        track = self._attribution.track
        step = int(track.step[max(self.instant - 1, 0)]) if len(track.step) else -1
        return None if step < 0 else step

    @property
    def active_bytes(self) -> int:
        """Return the bytes of blocks whose free has not completed: the sum of the categories."""
        return int(self._timeline.active[self.instant]) + self.not_in_history_bytes

    @property
    def not_in_history_bytes(self) -> int:
        """Return the part of ``allocated_bytes`` that the allocator counted and no recorded allocation explains."""
        return 0 if self._unseen is None else self._unseen.bytes

    @property
    def allocated_bytes(self) -> int:
        """Return the bytes of blocks the program holds, as ``torch.cuda.memory_allocated`` counts."""
        return int(self._timeline.allocated[self.instant]) + self.not_in_history_bytes

    @property
    def reserved_bytes(self) -> int | None:
        """Return the bytes of segments; ``None`` for a tensor trace, which has no allocator."""
        reserved = self._timeline.reserved
        return None if reserved is None else max(int(reserved[self.instant]), self.active_bytes)

    @property
    def pending_free_bytes(self) -> int:
        """Return the bytes freed by the program that wait for a stream: active − allocated."""
        return self.active_bytes - self.allocated_bytes

    @cached_property
    def requested_bytes(self) -> int:
        """Return the bytes the program requested for the blocks it holds."""
        held = self.rows[self._timeline.release_event[self.rows] >= self.instant]
        return int(self._timeline.requested[held].sum()) + (self._unseen.requested if self._unseen else 0)

    @property
    def rounding_bytes(self) -> int:
        """Return the bytes that rounding to block sizes adds: allocated − requested."""
        return self.allocated_bytes - self.requested_bytes

    def _by(self, codes: np.ndarray, n_codes: int, sizes: I64) -> I64:
        totals = np.zeros(n_codes, dtype=np.int64)
        np.add.at(totals, codes[self.rows], sizes[self.rows])
        return totals

    @cached_property
    def categories(self) -> dict[Category, int]:
        """Return the bytes of each category; every category is present."""
        totals = self._by(self._attribution.category, len(_CATEGORIES), self._timeline.size)
        totals[Category.UNATTRIBUTED.code] += self.not_in_history_bytes
        return {c: int(totals[i]) for i, c in enumerate(_CATEGORIES)}

    @property
    def present(self) -> dict[Category, int]:
        """Return the bytes of each category that has any."""
        return {category: n for category, n in self.categories.items() if n}

    @cached_property
    def categories_requested(self) -> dict[Category, int]:
        """Return the requested bytes of each category."""
        totals = self._by(self._attribution.category, len(_CATEGORIES), self._timeline.requested)
        totals[Category.UNATTRIBUTED.code] += self._unseen.requested if self._unseen else 0
        return {c: int(totals[i]) for i, c in enumerate(_CATEGORIES)}

    @cached_property
    def details(self) -> dict[Category, dict[str, int]]:
        """Return the bytes of each sub-id, for categories that have any."""
        attribution = self._attribution
        n_details = len(attribution.details)
        codes = attribution.category.astype(np.int64) * n_details + attribution.detail
        totals = self._by(codes, n_details * len(_CATEGORIES), self._timeline.size)
        found: dict[Category, dict[str, int]] = {}
        for code in np.flatnonzero(totals):
            category, detail = divmod(int(code), n_details)
            if detail:
                found.setdefault(_CATEGORIES[category], {})[attribution.details[detail]] = int(totals[code])
        if self._unseen is not None:
            found.setdefault(Category.UNATTRIBUTED, {})[DETAIL] = self._unseen.bytes
        return found

    @cached_property
    def groups(self) -> dict[Group, int]:
        """Return the bytes of each row of the published table; ``total`` is their sum."""
        groups = dict.fromkeys(Group, 0)
        for category in _CATEGORIES:
            groups[GROUP_OF[category]] += self.categories[category]
        groups[Group.TOTAL] = sum(groups.values())
        return groups

    @cached_property
    def evidence(self) -> dict[Evidence, int]:
        """Return the bytes of each kind of evidence; every kind is present."""
        totals = self._by(self._attribution.evidence, len(_EVIDENCE), self._timeline.size)
        totals[Evidence.NONE.code] += self.not_in_history_bytes
        return {e: int(totals[i]) for i, e in enumerate(_EVIDENCE)}

    @cached_property
    def guessed(self) -> dict[Category, int]:
        """Return the bytes of each category that nothing but a lifetime, a shape or a set of sizes speaks for."""
        evidence = self._attribution.evidence[self.rows]
        rows = self.rows[np.isin(evidence, [_EVIDENCE.index(e) for e in GUESSES])]
        totals = np.zeros(len(_CATEGORIES), dtype=np.int64)
        np.add.at(totals, self._attribution.category[rows], self._timeline.size[rows])
        return {c: int(totals[i]) for i, c in enumerate(_CATEGORIES) if totals[i]}

    @cached_property
    def reserved_split(self) -> ReservedSplit:
        """Split reserved − active bytes."""
        if self._split is None or self.reserved_bytes is None:
            return ReservedSplit()
        split = self._split(self.instant)
        parts = [split.get(name, 0) for name in ("cached", "inactive_split", "private_pools")]
        # Bytes that the history lacks lay in memory that it shows as free: count them in whole free segments first.
        taken = sum(parts) - (self.reserved_bytes - self.active_bytes)
        for i, part in enumerate(parts):
            less = min(part, taken)
            parts[i], taken = part - less, taken - less
        return ReservedSplit(*parts)

    def self_check(self) -> None:
        """Prove that every byte is accounted for.

        Raises:
            AssertionError: a total does not add up; the message tells which one and by how much.
        """
        checks = {
            "categories": (sum(self.categories.values()), self.active_bytes),
            "groups": (self.groups[Group.TOTAL], self.active_bytes),
            "evidence": (sum(self.evidence.values()), self.active_bytes),
            "requested + rounding": (self.requested_bytes + self.rounding_bytes, self.allocated_bytes),
            "live blocks": (
                int(self._timeline.size[self.rows].sum()) + self.not_in_history_bytes,
                self.active_bytes,
            ),
        }
        for category, parts in self.details.items():
            total = sum(parts.values())
            checks[f"details of {category}"] = (min(total, self.categories[category]), total)
        if self.reserved_bytes is not None:
            checks["reserved"] = (self.active_bytes + self.reserved_split.total, self.reserved_bytes)
        wrong = [f"{name}: {got:,} against {want:,} bytes" for name, (got, want) in checks.items() if got != want]
        if wrong:
            raise AssertionError(f"does not add up at instant {self.instant}: " + "; ".join(wrong))
