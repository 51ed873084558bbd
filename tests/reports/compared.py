"""Comparisons made of the sample run and its relatives, for the tests of what shows them."""

from __future__ import annotations

import copy
from typing import Any

from memprof.reports.document.model import Document

from memprof.analysis.compare import ComparisonColumn
from memprof.analysis.published_tables import published_columns
from memprof.vocabulary import GROUP_OF, Category, Group
from tests.report.plain import as_run as plain_run
from tests.report.plain import compare, holdings_of_report
from tests.reports.sample import HOSTILE, MIB, hostile, sample
from tests.reports.typed import build_document

CAPACITY = 7 * 2**30


def as_run(report: dict[str, Any], label: str) -> ComparisonColumn:
    badge = "simulated" if report["source"]["kind"] == "simulated" else "measured"
    return plain_run(label, badge, report, held=holdings_of_report(report))


def leaner(kind: str = "cuda") -> dict[str, Any]:
    """The sample with its logits cut to an eighth, another setting, and less of everything that follows from it."""
    report = copy.deepcopy(sample(kind)[0])
    peak = report["peak"]
    saved = 0
    for allocation in peak["allocations"]:
        if allocation["category"] == "loss_logits":
            saved += allocation["bytes"] * 7 // 8
            allocation["bytes"] //= 8
            allocation["requested_bytes"] = allocation["bytes"] - 512
    peak["categories"]["loss_logits"] -= saved
    peak["details"]["loss_logits"]["policy"] -= saved
    for key in ("allocated_bytes", "active_bytes", "requested_bytes"):
        peak[key] -= saved
    if peak["reserved_bytes"] is not None:
        peak["reserved_bytes"] -= saved
        report["device_peak"]["reserved_bytes"] -= saved
        report["device_peak"]["grown_by"][1]["bytes"] -= saved
    peak["evidence"]["shape"] -= saved
    peak["groups"] = {str(g): 0 for g in Group}
    for category, n in peak["categories"].items():
        peak["groups"][str(GROUP_OF[Category(category)])] += n
    peak["groups"]["total"] = peak["active_bytes"]
    report["own_peaks"]["loss_logits"] -= saved
    report["group_own_peaks"]["grpo_loss"] -= saved
    report["group_own_peaks"]["total"] -= saved
    report["source"]["config"] = {**report["source"]["config"], "beta": 0.04, "use_liger_kernel": True}
    report["source"]["files"] = ["runs/lean.pickle"]
    return report


def sample_comparison(capacity: int | None = CAPACITY) -> tuple[dict[str, Any], list[Document | None]]:
    """Two runs with their timelines."""
    report, series = sample()
    other = leaner()
    data = compare([as_run(report, "trl"), as_run(other, "lean")], capacity)
    return data, [build_document(report, series), build_document(other, series)]


def published_comparison() -> dict[str, Any]:
    """One run beside the published table."""
    columns = [ComparisonColumn(p.label, "published", published=p) for p in published_columns("unsloth-2025")]
    return compare([as_run(sample()[0], "mine"), *columns], 80 * 10**9)


def hostile_comparison() -> tuple[dict[str, Any], list[Document | None]]:
    """Every name a stranger can choose tries to break out, labels too."""
    report, series = hostile()
    other = copy.deepcopy(report)
    other["source"]["config"] = {**{f"key{w}": w[::-1] for w in HOSTILE}, "model": HOSTILE[1], HOSTILE[0]: HOSTILE[3]}
    for allocation in other["peak"]["allocations"]:
        allocation["stack"] = [f"/x/{word}.py:2 {word}!" for word in HOSTILE]
    other["host"] = {"rss_bytes": MIB}
    data = compare([as_run(report, HOSTILE[0]), as_run(other, HOSTILE[1]), as_run(other, HOSTILE[2])], CAPACITY)
    return data, [build_document(report, series), build_document(other, series), None]
