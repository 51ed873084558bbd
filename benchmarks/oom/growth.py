"""Time the patterns of ``memprof oom`` on text made to make them backtrack, and long logs.

    python -m benchmarks.oom growth

``tests/oom/test_knowledge.py`` checks by structure that every repeat has an end. What several repeats in a row cost is
measured here: a pattern whose time grows much faster than its text is printed, with the text.
"""

from __future__ import annotations

import re
import time

import click

from memprof.oom.reading.find import find_failures
from tests.oom.test_bent import FULL, NOISES
from tests.oom.test_knowledge import PATTERNS

_SMALL, _LARGE = 2_000, 16_000


def hostile(pattern: str) -> list[str]:
    """Return pieces that, repeated, make a pattern that backtracks try every way to divide them."""
    literals = sorted(set(re.findall(r"[a-z_,:=]{4,}", pattern)), key=len)[-3:]
    heads = re.findall(r"^(?:\(\?:)?([a-z_,:=]{3,})", pattern)
    return [*("1", "1,", "1.", "a", " ", "/", "9gib", "(", "[1", "-"), *literals, *heads, "".join(literals) or "x"]


def seconds(pattern: re.Pattern[str], text: str) -> float:
    """Return the CPU seconds that all matches in a text take, the least of two runs."""
    took = []
    for _ in range(2):
        begun = time.process_time()
        for _match in pattern.finditer(text):
            pass
        took.append(time.process_time() - begun)
    return min(took)


def backtracks(pattern: re.Pattern[str], piece: str) -> bool:
    """Say whether eight times the text takes far more than eight times as long: 64 times where it is quadratic."""
    long = seconds(pattern, piece * (_LARGE // len(piece)))
    return long > 0.1 and long > 25 * seconds(pattern, piece * (_SMALL // len(piece)))


@click.command(help=__doc__)
def main() -> None:
    found = [(name, piece) for name, p in PATTERNS.items() for piece in hostile(p.pattern) if backtracks(p, piece)]
    for name, piece in found:
        print(f"{name}: grows faster than its text, {piece!r} repeated")
    print(f"{len(found)} of {len(PATTERNS)} patterns grow faster than their text")
    for noise in NOISES:
        log = noise * (50_000_000 // len(noise)) + FULL
        begun = time.process_time()
        find_failures(log)
        print(f"{time.process_time() - begun:6.2f} s for 50 MB of {noise[:40]!r}")
