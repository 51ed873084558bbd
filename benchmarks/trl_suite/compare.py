"""Compare what TRL's tests came to with each trainer, and how far the trained parameters are apart."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.tabling import table
from benchmarks.trl_suite.plugin import TRL, Outcome


@dataclass
class Difference:
    """A test that passes with TRL's trainer and does not pass another way."""

    test: str
    way: str
    outcome: str
    said: str


@dataclass
class Distance:
    """How far one test's training is from that of TRL's trainer.

    Attributes:
        gradient: distance of the first optimizer step's gradient over its norm; None without a gradient.
        same_parameters: the trained parameters are equal to the bit. Later steps amplify rounding: the tests train with
            Adam at a learning rate of 0.1, which turns a gradient of rounding's size into a whole step.
    """

    test: str
    way: str
    gradient: float | None
    same_parameters: bool


@dataclass
class Comparison:
    """One file of tests, over all ways.

    Attributes:
        suite: its name.
        counts: by way, how many tests had each outcome.
        applicable: tests that pass with TRL's own trainer.
        passed: by way, how many of the applicable ones pass.
        without: tests that don't pass with TRL's own trainer, with the reason.
        worse: applicable tests that don't pass another way.
        distances: of each applicable test that trains.
    """

    suite: str
    counts: dict[str, dict[str, int]]
    applicable: int
    passed: dict[str, int]
    without: dict[str, str]
    worse: list[Difference] = field(default_factory=list)
    distances: list[Distance] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def read_outcomes(folder: Path) -> dict[str, Outcome]:
    """Read what one run of pytest wrote down, by test."""
    lines = (folder / "outcomes.jsonl").read_text(encoding="utf-8").splitlines()
    found = [Outcome(**json.loads(line)) for line in lines]
    return {one.test: one for one in found}


def compared(suite: str, outcomes: Mapping[str, Mapping[str, Outcome]], folder: Path) -> Comparison:
    """Compare every way's outcomes with TRL's own; parameters lie below ``folder`` by way."""
    meant = outcomes[TRL]
    applicable = {name: one for name, one in meant.items() if one.outcome == "passed"}
    made = Comparison(
        suite=suite,
        counts={way: dict(Counter(one.outcome for one in found.values())) for way, found in outcomes.items()},
        applicable=len(applicable),
        passed={},
        without={name: f"{one.outcome}: {one.said}" for name, one in meant.items() if one.outcome != "passed"},
    )
    for way, found in outcomes.items():
        passed = [name for name in applicable if name in found and found[name].outcome == "passed"]
        made.passed[way] = len(passed)
        for name in applicable.keys() - set(passed):
            one = found.get(name)
            said = (one.outcome, one.said) if one else ("missing", "it did not run")
            made.worse.append(Difference(name, way, *said))
        if way != TRL:
            pairs = ((name, applicable[name], found[name]) for name in passed if applicable[name].trained)
            made.distances += [_distance(name, way, *pair, folder) for name, *pair in pairs]
    return made


def _distance(test: str, way: str, meant: Outcome, found: Outcome, folder: Path) -> Distance:
    import torch

    apart: list[float | None] = [None]
    same = len(meant.trained) == len(found.trained)
    for one, other in zip(meant.trained, found.trained, strict=False):
        theirs = torch.load(folder / TRL / one, weights_only=True)
        ours = torch.load(folder / way / other, weights_only=True)
        apart.append(_apart(theirs["gradient"], ours["gradient"]))
        pair = theirs["parameters"], ours["parameters"]
        same = same and pair[0].keys() == pair[1].keys() and all(torch.equal(pair[0][n], pair[1][n]) for n in pair[0])
    return Distance(test, way, max((value for value in apart if value is not None), default=None), same)


def _apart(meant: Mapping[str, Any], found: Mapping[str, Any]) -> float | None:
    """Return the distance of two gradients over the norm of the first; None if that is zero or there is none."""
    if meant.keys() != found.keys():
        return float("inf")
    size = sum(float(grad.double().square().sum()) for grad in meant.values())
    rest = sum(float((meant[name].double() - found[name].double()).square().sum()) for name in meant)
    return (rest / size) ** 0.5 if size else None


def printed(found: Sequence[Comparison]) -> str:
    """Return the table, and below it each test that differs."""
    ways = list(dict.fromkeys(way for one in found for way in one.passed))
    head = ("suite", "tests", "pass with TRL's trainer", *(f"of these, {way}" for way in ways if way != TRL))
    rows = []
    for one in found:
        others = [f"{one.passed[way]} of {one.applicable}" if way in one.passed else "" for way in ways if way != TRL]
        rows.append((one.suite, sum(one.counts[TRL].values()), one.applicable, *others))
    lines = [table(head, rows)]
    for one in found:
        lines += [f"{one.suite}, {other.way}: {other.test} {other.outcome}: {other.said}" for other in one.worse]
        for way in one.passed.keys() - {TRL}:
            trained = [distance for distance in one.distances if distance.way == way]
            apart = sorted(distance.gradient for distance in trained if distance.gradient is not None)
            if trained:
                equal = sum(distance.same_parameters for distance in trained)
                most = f"{apart[-1]:.2g}" if apart else "unknown"
                lines.append(
                    f"{one.suite}, {way}: of {len(trained)} tests that train, {equal} leave parameters equal to the "
                    f"bit; the first step's gradient is at most {most} of its norm from that of TRL's trainer"
                )
    return "\n".join(lines)
