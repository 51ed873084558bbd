"""Run the cases and write snapshots with their truth.

    python -m benchmarks.truth generate --out DIR [--case NAME ...] [--variants] [--events N] [--layers N]
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import click

from benchmarks.truth.cases import CASES
from benchmarks.truth.replay.emit import Variant, replay, write
from benchmarks.truth.replay.variants import to_length, variants_of
from benchmarks.truth.run import run_case


def _line(name: str, truth: dict[str, Any], seconds: float) -> str:
    peak = truth["peak"]
    total = peak["allocated_bytes"]
    parts = ", ".join(f"{k} {100 * v / total:.1f}%" for k, v in peak["by_category"].items() if v > 0.004 * total)
    size = f"{truth['entries']} entries, peak {total / 2**30:.2f} GiB in {peak['phase']}"
    return f"{name}: {size} ({parts}) [{seconds:.0f} s]"


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--case", "cases", multiple=True, type=click.Choice(sorted(CASES)), metavar="NAME")
@click.option("--variants", is_flag=True, help="Write the derived recordings of each run too.")
@click.option("--layers", type=int, help="Fewer layers (quick).")
@click.option("--events", type=int, help="Write one with this many entries too: the last step played again.")
def main(out: Path, cases: tuple[str, ...], variants: bool, layers: int | None, events: int | None) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    warnings.simplefilter("ignore")
    for name in cases or CASES:
        start = time.time()
        stream, about = run_case(CASES[name], layers)
        for variant, altered in variants_of(name, stream, variants):
            _write(out, name, replay(altered, variant, about), start)
        if events:
            longer = to_length(stream, events)
            _write(out, name, replay(longer, Variant(f"{events}_events"), about), start)
        if about.get("guessed_extents"):
            print(f"  extents not recognised by meaning: {about['guessed_extents']}", file=sys.stderr)


def _write(out: Path, case: str, replayed: tuple[Any, dict[str, Any]], start: float) -> None:
    """Write a replayed variant's snapshot and truth as ``CASE.VARIANT``, and say what is in it."""
    snapshot, truth = replayed
    name = f"{case}.{truth['variant']}"
    write(out, name, snapshot, truth)
    print(_line(name, truth, time.time() - start), file=sys.stderr)
