"""From a comparison's JSON to what the page, the terminal and markdown show of it: frozen, plain, in words where words
are shown. Every string is one harmless line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memprof.reports.document.blocks import Column, Line, Part, Table, Words, table
from memprof.reports.document.build import Document, build_document
from memprof.reports.document.model import Fact, Headline, Room
from memprof.reports.document.summary import room_of
from memprof.reports.document.tables import call_site, shown_stack
from memprof.reports.document.text import (
    CATEGORY_WORDS,
    GROUP_WORDS,
    category_label,
    gib,
    group_label,
    plain,
    short_path,
    signed_gib,
    size,
)

from memprof._version import __version__
from memprof.analysis.headline import change_words, fit_words, headline_of_comparison

__all__ = [
    "Compared",
    "ComparedRun",
    "Comparison",
    "OnlyIn",
    "Verdict",
    "build_comparison",
    "change_words",
    "children_worth_a_line",
    "ratio_words",
]


@dataclass(frozen=True)
class ComparedRun:
    """One run. ``document`` is ``None`` for published rows; ``facts`` say what it is, ``parts`` what it is made of.

    ``where`` says when it peaked, empty where that is not known; ``room`` how far it was from out of memory.
    """

    label: str
    badge: str
    document: Document | None
    facts: tuple[str, ...]
    parts: tuple[Part, ...]
    where: str = ""
    room: Room | None = None


@dataclass(frozen=True)
class Compared:
    """One row: a figure a column, ``None`` where it is not known.

    ``differences``, ``ratios`` and ``changes`` are words, one for each column after the first.
    """

    id: str
    label: str
    words: str
    at_peak: tuple[int | None, ...]
    own_peak: tuple[int | None, ...]
    differences: tuple[str, ...]
    ratios: tuple[str, ...]
    changes: tuple[str, ...]
    children: tuple[Compared, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """Whether one run fits: ``words`` say by how much."""

    fits: bool
    words: str


@dataclass(frozen=True)
class OnlyIn:
    """What one run holds at its peak and the other does not: blocks of one stack and size in a line."""

    title: str
    note: str
    allocations: Table


@dataclass(frozen=True)
class Comparison:
    """Runs side by side. ``scale_bytes`` is the one scale of every bar; ``data`` is the JSON it was made from.

    ``settings`` differ and memory is known to depend on them, ``others`` differ too. ``unchanged`` says how far off
    the simulator is on a recorded run as it was; empty where none was simulated.
    """

    title: str
    headline: Headline
    unchanged: str
    columns: tuple[ComparedRun, ...]
    rows: tuple[Compared, ...]
    beside: tuple[Compared, ...]
    capacity_bytes: int | None
    verdicts: tuple[Verdict, ...]
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
    rows = tuple(_line(row, GROUP_WORDS) for row in data["rows"])
    beside = _beside_rows(data["beside"])
    labels = [column.label for column in columns]
    capacity = data["capacity"]
    highest = max((n or 0 for line in (rows[-1], *_stacked(beside)) for n in line.at_peak), default=0)
    return Comparison(
        title=_title(data, labels),
        headline=_headline(data),
        unchanged=_unchanged(data),
        columns=columns,
        rows=rows,
        beside=beside,
        capacity_bytes=capacity["bytes"] if capacity else None,
        verdicts=_verdicts(capacity),
        scale_bytes=max(highest, 1),
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


def _stacked(beside: Sequence[Compared]) -> list[Compared]:
    return [line for line in beside if line.id == "device_peak"]


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
    return ComparedRun(label, plain(run["badge"]), made, made.subtitle, made.summary.bar, made.summary.where, room)


def _card(report: Mapping[str, Any], capacity: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the card that a run is held against; one that only the other run had is called that."""
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


def _line(row: Mapping[str, Any], words: Mapping[str, str]) -> Compared:
    figures, own = tuple(row["at_peak"]), row.get("own_peak") or ()
    children = row.get("categories") or row.get("details") or []
    differences, ratios, changes = _changes(row, figures, own)
    return Compared(
        id=plain(row["id"]),
        label=plain(row["label"]),
        words=words.get(row["id"], ""),
        at_peak=figures,
        own_peak=tuple(own or (None,) * len(figures)),
        differences=differences,
        ratios=ratios,
        changes=changes,
        children=tuple(_line(child, CATEGORY_WORDS) for child in children) if row["id"] != "unattributed" else (),
    )


def _beside_rows(rows: Sequence[Mapping[str, Any]]) -> tuple[Compared, ...]:
    """Leave out what was reserved where nothing else is known beside it."""
    outside = any(row["id"] == "non_torch" for row in rows)
    return tuple(_beside(row) for row in rows if outside or row["id"] != "reserved")


def _beside(row: Mapping[str, Any]) -> Compared:
    figures = tuple(row["values"])
    nothing = (None,) * len(figures)
    return Compared(row["id"], plain(row["label"]), "", figures, nothing, *_changes(row, figures))


def _changes(
    row: Mapping[str, Any], figures: Sequence[int | None], own: Sequence[int | None] = ()
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Put differences, ratios and changes in words; ``own`` are the highest figures at any time, where known."""
    most = own or (None,) * len(figures)
    return (
        tuple("–" if d is None else signed_gib(d) for d in row["difference"][1:]),
        tuple(ratio_words(r) for r in row["ratio"][1:]),
        tuple(change_words(figures[0], n, most[0], m) for n, m in zip(figures[1:], most[1:], strict=True)),
    )


# Groups that can hold one category only: the row says it all.
_ALONE = ("grpo_loss", "inference", "kv_cache")


def children_worth_a_line(row: Compared) -> tuple[Compared, ...]:
    """List a row's parts where each costs a line, without one that only repeats its row."""
    return () if row.id in _ALONE else row.children


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
    return Headline.of(data.get("headline") or headline_of_comparison(data))


def _verdicts(capacity: Mapping[str, Any] | None) -> tuple[Verdict, ...]:
    if capacity is None:
        return ()
    return tuple(Verdict(fits, fit_words(capacity, i)) for i, fits in enumerate(capacity["fits"]))


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
    site = call_site(allocation["stack"]) or _named(allocation, n_more) or "no stack recorded"
    made = Words(site, "code", folded=shown_stack(allocation["stack"]))
    return Line((allocation["bytes"], many, category, short_path(site, 1), made))
