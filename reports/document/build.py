"""Fill the document that every renderer reads from a report's JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

from memprof.reports.document.advice import advised
from memprof.reports.document.blocks import Fact, Headline
from memprof.reports.document.checks import adds_up
from memprof.reports.document.model import Allocation, DevicePeak, Document, Growth, Leftover, Oom, Step, Steps
from memprof.reports.document.outside_torch import outside_facts, switches_of
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
    KIND_WORDS,
    category_label,
    phase_label,
    plain,
    sentence_list,
    signed_gib,
    size,
    thousands,
    where_words,
)
from memprof.reports.document.timeline import timeline_of

from memprof._version import __version__
from memprof.analysis.allocations.alike import fold
from memprof.analysis.headline import headline_of
from memprof.analysis.host.growth import PARTS as HOST_PARTS
from memprof.units import gib
from memprof.vocabulary import EMULATED, ahead_words

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
        from memprof.redact import redact as redacted

        told = analysis.snapshot.extra
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
        timeline=timeline_of(series, timed=timed) if series and series["time_us"] else None,
        icicle=icicle(report, rows),
        allocations=rows[:_MAX_ROWS],
        allocations_bytes=sum(a.bytes for a in rows[:_MAX_ROWS]),
        allocations_listed=sum(a.count for a in rows[:_MAX_ROWS]),
        openable=_openable(rows, active),
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


def _openable(rows: Sequence[Allocation], whole: int) -> tuple[Allocation, ...]:
    """Choose the rows that a page can open: those of the table, and those that get a box in the icicle."""
    return tuple(row for i, row in enumerate(rows) if i < _MAX_ROWS or row.bytes * SMALLEST_BOX >= whole)


def _sentence(note: str) -> str:
    """Write a note as a sentence: a capital first, but for the name of a file or a setting, and a full stop last."""
    words = plain(note).strip()
    first = words.partition(" ")[0].rstrip(",.:;")
    begin = words[:1].upper() if first.isalpha() else words[:1]
    return begin + words[1:] + ("" if words.endswith((".", "!", "?")) else ".")


def _config(config: Mapping[str, Any] | None) -> tuple[tuple[str, str], ...]:
    return tuple((plain(key), plain(value)) for key, value in sorted((config or {}).items()) if value is not None)


_MODEL_KEYS = ("model", "model_name", "model_name_or_path", "_name_or_path", "name_or_path")


def _base_name(path: object) -> str:
    text = str(path)
    return PureWindowsPath(text).name if "\\" in text else PurePosixPath(text).name


def title_of(report: Mapping[str, Any]) -> str:
    """Name a report's run: by its model and how many ranks it has, else by its file or folder."""
    source = report["source"]
    config = source["config"] or {}
    model = next((config[k] for k in _MODEL_KEYS if isinstance(config.get(k), str) and config[k]), None)
    if report.get("across_ranks") and report.get("ranks"):
        return _run_title(report, model)
    if model:
        return plain(_base_name(model.rstrip("/")) or model)
    return plain(_base_name(source["files"][0])) if source["files"] else "Memory report"


def _run_title(report: Mapping[str, Any], model: str | None) -> str:
    """Name a run of several ranks: by its model, else by the folder that all its files are in."""
    ranks, world = len(report["ranks"]), report["across_ranks"]["world_size"]
    count = f"{ranks} of {world} ranks" if world and world != ranks else f"{ranks} rank{'' if ranks == 1 else 's'}"
    folders = {str(PurePosixPath(rank["file"]).parent) for rank in report["ranks"] if rank.get("file")}
    folder = PurePosixPath(folders.pop()) if len(folders) == 1 else PurePosixPath()
    # The callback's own folder says nothing; the trainer's output folder is above it.
    inner = folder.parent if folder.name.startswith("_memprof") else folder
    name = _base_name(model.rstrip("/")) if model else inner.name
    return plain(f"{name}: {count}" if name else f"Run of {count}")


def subtitle_of(report: Mapping[str, Any]) -> tuple[str, ...]:
    """Say what was recorded, where and how."""
    source = report["source"]
    words = [KIND_WORDS.get(source["kind"], source["kind"])]
    if (source.get("device_name") or "").endswith(EMULATED):
        words[0] += " on an emulated device: memory is real, kernels and times are not"
    device = source.get("device_name") or f"device {source['device']}"
    total = source["device_total_bytes"]
    words.append(f"{device}, {gib(total)} GiB" if total and report["peak"]["reserved_bytes"] is not None else device)
    others = [str(d) for d in source.get("devices") or [] if d != source["device"]]
    if others:
        own = f"device {source['device']}; " if source.get("device_name") else ""
        words[-1] += f" ({own}the file also holds {sentence_list(others)}, see --device)"
    if source["torch"]:
        words.append(f"torch {source['torch']}")
    if (source["world_size"] or 1) > 1:
        shown = " shown in full" if report.get("across_ranks") else ""
        words.append(f"rank {source['rank']} of {source['world_size']}{shown}")
    words.append(f"{thousands(source['events'])} event{'' if source['events'] == 1 else 's'}")
    steps = sorted({p["step"] for p in report["phases"] if p["step"] is not None})
    if steps:
        words.append(f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}")
    if source["history"] != "complete":
        words.append(HISTORY_WORDS.get(source["history"], source["history"]))
    return tuple(plain(w) for w in words)


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
    steps = tuple(Step(s["step"], s["peak_bytes"], s["end_bytes"], s["tokens"]) for s in growth["steps"])
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
    name = plain(_base_name(source["files"][0])) if source["files"] else "SNAPSHOT"
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
