"""Search, for every method of a plan, the longest context or the largest batch that fits; each answer is simulated.

A simulation of one size says where to look next: its allocations, resized, go through the allocator's model at other
sizes (:mod:`memprof.simulate.resizing`). What is found so is simulated; where that does not fit, or leaves room, the
new simulation says where to look. All methods are searched at once, in rounds, so that the workers have something to
do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from memprof.config.settings import Settings, TrainerSettings
from memprof.plan.simulations import Changes, SimulatedRow
from memprof.plan.sizes import ENOUGH, choices, place_of, size_of, step_back
from memprof.plan.subprocess_runner import Runner
from memprof.report.plan import PlanRow
from memprof.vocabulary import Category, Phase

#: So many more simulations a method gets at most.
ROUNDS = 4


@dataclass(frozen=True)
class SearchRow:
    """Hold one simulated configuration; sizes in bytes. ``device_peak_bytes`` is reserved plus outside torch.

    ``largest`` is the largest configuration of the same method that was found to fit, where one was searched.
    ``step_s`` estimates the seconds of one step; None where the card has no speed that is known. ``limit_bytes``: what
    a prediction of these settings must not exceed; more is kept where parts of a run were never compared.
    """

    method: str
    settings: Settings
    fits: bool
    peak_bytes: int
    device_peak_bytes: int
    host_bytes: int
    largest_category: Category
    phase: Phase
    categories: Mapping[Category, int] = field(default_factory=dict)
    step_s: float | None = None
    limit_bytes: int | None = None
    largest: SearchRow | None = None

    @property
    def used(self) -> float:
        return self.device_peak_bytes / self.limit_bytes if self.limit_bytes else 0.0

    def answer(self) -> PlanRow:
        """Return the row as in ``memprof.plan/1``."""
        return PlanRow(
            method=self.method,
            config=self.settings.to_dict(),
            fits=self.fits,
            peak_bytes=self.peak_bytes,
            device_peak_bytes=self.device_peak_bytes,
            host_bytes=self.host_bytes,
            largest_category=self.largest_category,
            phase=self.phase,
            categories=self.categories,
            step_s=self.step_s,
            limit_bytes=self.limit_bytes,
            largest=None if self.largest is None else self.largest.answer(),
        )


def row_of(name: str, settings: Settings, result: SimulatedRow) -> SearchRow:
    """Make a row of what the simulation of some settings returned."""
    return SearchRow(
        method=name,
        settings=settings,
        fits=bool(result.fits),
        peak_bytes=result.peak_bytes,
        device_peak_bytes=result.needed_bytes,
        host_bytes=result.host_bytes,
        largest_category=result.largest_category,
        phase=result.peak_phase,
        categories=result.categories,
        step_s=result.step_s,
        limit_bytes=result.limit_bytes,
    )


def largest_of_each(
    machine: Runner, rows: list[SearchRow], results: list[SimulatedRow], what: str
) -> tuple[list[SearchRow], SearchRow | None]:
    """Search the most of ``what`` that fits with every method.

    Args:
        machine: simulates; results are kept.
        rows, results: the methods as given, those that train the most first, and what these rows were made of; they
            were asked for their largest (:func:`memprof.plan.sizes.choices`).
        what: as of ``choices``; ``speed``: the largest micro-batch that makes the same step, at most the row's own.

    Returns:
        The rows with their ``largest``, and the largest of all: of equal ones the first.
    """
    searches = [_Search(row, result, what) for row, result in zip(rows, results, strict=True)]
    for _ in range(ROUNDS):
        wanted = [(search, settings) for search in searches if (settings := search.next()) is not None]
        if not wanted:
            break
        seen = machine.run([settings for _, settings in wanted], sizes=[search.sizes for search, _ in wanted])
        for (search, settings), result in zip(wanted, seen, strict=True):
            search.saw(row_of(search.row.method, settings, result), result)
    found = [replace(search.row, largest=search.good) for search in searches]
    fitting = [search.good for search in searches if search.good is not None]
    best = max(fitting, key=lambda row: size_of(row.settings, what), default=None)
    return found, best


class _Search:
    """Look for one method's largest size between the largest that fitted and the smallest that did not."""

    def __init__(self, row: SearchRow, result: SimulatedRow, what: str) -> None:
        self.row, self._what = row, what
        self.sizes = choices(row.settings, what)
        self.good: SearchRow | None = None
        self._bad: SearchRow | None = None
        self._told: Changes | None = None
        self.saw(row, result)

    def saw(self, tried: SearchRow, result: SimulatedRow) -> None:
        """Take in what was simulated, and where that says to look."""
        self._told = result.largest
        if tried.fits:
            self.good = tried
        else:
            self._bad = tried

    def next(self) -> Settings | None:
        """Return the settings to simulate next; None where the search is over."""
        if self._told is None or (self.good is not None and self.good.used >= ENOUGH):
            return None
        told = self.row.settings.with_(**self._told)
        if self._bad is not None and self._place(told) >= self._place(self._bad.settings):
            less = step_back(self._bad.settings, self._what)  # resized it fits, simulated it does not
            if less is None:
                return None
            told = less
        return told if self.good is None or self._place(told) > self._place(self.good.settings) else None

    def _place(self, settings: TrainerSettings) -> tuple[int, int]:
        return place_of(settings, self._what)
