"""Make a plan: simulate every method, then search the largest configuration that fits and execute it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from memprof.config.expected_error import MARGIN, expected_error
from memprof.config.gpus import find_gpu
from memprof.config.settings import Settings
from memprof.errors import UsageError
from memprof.plan.grid import methods_for
from memprof.plan.subprocess_runner import Runner, runner

__all__ = ["MAXIMIZE", "Plan", "Row", "limit_of", "make_plan"]

MAXIMIZE = ("context", "num_generations", "batch")
_LIMITS = {"context": 131_072, "num_generations": 256, "batch": 1024}
_ROUNDS = 4
# A search ends when this share of the room is used; the rest is not worth another simulation.
_FULL = 0.985


@dataclass(frozen=True)
class Row:
    """Hold one simulated configuration; sizes in bytes. ``device_peak_bytes`` is reserved plus outside torch."""

    method: str
    settings: Settings
    fits: bool
    peak_bytes: int
    device_peak_bytes: int
    host_bytes: int
    largest_category: str
    phase: str
    categories: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the row as in ``memprof.plan/1``."""
        return {
            "method": self.method,
            "config": self.settings.to_dict(),
            "fits": self.fits,
            "peak_bytes": self.peak_bytes,
            "device_peak_bytes": self.device_peak_bytes,
            "host_bytes": self.host_bytes,
            "largest_category": self.largest_category,
            "phase": self.phase,
            "categories": self.categories,
        }


@dataclass(frozen=True)
class Plan:
    """Hold a plan: ``rows`` are the methods or the values of ``--vary``; ``best`` is the largest one found to fit."""

    model: str
    gpu: str
    rows: list[Row]
    best: Row | None
    maximized: str
    executed: int
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data, schema ``memprof.plan/1``."""
        return {
            "schema": "memprof.plan/1",
            "model": self.model,
            "gpu": self.gpu,
            "rows": [row.to_dict() for row in self.rows],
            "best": self.best.to_dict() if self.best is not None else None,
            "maximized": self.maximized,
            "total_bytes": find_gpu(self.gpu).total_bytes,
            "limit_bytes": limit_of(self.gpu),
            "expected_error": expected_error(*(row.settings.to_dict() for row in self.rows)),
            "notes": self.notes,
        }


def make_plan(
    base: Settings,
    gpu: str,
    *,
    fixed: set[str] | None = None,
    maximize: str = "context",
    vary: tuple[str, list[Any]] | None = None,
    search: bool = True,
    workers: int | None = None,
    use_cache: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """Simulate the methods (or one setting's values) and search the best configuration that fits.

    Args:
        base: the settings that the user fixed, and defaults for the rest.
        gpu: a GPU's name or its memory size.
        fixed: names of the settings that the user gave; no method changes them.
        maximize: the setting to enlarge: ``context`` (completion length), ``num_generations`` or ``batch``.
        vary: a setting and the values to compare instead of the methods.
        search: whether to search for the best configuration.
        workers, use_cache, progress: see :class:`memprof.plan.subprocess_runner.Runner`.

    Raises:
        UsageError: a name is not known, or no method agrees with the fixed settings.
        InputError: the model cannot be found or simulated.
    """
    if maximize not in MAXIMIZE:
        raise UsageError(f"--maximize {maximize!r}: choose from {', '.join(MAXIMIZE)}.")
    with runner(gpu, workers=workers, progress=progress, use_cache=use_cache) as machine:
        wanted = (
            _varied(base, vary) if vary is not None else [(m.name, s) for m, s in methods_for(base, fixed or set())]
        )
        if not wanted:
            raise UsageError("no method is left with these settings; leave some of them open.")
        results = machine.run([settings for _, settings in wanted])
        rows = [_row(name, settings, result) for (name, settings), result in zip(wanted, results, strict=True)]
        best = _search(machine, rows, maximize) if search and vary is None else _largest_fitting(rows)
        return Plan(base.model, gpu, rows, best, maximize, machine.executed, _notes(base))


def _varied(base: Settings, vary: tuple[str, list[Any]]) -> list[tuple[str, Settings]]:
    name, values = vary
    if not hasattr(base, name):
        raise UsageError(f"--vary {name}: no such setting.")
    out = []
    for value in values:
        settings = base.with_(**{name: value, **_together(base, name, value)})
        out.append((f"{name}={value}", settings))
    return out


def _together(base: Settings, name: str, value: Any) -> dict[str, Any]:
    """Return one changed setting, with the micro-batch changed too where TRL would otherwise refuse the batch."""
    if name == "num_generations" and (base.per_device_train_batch_size * base.generation_steps * base.gpus) % value:
        return {"per_device_train_batch_size": value}
    return {}


def _row(name: str, settings: Settings, result: dict[str, Any]) -> Row:
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
    )


def _largest_fitting(rows: list[Row]) -> Row | None:
    fitting = [row for row in rows if row.fits]
    return max(fitting, key=lambda row: row.device_peak_bytes) if fitting else None


# -- the search ------------------------------------------------------------------------------------------------------


def _search(machine: Runner, rows: list[Row], what: str) -> Row | None:
    """Find the most of ``what`` that fits, with the first method of the table that fits as given (it trains the most).

    Memory grows almost linearly with lengths and batches, so a line through two simulated points shows where to look
    next. Every answer is simulated before it is given.
    """
    start = next((row for row in rows if row.fits), None)
    if start is None:
        return _shrunk(machine, rows)
    good, bad = start, None
    guess = _size(start.settings, what) * 2
    for _ in range(_ROUNDS):
        guess = _allowed(start.settings, what, guess)
        if guess <= _size(good.settings, what) or (bad is not None and guess >= _size(bad.settings, what)):
            break
        settings = _resized(start.settings, what, guess)
        tried = _row(start.method, settings, machine.run([settings])[0])
        if tried.fits:
            slope_from, good = good, tried
        else:
            slope_from, bad = good, tried
        if good.device_peak_bytes >= _FULL * _room(machine):
            break
        guess = _next(slope_from, tried, good, bad, what, _room(machine))
    return good


def _next(one: Row, other: Row, good: Row, bad: Row | None, what: str, room: int) -> int:
    """Return where the line through two points meets the card's memory, kept between ``good`` and ``bad``."""
    rise = other.device_peak_bytes - one.device_peak_bytes
    run = _size(other.settings, what) - _size(one.settings, what)
    low = _size(good.settings, what)
    if rise <= 0 or run <= 0:
        return low * 2 if bad is None else (low + _size(bad.settings, what)) // 2
    target = int(low + (room - good.device_peak_bytes) * run / rise)
    if bad is not None:
        high = _size(bad.settings, what)
        return target if low < target < high else (low + high) // 2
    return min(target, low * 8)


def limit_of(gpu: str) -> int:
    """Return the bytes that a prediction must not exceed on a GPU."""
    return int(find_gpu(gpu).total_bytes / (1 + MARGIN))


def _room(machine: Runner) -> int:
    assert isinstance(machine.gpu, str)  # a plan's card is named
    return limit_of(machine.gpu)


def _shrunk(machine: Runner, rows: list[Row]) -> Row | None:
    """Shrink the leanest method, where none fits as given: smaller micro-batches, then shorter completions."""
    row = min(rows, key=lambda r: r.device_peak_bytes)
    settings = row.settings
    for _ in range(_ROUNDS):
        smaller = _halved(settings)
        if smaller is None:
            return None
        settings = smaller
        tried = _row(row.method, settings, machine.run([settings])[0])
        if tried.fits:
            return tried
    return None


def _halved(settings: Settings) -> Settings | None:
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


def _size(settings: Settings, what: str) -> int:
    if what == "context":
        return settings.sequence_length
    return settings.num_generations if what == "num_generations" else settings.per_device_train_batch_size


def _allowed(settings: Settings, what: str, guess: int) -> int:
    guess = min(guess, _LIMITS[what])
    if what == "context":
        return max(settings.prompt_length + 64, guess // 64 * 64)
    step = settings.num_generations if what == "batch" else 1
    return max(step, guess // step * step)


def _resized(settings: Settings, what: str, size: int) -> Settings:
    if what == "context":
        return settings.with_(completion_length=size - settings.prompt_length)
    if what == "batch":
        return settings.with_(per_device_train_batch_size=size)
    return settings.with_(num_generations=size, per_device_train_batch_size=size)


def _notes(base: Settings) -> list[str]:
    notes = ["the step was executed on fake tensors; reserved memory came from a model of CUDA's caching allocator"]
    if base.load_in_4bit:
        notes.append("4-bit layers are modelled after bitsandbytes, not executed")
    return notes
