"""Fill the document that every renderer reads from a report's JSON."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from memprof.reports.document.advice import advised
from memprof.reports.document.blocks import Fact, Headline, Line, table
from memprof.reports.document.checks import adds_up
from memprof.reports.document.model import (
    DevicePeak,
    Document,
    Growth,
    Leftover,
    Oom,
    Span,
    Steps,
    Timeline,
)
from memprof.reports.document.outside_torch import outside_facts, switches_of
from memprof.reports.document.page_title import base_name, subtitle_of, title_of
from memprof.reports.document.prediction import assumed, prediction_of
from memprof.reports.document.ranks import ranks_of, recordings_of
from memprof.reports.document.summary import room_of, summary_of
from memprof.reports.document.tables import (
    SMALLEST_BOX,
    allocation_rows,
    call_site,
    evidence_shares,
    group_rows,
    icicle,
    phase_table,
    shown_stack,
    whole_stack,
)
from memprof.reports.document.text import (
    HISTORY_WORDS,
    STACK_ORDER,
    category_label,
    phase_label,
    phase_short,
    plain,
    signed_gib,
    size,
    thousands,
    where_words,
)

from memprof._version import __version__
from memprof.analysis.allocations.alike import fold
from memprof.analysis.headline import headline_of
from memprof.analysis.host.growth import PARTS as HOST_PARTS
from memprof.vocabulary import ahead_words

if TYPE_CHECKING:
    from memprof.analysis.analysis import Analysis


# How many groups of alike allocations a document looks at: the page's icicle wants more than the JSON lists.
_MAX_GROUPS = 2000
_MAX_ROWS = 60
_MAX_ELSEWHERE = 150


# Up to so many events a document's timeline has every one; beyond, about so many points, no peak missing.
_EXACT_EVENTS = 250_000
_MAX_POINTS = 60_000


def document_of(
    analysis: Analysis,
    label: str | None = None,
    redact: bool = False,
    exact: int = _EXACT_EVENTS,
    report: dict[str, Any] | None = None,
) -> Document:
    """Fill the document of an analysis, with its timeline and every allocation worth drawing.

    Args:
        analysis: what :func:`memprof.analyze` returned.
        label: a title; see :func:`build_document`.
        redact: leave out what says who made it where (see :mod:`memprof.redact`).
        exact: up to how many events the timeline has every one.
        report: the report where it says more than the analysis alone (the other ranks), redacted already.
    """
    report = analysis.to_dict() if (alone := report is None) else report
    allocations, elsewhere = analysis.largest(_MAX_GROUPS), analysis.explain_phases()
    if redact:
        from msgspec import to_builtins

        from memprof.redact import redact as redacted

        told = to_builtins(analysis.snapshot.run)
        report = redacted(report, told) if alone else report
        allocations, elsewhere = redacted(allocations, told), redacted(elsewhere, told)
    points = exact if analysis.timeline.n_events < exact else _MAX_POINTS
    return build_document(report, analysis.series(points), label, allocations, elsewhere)


def build_document(
    report: dict[str, Any],
    series: dict[str, Any] | None = None,
    label: str | None = None,
    allocations: Sequence[Mapping[str, Any]] | None = None,
    elsewhere: Sequence[Mapping[str, Any]] = (),
) -> Document:
    """Fill the document of one report (``memprof.report/1``).

    Args:
        report: the report as ``Analysis.to_dict`` gives it.
        series: the decimated timeline as ``Analysis.series`` gives it; without it the document has no timeline.
        label: a title of the reader's choice; default: the model and step, or the file's name.
        allocations: groups of those alive at the peak (``Analysis.largest``), where more are known than the report
            lists.
        elsewhere: the largest at other phases' peaks, for the timeline's panel.
    """
    active = report["peak"]["active_bytes"]
    timed = report["source"].get("timed", report["source"]["kind"] != "simulated")
    rows = allocation_rows(_groups(report["peak"]) if allocations is None else allocations, active, timed=timed)
    return Document(
        title=plain(label) if label else title_of(report),
        subtitle=subtitle_of(report),
        badge={"simulated": "simulated"}.get(report["source"]["kind"], "measured"),
        headline=_headline(report),
        summary=summary_of(report, rows),
        oom=_oom(report.get("oom")),
        advice=advised(report),
        rows=group_rows(report),
        phases=phase_table(report),
        timeline=_timeline(series, timed) if series and series["time_us"] else None,
        icicle=icicle(report, rows),
        allocations=rows[:_MAX_ROWS],
        allocations_bytes=sum(a.bytes for a in rows[:_MAX_ROWS]),
        allocations_listed=sum(a.count for a in rows[:_MAX_ROWS]),
        # Those of the table, and those that get a box in the icicle.
        openable=tuple(row for i, row in enumerate(rows) if i < _MAX_ROWS or row.bytes * SMALLEST_BOX >= active),
        elsewhere=allocation_rows(fold(elsewhere), active, timed=timed)[:_MAX_ELSEWHERE],
        device_peak=_device_peak(report.get("device_peak")),
        steps=_steps(report.get("growth")),
        evidence=evidence_shares(report),
        adds_up=adds_up(report),
        host=_host(report.get("host")),
        reproduce=_reproduce(report["source"]),
        config=_config(report["source"]["config"]),
        notes=tuple(_sentence(note) for note in [*report["notes"], *assumed(report)]),
        prediction=prediction_of(report),
        report=report,
        ranks=ranks_of(report),
        recordings=recordings_of(report),
        outside=outside_facts(report.get("outside")),
        switches=switches_of(report.get("switches")),
        room=None if report.get("fit") else room_of(report),  # a verdict says it
    )


def _headline(report: Mapping[str, Any]) -> Headline:
    """Take the report's headline; a report that was written before reports had one gets it here."""
    fit = report.get("fit")
    bad = bool(report.get("oom") or (fit and not fit["fits"]))
    return Headline.of(report.get("headline") or headline_of(report), bad=bad)


def _groups(peak: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the groups of alike blocks; a report without them lists single blocks only, which are folded here."""
    found: Sequence[Mapping[str, Any]] | None = peak.get("largest")
    return fold(peak["allocations"]) if found is None else found


def _sentence(note: str) -> str:
    """Write a note as a sentence: a capital first, but for the name of a file or a setting, and a full stop last."""
    words = plain(note).strip()
    first = words.partition(" ")[0].rstrip(",.:;")
    begin = words[:1].upper() if first.isalpha() else words[:1]
    return begin + words[1:] + ("" if words.endswith((".", "!", "?")) else ".")


def _config(config: Mapping[str, Any] | None) -> tuple[tuple[str, str], ...]:
    return tuple((plain(key), plain(value)) for key, value in sorted((config or {}).items()) if value is not None)


def _device_peak(device: Mapping[str, Any] | None) -> DevicePeak | None:
    if not device or device["reserved_bytes"] is None:
        return None
    return DevicePeak(
        reserved_bytes=device["reserved_bytes"],
        non_torch_bytes=device["non_torch_bytes"],
        where=where_words(device["phase"], device["step"]),
        grown_by=_growths(device["grown_by"]),
    )


def _growths(grown_by: Sequence[Mapping[str, Any]]) -> tuple[Growth, ...]:
    """Add up growth by phase and call site, the largest first; the stack shown is the one that brought the most."""
    merged: dict[tuple[str, str], Growth] = {}
    for grown in sorted(grown_by, key=lambda g: -g["bytes"]):
        phase = plain(phase_label(grown["phase"])) if grown["phase"] else ""
        site = call_site(grown["stack"])
        known = merged.get((phase, site))
        stack = known.stack if known else shown_stack(grown["stack"])
        whole = known.whole_stack if known else whole_stack(grown["stack"])
        merged[phase, site] = Growth(grown["bytes"] + (known.bytes if known else 0), phase, site, stack, whole)
    return tuple(sorted(merged.values(), key=lambda g: -g.bytes))


def _oom(oom: Mapping[str, Any] | None) -> Oom | None:
    if not oom:
        return None
    asked, free = oom["requested_bytes"], oom["device_free_bytes"]
    where = where_words(oom["phase"], oom["step"])
    sentence = f"Out of memory in {where}: {size(asked)} were asked for"
    if free is not None:
        segment = oom.get("segment_bytes") or 0
        piece = f", which takes {size(segment)} in one piece" if asked <= free < segment else ""
        sentence += f"{piece}, {size(free)} were free on the device."
    else:
        sentence += "."
    sentence += _limited(oom)
    ahead = oom.get("ahead") or {}
    if oom.get("fits_defragmented") is not None:
        idle = (oom.get("cached_bytes") or 0) + (oom.get("inactive_split_bytes") or 0)
        fits = oom["fits_defragmented"]
        verdict = "Joined to it, the request would fit." if fits else "Even joined to it, the request would not fit."
        sentence += f" {size(idle)} lay free inside the allocator. {verdict}"
    if ahead:
        sentence += f" The step {plain(ahead_words(ahead))}."
    return Oom(sentence, shown_stack(oom.get("stack") or []))


def _limited(oom: Mapping[str, Any]) -> str:
    """Say which limit of the process refused the request; nothing where none did."""
    if not oom.get("limited"):
        return ""
    by = "torch.cuda.set_per_process_memory_fraction, or memprof's capacity"
    if (limit := oom.get("limit_bytes")) is None:
        return f" The device had room, so a limit of this process refused it ({by})."
    held = size(oom["reserved_bytes"] or 0)
    return f" A limit of this process refused it: of the {size(limit)} it may reserve ({by}), it held {held}."


def _steps(growth: Mapping[str, Any] | None) -> Steps | None:
    """Fill the steps where there is a trend to see: the first builds the optimizer's state, so two say nothing."""
    if not growth or (len(growth["steps"]) < 3 and not growth["left_behind"]):
        return None
    counted = any(s["tokens"] is not None for s in growth["steps"])
    lines = []
    for s in growth["steps"]:
        tokens = "–" if s["tokens"] is None else thousands(s["tokens"])
        lines.append(Line((str(s["step"]), s["peak_bytes"], s["end_bytes"], *([tokens] if counted else ()))))
    steps = table("Step|Peak>|Left at its end>" + ("|Tokens>" if counted else ""), lines, "steps")
    left = tuple(
        Leftover(
            bytes=x["bytes"],
            bytes_per_step=x["bytes_per_step"],
            steps=x["steps"],
            category=plain(x["category"]),
            category_label=plain(category_label(x["category"])),
            held_by=tuple(plain(who) for who in x.get("held_by") or []),
            site=call_site(x["stack"]),
            stack=shown_stack(x["stack"]),
            whole_stack=whole_stack(x["stack"]),
        )
        for x in growth["left_behind"]
    )
    return Steps(_growth_words(growth), steps, left)


def _growth_words(growth: Mapping[str, Any]) -> str:
    slope, explained = growth["end_bytes_per_step"], growth["explained_by_tokens"]
    if slope is None:
        return "Too few steps to see a trend."
    words = f"Memory left when a step ends changes by {signed_gib(round(slope))} GiB a step"
    if explained is not None:
        words += f"; the number of tokens explains {100 * explained:.0f} % of the difference between peaks"
    return words + "."


_HOST_LABELS = {
    "rss_bytes": ("Resident memory of the process", "RSS"),
    "pinned_bytes": ("Pinned memory held", "the pinned allocator rounds up to powers of two"),
    "pinned_requested_bytes": ("Pinned memory requested", ""),
    "managed_bytes": ("Managed memory", "paged optimizer state"),
}


def _host(host: Mapping[str, Any] | None) -> tuple[Fact, ...]:
    known = [(key, (host or {}).get(key)) for key in _HOST_LABELS]
    facts = [Fact(_HOST_LABELS[k][0], size(n), _HOST_LABELS[k][1], n) for k, n in known if isinstance(n, int)]
    offloaded = (host or {}).get("offloaded") or {}
    facts += [Fact(f"Offloaded: {category_label(c).lower()}", size(n), "", n) for c, n in offloaded.items()]
    if growth := (host or {}).get("growth"):
        facts.append(Fact(f"Grown in {growth['steps']} steps", size(growth["bytes"]), plain(growth["sentence"])))
        parts = growth["parts"].items()
        facts += [Fact(f"of it {plain(HOST_PARTS.get(f'host_{c}', c))}", size(n), "", n) for c, n in parts]
    return tuple(facts)


def _commands(source: Mapping[str, Any], quoted: str) -> list[Fact]:
    """Return what makes this report again; of a simulation that kept no snapshot, from its own JSON."""
    config = source.get("config") or {}
    if source["kind"] == "simulated" and not source["files"] and "recipe" in config:
        note = "memprof-report.json is this report's JSON: Download JSON on the page, or --json"
        return [Fact("Command", "memprof simulate --like memprof-report.json -o report.html", note)]
    return [
        Fact("Command", f"memprof report {quoted} -o report.html"),
        Fact("Every allocation", f"memprof explain {quoted} --all"),
    ]


def _reproduce(source: Mapping[str, Any]) -> tuple[Fact, ...]:
    name = plain(base_name(source["files"][0])) if source["files"] else "SNAPSHOT"
    quoted = f"'{name}'" if any(c in " '\"$&;|<>()*?`\\" for c in name) else name
    facts = [*_commands(source, quoted)]
    facts += [
        Fact("History", HISTORY_WORDS.get(source["history"], plain(source["history"]))),
        Fact("memprof", __version__),
    ]
    versions = dict(source.get("versions") or {})
    versions.setdefault("torch", source["torch"])
    facts += [Fact(plain(k), plain(v)) for k, v in versions.items() if v and k != "memprof"]
    recorder = (source.get("versions") or {}).get("memprof")
    if recorder and recorder != __version__:
        facts.append(Fact("recorded with memprof", plain(recorder)))
    facts.append(Fact("Units", "1 GiB = 2³⁰ bytes", "below 1 GiB in MiB; in GiB columns below 0.005 as <0.01"))
    if source.get("phases_known_by"):
        words = {"marks": "marks in the recording", "stacks": "stacks (inferred)", "none": "nothing"}
        facts.append(Fact("Phases known by", plain(words.get(source["phases_known_by"], source["phases_known_by"]))))
    return tuple(facts)


# ---- over time: categories in stacking order, and the phases' spans over them ----------------------------------------


def _timeline(series: Mapping[str, Any], timed: bool) -> Timeline:
    """Fill the timeline from a series of one point or more, as ``Analysis.series`` gives it; ``timed``: as recorded."""
    start = series["time_us"][0]
    known = [c for c in STACK_ORDER if any(series["categories"].get(c, ()))]
    others = [c for c in series["categories"] if c not in STACK_ORDER and any(series["categories"][c])]
    categories = {c: tuple(series["categories"][c]) for c in known + others}
    n_points = len(series["time_us"])
    total = tuple(map(sum, zip(*categories.values(), strict=True))) if categories else (0,) * n_points
    time_us = tuple(t - start for t in series["time_us"])
    spans = tuple(_span(s) for s in series["phase_spans"] if s["end_point"] > s["start_point"])
    return Timeline(
        clock_us=start,
        time_us=time_us,
        phase_x=_phase_axis(n_points, spans),
        spans=spans,
        categories=categories,
        reserved=None if series["reserved"] is None else tuple(series["reserved"]),
        total=total,
        peak_point=series["peak_point"],
        timed=timed,
    )


def _span(span: Mapping[str, Any]) -> Span:
    return Span(
        phase=plain(span["phase"]),
        label=plain(phase_label(span["phase"])),
        short=plain(phase_short(span["phase"])),
        step=span["step"],
        start_point=span["start_point"],
        end_point=span["end_point"],
    )


# What is between the phases gets less room than they do.
_NARROW = {"other": 0.3}


def _phase_axis(n_points: int, spans: Sequence[Span]) -> tuple[float, ...]:
    """Place each point on an axis where every phase is one unit wide, its points spread evenly over it.

    Without spans the whole recording is one unit.
    """
    edges = [0, *(s.start_point for s in spans), *(s.end_point for s in spans), max(n_points - 1, 0)]
    stops = sorted(set(edges))
    widths = {s.start_point: _NARROW.get(s.phase, 1.0) for s in spans}
    places, x = {}, 0.0
    for stop, following in zip(stops, [*stops[1:], None], strict=True):
        places[stop] = (x, following)
        x += widths.get(stop, 0.0) if spans else 1.0
    return tuple(_place(point, stops, places) for point in range(n_points))


def _place(point: int, stops: list[int], places: dict[int, tuple[float, int | None]]) -> float:
    stop = stops[bisect_right(stops, point) - 1]
    x, following = places[stop]
    if following is None:
        return x
    width = places[following][0] - x
    return x + width * (point - stop) / (following - stop)
