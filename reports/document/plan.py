"""Fill the document of a plan from its JSON (``memprof.plan/1``): what fits a card, and what to set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memprof.reports.document.model import Part
from memprof.reports.document.text import STACK_ORDER, category_label, gib, phase_label, plain, thousands, time_taken

from memprof.units import format_gib

__all__ = ["PlanDocument", "PlanRow", "build_plan"]


@dataclass(frozen=True)
class PlanRow:
    """One method, or one value of ``--vary``.

    ``parts`` are the categories at its peak, and then what the device needs beyond them. ``largest`` is the most of
    what was maximized that fits with this method (0: nothing was found), and ``largest_bytes`` what it needs.
    """

    method: str
    fits: bool
    needed_bytes: int
    held_bytes: int
    host_bytes: int
    phase_label: str
    largest_label: str
    parts: tuple[Part, ...]
    largest: int | None = None
    largest_bytes: int = 0
    step_us: int | None = None

    @property
    def verdict(self) -> str:
        """``fits`` or ``does not fit``."""
        return "fits" if self.fits else "does not fit"

    @property
    def largest_words(self) -> str:
        """The largest that fits, in a cell; ``none`` where nothing does."""
        return "–" if self.largest is None else thousands(self.largest) if self.largest else "none"


@dataclass(frozen=True)
class PlanDocument:
    """What is shown of a plan.

    ``scale_bytes`` is the one scale of every bar. ``best`` names the best row and is empty where nothing fits; ``code``
    and ``yaml`` are its settings to paste, as they stand: they hold line breaks.
    """

    title: str
    rows: tuple[PlanRow, ...]
    total_bytes: int
    limit_bytes: int
    scale_bytes: int
    best: str
    best_sentence: str
    code: str
    yaml: str
    error: str
    notes: tuple[str, ...]
    data: dict[str, Any]
    error_band: tuple[float, float] = (0.0, 0.0)
    largest_title: str = ""

    def cells(self) -> list[tuple[str, ...]]:
        """Write the rows as a table of words, its head first."""
        step = ("Step",) if self.timed else ()
        head = ("Method", "Verdict", "Needed GiB", "Allocated GiB", "Host GiB", *step, "Highest in", "Largest")
        if not self.largest_title:
            return [head, *(_cells(row, self.timed) for row in self.rows)]
        return [(*head, self.largest_title), *((*_cells(row, self.timed), row.largest_words) for row in self.rows)]

    @property
    def timed(self) -> bool:
        """Tell whether any row's time is estimated."""
        return any(row.step_us is not None for row in self.rows)


def _cells(row: PlanRow, timed: bool) -> tuple[str, ...]:
    sizes = (format_gib(n) for n in (row.needed_bytes, row.held_bytes, row.host_bytes))
    took = (time_taken(row.step_us, estimated=True),) if timed else ()
    return (row.method, "fits" if row.fits else "OOM", *sizes, *took, row.phase_label, row.largest_label)


def build_plan(data: dict[str, Any], yaml: str = "") -> PlanDocument:
    """Fill the document of a plan.

    Args:
        data: the plan as ``Plan.to_dict`` gives it, and under ``code`` the best configuration to paste.
        yaml: the same as YAML, where it was asked for.
    """
    searched = any("largest" in row for row in data["rows"])
    rows = tuple(_row(row, data["maximized"] if searched else "") for row in data["rows"])
    limit = int(data["limit_bytes"])
    return PlanDocument(
        title=f"{plain(data['model'])} on {plain(data['gpu'])}",
        rows=rows,
        total_bytes=int(data["total_bytes"]),
        limit_bytes=limit,
        scale_bytes=max([limit, *(row.needed_bytes for row in rows)]),
        best=plain(data["best"]["method"]) if data["best"] else "",
        best_sentence=_best_sentence(data),
        code=data.get("code") or "",
        yaml=yaml,
        error_band=_error_band(data["expected_error"]["reserved"]),
        largest_title=_LARGEST[data["maximized"]] if any("largest" in row for row in data["rows"]) else "",
        error=plain(data["expected_error"]["sentence"]),
        notes=tuple(plain(note) for note in data["notes"]),
        data=data,
    )


_LARGEST = {"context": "Longest completion", "num_generations": "Most generations", "batch": "Largest micro-batch"}
_SETTING = {
    "context": "completion_length",
    "num_generations": "num_generations",
    "batch": "per_device_train_batch_size",
}


def _error_band(seen: Mapping[str, Any]) -> tuple[float, float]:
    """Return between which multiples of a simulated need the measured one lay, in the comparisons there are."""
    return 1 / (1 + seen["high"]), 1 / (1 + seen["low"])


def _row(row: Mapping[str, Any], maximized: str) -> PlanRow:
    held = [Part(c, category_label(c), row["categories"][c]) for c in STACK_ORDER if row["categories"].get(c)]
    beyond = int(row["device_peak_bytes"]) - sum(part.bytes for part in held)
    rest = [Part("cached", "Reserved beyond, and outside torch", beyond)] if beyond > 0 else []
    return PlanRow(
        method=plain(row["method"]),
        fits=bool(row["fits"]),
        needed_bytes=int(row["device_peak_bytes"]),
        held_bytes=int(row["peak_bytes"]),
        host_bytes=int(row["host_bytes"]),
        phase_label=plain(phase_label(row["phase"])),
        largest_label=plain(category_label(row["largest_category"])),
        parts=(*held, *rest),
        largest=(row["largest"]["config"][_SETTING[maximized]] if "largest" in row else 0) if maximized else None,
        largest_bytes=int(row["largest"]["device_peak_bytes"]) if "largest" in row else 0,
        step_us=round(row["step_s"] * 1e6) if row.get("step_s") else None,
    )


def _best_sentence(data: Mapping[str, Any]) -> str:
    best = data["best"]
    if not best:
        return "Nothing tried fits. Use a smaller model, a larger card or shorter sequences."
    config, method = best["config"], plain(best["method"])
    how = f"Best found ({method}, most {plain(data['maximized']).replace('_', ' ')})"
    if "=" in method:  # a value of --vary
        how = f"Largest of these that fits ({method})"
    return (
        f"{how}: {config['per_device_train_batch_size']} completions in a micro-batch of "
        f"{config['prompt_length']} + {config['completion_length']} tokens, "
        f"{gib(best['device_peak_bytes'])} GiB needed.{_fastest(data)}"
    )


def _fastest(data: Mapping[str, Any]) -> str:
    """Name the fastest of the methods that fit as given, where their times are estimated."""
    timed = [row for row in data["rows"] if row["fits"] and row.get("step_s")]
    if len(timed) < 2:
        return ""
    row = min(timed, key=lambda row: row["step_s"])
    took = time_taken(round(row["step_s"] * 1e6), estimated=True)
    return f" Fastest that fits as given: {plain(row['method'])}, {took} a step (estimated)."
