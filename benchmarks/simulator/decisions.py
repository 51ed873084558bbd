"""Count fits-or-not decisions that the comparisons made so far allow, against what was measured.

    python -m benchmarks.simulator decisions

A decision is one run on one card. The truth is the measured reserved memory (a GPU's capture), or the published peak of
the whole device; the prediction's verdict is taken as ``simulate --gpu`` takes it, with its margin. Cards are all that
memprof knows by name. What is outside torch is the same estimate on both sides of a capture, since none recorded it.
"""

from __future__ import annotations

import json
from typing import Any

import click

from benchmarks.tabling import RESULTS
from memprof.config.expected_error import MARGIN
from memprof.config.gpus import known_gpus

_NEAR = 0.2  # of the measured need: how far around it the imaginary cards of ``near`` lie


def captured() -> list[tuple[str, int, int]]:
    """Return name, measured and predicted need of each GPU capture, in bytes, without what is outside torch."""
    rows = json.loads((RESULTS / "simulator.json").read_text())["comparisons"]
    return [(r["name"], r["measured_bytes"], r["simulated_bytes"]) for r in rows if r["what"] == "reserved"]


def published() -> list[tuple[str, int | None, int]]:
    """Return the same of the published table of methods; None where it ran out of memory on its H100."""
    from examples.published_tables import MODELS, PUBLISHED

    found = json.loads((RESULTS / "published_methods.json").read_text())
    rows = []
    for method, peaks in PUBLISHED.items():
        for size, peak in zip(MODELS, peaks, strict=True):
            row = found.get(f"{method}|{size}")
            if row is not None:
                rows.append((f"{method}, {size}", peak * 10**9 if peak else None, row["device_peak_bytes"]))
    return rows


def count(pairs: list[tuple[bool, bool]]) -> dict[str, Any]:
    """Count ``pairs`` of truth and prediction, both *fits*: all, and those wrong in either way."""
    fit = [said for truth, said in pairs if truth]
    not_fit = [said for truth, said in pairs if not truth]
    return {
        "decisions": len(pairs),
        "false_fits": sum(not_fit),
        "false_does_not_fit": fit.count(False),
        "of_runs_that_fit": len(fit),
        "of_runs_that_do_not": len(not_fit),
    }


def on_named_cards(rows: list[tuple[str, int, int]], outside: bool) -> list[tuple[bool, bool]]:
    """Decide on every run on every card memprof knows."""
    pairs = []
    for _, measured, predicted in rows:
        for gpu in known_gpus():
            more = gpu.context_bytes if outside else 0
            pairs.append((measured + more <= gpu.total_bytes, (predicted + more) * (1 + MARGIN) <= gpu.total_bytes))
    return pairs


def near(rows: list[tuple[str, int, int]]) -> list[tuple[bool, bool]]:
    """Decide on every run on imaginary cards around its measured need, one percent apart: the hard cases."""
    steps = [1 - _NEAR + 0.01 * i + 0.005 for i in range(round(2 * _NEAR / 0.01))]
    return [
        (step >= 1, predicted * (1 + MARGIN) <= measured * step) for _, measured, predicted in rows for step in steps
    ]


def decisions() -> dict[str, Any]:
    """Count all decisions, as they are written."""
    table = published()
    on_h100 = next(gpu for gpu in known_gpus() if gpu.name == "H100")
    verdicts = [(peak is not None, need * (1 + MARGIN) <= on_h100.total_bytes) for _, peak, need in table]
    measured = [(name, peak, need) for name, peak, need in table if peak is not None]
    return {
        "margin": MARGIN,
        "captures on every named card": count(on_named_cards(captured(), outside=True)),
        "captures on cards within 20 % of their need": count(near(captured())),
        "the published table on its H100": count(verdicts),
        "the published table on every named card": count(on_named_cards(measured, outside=False)),
    }


@click.command(help=__doc__)
def main() -> None:
    found = decisions()
    (RESULTS / "decisions.json").write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


def table(found: dict[str, Any]) -> str:
    """Make a Markdown table."""
    lines = ["| over | decisions | false *fits* | false *does not fit* |", "|---|--:|--:|--:|"]
    for name, row in found.items():
        if name != "margin":
            lines.append(
                f"| {name} | {row['decisions']} | {row['false_fits']} of {row['of_runs_that_do_not']} "
                f"| {row['false_does_not_fit']} of {row['of_runs_that_fit']} |"
            )
    return "\n".join(lines) + "\n"
