"""Lay out a plan: what fits on a GPU, and what to set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from memprof.reports.document.blocks import BarPart, Cell, Column, HeadlineBlock, TableBlock, TableRow, TextCell
from memprof.reports.document.tables import category_parts
from memprof.reports.document.text import category_label, phase_label, sentence_list, thousands, time_taken

from memprof.report.advice import Headline as FoundHeadline
from memprof.report.plan import Plan, PlanRow
from memprof.units import gib

_LARGEST = {
    "context": "Longest completion",
    "num_generations": "Most generations",
    "batch": "Largest micro-batch",
    "speed": "Micro-batch that fits",
}
_SETTING = {
    "context": "completion_length",
    "num_generations": "num_generations",
    "batch": "per_device_train_batch_size",
    "speed": "per_device_train_batch_size",
}


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A point of the chart of memory over time, as the page's script reads it; ``lines`` are its label."""

    name: str
    bytes: int
    seconds: float
    fits: bool
    on_front: bool
    lines: tuple[str, ...]
    fastest: bool


@dataclass(frozen=True)
class PlanDocument:
    """A plan and its best configuration as ``yaml``, if that was asked for."""

    plan: Plan
    yaml: str = ""

    @property
    def title(self) -> str:
        return f"{self.plan.model} on {self.plan.gpu}"

    @property
    def headline(self) -> HeadlineBlock:
        found = self.plan.headline or FoundHeadline(verdict=self.title, cause="", places=(), action="", assumed=())
        return HeadlineBlock.of(found, bad=not any(row.fits for row in self.plan.rows))

    @property
    def scale_bytes(self) -> int:
        """The scale of every bar."""
        return max([self.plan.limit_bytes, *(row.device_peak_bytes for row in self.plan.rows)])

    @property
    def best(self) -> str:
        """The name of the best row; empty if nothing fits."""
        return self.plan.best.method if self.plan.best else ""

    @property
    def fastest_code(self) -> str:
        """The fastest row's settings to paste, unless that is the best row too."""
        best, fastest = self.plan.best, self.plan.fastest
        same = best is not None and fastest is not None and best.config == fastest.config
        return "" if same else self.plan.fastest_code or ""

    @property
    def error_band(self) -> tuple[float, float]:
        """Multiples of a simulated need between which measured ones were, of programs that are known exactly."""
        seen = self.plan.expected_error.reserved
        return 1 / (1 + seen.high), 1 / (1 + seen.low)

    @property
    def largest_title(self) -> str:
        """The heading of what a search enlarged; empty without a search."""
        return _LARGEST[self.plan.maximized] if any(row.largest for row in self.plan.rows) else ""

    def largest(self, row: PlanRow) -> str:
        """Return the largest that fits with a row's method, in a cell; ``none`` if nothing does."""
        found = row.largest.config[_SETTING[self.plan.maximized]] if row.largest else 0
        return thousands(found) if found else "none"

    @property
    def varied(self) -> str:
        """What differs between the values of ``--vary``, and that nothing else does."""
        rows = self.plan.rows
        names = {row.method.partition("=")[0] for row in rows}
        if any("=" not in row.method for row in rows) or len(names) != 1:
            return ""
        name = names.pop()
        others = [n for n in rows[0].config if n != name and len({repr(row.config[n]) for row in rows}) > 1]
        also = f", and {sentence_list(others)} with it" if others else ""
        return f"Varied: {name}{also}. All other settings are the same in every row."

    @property
    def room(self) -> str:
        """How much the rows may use that have parts never compared, since their margin is larger."""
        less: dict[int, list[str]] = {}
        for row in self.plan.rows:
            if row.limit_bytes and row.limit_bytes < self.plan.limit_bytes:
                less.setdefault(row.limit_bytes, []).append(row.method)
        told = [f"{gib(limit)} GiB by {sentence_list(names)}" for limit, names in sorted(less.items(), reverse=True)]
        return f"Rows with a part that was never compared may use less: {'; '.join(told)}." if told else ""

    @property
    def notes(self) -> tuple[str, ...]:
        """All notes, those of ``varied`` and ``room`` first."""
        return (*filter(None, (self.varied, self.room)), *self.plan.notes)

    @property
    def timed(self) -> bool:
        """Whether any row's time is estimated."""
        return any(row.step_s for row in self.plan.rows)

    @property
    def per_tokens(self) -> bool:
        """Whether the rows' steps differ in their work, so that only the time of a token compares them."""
        return len({_tokens(row) for row in self.plan.rows}) > 1

    @property
    def table(self) -> TableBlock:
        """The rows as a table."""
        searched = self.largest_title
        more = (
            Column(searched, right=True, rank=1, folds=True), Column("needs then", right=True, on="p"),
        ) if searched else ()  # fmt: skip
        step = (Column("Step", right=True, rank=2, on="tm"), Column("Step", right=True, on="p")) if self.timed else ()
        columns = (
            Column("Method"), Column("Verdict", whole=True), Column("Needed", right=True, folds=True), *more,
            Column("Allocated", right=True, rank=5, folds=True),
            Column("Host", right=True, rank=6, folds=True), *step,
            Column("Highest in", whole=True, rank=4, folds=True), Column("Largest", whole=True, rank=3),
        )  # fmt: skip
        lines = tuple(self._line(row) for row in self.plan.rows)
        return TableBlock(columns, lines, "", elsewhere="a wider terminal, the page and the JSON have them")

    def _line(self, row: PlanRow) -> TableRow:
        searched, best = self.largest_title, row.method == self.best
        name = TextCell(row.method, badges=("best",) if searched and best else (), short=row.method)
        verdict = TextCell(verdict_of(row), "ok" if row.fits else "bad", short="fits" if row.fits else "OOM")
        needs = row.largest.device_peak_bytes if row.largest else None
        largest: tuple[Cell, ...] = (self.largest(row), needs or None) if searched else ()
        took = time_taken(round(row.step_s * 1e6) if row.step_s else None, estimated=True)
        times = (took + (" *" if row.on_front else "  "), TextCell(took, badges=("front",) if row.on_front else ()))
        where = phase_label(row.phase), category_label(row.largest_category)
        sizes = (row.peak_bytes, row.host_bytes)
        cells = (name, verdict, row.device_peak_bytes, *largest, *sizes, *(times if self.timed else ()), *where)
        return TableRow(cells, best)

    # -- time, as a cost -----------------------------------------------------------------------------------------------

    @property
    def fastest_sentence(self) -> str:
        """Which is the fastest that fits, by estimated time; or why none is named."""
        plan, row = self.plan, self.plan.fastest
        if row is None:
            if not self.timed:
                return f"No time is estimated: the speed of {plan.gpu} is unknown. Give a GPU model (--gpu 4090)."
            return "No row fits as given, so that none is called the fastest."
        own = row.config["per_device_train_batch_size"]
        where = f" with {own} in a micro-batch" if plan.maximized == "speed" else " as given"
        words = f"Fastest that fits{where}: {row.method}, {self._took(row)} (estimated)."
        if alike := _as_fast(row, plan):
            words += f" As fast to within 10%, which no estimate tells apart: {sentence_list(alike)}."
        return words

    def _time_us(self, row: PlanRow) -> int:
        return round((1000 * _pace(row) if self.per_tokens else row.step_s or 0.0) * 1e6)

    def _took(self, row: PlanRow) -> str:
        of = f" for {thousands(1000)} tokens" if self.per_tokens else " a step"
        return time_taken(self._time_us(row), estimated=True) + of

    def priced(self) -> tuple[Point, ...]:
        """Make the points of the chart: the rows as given, and the smaller micro-batches of a search for speed."""
        rows = [row for row in self.plan.rows if row.step_s]
        if self.plan.maximized == "speed":
            rows += [row.largest for row in rows if not row.fits and row.largest and row.largest.step_s]
        differ = _differing(rows)
        return tuple(self._point(row, differ) for row in rows)

    def _point(self, row: PlanRow, differ: Sequence[str]) -> Point:
        fastest = self.plan.fastest
        lines = (
            f"{gib(row.device_peak_bytes)} GiB needed, {verdict_of(row)}",
            f"{self._took(row)} (estimated)",
            *(f"{name} = {row.config[name]}" for name in differ),
        )
        return Point(
            name=row.method, bytes=row.device_peak_bytes, seconds=self._time_us(row) / 1e6, fits=row.fits,
            on_front=bool(row.on_front), lines=lines,
            fastest=fastest is not None and (row.method, row.config) == (fastest.method, fastest.config),
        )  # fmt: skip


def verdict_of(row: PlanRow) -> str:
    """Return ``fits`` or ``does not fit``."""
    return "fits" if row.fits else "does not fit"


def parts_of(row: PlanRow) -> tuple[BarPart, ...]:
    """List the categories at a row's peak, and then what the device needs beyond them."""
    held = category_parts(row.categories)
    beyond = row.device_peak_bytes - sum(part.bytes for part in held)
    return (*held, BarPart("cached", "Reserved beyond, and non-PyTorch", beyond)) if beyond > 0 else held


# Times that differ by less are called a tie (as ``memprof.plan.pareto_front`` chooses).
_ALIKE = 0.10


def _as_fast(row: PlanRow, plan: Plan) -> list[str]:
    """Name the other rows that fit, as given or in smaller micro-batches, and tie with the fastest."""
    smaller = plan.maximized == "speed"
    tried = [(r.largest or r) if smaller and not r.fits else r for r in plan.rows]
    timed = [r for r in tried if r.fits and r.step_s]
    least = min(_pace(r) for r in timed)
    return [r.method for r in timed if r.method != row.method and _pace(r) <= least * (1 + _ALIKE)]


def _tokens(row: PlanRow) -> int:
    """Count the tokens that a row's step trains on, all ranks together."""
    c = row.config
    own = c["per_device_train_batch_size"] * c["gradient_accumulation_steps"]
    ranks = 1 if c["sharding"] == "tp" else c["gpus"]
    return int(own * ranks * (c["prompt_length"] + c["completion_length"]))


def _pace(row: PlanRow) -> float:
    return (row.step_s or 0.0) / _tokens(row)


def _differing(rows: Sequence[PlanRow]) -> list[str]:
    """Name the settings that are not the same in all rows, and those that say how much a step does."""
    always = ("per_device_train_batch_size", "prompt_length", "completion_length")
    first = rows[0].config if rows else {}
    names = [name for name in first if len({repr(row.config[name]) for row in rows}) > 1]
    return [*names, *(name for name in always if name not in names)]
