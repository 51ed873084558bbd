"""Search, for every method of a plan, the longest context or the largest batch that fits; each answer is simulated.

Memory grows almost linearly with lengths and batches, so a line through two simulated points shows where to look next.
All methods are searched at once, in rounds, so that the workers have something to do.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from memprof.config.catalogue import find_config
from memprof.config.expected_error import MARGIN, margin_of
from memprof.config.settings import Settings
from memprof.plan.subprocess_runner import Runner

__all__ = ["MAXIMIZE", "ROUNDS", "Row", "fitted_each", "halved", "largest_of_each", "most_of", "row_of"]

MAXIMIZE = ("context", "num_generations", "batch")
#: So many more simulations a method gets at most.
ROUNDS = 4
_LIMITS = {"context": 131_072, "num_generations": 256, "batch": 1024}
# A search ends when this share of the room is used; the rest is not worth another simulation.
_FULL = 0.97
# Categories that no shorter completion makes smaller.
_STANDING = ("weights", "adapters", "reference_model", "optimizer_state", "gradients")


@dataclass(frozen=True)
class Row:
    """Hold one simulated configuration; sizes in bytes. ``device_peak_bytes`` is reserved plus outside torch.

    ``largest`` is the largest configuration of the same method that was found to fit, where one was searched.
    ``step_s`` estimates the seconds of one step; None where the card has no speed that is known.
    """

    method: str
    settings: Settings
    fits: bool
    peak_bytes: int
    device_peak_bytes: int
    host_bytes: int
    largest_category: str
    phase: str
    categories: dict[str, int] = field(default_factory=dict)
    largest: Row | None = None
    step_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the row as in ``memprof.plan/1``."""
        found = {
            "method": self.method,
            "config": self.settings.to_dict(),
            "fits": self.fits,
            "peak_bytes": self.peak_bytes,
            "device_peak_bytes": self.device_peak_bytes,
            "host_bytes": self.host_bytes,
            "largest_category": self.largest_category,
            "phase": self.phase,
            "categories": self.categories,
            "step_s": self.step_s,
        }
        return found if self.largest is None else {**found, "largest": self.largest.to_dict()}


def row_of(name: str, settings: Settings, result: dict[str, Any]) -> Row:
    """Make a row of what the simulation of some settings returned."""
    return Row(
        method=name,
        settings=settings,
        fits=bool(result["fits"]),
        peak_bytes=result["peak_bytes"],
        device_peak_bytes=result["device_peak_bytes"],
        host_bytes=result["host_bytes"],
        largest_category=result["largest_category"],
        phase=result["peak_phase"],
        categories=result.get("categories") or {},
        step_s=result.get("step_s"),
    )


def largest_of_each(machine: Runner, rows: list[Row], what: str, room: int) -> tuple[list[Row], Row | None]:
    """Search the most of ``what`` that fits with every method.

    Args:
        machine: simulates; results are kept.
        rows: the methods as given, those that train the most first.
        what: one of :data:`MAXIMIZE`.
        room: bytes that a prediction must not exceed; less where parts of the run were never compared.

    Returns:
        The rows with their ``largest``, and the largest of all: of equal ones the first.
    """
    searches = [_Search(row, what, room) for row in rows]
    for _ in range(ROUNDS):
        wanted = [(search, settings) for search in searches if (settings := search.next()) is not None]
        if not wanted:
            break
        results = machine.run([settings for _, settings in wanted])
        for (search, settings), result in zip(wanted, results, strict=True):
            search.saw(row_of(search.row.method, settings, result))
    found = [replace(search.row, largest=search.good) for search in searches]
    fitting = [search.good for search in searches if search.good is not None]
    best = max(fitting, key=lambda row: _size(row.settings, what), default=None)
    return found, best


def fitted_each(machine: Runner, rows: list[Row], room: int) -> list[Row]:
    """Divide the micro-batches of every method that does not fit as given, until it fits; the step's work stays.

    Returns the rows with what fits of each as their ``largest``: the row itself, or its smaller micro-batches.
    """
    found: dict[int, Row] = {}
    waiting = {
        i: row.settings
        for i, row in enumerate(rows)
        if not row.fits and sum(row.categories.get(c, 0) for c in _STANDING) <= room
    }
    for _ in range(ROUNDS):
        smaller = {i: s for i, settings in waiting.items() if (s := _same_work_halved(settings)) is not None}
        if not smaller:
            break
        results = machine.run(list(smaller.values()))
        waiting = {}
        for (i, settings), result in zip(smaller.items(), results, strict=True):
            tried = row_of(rows[i].method, settings, result)
            if tried.fits:
                found[i] = tried
            else:
                waiting[i] = settings
    return [replace(row, largest=row if row.fits else found.get(i)) for i, row in enumerate(rows)]


def _same_work_halved(settings: Settings) -> Settings | None:
    smaller = halved(settings)
    return smaller if smaller is not None and smaller.sequence_length == settings.sequence_length else None


class _Search:
    """Look for one method's largest size between the largest that fitted and the smallest that did not."""

    def __init__(self, row: Row, what: str, room: int) -> None:
        self.row, self._what = row, what
        self._room = int(room * (1 + MARGIN) / (1 + margin_of(row.settings.to_dict())))
        self._most = most_of(row.settings, what)
        self.good: Row | None = row if row.fits else None
        self._bad: Row | None = None if row.fits else row
        self._last: Row | None = None
        self._before: Row | None = None
        # What stands in memory whatever the length does not fit: nothing to search.
        self._hopeless = sum(row.categories.get(c, 0) for c in _STANDING) > room

    def next(self) -> Settings | None:
        """Return the settings to simulate next; None where the search is over."""
        if self._hopeless or (self.good is not None and self.good.device_peak_bytes >= _FULL * self._room):
            return None
        if self.good is None and self._what == "context":
            return halved((self._bad or self.row).settings)
        start = (self.good or self.row).settings
        size = _allowed(start, self._what, min(self._guess(), self._most))
        low = _size(self.good.settings, self._what) if self.good else 0
        if size <= low or (self._bad is not None and size >= _size(self._bad.settings, self._what)):
            return None
        return _resized(start, self._what, size)

    def saw(self, tried: Row) -> None:
        """Take in what was simulated."""
        if self._what == "context" and self.good is None:
            # Smaller micro-batches need less at any length: what is known of larger ones says nothing of these.
            self.good, self._bad = (tried, None) if tried.fits else (None, tried)
            self._last = tried
            return
        self._before, self._last = self._last or self.row, tried
        if tried.fits:
            self.good = tried
        else:
            self._bad = tried

    def _guess(self) -> int:
        """Return where the line through two points meets the room, kept between what fits and what does not."""
        low = _size(self.good.settings, self._what) if self.good else 0
        high = _size(self._bad.settings, self._what) if self._bad else None
        if self._last is None or self._before is None:
            return low * 4 if high is None else high // 2
        rise = self._last.device_peak_bytes - self._before.device_peak_bytes
        run = _size(self._last.settings, self._what) - _size(self._before.settings, self._what)
        if rise * run <= 0:
            return low * 4 if high is None else (low + high) // 2
        spare = 0.99 * self._room - self._last.device_peak_bytes
        target = int(_size(self._last.settings, self._what) + spare * run / rise)
        if high is not None:
            return target if low < target < high else (low + high) // 2
        return min(target, low * 16)


def most_of(settings: Settings, what: str) -> int:
    """Return how much is worth trying: for a context, at most what the model was made for."""
    if what != "context":
        return _LIMITS[what]
    positions = find_config(settings.model).get("max_position_embeddings")
    return min(_LIMITS[what], positions) if isinstance(positions, int) and positions > 0 else _LIMITS[what]


def _size(settings: Settings, what: str) -> int:
    if what == "context":
        return settings.sequence_length
    return settings.num_generations if what == "num_generations" else settings.per_device_train_batch_size


def _allowed(settings: Settings, what: str, guess: int) -> int:
    if what == "context":
        return max(settings.prompt_length + 64, guess // 64 * 64)
    step = settings.num_generations if what == "batch" else 1
    return max(step, 2, guess // step * step)


def _resized(settings: Settings, what: str, size: int) -> Settings:
    if what == "context":
        return settings.with_(completion_length=size - settings.prompt_length)
    if what == "batch":
        return settings.with_(per_device_train_batch_size=size)
    return settings.with_(num_generations=size, per_device_train_batch_size=size)


def halved(settings: Settings) -> Settings | None:
    """Return settings that need about half: smaller micro-batches first, then shorter completions."""
    size = settings.per_device_train_batch_size
    if size > 1 and size % 2 == 0:
        # The same completions in more, smaller micro-batches make the same step mathematically.
        return settings.with_(
            per_device_train_batch_size=size // 2,
            gradient_accumulation_steps=settings.gradient_accumulation_steps * 2,
            steps_per_generation=settings.generation_steps * 2,
        )
    if settings.completion_length >= 128:
        return settings.with_(completion_length=settings.completion_length // 2)
    return None
