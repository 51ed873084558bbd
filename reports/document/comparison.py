"""From a comparison's JSON to what the page, the terminal and markdown show of it: frozen, plain, in words where words
are shown. Every string is one harmless line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memprof.reports.document.blocks import (
    Cell,
    Column,
    Fact,
    Figure,
    Headline,
    Line,
    Part,
    Table,
    Words,
    table,
)  # fmt: skip
from memprof.reports.document.build import build_document
from memprof.reports.document.model import Document, Room
from memprof.reports.document.summary import room_of
from memprof.reports.document.tables import call_site, shown_stack, site_words
from memprof.reports.document.text import (
    CATEGORY_WORDS,
    GROUP_WORDS,
    category_label,
    group_label,
    plain,
    short_path,
    signed_gib,
    size,
)

from memprof._version import __version__
from memprof.analysis.headline import change_words, fit_words, headline_of_comparison
from memprof.report import comparison as model
from memprof.report.codec import from_builtins, to_builtins
from memprof.units import amount, gib


@dataclass(frozen=True)
class ComparedRun:
    """One run. ``document`` is ``None`` for published rows; ``facts`` say what it is, ``parts`` what it is made of.

    ``room`` says how far it was from out of memory.
    """

    label: str
    badge: str
    document: Document | None
    facts: tuple[str, ...]
    parts: tuple[Part, ...]
    room: Room | None = None


@dataclass(frozen=True)
class OnlyIn:
    """What one run holds at its peak and the other does not: blocks of one stack and size in a line."""

    title: str
    note: str
    allocations: Table


@dataclass(frozen=True)
class Comparison:
    """Runs side by side. ``scale_bytes`` is the one scale of every bar; ``data`` is the JSON it was made from.

    ``totals`` are the runs' own, ``rows`` has a line for each component, with a terminal's and a page's figures.
    ``verdicts`` say of each run whether it fits, and by how much.

    ``settings`` differ and memory is known to depend on them, ``others`` differ too. ``unchanged`` says how far off
    the simulator is on a recorded run as it was; empty where none was simulated.
    """

    title: str
    headline: Headline
    unchanged: str
    columns: tuple[ComparedRun, ...]
    totals: tuple[int | None, ...]
    rows: Table
    capacity_bytes: int | None
    device: str
    verdicts: tuple[tuple[bool, str], ...]
    scale_bytes: int
    settings: Table | None
    others: Table | None
    only_in: tuple[OnlyIn, ...]
    legend: tuple[Part, ...]
    reproduce: tuple[Fact, ...]
    notes: tuple[str, ...]
    data: dict[str, Any]


# A published row has no categories: it is drawn in the colour of the only or main one it is made of; training memory,
# which is many, in a colour of its own.
_COLOUR_OF = {
    "training": "training",
    "grpo_loss": "loss_logits",
    "reference_and_reward": "reference_model",
    "inference": "inference_engine",
    "kv_cache": "kv_cache",
}


def build_comparison(data: dict[str, Any], documents: Sequence[Document | None] = ()) -> Comparison:
    """Fill the document of a comparison (``memprof.compare/1``).

    Args:
        data: the comparison as :func:`memprof.analysis.compare.compare` gives it.
        documents: one a run, where the caller has them with their timelines; others are made from the reports.
    """
    runs = data["runs"]
    known = list(documents) or [None] * len(runs)
    columns = tuple(_column(run, document, data["capacity"]) for run, document in zip(runs, known, strict=True))
    labels = [column.label for column in columns]
    capacity, totals = data["capacity"], tuple(data["rows"][-1]["at_peak"])
    beside = _beside_rows(data["beside"])
    devices = [n for row in beside if row["id"] == "device_peak" for n in row["values"]]
    scale = max(1, *(n or 0 for n in (*totals, *devices)))
    verdicts, device = _verdicts(capacity), _device(capacity)
    return Comparison(
        title=_title(data, labels),
        headline=_headline(data),
        unchanged=_unchanged(data),
        columns=columns,
        totals=totals,
        rows=_Rows(columns, scale, capacity, device, verdicts).table(data["rows"], beside),
        capacity_bytes=capacity["bytes"] if capacity else None,
        device=device,
        verdicts=verdicts,
        scale_bytes=scale,
        settings=_settings("What changed", labels, [line for line in data["config_diff"] if line["matters"]]),
        others=_settings("Setting", labels, [line for line in data["config_diff"] if not line["matters"]]),
        only_in=tuple(_only_in(entry, labels) for entry in data["allocations_only_in"] if entry["allocations"]),
        legend=_legend(columns),
        reproduce=_reproduce(data),
        notes=_notes(data, columns),
        data=data,
    )


def _title(data: Mapping[str, Any], labels: Sequence[str]) -> str:
    """Name the runs; of published rows also what was measured, which is seldom the model they stand beside."""
    title = " and ".join(labels) if len(labels) < 3 else f"{labels[0]} and {len(labels) - 1} others"
    settings = dict.fromkeys(plain(run["published"]["setting"]) for run in data["runs"] if run["report"] is None)
    if not settings or all(run["report"] is None for run in data["runs"]):
        return title
    return f"{title} (published for {'; '.join(settings)})"


def _column(run: Mapping[str, Any], document: Document | None, capacity: Mapping[str, Any] | None) -> ComparedRun:
    label = plain(run["label"])
    if run["report"] is None:
        published = run["published"]
        facts = (plain(published["setting"]), plain(published["source"]))
        groups = published["groups"]
        parts = tuple(Part(c, group_label(g), groups[g]) for g, c in _COLOUR_OF.items() if groups.get(g))
        return ComparedRun(label, plain(run["badge"]), None, facts, parts)
    made = document or build_document(run["report"], label=label)
    room = room_of({**run["report"], **_card(run["report"], capacity)})
    return ComparedRun(label, plain(run["badge"]), made, made.subtitle, made.summary.bar, room)


def _card(report: Mapping[str, Any], capacity: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the card that a run is measured against, and whether it is the other run's."""
    if capacity is None:
        return {}
    own = report["source"]["device_total_bytes"] == capacity["bytes"]
    came = capacity["from"] if own or capacity["from"] != "device" else "other"
    return {"capacity": {"bytes": capacity["bytes"], "from": came}}


def _notes(data: Mapping[str, Any], columns: Sequence[ComparedRun]) -> tuple[str, ...]:
    """List the comparison's own notes, then each run's under its label."""
    own = [plain(note) for note in data["notes"]]
    return (*own, *[f"{c.label}: {note}" for c in columns if c.document for note in c.document.notes])


def _legend(columns: Sequence[ComparedRun]) -> tuple[Part, ...]:
    """List every colour once, under the name it has in the first run that shows it."""
    parts: dict[str, Part] = {}
    for column in columns:
        for part in column.parts:
            if part.bytes:
                parts.setdefault(part.id, part)
    return tuple(parts.values())


def _reproduce(data: Mapping[str, Any]) -> tuple[Fact, ...]:
    runs, capacity = data["runs"], data["capacity"]
    files = [name for run in runs if run["report"] for name in run["report"]["source"]["files"][:1]]
    shown = [_quoted(re.split(r"[/\\]", plain(name))[-1]) for name in files]
    sets = dict.fromkeys(plain(run["published"]["set"]) for run in runs if run["report"] is None)
    shown += [f"--published {_quoted(name)}" for name in sets]
    shown += [f"--capacity {_sized(capacity['bytes'])}"] if capacity and capacity["from"] == "option" else []
    return (
        Fact("Command", f"memprof compare {' '.join(shown)} -o compare.html"),
        Fact("memprof", __version__),
        Fact("Units", "1 GiB = 2³⁰ bytes", "below 1 GiB in MiB; in GiB columns below 0.005 as <0.01"),
    )


def _quoted(word: str) -> str:
    return "'" + word.replace("'", "'\\''") + "'" if re.search(r"[^\w.+-]", word) else word


def _sized(n_bytes: int) -> str:
    """Write a size as the command line takes it, exact."""
    for factor, unit in ((2**30, "GiB"), (10**9, "GB"), (10**6, "MB")):
        if n_bytes % factor == 0:
            return f"{n_bytes // factor}{unit}"
    return f"{n_bytes}B"


# ---- rows ------------------------------------------------------------------------------------------------------------

# Groups that can hold one category only: where each line costs one, the group says it all.
_ALONE = ("grpo_loss", "inference", "kv_cache")
# Sums and figures of the device: their bars are plain.
_PLAIN = ("total", "device_peak", "reserved", "non_torch")


def _beside_rows(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Leave out reserved memory where memory outside torch is not known."""
    outside = any(row["id"] == "non_torch" for row in rows)
    return [row for row in rows if outside or row["id"] != "reserved"]


@dataclass(frozen=True)
class _Rows:
    """Draw up the components: a line each, its categories and their details below it, what lies beside them last."""

    runs: tuple[ComparedRun, ...]
    highest: int
    capacity: Mapping[str, Any] | None
    device: str
    verdicts: tuple[tuple[bool, str], ...]

    @property
    def scale(self) -> int:
        """Count the bytes of a full bar, the capacity among them unless everything would look tiny beside it."""
        capacity = self.capacity["bytes"] if self.capacity else 0
        return int(max(self.highest, capacity if capacity <= 4 * self.highest else 0))

    def table(self, rows: Sequence[Mapping[str, Any]], beside: Sequence[Mapping[str, Any]]) -> Table:
        lines = [line for row in rows for line in self._lines(row, GROUP_WORDS, ())]
        lines += [line for row in beside for line in self._lines({**row, "at_peak": row["values"]}, {}, (), "beside")]
        lines += [self._fits()] if self.capacity else []
        limit = self.capacity["bytes"] if self.capacity else None
        columns = tuple(self._columns())
        return Table(columns, tuple(lines), "components compared", scale=self.scale, capacity=limit, units=False)

    def _columns(self) -> Iterator[Column]:
        two = len(self.runs) == 2
        yield Column("GiB at the peak", page="Component", least=26)
        for i, run in enumerate(self.runs):
            yield Column(run.label, right=True, note=run.badge, group=i, named=True)
            if run.document:
                yield Column("own peak", right=True, wide=True, rank=3, group=i)
        for i, run in enumerate(self.runs[1:], 1):
            more: dict[str, Any] = {"group": i, "note": "" if two else run.label}
            yield Column("Difference", right=True, rank=2, on="tm", **more)
            yield Column("Difference", right=True, on="p" if two else "", **more)
            yield Column("Ratio", right=True, rank=4, wide=True, on="tmp" if two else "tm", **more)
            yield Column("Change", rank=1, whole=True, on="tm", **more)
            yield Column("Change", on="p" if two else "", **more)

    def _lines(
        self, row: Mapping[str, Any], words: Mapping[str, str], above: tuple[str, ...], kind: str = ""
    ) -> Iterator[Line]:
        figures, own = tuple(row["at_peak"]), tuple(row.get("own_peak") or (None,) * len(self.runs))
        path, label = (*above, plain(row["id"])), plain(row["label"])
        below = () if path[-1] == "unattributed" else row.get("categories") or row.get("details") or ()
        cells: list[Cell] = [Words(label, category=path[-1] if len(path) == 2 else "")]
        for i, (run, n) in enumerate(zip(self.runs, figures, strict=True)):
            small = f"{_difference(figures, i)}, {_change(figures, own, i)}" if i and len(self.runs) > 2 else ""
            small = "" if small.endswith((", –", ", same")) else small
            cells.append(Figure(n, self._parts(path, label, n, below, i), small, path[-1] in _PLAIN[:2]))
            cells += ["" if own[i] is None else own[i]] if run.document else []
        for i in range(1, len(self.runs)):
            change = row["difference"][i]
            cells += ["–" if change is None else signed_gib(change), _difference(figures, i)]
            cells += [ratio_words(row["ratio"][i]), change_words(figures[0], figures[i], own[0], own[i])]
            cells.append(_change(figures, own, i))
        kind = "total" if path == ("total",) else kind or ("" if any(figures) or any(own) else "zero")
        alone = len(path) > 2 or (len(path) == 2 and path[0] in _ALONE)
        ids = tuple(plain(child["id"]) for child in below)
        yield Line(
            tuple(cells), path=path, parts=ids, kind=kind, hint=words.get(path[-1], ""), on="p" if alone else "tmp"
        )
        for child in below:
            yield from self._lines(child, CATEGORY_WORDS, path)

    def _parts(
        self, path: tuple[str, ...], label: str, n: int | None, below: Sequence[Mapping[str, Any]], run: int
    ) -> tuple[Part, ...]:
        """Draw a figure: a group's bar is made of its categories, the total's and the device's are plain."""
        if not n or path[-1].endswith("_bytes"):
            return ()
        if path[-1] in _PLAIN or path[-1].startswith("phase:"):
            return (Part("total", label, n),)
        if len(path) == 1 and any(child["at_peak"][run] for child in below):
            return tuple(Part(plain(c["id"]), plain(c["label"]), c["at_peak"][run] or 0) for c in below)
        if len(path) == 1 and self.runs[run].document is None:
            return tuple(part for part in self.runs[run].parts if part.label == label)
        return (Part(path[1] if len(path) > 2 else path[-1], label, n),)

    def _fits(self) -> Line:
        limit = self.capacity["bytes"] if self.capacity else 0
        small = "the dashed line" if limit <= self.scale else ""
        cells: list[Cell] = [Words(f"Fits in {self.device}", small=small, short=f"Fits {gib(limit)}")]
        for run, (fits, words) in zip(self.runs, self.verdicts, strict=True):
            tone, short = ("ok", "yes") if fits else ("bad", "no")
            cells += [Words(words, tone, short=short), *([""] if run.document else [])]
        return Line((*cells, *[""] * (5 * (len(self.runs) - 1))), kind="fits")


def _difference(figures: Sequence[int | None], run: int) -> str:
    """Write how much more a later run holds than the first, with its unit; ``–`` where one is not known."""
    first, other = figures[0], figures[run]
    if first is None or other is None:
        return "–"
    return f"+{amount(other - first)}" if other > first else amount(other - first)


def _change(figures: Sequence[int | None], own: Sequence[int | None], run: int) -> str:
    """Put in words how a later run differs from the first, sizes with their unit."""
    return change_words(figures[0], figures[run], own[0], own[run], amount)


def ratio_words(ratio: float | None) -> str:
    """Write a ratio as ``0.11×``; ``–`` where there is nothing to divide by."""
    if ratio is None:
        return "–"
    if 0 < ratio < 0.005:
        return "<0.01×"
    return f"{ratio:.2f}×" if ratio < 10 else f"{ratio:.1f}×"


# ---- sentences -------------------------------------------------------------------------------------------------------


def _unchanged(data: Mapping[str, Any]) -> str:
    """Say, of a recorded run that was simulated, how far off the simulator is on the run as it was."""
    found = data.get("unchanged")
    if not found:
        return ""
    measured, simulated = found["measured_bytes"], found["simulated_bytes"]
    error = f"{100 * (simulated - measured) / measured:+.2f} %".replace("-", "−") if measured else "not known"
    figures = f"{size(simulated)} simulated, {size(measured)} measured"
    return f"The simulator's error on the unchanged run: {error} of the allocated peak ({figures})."


def _headline(data: Mapping[str, Any]) -> Headline:
    """Take the comparison's headline; one that was written before comparisons had one gets it here."""
    found = data.get("headline") or to_builtins(headline_of_comparison(from_builtins(data, model.Comparison)))
    return Headline.of(found)


def _device(capacity: Mapping[str, Any] | None) -> str:
    """Write the capacity as it was given: 24 GB are not 24 GiB."""
    n = capacity["bytes"] if capacity else 0
    return f"{n / 1e9:g} GB" if n % 10**8 == 0 else f"{gib(n)} GiB"


def _verdicts(capacity: Mapping[str, Any] | None) -> tuple[tuple[bool, str], ...]:
    if capacity is None:
        return ()
    typed = from_builtins(capacity, model.ComparedCapacity)
    return tuple((fits, fit_words(typed, i)) for i, fits in enumerate(typed.fits))


def _settings(title: str, labels: Sequence[str], lines: Sequence[Mapping[str, Any]]) -> Table | None:
    """Draw up settings that differ, a column a run."""
    columns = (Column(title), *[Column(label) for label in labels])
    return Table(columns, tuple(_setting(line) for line in lines), "settings") if lines else None


def _setting(line: Mapping[str, Any]) -> Line:
    name = line["setting"] if line["of"] == "config" else f"{line['setting']} ({line['of']})"
    values = [Words("–") if v is None else Words(plain(v), "code") for v in line["values"]]
    return Line((Words(plain(name), "code"), *values))


# ---- allocations -----------------------------------------------------------------------------------------------------


def _only_in(entry: Mapping[str, Any], labels: Sequence[str]) -> OnlyIn:
    here, there = labels[entry["in"]], labels[entry["not_in"]]
    note = f"{gib(entry['bytes'])} GiB by stack and size, {gib(sum(a['bytes'] for a in entry['allocations']))} listed"
    if entry["above_bytes"]:
        note += f"; blocks of up to {size(entry['above_bytes'])} are not compared: a report does not list them all"
    found = table(
        "Size>|Blocks!|Category|Made at~@t|Made at@mp", [_missing(a) for a in entry["allocations"]], "only-in"
    )
    assert found is not None
    return OnlyIn(f"At the peak of {here}, not of {there}", note, found)


def _named(allocation: Mapping[str, Any], count: int) -> str:
    """Name the tensor where no stack says where it was made; of several like it, with stars for the digits."""
    name = plain(allocation.get("name") or "")
    return re.sub(r"\d+", "*", name) if count > 1 else name


def _missing(allocation: Mapping[str, Any]) -> Line:
    n_more = allocation["count_in"] - allocation["count_not_in"]
    many = f"{n_more} × {size(allocation['each_bytes'])}" if n_more > 1 else size(allocation["each_bytes"])
    if allocation["count_not_in"]:
        many += f" ({allocation['count_in']} against {allocation['count_not_in']})"
    detail = f", {allocation['detail'].replace('_', ' ')}" if allocation.get("detail") else ""
    category = Words(plain(category_label(allocation["category"]) + detail), category=plain(allocation["category"]))
    site = site_words(call_site(allocation["stack"]) or _named(allocation, n_more), allocation["stack"])
    made = Words(site, "code", folded=shown_stack(allocation["stack"]))
    return Line((allocation["bytes"], many, category, short_path(site, 1), made))
