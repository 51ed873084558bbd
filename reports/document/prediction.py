"""Fill a simulated run's own sections: does it fit, how far off may it be, what do lengths change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memprof.reports.document.blocks import Fact, Line, Table, Words, table
from memprof.reports.document.model import Prediction
from memprof.reports.document.text import duration, phase_label, plain, thousands

from memprof.units import gib, percent


def prediction_of(report: Mapping[str, Any]) -> Prediction | None:
    """Collect what the report says of a prediction; None for a recorded run."""
    error, fit, lengths = (report.get(name) for name in ("expected_error", "fit", "lengths"))
    if not (error or fit or lengths):
        return None
    return Prediction(
        fits=fit["fits"] if fit else None,
        verdict=plain(fit["sentence"]) if fit else "",
        error=plain(error["sentence"]) if error else "",
        needs=_needs(fit) if fit else None,
        lengths=_lengths(lengths["points"]) if lengths else None,
        lengths_sentence=plain(lengths["sentence"]) if lengths else "",
    )


_FITS = {True: Words("fits", "ok"), False: Words("does not fit", "bad"), None: Words("–", "muted")}


def _needs(fit: Mapping[str, Any]) -> Table | None:
    """Judge each phase; what it reserves and does not hold is cached, often by a phase before it."""
    room, lines = fit["limit_bytes"] - fit["non_torch_bytes"], []
    for need in fit["phases"]:
        decides = ("decides",) if need["phase"] == fit["phase"] else ()
        cached = not need["fits"] and need["allocated_bytes"] <= room
        verdict = "It fits only if cached memory is released." if cached else _FITS[need["fits"]]
        name = Words(plain(phase_label(need["phase"])), badges=decides)
        lines.append(Line((name, need["allocated_bytes"], need["needed_bytes"], verdict)))
    return table("Does it fit?|Held>|Needed>|Alone+", lines)


def _lengths(points: Sequence[Mapping[str, Any]]) -> Table | None:
    lines = [
        Line((
            plain(", ".join(x["names"])), thousands(x["length"]), percent(round(1e6 * x["share_below"]), 1_000_000),
            x["peak_bytes"], x["needed_bytes"], _FITS[x["fits"]],
            Words("simulated" if x["executed"] else "interpolated", "muted"),
        ))
        for x in points
    ]  # fmt: skip
    return table("Longest completion|Tokens>|Steps so long>|Held>~|Needed>|Verdict|Known~", lines)


def prediction_facts(report: Mapping[str, Any]) -> tuple[Fact, ...]:
    """List beside the peak what decides the verdict, and how far off the figures may be."""
    facts = []
    if fit := report.get("fit"):
        note = f"{100 * fit['margin']:.0f} % of the card are kept free"
        if apart := _apart(fit):
            note += f"; {apart}"
        facts.append(Fact("Decided by", phase_label(fit["phase"]), plain(note)))
        facts += _host(fit["host"])
    if error := report.get("expected_error"):
        facts.append(Fact("Expected error", _range(error["allocated"]), plain(_rests_on(error))))
    if time := report.get("estimated_time"):
        facts.append(Fact("A step takes", f"≈ {duration(round(time['step_s'] * 1e6))}", plain(_slowest(time))))
    return tuple(facts)


def _rests_on(error: Mapping[str, Any]) -> str:
    """Say what an expected error rests on: how many comparisons of what, and what none covers."""
    held, reserved = error["allocated"], error["reserved"]
    parts = []
    if reserved["comparisons"] and _range(reserved) != _range(held):
        parts.append(f"reserved {_range(reserved)}")
    for each in error.get("basis") or [{"class": "comparisons", **held}]:
        parts.append(f"{each['comparisons']} {each['class']}")
    if error["not_compared"]:
        parts.append(f"never compared: {', '.join(error['not_compared'])}")
    return "; ".join(parts)


def _apart(fit: Mapping[str, Any]) -> str:
    """Say how far the variants of a run lie apart; nothing where none was asked, or all reserve the same."""
    told = fit.get("ensemble")
    if not told or told["lowest_bytes"] == told["highest_bytes"]:
        return ""
    low, high = (gib(told[side] + fit["non_torch_bytes"]) for side in ("lowest_bytes", "highest_bytes"))
    return f"{told['members']} variants need {low} to {high}" + (f", {told['failed']} fail" if told["failed"] else "")


def reserving(report: Mapping[str, Any]) -> str:
    """Say what a simulated generation reserves, and whether the allocator has to give memory back to go on."""
    told = (report.get("fit") or {}).get("generation")
    if not told:
        return ""
    often = "once" if told["flushes"] == 1 else f"{told['flushes']} times"
    flushes = f"cached memory is given back {often} to go on" if told["flushes"] else "nothing has to be given back"
    return f"; reserves {gib(told['reserved_bytes'])}, {flushes}"


def assumed(report: Mapping[str, Any]) -> list[str]:
    """Say what an estimated time rests on, in one note."""
    time = report.get("estimated_time")
    return [f"Estimated time: {'; '.join(time['assumptions'])}"] if time else []


def _slowest(time: Mapping[str, Any]) -> str:
    phases = sorted(time["phases"].items(), key=lambda item: -item[1])[:2]
    parts = ", ".join(f"{phase_label(name).lower()} {duration(round(s * 1e6))}" for name, s in phases)
    return f"{parts}; estimated at the card's published speed, not measured"


def _host(host: Mapping[str, Any] | None) -> list[Fact]:
    if not host:
        return []
    if host["total_bytes"] is None:
        note = "of all processes on the node; its size is not known"
    else:
        note = f"of {gib(host['total_bytes'])}; {'fits' if host['fits'] else 'does not fit'}"
    return [Fact("Host needs", f"{gib(host['needed_bytes'])} GiB", note, host["needed_bytes"])]


def _range(error: Mapping[str, Any]) -> str:
    low, high = (f"{100 * error[side]:+.{0 if abs(error[side]) >= 0.1 else 1}f}" for side in ("low", "high"))
    return f"{low} to {high} %".replace("-", "−")
