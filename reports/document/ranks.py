"""Fill the ranks from a merged report's ``ranks`` and ``across_ranks``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from memprof.reports.document.blocks import Line, Table, Words, table
from memprof.reports.document.model import RankCell, RankRow, Ranks
from memprof.reports.document.text import STACK_ORDER, category_label, phase_label, plain, sentence_list, size

_HEATS = 8
# A cell is marked where it stands above the median by this part of the median rank's whole peak.
_CLEARLY = 0.02
_MOST_MISSING = 8
# A category that nowhere comes to this part of the highest peak shares a column with the others like it.
_WORTH_A_COLUMN = 0.01
# Peaks that lie this close together are alike.
_ALIKE = 0.005
# What a page calls its tables of phases and nodes in its styles.
_SPREAD = "rank-spread"


def ranks_of(report: Mapping[str, Any]) -> Ranks | None:
    """Fill the ranks of a report; ``None`` where it is of one process alone."""
    ranks, across = report.get("ranks") or [], report.get("across_ranks")
    if not ranks or not across:
        return None
    peak = across["peak"]
    spreads = {s["category"]: s for s in across["categories"]}
    worth = [c for c in spreads if spreads[c]["highest_bytes"] >= _WORTH_A_COLUMN * peak["highest_bytes"]]
    columns = [c for c in STACK_ORDER if c in worth] + [c for c in worth if c not in STACK_ORDER]
    scale = _Scale(
        columns,
        spreads,
        max((s["highest_bytes"] for s in spreads.values()), default=0),
        _CLEARLY * peak["median_bytes"],
    )
    rows = [_row(r, report["source"]["rank"], scale, peak) for r in ranks]
    rows.sort(key=lambda r: (not r.oom, -r.peak_bytes, r.rank))
    world = across["world_size"] or len(ranks)
    nodes = sorted(across["nodes"], key=lambda n: -n["highest_bytes"])
    return Ranks(
        sentence=_sentence(across, len(ranks), report["source"]["rank"], rows),
        in_full=_in_full(report["source"]["rank"], peak, rows),
        missing=_missing(across["missing"]),
        differences=tuple(_difference(d) for d in across["differences"]),
        count=len(ranks),
        world_size=world,
        columns=(
            *((c, plain(category_label(c))) for c in columns),
            *([("", "Everything else")] if len(columns) < len(spreads) else []),
        ),
        rows=tuple(rows),
        phases=table(
            "Phase|Highest>|by rank>|Median>|Lowest>|by rank>|Above the mean>",
            [_phase(p) for p in across["phases"]],
            _SPREAD,
        ),
        nodes=table("Node|Ranks|Fullest>|by rank>|Mean>|Together>", [_node(n) for n in nodes], _SPREAD),
        several_nodes=len(nodes) > 1,
    )


def recordings_of(report: Mapping[str, Any]) -> Table | None:
    """List every recording of a folder where not all of them are shown, those that are first."""
    rows = sorted(report.get("recordings") or [], key=lambda row: not row["shown"])
    return table("Dump+|Rank|Role, process|Step, time@mp~|GiB>|Here+", [_recording(row) for row in rows], "ranks")


def _recording(row: Mapping[str, Any]) -> Line:
    role = row["role"] or "role not known"
    if row["role_from"] == "content":
        role += " (by what it holds)"
    process = f"process {row['pid']}" if row["pid"] is not None else ""
    step = f"step {row['step']}" if row["step"] is not None else ""
    file = Words(row["file"], "code", ("out of memory",) if row["out_of_memory"] else ())
    who, when = ", ".join(filter(None, (role, process, row["label"]))), ", ".join(filter(None, (step, row["time"])))
    rank = "–" if row["rank"] is None else str(row["rank"])
    because = "shown" if row["shown"] else row["because"] or ""
    return Line((file, rank, who, when or "–", row["peak_bytes"], because), row["shown"])


@dataclass(frozen=True)
class _Scale:
    """What cells are measured against: each column's spread, the largest cell, and what is clearly above."""

    columns: Sequence[str]
    spreads: Mapping[str, Any]
    most: int
    clearly: float

    def cell(self, column: str, n: int) -> RankCell:
        """Make a rank's cell in one column."""
        spread = self.spreads[column]
        marked = n - spread["median_bytes"] > self.clearly
        return RankCell(n, ceil(_HEATS * n / self.most), self.shade(spread, n), marked)

    def shade(self, spread: Mapping[str, Any], n: int) -> int:
        """Place a figure between the lowest and the highest of its spread: 1 to 8, 0 where they hardly differ."""
        low, high = spread["lowest_bytes"], spread["highest_bytes"]
        return 1 + round((_HEATS - 1) * (n - low) / (high - low)) if high - low > self.clearly else 0


def _row(rank: Mapping[str, Any], shown: int, scale: _Scale, peaks: Mapping[str, Any]) -> RankRow:
    peak, device, held = rank["peak"], rank["device_peak"], rank["peak"]["categories"]
    reserved = device["reserved_bytes"]
    cells = [scale.cell(c, held.get(c, 0)) for c in scale.columns]
    rest = peak["active_bytes"] - sum(c.bytes for c in cells)
    if len(scale.columns) < len(scale.spreads):
        cells.append(RankCell(rest, ceil(_HEATS * rest / scale.most), 0, False))
    return RankRow(
        rank=rank["rank"],
        node=plain(rank["node"] or ""),
        where=_where(peak),
        peak_bytes=peak["active_bytes"],
        shade=scale.shade(peaks, peak["active_bytes"]),
        held_bytes=None if reserved is None else reserved + (device["non_torch_bytes"] or 0),
        oom=rank["oom"] is not None,
        shown=rank["rank"] == shown,
        cells=tuple(cells),
    )


def _where(peak: Mapping[str, Any]) -> str:
    phase = phase_label(peak["phase"]).lower() if peak["phase"] else "an unknown phase"
    return plain(phase if peak["step"] is None else f"{phase}, step {peak['step']}")


def _sentence(across: Mapping[str, Any], count: int, shown: int, rows: Sequence[RankRow]) -> str:
    peak = across["peak"]
    failed = sorted(r.rank for r in rows if r.oom)
    words = ""
    if failed:
        words = f"{_numbered(failed)} ran out of memory. "
    if count == 1:
        return f"{words}Only rank {shown} is here; it peaks at {size(peak['highest_bytes'])}."
    if peak["highest_bytes"] - peak["lowest_bytes"] <= _ALIKE * peak["highest_bytes"]:
        words += f"All {count} ranks peak alike, at {size(peak['highest_bytes'])}."
    else:
        first = next(r for r in rows if r.rank == peak["highest_rank"])
        words += (
            f"Rank {first.rank} peaks highest: {size(first.peak_bytes)} in {first.where}, "
            f"{100 * peak['imbalance']:.1f} % above the mean of {count} ranks; "
            f"rank {peak['lowest_rank']} lowest: {size(peak['lowest_bytes'])}."
        )
    return words


def _in_full(shown: int, peak: Mapping[str, Any], rows: Sequence[RankRow]) -> str:
    """Name the rank that the rest of the page is about, and why that one."""
    failed = any(row.shown and row.oom for row in rows)
    fullest = shown == peak["highest_rank"] and peak["lowest_bytes"] < (1 - _ALIKE) * peak["highest_bytes"]
    why = ", which ran out of memory," if failed else ", the fullest," if fullest else ""
    return f"Rank {shown}{why} in full"


def _missing(missing: Sequence[Mapping[str, Any]]) -> str:
    if not missing:
        return ""
    known = [m for m in missing if m["last_step"] is not None]
    words = f"No recording of {_numbered([m['rank'] for m in missing]).lower()}."
    for m in known[:_MOST_MISSING]:
        peak = f", highest {size(m['peak_allocated_bytes'])} allocated" if m["peak_allocated_bytes"] else ""
        words += f" Rank {m['rank']} last counted step {m['last_step']}{peak}."
    return words


def _numbered(ranks: Sequence[int]) -> str:
    return f"{'Rank' if len(ranks) == 1 else 'Ranks'} {sentence_list(_runs(ranks))}"


def _runs(ranks: Iterable[int]) -> list[str]:
    """Write ``0, 1, 2, 3, 7`` as ``0–3, 7``."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and found[-1][1] == rank - 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return [str(a) if a == b else f"{a}–{b}" if b > a + 1 else f"{a}, {b}" for a, b in found]


def _difference(difference: Mapping[str, Any]) -> str:
    what = "memory outside torch" if difference["category"] == "non_torch" else category_label(difference["category"])
    phase = f" in {phase_label(difference['phase']).lower()}" if difference["phase"] else ""
    reason = f": {difference['reason']}" if difference["reason"] else ""
    words = f"Rank {difference['rank']} holds {size(difference['bytes'])} more {what.lower()} than the median rank"
    return plain(f"{words}{phase}{reason}.")


def _phase(spread: Mapping[str, Any]) -> Line:
    alike = spread["highest_bytes"] == spread["lowest_bytes"]
    high, low = ("all" if alike else str(spread[f"{end}_rank"]) for end in ("highest", "lowest"))
    name = Words(plain(phase_label(spread["phase"])), phase=plain(spread["phase"]))
    figures = (spread["highest_bytes"], high, spread["median_bytes"], spread["lowest_bytes"], low)
    return Line((name, *figures, f"{100 * spread['imbalance']:.1f} %"))


def _node(spread: Mapping[str, Any]) -> Line:
    figures = (spread["highest_bytes"], str(spread["highest_rank"]), spread["mean_bytes"], spread["total_bytes"])
    return Line((plain(spread["node"] or "not known"), ", ".join(_runs(spread["ranks"])), *figures))
