"""Fill the document of a plan from its JSON (``memprof.plan/1``): what fits a card, and what to set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memprof.reports.document.blocks import Cell, Column, Headline, Line, Part, Table, Words
from memprof.reports.document.text import (
    STACK_ORDER,
    category_label,
    phase_label,
    plain,
    sentence_list,
    thousands,
    time_taken,
)

from memprof.units import gib


@dataclass(frozen=True)
class PlanRow:
    """One method, or one value of ``--vary``.

    ``parts`` are the categories at its peak, and then what the device needs beyond them. ``largest`` is the most of
    what was maximized that fits with this method (0: nothing was found), and ``largest_bytes`` what it needs.
    ``on_front``: no other row is as fast and as small.
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
    on_front: bool = False

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
    and ``yaml`` are its settings to paste, as they stand: they hold line breaks. ``fastest_code`` is the fastest's,
    where that is another one. ``priced`` are the points of the chart of memory against time, as its script reads them.
    ``room`` says which rows may use less than ``limit_bytes``, and why; ``varied`` what differs between the values of
    ``--vary``.
    """

    title: str
    rows: tuple[PlanRow, ...]
    total_bytes: int
    limit_bytes: int
    scale_bytes: int
    best: str
    headline: Headline
    code: str
    yaml: str
    error: str
    notes: tuple[str, ...]
    data: dict[str, Any]
    error_band: tuple[float, float] = (0.0, 0.0)
    largest_title: str = ""
    fastest_sentence: str = ""
    fastest_code: str = ""
    priced: tuple[dict[str, Any], ...] = ()
    per_tokens: bool = False
    room: str = ""
    varied: str = ""

    @property
    def table(self) -> Table:
        """Write the rows as a table."""
        searched = self.largest_title
        more = (
            Column(searched, right=True, rank=1, folds=True), Column("needs then", right=True, on="p"),
        ) if searched else ()  # fmt: skip
        step = (Column("Step", right=True, rank=2, on="tm"), Column("Step", right=True, on="p")) if self.timed else ()
        columns = (
            Column("Method"), Column("Verdict", whole=True), Column("Needed", right=True, folds=True), *more,
            Column("Allocated", right=True, rank=5, folds=True, page="Held"),
            Column("Host", right=True, rank=6, folds=True), *step,
            Column("Highest in", whole=True, rank=4, folds=True), Column("Largest", whole=True, rank=3),
        )  # fmt: skip
        lines = tuple(_line(row, searched, self.timed, row.method == self.best) for row in self.rows)
        return Table(columns, lines, "", elsewhere="a wider terminal, the page and the JSON have them")

    @property
    def told(self) -> tuple[str, ...]:
        """Return the notes without those that have a place of their own (``varied``, ``room``)."""
        return tuple(note for note in self.notes if note not in (self.varied, self.room))

    @property
    def timed(self) -> bool:
        """Tell whether any row's time is estimated."""
        return any(row.step_us is not None for row in self.rows)


def _line(row: PlanRow, searched: str, timed: bool, best: bool) -> Line:
    name = Words(row.method, badges=("best",) if searched and best else (), short=row.method)
    verdict = Words(row.verdict, "ok" if row.fits else "bad", short="fits" if row.fits else "OOM")
    largest: tuple[Cell, ...] = (row.largest_words, row.largest_bytes or None) if searched else ()
    took = time_taken(row.step_us, estimated=True)
    times = (took + (" *" if row.on_front else "  "), Words(took, badges=("front",) if row.on_front else ()))
    sizes, where = (row.held_bytes, row.host_bytes), (row.phase_label, row.largest_label)
    return Line((name, verdict, row.needed_bytes, *largest, *sizes, *(times if timed else ()), *where), best)


def build_plan(data: dict[str, Any], yaml: str = "") -> PlanDocument:
    """Fill the document of a plan.

    Args:
        data: the plan as ``Plan.to_dict`` gives it, and under ``code`` the best configuration to paste.
        yaml: the same as YAML, where it was asked for.
    """
    searched = any("largest" in row for row in data["rows"])
    rows = tuple(_row(row, data["maximized"] if searched else "") for row in data["rows"])
    limit = int(data["limit_bytes"])
    fastest = data.get("fastest") or {}
    same = bool(data["best"]) and fastest.get("config") == data["best"]["config"]
    return PlanDocument(
        title=f"{plain(data['model'])} on {plain(data['gpu'])}",
        rows=rows,
        total_bytes=int(data["total_bytes"]),
        limit_bytes=limit,
        scale_bytes=max([limit, *(row.needed_bytes for row in rows)]),
        best=plain(data["best"]["method"]) if data["best"] else "",
        headline=Headline.of(data["headline"], bad=not any(row.fits for row in rows)),
        code=data.get("code") or "",
        yaml=yaml,
        error_band=_error_band(data["expected_error"]),
        largest_title=_LARGEST[data["maximized"]] if any("largest" in row for row in data["rows"]) else "",
        error=plain(data["expected_error"]["sentence"]),
        notes=tuple(plain(note) for note in [*filter(None, [_varied(data), _room(data)]), *data["notes"]]),
        data=data,
        fastest_sentence=_fastest(data),
        fastest_code="" if same else data.get("fastest_code") or "",
        priced=_priced(data),
        per_tokens=_per_tokens(data),
        room=_room(data),
        varied=_varied(data),
    )


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


def _varied(data: Mapping[str, Any]) -> str:
    """Say what differs between the values of ``--vary``, and that nothing else does."""
    names = {row["method"].partition("=")[0] for row in data["rows"]}
    if any("=" not in row["method"] for row in data["rows"]) or len(names) != 1:
        return ""
    name = names.pop()
    configs = [row["config"] for row in data["rows"]]
    others = [n for n in configs[0] if n != name and len({repr(c[n]) for c in configs}) > 1]
    also = f", and {sentence_list(others)} with it" if others else ""
    return plain(f"Varied: {name}{also}. All other settings are the same in every row.")


def _room(data: Mapping[str, Any]) -> str:
    """Say how much the rows may use that have parts never compared, since a larger margin is kept for them."""
    less: dict[int, list[str]] = {}
    for row in data["rows"]:
        if (limit := row.get("limit_bytes")) and limit < data["limit_bytes"]:
            less.setdefault(limit, []).append(plain(row["method"]))
    told = [f"{gib(limit)} GiB by {sentence_list(names)}" for limit, names in sorted(less.items(), reverse=True)]
    return f"Rows with a part that was never compared may use less: {'; '.join(told)}." if told else ""


def _error_band(error: Mapping[str, Any]) -> tuple[float, float]:
    """Return between which multiples of a simulated need the measured one lay, of programs that are known exactly."""
    seen = error["reserved"]
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
        on_front=bool(row.get("on_front")),
    )


# -- time, as a price --------------------------------------------------------------------------------------------------

# Times that differ by less are called a tie (as ``memprof.plan.pareto_front`` chooses).
_ALIKE = 0.10


def _fastest(data: Mapping[str, Any]) -> str:
    """Say which is the fastest that fits, by estimated time; or why none is named."""
    row = data.get("fastest")
    if row is None:
        if not any(r.get("step_s") for r in data["rows"]):
            return f"No time is estimated: no speed is known of {plain(data['gpu'])}. Name a card, such as --gpu 4090."
        return "No row fits as given, so that none is called the fastest."
    took = _words(_time_us(row, _per_tokens(data)), data)
    own = row["config"]["per_device_train_batch_size"]
    where = f" with {own} in a micro-batch" if data["maximized"] == "speed" else " as given"
    words = f"Fastest that fits{where}: {plain(row['method'])}, {took} (estimated)."
    if alike := _as_fast(row, data):
        words += f" As fast to within 10 %, which no estimate tells apart: {sentence_list(alike)}."
    return words


def _as_fast(row: Mapping[str, Any], data: Mapping[str, Any]) -> list[str]:
    """Name the other rows that fit, as given or in smaller micro-batches, and tie with the fastest."""
    smaller = data["maximized"] == "speed"
    tried = [(r.get("largest") or r) if smaller and not r["fits"] else r for r in data["rows"]]
    timed = [r for r in tried if r["fits"] and r.get("step_s")]
    least = min(_pace(r) for r in timed)
    return [plain(r["method"]) for r in timed if r["method"] != row["method"] and _pace(r) <= least * (1 + _ALIKE)]


def _tokens(row: Mapping[str, Any]) -> int:
    """Count the tokens that a row's step trains on, all ranks together."""
    c = row["config"]
    own = c["per_device_train_batch_size"] * c["gradient_accumulation_steps"]
    ranks = 1 if c["sharding"] == "tp" else c["gpus"]
    return int(own * ranks * (c["prompt_length"] + c["completion_length"]))


def _pace(row: Mapping[str, Any]) -> float:
    return float(row["step_s"]) / _tokens(row)


def _per_tokens(data: Mapping[str, Any]) -> bool:
    """Tell whether the rows' steps differ in their work, so that only the time of a token compares them."""
    return len({_tokens(row) for row in data["rows"]}) > 1


def _time_us(row: Mapping[str, Any], per_tokens: bool) -> int:
    return round((1000 * _pace(row) if per_tokens else float(row["step_s"])) * 1e6)


def _words(us: int, data: Mapping[str, Any]) -> str:
    return time_taken(us, estimated=True) + (f" for {thousands(1000)} tokens" if _per_tokens(data) else " a step")


def _priced(data: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """Make the points of the chart: the rows as given, and the smaller micro-batches that a search for speed found."""
    rows = [row for row in data["rows"] if row.get("step_s")]
    if data["maximized"] == "speed":
        rows += [row["largest"] for row in rows if not row["fits"] and (row.get("largest") or {}).get("step_s")]
    differ = _differing([row["config"] for row in rows])
    fastest = data.get("fastest") or {}
    return tuple(_point(row, data, differ, fastest) for row in rows)


def _point(
    row: Mapping[str, Any], data: Mapping[str, Any], differ: list[str], fastest: Mapping[str, Any]
) -> dict[str, Any]:
    """Make a point; its lines tell it apart from the others, in its label."""
    config, us, need = row["config"], _time_us(row, _per_tokens(data)), int(row["device_peak_bytes"])
    lines = [
        f"{gib(need)} GiB needed, {'fits' if row['fits'] else 'does not fit'}",
        f"{_words(us, data)} (estimated)",
        *(f"{name} = {config[name]}" for name in differ),
    ]
    return {
        "name": plain(row["method"]), "bytes": need, "seconds": us / 1e6, "fits": bool(row["fits"]),
        "on_front": bool(row.get("on_front")), "lines": [plain(line) for line in lines],
        "fastest": row["method"] == fastest.get("method") and config == fastest.get("config"),
    }  # fmt: skip


def _differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name the settings that are not the same in all rows, and those that say how much a step does."""
    always = ("per_device_train_batch_size", "prompt_length", "completion_length")
    names = [name for name in (configs[0] if configs else ()) if len({repr(c[name]) for c in configs}) > 1]
    return [*names, *(name for name in always if name not in names)]
