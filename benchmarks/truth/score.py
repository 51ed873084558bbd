"""Score attribution against snapshots with the truth beside them, by the truth's bytes.

    python -m benchmarks.truth score FOLDER... [--phases] [--confusion]

A case is ``NAME.pickle`` with ``NAME.pickle.truth.json.gz``. Each is scored at the global peak and at each
phase's peak, per allocation and address. As the labels' rules say, ``gradients`` is also right for a weight
gradient in flight and ``workspace`` for cuBLAS workspaces.
"""

from __future__ import annotations

import gzip
import json
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np

from memprof.attribution.pipeline import attribute
from memprof.attribution.result import Attribution
from memprof.snapshot import load_snapshot
from memprof.timeline.timeline import Timeline, build_timeline
from memprof.vocabulary import Category, Evidence, Phase

CATEGORIES = [c.value for c in Category]
EVIDENCE = [e.value for e in Evidence]
NOTICEABLE = 0.01  # recall counts for categories above this share of the peak
ALSO_RIGHT = {("activation_gradients", "weight_grad"): "gradients", ("temporaries", "workspace"): "workspace"}


@dataclass
class Score:
    """Bytes at one instant: confusion[truth, said], and (evidence, right) pairs."""

    confusion: Counter[tuple[str, str]] = field(default_factory=Counter)
    evidence: Counter[tuple[str, bool]] = field(default_factory=Counter)
    worst: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return sum(self.confusion.values())

    @property
    def right(self) -> int:
        return sum(b for (t, s), b in self.confusion.items() if t == s)

    @property
    def accuracy(self) -> float:
        return self.right / self.total if self.total else 1.0

    def recalls(self) -> dict[str, float]:
        """Return the recall of each category above NOTICEABLE of the bytes."""
        of: Counter[str] = Counter()
        for (truth, _), size in self.confusion.items():
            of[truth] += size
        return {c: self.confusion[c, c] / b for c, b in of.items() if b > NOTICEABLE * self.total}


def score_instant(live: list[list[Any]], instant: int, timeline: Timeline, said: Attribution, stacks: Any) -> Score:
    """Compare what is alive at an instant with the truth's list of it."""
    rows = timeline.alive_at(instant)
    row_at = dict(zip(timeline.address[rows].tolist(), rows.tolist(), strict=True))
    score = Score()
    for address, size, truth, detail in live:
        row = row_at.get(address)
        answer = CATEGORIES[said.category[row]] if row is not None else "(missing)"
        if ALSO_RIGHT.get((truth, detail)) == answer:
            answer = truth
        score.confusion[truth, answer] += size
        if row is None:
            continue
        score.evidence[EVIDENCE[said.evidence[row]], answer == truth] += size
        if answer != truth:
            frames = stacks.of(int(timeline.stack[row]))
            where = (
                " < ".join(f"{f.file.rsplit('/', 1)[-1]}:{f.line}:{f.function}" for f in frames[:6]) or "(no frames)"
            )
            score.worst[f"{truth}/{detail} said {answer} by {said.rules[said.rule[row]]}: {where}"] += size
    return score


@dataclass
class Case:
    """One scored file."""

    name: str
    seconds: float
    events: int
    instants: dict[str, Score]
    phase_peaks_found: dict[str, bool]


def score_case(path: Path) -> Case:
    """Score one snapshot at its truth's instants."""
    with gzip.open(f"{path}.truth.json.gz", "rt") as file:
        truth = json.load(file)
    snapshot = load_snapshot(path)
    timeline = build_timeline(snapshot, truth["device"])
    start = time.process_time()
    said = attribute(snapshot, timeline)
    seconds = time.process_time() - start
    moments = {"peak": truth["peak"], **{k: v for k, v in truth["phases"].items() if v}}
    instants, found = {}, {}
    for name, moment in moments.items():
        instants[name] = score_instant(moment["live"], moment["entry"] + 1, timeline, said, snapshot.stacks)
        if name != "peak":
            found[name] = _own_peak_agrees(name, moment, timeline, said)
    return Case(path.name, seconds, timeline.n_events, instants, found)


def _own_peak_agrees(name: str, moment: dict[str, Any], timeline: Timeline, said: Attribution) -> bool:
    """Tell whether the phase's highest total, by our own phases, is the truth's."""
    code = next(p.code for p in Phase if p.value == name)
    events = np.flatnonzero(said.track.phase == code)
    if not len(events):
        return False
    return bool(timeline.requested_total[events + 1].max() == moment["allocated_bytes"])


def report(cases: list[Case], *, phases: bool, confusion: bool) -> None:
    """Print one line a case (and phase), then the sums."""
    evidence: Counter[tuple[str, bool]] = Counter()
    overall: Counter[tuple[str, str]] = Counter()
    for case in cases:
        for name, score in case.instants.items():
            if name == "peak":
                evidence.update(score.evidence)
                overall.update(score.confusion)
            low = {c: r for c, r in score.recalls().items() if r < 0.9}
            failing = score.accuracy < 0.95 or low or case.phase_peaks_found.get(name) is False
            if name != "peak" and not phases and not failing:
                continue
            label = case.name if name == "peak" else f"   {name}"
            notes = " ".join(f"{c}={r:.0%}" for c, r in low.items())
            notes += "" if case.phase_peaks_found.get(name, True) else " [own peak differs]"
            timing = f"{case.seconds:6.2f} s {case.events:8d} events" if name == "peak" else ""
            print(f"{label:52s} {100 * score.accuracy:6.2f}% {score.total / 2**30:8.2f} GiB  {timing} {notes}")
            if (confusion and failing) or (confusion and name == "peak" and score.accuracy < 0.98):
                for line, size in score.worst.most_common(6):
                    if size < 0.002 * score.total:
                        break
                    print(f"        {size / 2**20:9.1f} MiB {line[:230]}")
    _print_evidence(evidence)
    if confusion:
        _print_confusion(overall)


def _print_evidence(evidence: Counter[tuple[str, bool]]) -> None:
    total = sum(evidence.values()) or 1
    print("\n| evidence | share of peak bytes | precision |\n|---|---:|---:|")
    for kind in EVIDENCE:
        right, wrong = evidence[kind, True], evidence[kind, False]
        if right + wrong:
            print(f"| `{kind}` | {100 * (right + wrong) / total:.1f}% | {100 * right / (right + wrong):.2f}% |")


def _print_confusion(overall: Counter[tuple[str, str]]) -> None:
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for (truth, said), size in overall.items():
        rows[truth][said] += size
    print("\n| truth | GiB | recall | taken for |\n|---|---:|---:|---|")
    for truth, row in sorted(rows.items(), key=lambda item: -sum(item[1].values())):
        total = sum(row.values())
        others = ", ".join(f"{s} {b / 2**30:.2f}" for s, b in row.most_common() if s != truth and b > 1e-4 * total)
        print(f"| `{truth}` | {total / 2**30:.2f} | {100 * row[truth] / total:.1f}% | {others} |")


@click.command(help=__doc__)
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FOLDER...")
@click.option("--phases", is_flag=True, help="Print every phase, not only those that fall short.")
@click.option("--confusion", is_flag=True, help="Print what was mistaken for what.")
def main(folders: tuple[Path, ...], phases: bool, confusion: bool) -> None:
    paths: list[Path] = []
    for folder in folders:
        paths += [folder] if folder.is_file() else sorted(folder.glob("*.pickle"))
    paths = [p for p in paths if Path(f"{p}.truth.json.gz").exists()]
    if not paths:
        print("no NAME.pickle with NAME.pickle.truth.json.gz beside it", file=sys.stderr)
        sys.exit(3)
    report([score_case(path) for path in paths], phases=phases, confusion=confusion)
