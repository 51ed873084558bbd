"""Score ``memprof oom`` on a folder of real texts: ``NN.txt``, and what an expert says of each in ``INDEX.json``.

    python -m benchmarks.oom texts FOLDER [--answers]

An entry's ``expect`` may hold ``recognised``, ``count``, ``kind``, ``cause``, ``phase``, ``backend``, ``rank``,
``logits``, ``requested`` (GiB) and ``requested_b`` (bytes); ``a|b`` allows either. ``--answers`` prints every answer
beside what the expert says, to be read line by line: whether advice is right is not scored by a program.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from memprof.reports.renderers import draw

from memprof.oom.explain import explain_log
from memprof.report.oom import ExplainedFailure
from memprof.units import GIB


def _allowed(expected: object, found: object) -> bool:
    return any(str(found) == one for one in str(expected).split("|"))


def _near(expected: float, found: int | None, unit: int) -> bool:
    return found is not None and abs(found / unit - expected) <= 0.006 * max(1.0, expected)


# What an entry may expect, and whether an answer (its first failure, all of them) says so.
CHECKS: dict[str, Callable[[Any, ExplainedFailure, Sequence[ExplainedFailure]], bool]] = {
    "count": lambda want, first, every: len(every) == want,
    "kind": lambda want, first, every: _allowed(want, first.kind),
    "cause": lambda want, first, every: _allowed(want, first.cause),
    "phase": lambda want, first, every: _allowed(want, first.phase),
    "backend": lambda want, first, every: _allowed(want, first.backend),
    "rank": lambda want, first, every: first.rank == want,
    "logits": lambda want, first, every: first.logits == want,
    "requested": lambda want, first, every: _near(want, first.requested_bytes, GIB),
    "requested_b": lambda want, first, every: first.requested_bytes == want,
}


def checked(expect: dict[str, Any], failures: Sequence[ExplainedFailure]) -> Iterator[tuple[str, bool]]:
    """Yield each thing that is expected of a text and whether it was said."""
    yield "recognised", bool(failures) == expect.get("recognised", True)
    for name, check in CHECKS.items():
        if name in expect:
            yield name, bool(failures) and check(expect[name], failures[0], failures)


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--answers", is_flag=True, help="Print every answer beside what the expert says.")
def main(folder: Path, answers: bool) -> None:
    right: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    wrong, started = [], time.perf_counter()
    for entry in json.loads((folder / "INDEX.json").read_text(encoding="utf-8")):
        answer = explain_log((folder / f"{entry['n']:02d}.txt").read_text(encoding="utf-8", errors="replace"))
        if answers:
            said = json.dumps({k: v for k, v in entry["expect"].items() if k != "say"})
            print(f"{'=' * 79}\n{entry['n']:02d} expected: {said}\nexpert: {entry['expect'].get('say', '-')}\n")
            print(draw("oom", answer, width=80) if answer.failures else f"no failure. {' '.join(answer['notes'])}\n")
        for name, ok in checked(entry["expect"], answer.failures):
            asked[name] += 1
            right[name] += ok
            if not ok:
                got = [(f.kind, f.cause, f.phase, f.rank) for f in answer.failures]
                wrong.append(f"{entry['n']:02d} {name}: expected {entry['expect'].get(name)}, got {got}")
    for name in asked:
        print(f"{name:<12} {right[name]:>3} of {asked[name]}")
    print(f"{time.perf_counter() - started:.2f} s for all")
    print("\n".join(wrong))
