"""Count fits-or-not decisions that the comparisons made so far allow, against what was measured.

    python -m benchmarks.simulator decisions

A decision is one run on one GPU. The truth is the measured reserved memory (of a GPU's program, or of the real
allocator on an emulated GPU), or the published peak of the whole device; the prediction's verdict is taken as
``simulate --gpu`` takes it, with the margin of its class of run. GPUs are all that memprof knows by name. What is
outside torch is the same estimate on both sides where none recorded it. The smallest GPUs are those of
``emulated-edges``: a verdict is right where the run lives on the GPU that it names.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import click

from benchmarks.tabling import RESULTS
from memprof.config.expected_error import comparisons
from memprof.config.fits import fits, margin_of, wide_margin
from memprof.config.gpus import known_gpus
from memprof.config.settings import Settings

_NEAR = 0.2  # of the measured need: how far around it the imaginary cards of ``near`` lie


class Need(NamedTuple):
    """Hold what a run was measured and predicted to need, in bytes, and the margin that its verdict keeps."""

    name: str
    measured: int
    predicted: int
    margin: float

    def fits(self, card: int, outside: int = 0) -> tuple[bool, bool]:
        """Tell whether it fits a GPU of so many bytes, and whether it is said to."""
        return self.measured + outside <= card, fits(self.predicted + outside, card, self.margin)


def reserved(where: str) -> list[Need]:
    """Return what was reserved in each comparison made on GPUs (``gpu``) or on the real allocator (``emulated``)."""
    margin = wide_margin() if where == "gpu" else margin_of(Settings(model="").known)
    return [
        Need(row.name, row.measured_bytes, row.simulated_bytes, margin)
        for row in comparisons()
        if row.where == where and row.what == "reserved"
    ]


def published() -> list[tuple[str, int | None, int]]:
    """Return name, peak and prediction of the published table of methods; None where it ran out of memory."""
    from examples.published_tables import MODELS, PUBLISHED

    found = json.loads((RESULTS / "published_methods.json").read_text())
    rows = []
    for method, peaks in PUBLISHED.items():
        for size, peak in zip(MODELS, peaks, strict=True):
            row = found.get(f"{method}|{size}")
            if row is not None:
                rows.append((f"{method}, {size}", peak * 10**9 if peak else None, row["device_peak_bytes"]))
    return rows


def _margin(name: str) -> float:
    """Return the margin of a cell of the published table."""
    from examples.published_tables import settings_of

    method, _, _ = name.rpartition(", ")
    return margin_of(settings_of("", method).known)


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


def on_named_cards(needs: list[Need], outside: bool) -> list[tuple[bool, bool]]:
    """Decide on every run on every GPU memprof knows."""
    return [need.fits(gpu.total_bytes, gpu.context_bytes if outside else 0) for need in needs for gpu in known_gpus()]


def near(needs: list[Need]) -> list[tuple[bool, bool]]:
    """Decide on every run on imaginary GPUs around its measured need, one percent apart: the hard cases."""
    steps = [1 - _NEAR + 0.01 * i + 0.005 for i in range(round(2 * _NEAR / 0.01))]
    return [need.fits(int(need.measured * step)) for need in needs for step in steps]


def at_the_edge() -> list[tuple[bool, bool]]:
    """Decide on the smallest GPU that each bisected run is said to fit, its make known and its size alone."""
    from benchmarks.simulator.emulated import edges

    return [
        (row["real"]["edge_bytes"] <= row["said"][kind], True)
        for row in edges.read().values()
        for kind in ("by_make", "by_size")
        if row["said"][kind] is not None
    ]


def decisions() -> dict[str, Any]:
    """Count all decisions, as they are written."""
    table = published()
    on_h100 = next(gpu for gpu in known_gpus() if gpu.name == "H100")
    verdicts = [(peak is not None, need * (1 + _margin(name)) <= on_h100.total_bytes) for name, peak, need in table]
    measured = [Need(name, peak, need, _margin(name)) for name, peak, need in table if peak is not None]
    return {
        "programs on GPUs, every named GPU": count(on_named_cards(reserved("gpu"), outside=True)),
        "programs on GPUs, GPUs within 20% of their need": count(near(reserved("gpu"))),
        "real allocator, every named GPU": count(on_named_cards(reserved("emulated"), outside=True)),
        "real allocator, GPUs within 20% of their need": count(near(reserved("emulated"))),
        "real allocator, the smallest GPU said to be enough": count(at_the_edge()),
        "the published table on its H100": count(verdicts),
        "the published table on every named GPU": count(on_named_cards(measured, outside=False)),
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
        lines.append(
            f"| {name} | {row['decisions']} | {row['false_fits']} of {row['of_runs_that_do_not']} "
            f"| {row['false_does_not_fit']} of {row['of_runs_that_fit']} |"
        )
    return "\n".join(lines) + "\n"
